"""Requests: a port and its adapters."""
