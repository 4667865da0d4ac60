"""Recordings of a frontend's traffic: the schema, salted names, and the writer of files."""
