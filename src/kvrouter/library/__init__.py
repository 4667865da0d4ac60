"""kvrouter inside your own program."""
