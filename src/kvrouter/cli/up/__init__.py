"""``kvrouter up``: serves a whole fleet from one command."""
