"""The discovery plane: a port and its adapters."""
