"""What kubelets tell containers of Services, as kubelets make it."""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import JsonValue

HEADLESS = ("", "None")


@dataclass(frozen=True)
class ServicePort:
    """One port of a Service."""

    number: int
    name: str = ""
    protocol: str = "TCP"


@dataclass(frozen=True)
class Service:
    """A Service that has an address."""

    name: str
    address: str
    ports: tuple[ServicePort, ...]

    @classmethod
    def read(cls, manifest: JsonValue) -> "Service | None":
        """A stored Service; None for one without an address, of which nobody hears."""
        assert isinstance(manifest, dict)
        metadata, spec = manifest["metadata"], manifest["spec"]
        assert isinstance(metadata, dict)
        assert isinstance(spec, dict)
        address = str(spec.get("clusterIP", ""))
        if address in HEADLESS:
            return None
        ports = spec["ports"]
        assert isinstance(ports, list)
        return cls(
            str(metadata["name"]),
            address,
            tuple(
                ServicePort(
                    int(str(each["port"])), str(each.get("name", "")), str(each.get("protocol", "TCP"))
                )
                for each in ports
                if isinstance(each, dict)
            ),
        )


def service_variables(services: Iterable[Service]) -> dict[str, str]:
    """The variables of all these; where two make the same, the later one has it."""
    return {name: value for service in services for name, value in _links_of(service).items()}


def _links_of(service: Service) -> dict[str, str]:
    of, first = _variable(service.name), service.ports[0]
    reported = {f"{of}_SERVICE_HOST": service.address, f"{of}_SERVICE_PORT": str(first.number)}
    for port in service.ports:
        if port.name:
            reported[f"{of}_SERVICE_PORT_{_variable(port.name)}"] = str(port.number)
    host = f"[{service.address}]" if ":" in service.address else service.address
    for port in service.ports:
        protocol = port.protocol.lower()
        url = f"{protocol}://{host}:{port.number}"
        if port is first:
            reported[f"{of}_PORT"] = url
        at = f"{of}_PORT_{port.number}_{port.protocol.upper()}"
        reported |= {
            at: url,
            f"{at}_PROTO": protocol,
            f"{at}_PORT": str(port.number),
            f"{at}_ADDR": service.address,
        }
    return reported


def _variable(name: str) -> str:
    return name.upper().replace("-", "_")
