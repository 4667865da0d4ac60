"""Traces of requests: the fields of each format, read row by row."""
