"""The plan: from a deployment to manifests.

A field of a deployment goes where its effect is: :mod:`~kvrouter.operator.plan.shared` for what all pods get,
:mod:`~kvrouter.operator.plan.containers` for the image, command, variables, ports and probes of a component's
containers, :mod:`~kvrouter.operator.plan.transfer_policy` for what follows from the transfer policy, and
:mod:`~kvrouter.operator.plan.workload` for the Deployment around the pods.
"""
