"""The settings: one table for flags, environment variables, YAML and the documentation pages."""
