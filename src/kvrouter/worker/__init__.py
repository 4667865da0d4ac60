"""What runs beside an engine: register, serve, publish, and read the topology files."""
