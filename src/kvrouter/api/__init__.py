"""The HTTP API of a router: its answers and bodies as types, and its client.

Fields that a router of another version may omit have a default, so that every command reads every router.
JSON has the fields in their order here; None is written as null.
"""
