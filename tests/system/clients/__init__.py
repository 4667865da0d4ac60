"""Clients of others, as their users have them, before kvrouter."""
