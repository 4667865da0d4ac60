"""One request's life as a table: state × event → commands."""
