"""Replaying requests over a simulated fleet: the router's decisions and mock engines on a simulated clock."""
