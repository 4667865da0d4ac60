"""The planes that the processes of one test talk over, as settings and flags say it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FleetTransports:
    """``name`` says discovery, requests, events. Every process gets ``environ``, workers get ``flags``."""

    name: str
    environ: Mapping[str, str]
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


FILE_TCP_ZMQ = FleetTransports("file-tcp-zmq", {})
NATS_TCP_JETSTREAM_SYNC = FleetTransports(
    "nats-tcp-jetstream-sync", {"DYN_DISCOVERY_BACKEND": "nats", "DYN_ROUTER_REPLICA_SYNC": "true"}
)
NATS_HTTP_JETSTREAM = FleetTransports(
    "nats-http-jetstream", {"DYN_DISCOVERY_BACKEND": "nats", "DYN_REQUEST_PLANE": "http"}
)
NATS_NATS_CORE = FleetTransports(
    "nats-nats-core",
    {"DYN_DISCOVERY_BACKEND": "nats", "DYN_REQUEST_PLANE": "nats"},
    ("--enable-local-indexer",),
)
