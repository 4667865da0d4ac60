"""Attached engines: runs a worker for each engine that already runs (flags, fleet file, labelled pods)."""
