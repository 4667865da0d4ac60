"""``kvrouter top``: the fleet of a running router, live in a terminal."""
