"""What the operator brings to every deployment: its image, and the planes between processes."""

from dataclasses import dataclass

from kvrouter.config.planes import DiscoveryBackend, RequestPlaneKind


@dataclass(frozen=True, slots=True)
class SecretKey:
    """One value of a Secret in the deployment's own namespace."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class PlanDefaults:
    """What containers get that do not say otherwise themselves.

    ``image`` holds kvrouter: it runs the init container, and each container that names no image of its own.
    ``nats_server`` is where the fleet's NATS is, the chart's own or another one. ``wait_timeout_s`` is how
    long an init container waits for topology files before it fails and is started again.
    """

    image: str
    nats_server: str = "nats://kvrouter-nats:4222"
    request_plane: RequestPlaneKind = RequestPlaneKind.TCP
    discovery: DiscoveryBackend = DiscoveryBackend.NATS
    plane_token: SecretKey | None = None
    wait_timeout_s: int = 300
