"""Traces of requests: what each format says, read row by row."""
