"""A toy engine: all that a new kind of engine needs in its own folder."""

SHORT_HELP = "A worker for a toy."

HELP = "Make a toy part of a fleet."
