"""The Kubernetes operator: admission, plan, labels, status."""
