"""The engines of pods with a worker each in one process, as a test sees them."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvrouter.app.attach.attachment import EngineWorkers
from kvrouter.app.attach.pod_fleet import JOINED, PodFleet, PodPolicy, worker_id_of
from kvrouter.app.attach.transport_provider import MemoryTransports
from kvrouter.app.mock_fleet import ProcessTransports
from kvrouter.cli.worker.engine_pods import PodsDiscovery
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import EnginePod, WorkerCard
from kvrouter.engines.attach import Attached, AttachSpec
from kvrouter.settings.tree import Settings
from kvrouter.text.source import MOCK_FOLDER
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.records.kubernetes.pods import pod_of
from kvrouter.transports.records.port import Gone
from kvrouter.transports.requests.memory import MemoryRequestTransport
from kvrouter.worker import WorkerTransports
from tests.testing.scripted_engine import ScriptedEngine
from tests.testing.waits import until

ENGINE = "kvrouter.dev/engine"
ZONE = "topology.kubernetes.io/zone"


def pod_json(
    name: str = "vllm-0",
    *,
    ip: str = "10.0.0.7",
    ports: Mapping[str, int] | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    ready: bool = True,
    restarts: int = 0,
    more: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """A pod with one container. ``annotations`` are without their prefix; ``more`` is of its metadata."""
    listed = [{"name": port, "containerPort": number} for port, number in (ports or {"http": 8000}).items()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "models",
            "uid": f"uid of {name}",
            "resourceVersion": "7",
            "labels": {ENGINE: "vllm", **(labels or {})},
            "annotations": {f"kvrouter.dev/{key}": value for key, value in (annotations or {}).items()},
            **(more or {}),
        },
        "spec": {"containers": [{"name": "engine", "ports": listed}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": "engine", "restartCount": restarts, "containerID": "c"}],
        },
    }


def pod(name: str = "vllm-0", **said: Any) -> EnginePod:
    """What is read of :func:`pod_json`."""
    return pod_of(json.dumps(pod_json(name, **said)).encode())


PLAIN = {"tokenizer": str(MOCK_FOLDER), "kv-events": "false"}


@dataclass
class PodFleetHarness:
    """The workers of pods, what discovery tells of them, and the events about the pods."""

    fleet: PodFleet
    ground: "ContestedTransports"
    cards: dict[WorkerId, WorkerCard] = field(default_factory=dict)
    gone: list[Epoch] = field(default_factory=list)
    events: list[tuple[str, str, str]] = field(default_factory=list)

    def on_card(self, card: WorkerCard) -> None:
        self.cards[card.worker_id] = card

    def on_gone(self, worker_id: WorkerId, incarnation: Epoch, _why: Gone) -> None:
        self.gone.append(incarnation)
        self.cards.pop(worker_id, None)

    def card(self, given: EnginePod) -> WorkerCard | None:
        return self.cards.get(worker_id_of(given.uid))

    async def joined(self, given: EnginePod) -> WorkerCard:
        await until(lambda: self.card(given) is not None)
        card = self.card(given)
        assert card is not None
        return card

    def reported(self, reason: str) -> list[str]:
        return [message for _, each, message in self.events if each == reason]


class ContestedTransports(MemoryTransports):
    """Another process may have a worker's place: :attr:`losses` has what tells so, one for each stand."""

    def __init__(self, transports: ProcessTransports) -> None:
        super().__init__(transports)
        self.losses: list[asyncio.Event] = []
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.mistakes: list[Exception] = []

    @asynccontextmanager
    async def open(self, spec: AttachSpec, attached: Attached) -> AsyncIterator[WorkerTransports]:
        await self.is_free.wait()
        if self.mistakes:
            raise self.mistakes[0]
        async with super().open(spec, attached) as transports:
            self.losses.append(transports.lost)
            yield transports


@asynccontextmanager
async def running_pod_fleet(
    policy: PodPolicy | None = None, *, drain_limit_s: float = 60.0
) -> AsyncIterator[PodFleetHarness]:
    transports = ProcessTransports(PodsDiscovery(), MemoryEventTransport(), MemoryRequestTransport())
    ground = ContestedTransports(transports)
    events: list[tuple[str, str, str]] = []

    def write_event(pod: EnginePod, *, reason: str, message: str, warns: bool) -> None:
        assert warns is (reason != JOINED)
        events.append((pod.name, reason, message))

    workers = EngineWorkers(Settings(), ground)
    async with PodFleet(workers, policy or PodPolicy(), write_event, drain_limit_s=drain_limit_s) as fleet:
        made = PodFleetHarness(fleet, ground, events=events)
        await transports.discovery.watch(made.on_card, made.on_gone)
        yield made
    await transports.requests.close()


def pod_of_engine(engine: ScriptedEngine, name: str = "vllm-0", **said: Any) -> EnginePod:
    """A pod with this engine in it."""
    at = urlsplit(engine.url)
    annotations = PLAIN | said.pop("annotations", {})
    return pod(name, ip=at.hostname, ports={"http": at.port}, annotations=annotations, **said)


async def stopped_engine() -> ScriptedEngine:
    """An engine that is not up, and where it will be."""
    engine = ScriptedEngine()
    await engine.start()
    await engine.stop()
    return engine
