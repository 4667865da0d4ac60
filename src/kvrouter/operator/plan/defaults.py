"""The operator's defaults for every deployment: image, transports, secrets."""

from dataclasses import dataclass

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.json import decoded
from kvrouter.operator.plan.manifest import Manifest
from kvrouter.settings.planes import DiscoveryBackend, EventPlaneKind, RequestPlaneKind

API_SERVER_PORTS = (443, 6443)
"""Ports of API servers: in most hosted clusters, and as kubeadm and others set them up."""


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A key of a Secret in the deployment's own namespace."""

    name: str
    key: str


Amounts = dict[str, str | int | float]
"""Amounts of resources by name: ``{"cpu": "500m"}``."""


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The resources of a container."""

    requests: Amounts = {}
    limits: Amounts = {}

    def manifest(self) -> Manifest:
        """Return the resources in the form of a container's field."""
        found: Manifest = msgspec.to_builtins(self)
        return found


def read_resources(text: str, flag: str) -> Resources:
    """Return the resources that a flag states as JSON. Raises ConfigError."""
    return decoded(_resources, text.encode(), flag, error=ConfigError)


_resources = msgspec.json.Decoder(Resources)

WAIT_RESOURCES = Resources({"cpu": "10m", "memory": "64Mi"}, {"cpu": "500m", "memory": "256Mi"})
FRONTEND_RESOURCES = Resources({"cpu": "100m", "memory": "256Mi"}, {"cpu": "2", "memory": "4Gi"})
"""A quota on ``limits.cpu`` refuses a pod if one of its containers states no limit."""


@dataclass(frozen=True, slots=True)
class PlanDefaults:
    """Values for containers that do not state their own.

    ``image`` holds kvrouter, and is used by containers without an image. ``wait_image`` holds it too and runs
    the init containers: if it differs from ``image``, a new ``image`` rolls no engines. ``nats_server`` is
    the address of the fleet's NATS; None without NATS. ``admin_token`` is the token of frontends' admin
    routes, which are closed while the Secret is missing. ``wait_timeout_s`` is how long an init container
    waits for topology files before it fails and is restarted, and ``wait_resources`` are its resources;
    ``frontend_resources`` are those of frontends without stated ones. ``disruption_hold_s`` is how long a
    zone that lost workers keeps its former disruption budget. With ``network_policies`` pods get
    NetworkPolicies, which let them reach the API server on ``api_server_ports``.
    """

    image: str
    nats_server: str | None = None
    request_plane: RequestPlaneKind = RequestPlaneKind.TCP
    discovery: DiscoveryBackend = DiscoveryBackend.KUBERNETES
    event_plane: EventPlaneKind = EventPlaneKind.AUTO
    plane_token: SecretKey | None = None
    admin_token: SecretKey = SecretKey("kvrouter-admin", "token")
    wait_image: str | None = None
    wait_timeout_s: int = 300
    wait_resources: Resources = WAIT_RESOURCES
    frontend_resources: Resources = FRONTEND_RESOURCES
    disruption_hold_s: int = 600
    network_policies: bool = False
    api_server_ports: tuple[int, ...] = API_SERVER_PORTS

    @property
    def event_transport(self) -> EventPlaneKind:
        """The event transport. ``auto`` is ZMQ with discovery in Kubernetes: it needs no server."""
        if self.event_plane is EventPlaneKind.AUTO and self.discovery is DiscoveryBackend.KUBERNETES:
            return EventPlaneKind.ZMQ
        return self.event_plane

    @property
    def transports_of_nats(self) -> tuple[str, ...]:
        """The transports that need NATS."""
        needs = {
            "discovery": self.discovery is DiscoveryBackend.NATS,
            "request-plane": self.request_plane is RequestPlaneKind.NATS,
            "event-plane": self.event_transport in (EventPlaneKind.NATS, EventPlaneKind.JETSTREAM),
        }
        return tuple(transport for transport, is_needed in needs.items() if is_needed)
