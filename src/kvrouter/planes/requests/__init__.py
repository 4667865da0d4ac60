"""The requests plane: a port and its adapters."""
