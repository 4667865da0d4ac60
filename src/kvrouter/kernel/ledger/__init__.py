"""The ledger: the load of each rank, as prefill tokens that wait or run and blocks of running requests."""
