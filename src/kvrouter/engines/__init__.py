"""Engines: how each kind is attached, and its events and answers converted to core types."""
