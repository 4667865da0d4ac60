"""The load of each rank: prefill tokens that wait or run, and blocks that running requests hold."""
