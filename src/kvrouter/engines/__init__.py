"""Engines: how each kind is attached, and its events and answers converted to core types.

``mock_engine`` is the simulated engine, without sockets; ``mock`` is the adapter that runs it in real time.
"""
