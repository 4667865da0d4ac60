"""What kvrouter costs and what it gains, measured."""
