"""Kubernetes: a client of its API server, an informer and leases; for discovery and the operator."""
