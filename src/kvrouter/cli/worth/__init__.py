"""``kvrouter worth``: compares transfer policies on recorded traffic."""
