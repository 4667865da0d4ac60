"""The Kubernetes operator: admission, plan, labels, status.

``api`` has the custom resources as types, ``reconcile`` the controller; ``convert`` converts Dynamo's YAML.
"""
