"""The worker beside an engine: registers it, serves its requests, publishes its KV events."""

from kvrouter.worker.engine_door import EngineDoor
from kvrouter.worker.kv_publisher import KvPublisher
from kvrouter.worker.register import new_incarnation, register_llm
from kvrouter.worker.topology_env import TopologyEnv, parse_topology_env
from kvrouter.worker.worker import Worker, WorkerTransports

__all__ = [
    "EngineDoor",
    "KvPublisher",
    "TopologyEnv",
    "Worker",
    "WorkerTransports",
    "new_incarnation",
    "parse_topology_env",
    "register_llm",
]
