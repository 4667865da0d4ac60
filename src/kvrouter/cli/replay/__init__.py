"""``kvrouter replay``: recorded traffic over a simulated fleet, by several routing rules."""
