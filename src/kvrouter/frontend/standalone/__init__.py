"""The HTTP API of a standalone router."""
