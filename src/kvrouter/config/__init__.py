"""Settings and the fleet file: one source for flags, environment, YAML and the documentation pages."""
