"""The states of one request as a table: state × event → commands."""
