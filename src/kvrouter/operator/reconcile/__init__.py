"""What drives a cluster to what its deployments say: watches, writes, and the lease of who writes."""
