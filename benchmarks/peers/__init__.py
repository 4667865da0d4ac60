"""The peers, each in an environment of its own."""
