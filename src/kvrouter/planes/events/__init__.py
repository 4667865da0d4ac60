"""The events plane: a port and its adapters."""
