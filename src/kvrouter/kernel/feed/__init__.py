"""The feed of one worker rank: orders its KV event stream, and detects and recovers missing events."""
