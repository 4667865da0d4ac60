"""Runs that take minutes to hours: ``make test-nightly``."""
