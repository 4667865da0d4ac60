"""What each rank is doing: prefill tokens that wait or run, and blocks that running requests hold."""
