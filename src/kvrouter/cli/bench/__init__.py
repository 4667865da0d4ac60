"""``kvrouter bench``: the same conversations through a running router and by round-robin, in turn."""
