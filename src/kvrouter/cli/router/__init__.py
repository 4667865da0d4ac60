"""``kvrouter router``: the standalone router, for engines behind another proxy."""
