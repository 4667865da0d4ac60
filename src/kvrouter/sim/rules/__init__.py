"""Published rules."""
