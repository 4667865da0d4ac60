"""Worker cards and cordons as records of a store: the ports, and stores by files, NATS and Kubernetes."""
