"""What runs beside an engine: register, serve, publish, and read the topology files."""

from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.register import new_incarnation, register_llm
from kvrouter.worker.worker import Worker

__all__ = ["KvPublisher", "Worker", "new_incarnation", "register_llm"]
