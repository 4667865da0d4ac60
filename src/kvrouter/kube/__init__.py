"""Kubernetes: one client of its API server, one informer, leases; for discovery and for the operator."""
