"""The plan: from a deployment to manifests."""
