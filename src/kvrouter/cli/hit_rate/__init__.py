"""``kvrouter hit-rate``: where recorded requests lost their cache hits."""
