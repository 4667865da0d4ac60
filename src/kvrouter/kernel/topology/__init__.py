"""Topology: domains, levels, distance, transfer policy, link cost."""
