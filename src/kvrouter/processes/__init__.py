"""Processes: signals, exit codes, standby, and the supervisor of child processes."""
