"""``kvrouter cordon``, ``uncordon`` and ``drain``."""
