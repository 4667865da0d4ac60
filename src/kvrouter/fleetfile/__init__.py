"""The fleet file: models, workers and links of a fleet, read from YAML and checked."""
