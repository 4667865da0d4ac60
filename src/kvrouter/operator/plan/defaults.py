"""The operator's defaults for every deployment: image, transports, secrets."""

from dataclasses import dataclass

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.json import decoded
from kvrouter.operator.plan.manifest import Manifest
from kvrouter.settings.planes import DiscoveryBackend, EventPlaneKind, RequestPlaneKind

API_SERVER_PORTS = (443, 6443)
"""Where API servers listen: in most hosted clusters, and as kubeadm and others make them."""


@dataclass(frozen=True, slots=True)
class SecretKey:
    """One value of a Secret in the deployment's own namespace."""

    name: str
    key: str


Amounts = dict[str, str | int | float]
"""How much of each resource, by its name: ``{"cpu": "500m"}``."""


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The resources of a container."""

    requests: Amounts = {}
    limits: Amounts = {}

    def manifest(self) -> Manifest:
        """Return them as a container states them."""
        found: Manifest = msgspec.to_builtins(self)
        return found


def read_resources(text: str, flag: str) -> Resources:
    """Return the resources that a flag states as JSON. Raises ConfigError."""
    return decoded(_resources, text.encode(), flag, error=ConfigError)


_resources = msgspec.json.Decoder(Resources)

WAIT_RESOURCES = Resources({"cpu": "10m", "memory": "64Mi"}, {"cpu": "500m", "memory": "256Mi"})
FRONTEND_RESOURCES = Resources({"cpu": "100m", "memory": "256Mi"}, {"cpu": "2", "memory": "4Gi"})
"""A quota on ``limits.cpu`` takes no pod of which a container states none."""


@dataclass(frozen=True, slots=True)
class PlanDefaults:
    """What containers get that do not say otherwise themselves.

    ``image`` holds kvrouter, and is that of each container that names none. ``wait_image`` holds it too, and
    runs the init containers: another one than ``image`` keeps engines from rolling when that changes.
    ``nats_server`` is where the fleet's NATS is, the chart's own or another one; None where there is none.
    ``admin_token`` is where the token of frontends' admin routes is; where there is none they are closed.
    ``wait_timeout_s`` is how long an init container waits for topology files before it fails and is started
    again, and ``wait_resources`` what it may use; ``frontend_resources`` are those of frontends that state
    none. ``disruption_hold_s`` is for how long a zone that lost workers keeps the disruption budget of those
    that it had. With ``network_policies`` pods get NetworkPolicies, which let them reach the API server on
    ``api_server_ports``.
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
    def event_lane(self) -> EventPlaneKind:
        """How KV events travel: where workers are announced in Kubernetes nothing else has to run."""
        if self.event_plane is EventPlaneKind.AUTO and self.discovery is DiscoveryBackend.KUBERNETES:
            return EventPlaneKind.ZMQ
        return self.event_plane

    @property
    def planes_of_nats(self) -> tuple[str, ...]:
        """The planes that need NATS."""
        needs = {
            "discovery": self.discovery is DiscoveryBackend.NATS,
            "request-plane": self.request_plane is RequestPlaneKind.NATS,
            "event-plane": self.event_lane in (EventPlaneKind.NATS, EventPlaneKind.JETSTREAM),
        }
        return tuple(plane for plane, is_needed in needs.items() if is_needed)
