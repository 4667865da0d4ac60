"""Recordings of a frontend's traffic: what a record says, how it is salted, and who writes it to a folder."""
