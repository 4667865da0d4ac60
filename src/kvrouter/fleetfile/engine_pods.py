"""The labels and annotations of a pod that holds an engine, read as a line of the fleet file."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import EnginePod, PodPort
from kvrouter.fleetfile.fleet_checks import load_part
from kvrouter.fleetfile.fleet_engines import ATTACHED_KINDS, AttachedEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile, KvTransferSpec, WorkerGroup
from kvrouter.fleetfile.one_worker import put
from kvrouter.settings.problems import Document, Path, did_you_mean

PREFIX = "kvrouter.dev/"
KIND_LABEL = f"{PREFIX}engine"
"""The label that makes a pod an engine; its value is the kind."""

PORT_ANNOTATION = f"{PREFIX}engine-port"
PORT_NAME = "http"
"""The usual name of the port of an engine's server."""

TOPOLOGY_ANNOTATION = f"{PREFIX}topology."
OPERATOR_LABEL = "grove.io/topology."
"""Labels that a pod gets from its node by the operator: this and the domain."""

KUBERNETES_LABELS: Mapping[str, str] = {
    "region": "topology.kubernetes.io/region",
    "zone": "topology.kubernetes.io/zone",
}
"""Labels that a pod gets from its node by Kubernetes itself, by the domain; the broadest first."""

PORTS = range(1, 2**16)


def _text(text: str) -> object:
    return text


def _integer(text: str) -> object:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text


def _switch(text: str) -> object:
    return {"true": True, "false": False}.get(text.lower(), text)


def _list(text: str) -> object:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


class _Annotation(NamedTuple):
    """The path of an annotation's value in a fleet file, and the reader of its text."""

    path: Path
    read: Callable[[str], object]


_ENGINE: Path = ("workers", 0, "engine")
ANNOTATIONS: Mapping[str, _Annotation] = {
    "model": _Annotation(("models", 0, "name"), _text),
    "tokenizer": _Annotation(("models", 0, "tokenizer"), _text),
    "block-size": _Annotation(("models", 0, "block_size"), _integer),
    "context-length": _Annotation(("models", 0, "context_length"), _integer),
    "role": _Annotation(("workers", 0, "role"), _text),
    "dp-size": _Annotation(("workers", 0, "dp_size"), _integer),
    "taints": _Annotation(("workers", 0, "taints"), _list),
    "prompt-tokens-min": _Annotation(("workers", 0, "prompt_tokens", "min"), _integer),
    "prompt-tokens-max": _Annotation(("workers", 0, "prompt_tokens", "max"), _integer),
    "api-key-env": _Annotation((*_ENGINE, "api_key_env"), _text),
    "kv-events": _Annotation((*_ENGINE, "kv_events"), _switch),
    "kv-events-endpoint": _Annotation((*_ENGINE, "kv_events_endpoint"), _text),
    "kv-events-replay-endpoint": _Annotation((*_ENGINE, "kv_events_replay_endpoint"), _text),
}
"""The annotations, without their prefix."""

PLACES: Mapping[str, str] = {
    "kind": f"label {KIND_LABEL}",
    **{name.replace("-", "_"): f"annotation {PREFIX}{name}" for name in ANNOTATIONS},
    "kv_events": f"annotation {PREFIX}kv-events-endpoint",
    "kv_events_replay": f"annotation {PREFIX}kv-events-replay-endpoint",
}
"""Where a field that an engine may contradict is written, or may be, by the field's name."""


class PodEngine(NamedTuple):
    """An engine as its pod describes it.

    ``fleet`` is a fleet file of this one engine. ``start`` differs between two starts of the engine's
    container; empty if the container is unknown.
    """

    fleet: FleetFile
    url: str
    start: str

    @property
    def group(self) -> WorkerGroup:
        """Its worker."""
        return self.fleet.workers[0]

    @property
    def engine(self) -> AttachedEngineSpec:
        """Itself."""
        engine = self.group.engine
        if not isinstance(engine, AttachedEngineSpec):
            raise TypeError("a pod holds no mock engine")
        return engine


class _PodDocument(Document):
    """A fleet file without a text: mistakes are located by labels and annotations."""

    def __init__(self, content: Mapping[str, object], places: Mapping[Path, str]) -> None:
        super().__init__("pod", content, {})
        self._places = places

    def place(self, path: Path) -> str:
        """Return what of the pod the value came from."""
        here = path
        while here and here not in self._places:
            here = here[:-1]
        return self._places.get(here, "the pod")


