"""The composition root: builds each process from its settings, as the only package that names concrete
transports and engines.

``router_build``, ``frontend`` and ``router_transports`` build a router and its HTTP frontend;
``worker_transports``, ``mock_fleet`` and ``fleet_build`` build workers; ``attach`` runs a worker for each
engine that already runs. ``lifetime``, ``supervisor``, ``telemetry_hooks``, ``tls`` and ``trace_export``
serve every process. The commands (``cli``) and the library call these functions.
"""
