"""Engines: how each kind is attached, and its wire turned into core's words."""
