"""What a request, a token and a decision cost, counted and not timed: ``make bench-instructions``."""
