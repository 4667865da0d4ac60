"""Offline replay: the router's own decisions and the mock engines, on a clock that nobody has to wait for."""
