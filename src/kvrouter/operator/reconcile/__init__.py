"""The controller: watches, a workqueue, the reconciler, and what it writes to the cluster."""
