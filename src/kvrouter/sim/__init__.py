"""Offline replay: the router's own decisions and the mock engines, on a simulated clock."""
