"""``kvrouter dry-run``: the recorded requests that a transfer policy would have refused."""
