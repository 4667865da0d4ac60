"""What each command runs, from its first log line to its exit code."""
