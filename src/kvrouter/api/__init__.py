"""The HTTP API of a router: its answers and bodies as types, and its client.

What a router of another version may not say has a default, so that every command reads every router. Fields
are written in their order here; None is written as null.
"""
