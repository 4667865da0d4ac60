"""The status of a deployment: conditions, pods by domain, events."""
