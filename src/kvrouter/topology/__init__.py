"""Where a worker is: domains, levels, distance, transfer policy, link cost."""
