"""``kvrouter worker`` and ``kvrouter topology``: a worker's process, and the place where it runs."""