def engine_of(
    pod: EnginePod, *, policy: KvTransferSpec | None = None, levels: tuple[str, ...] = ()
) -> PodEngine:
    """Return the engine that a pod with an address describes.

    ``policy`` is that of all KV transfers, ``levels`` the order of the domains, the broadest first; without,
    regions are broader than zones, and zones than all others. Raises ConfigError with a line for each
    mistake, which names the label or annotation and the fix.
    """
    kind = pod.labels.get(KIND_LABEL, "")
    if kind not in ATTACHED_KINDS:
        *kinds, last = ATTACHED_KINDS
        known = f"{', '.join(kinds)} or {last}"
        raise ConfigError(f"label {KIND_LABEL}: must be {known}, not {kind!r}", param=KIND_LABEL)
    if unknown := list(_unknown(pod)):
        raise ConfigError("\n".join(unknown), param=PREFIX)
    port = _port(pod)
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    url = f"http://{host}:{port.number}"
    places: dict[Path, str] = {(*_ENGINE, "url"): f"annotation {PORT_ANNOTATION}"}
    content: dict[str, object] = {
        "version": 1,
        "models": [{}],
        "workers": [{"name": "engine", "engine": {"kind": kind, "url": url}}],
    }
    for name, annotation in ANNOTATIONS.items():
        places[annotation.path] = f"annotation {PREFIX}{name}"
        text = pod.annotations.get(PREFIX + name)
        if text is not None:
            put(content, annotation.path, _reached(annotation.read(text.strip()), host))
    domains = _domains(pod, places)
    ordered = _ordered(domains, policy, levels)
    for position, domain in enumerate(ordered):
        places[("topology", "levels", position)] = places.get(("workers", 0, "domains", domain), "")
    content["topology"] = {"levels": ordered}
    if policy is not None:
        content["kv_transfer"] = policy.model_dump()
    put(content, ("workers", 0, "domains"), domains)
    fleet = _checked(content, places)
    if policy is not None and policy.domain not in domains:
        raise ConfigError(_unplaced(policy.domain), param=policy.domain)
    return PodEngine(fleet, url, pod.starts.get(port.container, ""))


def _checked(content: Mapping[str, object], places: Mapping[Path, str]) -> FleetFile:
    try:
        return load_part(_PodDocument(content, places))
    except ConfigError as error:  # a domain stands in it twice
        raise ConfigError("\n".join(dict.fromkeys(error.message.splitlines())), param=error.param) from error


def _unknown(pod: EnginePod) -> Iterator[str]:
    known = [PREFIX + name for name in ANNOTATIONS]
    for name in pod.annotations:
        if not name.startswith(PREFIX) or name.startswith(TOPOLOGY_ANNOTATION):
            continue
        if name not in (*known, PORT_ANNOTATION):
            yield f"annotation {name[:120]}: unknown{did_you_mean(name, [*known, PORT_ANNOTATION])}"


def _port(pod: EnginePod) -> PodPort:
    """The port of the engine's server: that of the annotation, else ``http``, else the only one."""
    named = {port.name: port for port in reversed(pod.ports) if port.name}
    numbered = {port.number: port for port in reversed(pod.ports)}
    listed = ", ".join(f"{port.number} {port.name}".strip() for port in pod.ports) or "none"
    text = pod.annotations.get(PORT_ANNOTATION)
    if text is not None:
        number = _integer(text.strip())
        if text.strip() in named:
            return named[text.strip()]
        if not isinstance(number, int) or number not in PORTS:
            raise ConfigError(
                f"annotation {PORT_ANNOTATION}: must be a port or the name of one (the containers have "
                f"{listed}), not {text[:60]!r}",
                param=PORT_ANNOTATION,
            )
        only = next(iter(pod.starts)) if len(pod.starts) == 1 else ""
        return numbered.get(number, PodPort("", number, only))
    if PORT_NAME in named:
        return named[PORT_NAME]
    if len(numbered) == 1:
        return next(iter(numbered.values()))
    raise ConfigError(
        f"annotation {PORT_ANNOTATION}: is required where no port of the containers is named {PORT_NAME} "
        f"and there is not exactly one (there are: {listed})",
        param=PORT_ANNOTATION,
    )


def _domains(pod: EnginePod, places: dict[Path, str]) -> dict[str, str]:
    """Return the pod's domains: from labels copied from its node, else from annotations.

    An empty label states that the node has no value.
    """
    found: dict[str, str] = {}

    def take(domain: str, value: str, place: str) -> None:
        if not value.strip():
            return
        path: Path = ("workers", 0, "domains", domain)
        if domain not in found:
            found[domain] = value.strip()
            places[path] = place
        elif place.startswith("annotation ") and value.strip() != found[domain]:
            raise ConfigError(
                f"{place}: is {value.strip()[:60]!r}, and the {places[path]} says "
                f"{found[domain][:60]!r}, which counts: leave the annotation out",
                param=place,
            )

    for name, value in pod.labels.items():
        if name.startswith(OPERATOR_LABEL):
            take(name.removeprefix(OPERATOR_LABEL), value, f"label {name}")
    for domain, name in KUBERNETES_LABELS.items():
        take(domain, pod.labels.get(name, ""), f"label {name}")
    for name, value in pod.annotations.items():
        if name.startswith(TOPOLOGY_ANNOTATION):
            take(name.removeprefix(TOPOLOGY_ANNOTATION), value, f"annotation {name}")
    return found


def _ordered(domains: Mapping[str, str], policy: KvTransferSpec | None, levels: tuple[str, ...]) -> list[str]:
    """Return the levels, broadest first, with every domain that is present or asked for."""
    wanted = [*domains, *([] if policy is None else [policy.domain])]
    known = [*levels, *(name for name in KUBERNETES_LABELS if name in wanted)]
    return list(dict.fromkeys([*known, *sorted(wanted)]))


def _unplaced(domain: str) -> str:
    label = KUBERNETES_LABELS.get(domain, f"{OPERATOR_LABEL}{domain}")
    return (
        f"label {label}: is required, since KV transfers keep to the {domain}: where the cluster does not "
        f"put it on pods, give the annotation {TOPOLOGY_ANNOTATION}{domain}"
    )


def _reached(value: object, host: str) -> object:
    """Return an endpoint that the engine binds with the pod's address, which its template cannot know."""
    return value.replace("tcp://*:", f"tcp://{host}:", 1) if isinstance(value, str) else value
