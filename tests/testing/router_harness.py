"""Cards, a discovery and an event plane that a test turns by hand, and a router on top of them."""

import asyncio
from array import array
from collections.abc import Callable, Mapping

from kvrouter.app.router_build import build_service
from kvrouter.core.constraints import Pin
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import Epoch, EventId, ModelName, RequestId, Taint, WorkerId, WorkerRank
from kvrouter.core.requests import GenerateRequest, Sampling
from kvrouter.core.workers import Enforcement, LoadReport, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.circuit import CircuitState, Pair
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.router.router_service import RouterService
from kvrouter.router.traffic import TrafficRecorder
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Telemetry
from kvrouter.transports.events.port import BatchSink, EventSubscriber, LoadSink
from kvrouter.transports.records.port import CardSink, CordonStore, Gone, GoneSink, StoreSink
from kvrouter.transports.requests.port import RequestTransport
from tests.testing.scripted_transport import address_of

MODEL = ModelName("mock")
BLOCK_SIZE = 16


def card(
    worker_id: int,
    role: Role = Role.BOTH,
    *,
    zone: str | None = None,
    enforcement: Enforcement | None = None,
    weight: float | None = None,
    bootstrap: bool = False,
    dp_size: int = 1,
    incarnation: int = 1,
    draining: bool = False,
    taints: tuple[str, ...] = (),
    model: str = MODEL,
    publishes_kv_events: bool = True,
) -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(worker_id),
        incarnation=Epoch(incarnation),
        model=ModelName(model),
        role=role,
        block_size=BLOCK_SIZE,
        context_length=4096,
        address=address_of(worker_id),
        dp_size=dp_size,
        draining=draining,
        publishes_kv_events=publishes_kv_events,
        runtime_config=ModelRuntimeConfig(
            topology_domains={} if zone is None else {"zone": zone},
            topology_levels=("zone",),
            kv_transfer_domain=None if enforcement is None else "zone",
            kv_transfer_enforcement=enforcement,
            kv_transfer_preferred_weight=weight,
            taints=frozenset(map(Taint, taints)),
            total_kv_blocks=1024,
            bootstrap_host=f"host-{worker_id}" if bootstrap else None,
            bootstrap_port=9000 if bootstrap else None,
        ),
    )


def prefill_card(worker_id: int, *, zone: str = "a", bootstrap: bool = False, dp_size: int = 1) -> WorkerCard:
    """A prefill worker whose KV must stay in its zone."""
    required = Enforcement.REQUIRED
    return card(
        worker_id, Role.PREFILL, zone=zone, bootstrap=bootstrap, dp_size=dp_size, enforcement=required
    )


def decode_card(worker_id: int, *, zone: str = "a") -> WorkerCard:
    """A decode worker."""
    return card(worker_id, Role.DECODE, zone=zone)


class ScriptedDiscovery:
    """Cards come and go when the test says so."""

    propagation_s = 0.0

    def __init__(self) -> None:
        self.cards: dict[WorkerId, WorkerCard] = {}
        self._sinks: list[tuple[CardSink, GoneSink]] = []
        self.on_store: StoreSink | None = None

    async def publish(self, card: WorkerCard) -> None:
        self.put(card)

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        self.drop(worker_id, incarnation)

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        sinks = (on_card, on_gone)
        self._sinks.append(sinks)
        self.on_store = on_store
        for known in self.cards.values():
            on_card(known)
        return lambda: self._sinks.remove(sinks)

    async def close(self) -> None:
        self._sinks.clear()

    def put(self, *cards: WorkerCard) -> None:
        for each in cards:
            self.cards[each.worker_id] = each
            for on_card, _ in self._sinks:
                on_card(each)

    def drop(self, worker_id: int, incarnation: int = 1, why: Gone = Gone.WITHDRAWN) -> None:
        self.cards.pop(WorkerId(worker_id), None)
        for _, on_gone in self._sinks:
            on_gone(WorkerId(worker_id), Epoch(incarnation), why)


class ScriptedEvents:
    """KV events come when the test says so; snapshots are empty, and never come from who is ``silent``."""

    def __init__(self) -> None:
        self.silent: set[WorkerRank] = set()
        self._sinks: list[tuple[BatchSink, LoadSink]] = []
        self.snapshots: Mapping[WorkerRank, KvSnapshot] = {}
        self.followed: list[WorkerId] = []

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        sinks = (on_batch, on_load)
        self._sinks.append(sinks)
        return lambda: self._sinks.remove(sinks)

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        self.followed.append(card.worker_id)
        return lambda: self.followed.remove(card.worker_id)

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        return None

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = 0) -> KvSnapshot | None:
        if rank in self.silent:
            await asyncio.Event().wait()
        return self.snapshots.get(rank, KvSnapshot(rank, Epoch(1), EventId(0), ()))

    def load(self, report: LoadReport) -> None:
        for _, on_load in self._sinks:
            on_load(report)

    def batch(self, batch: KvBatch) -> None:
        for on_batch, _ in self._sinks:
            on_batch(batch)


class RouterHarness:
    """A router before scripted workers."""

    def __init__(
        self,
        plane: RequestTransport,
        config: KvRouterConfig | None = None,
        subscriber: EventSubscriber | None = None,
        *,
        prefill_alone: bool = False,
        place: Mapping[str, str] | None = None,
        cordons: CordonStore | None = None,
        sync: ReplicaSync | None = None,
        traffic: TrafficRecorder | None = None,
    ) -> None:
        self.discovery = ScriptedDiscovery()
        self.events = ScriptedEvents()
        self.telemetry = Telemetry()
        self.service: RouterService = build_service(
            config or KvRouterConfig(),
            request_transport=plane,
            discovery=self.discovery,
            subscriber=subscriber or self.events,
            telemetry=self.telemetry,
            prefill_alone=prefill_alone,
            place=place,
            cordons=cordons,
            sync=sync,
            traffic=traffic,
        )

    async def start(self, *cards: WorkerCard) -> None:
        await self.service.start()
        self.discovery.put(*cards)

    @property
    def model(self) -> ModelRouter:
        return self.service.model(MODEL)

    def circuit_state(self, worker_id: WorkerId) -> CircuitState:
        """What the worker's circuit lets through now."""
        return self.model.placer.circuits.state_of(worker_id, now_s=self.model.clock())

    def broken_pairs(self) -> list[tuple[Pair, CircuitState]]:
        """The pairs whose KV was lost, and what their circuits let through now."""
        return list(self.model.placer.circuits.pairs(now_s=self.model.clock()))

    def load(self, report: LoadReport) -> None:
        """Let a load report arrive."""
        self.events.load(report)

    async def until_parked(self) -> None:
        """Return once a request waits."""
        for _ in range(100):
            if self.model.placer.waiting:
                return
            await asyncio.sleep(0)
        raise AssertionError("no request waits")

    def booked(self) -> int:
        """Active blocks and prefill tokens over all ranks: 0 when nothing is booked."""
        columns = self.model.ledger.columns()
        return int(columns.active_blocks.sum() + columns.prefill_tokens.sum())


async def router_harness(
    plane: RequestTransport, *cards: WorkerCard, config: KvRouterConfig | None = None
) -> RouterHarness:
    """A router that runs, before these workers."""
    harness = RouterHarness(plane, config)
    await harness.start(*cards)
    return harness


def generate_request(
    *,
    tokens: int = 40,
    max_tokens: int = 8,
    request_id: str = "r1",
    sampling: Sampling | None = None,
    pinned: int | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        model=MODEL,
        token_ids=array("I", range(100, 100 + tokens)),
        sampling=sampling or Sampling(max_tokens=max_tokens, temperature=0.0),
        pin=None if pinned is None else Pin(WorkerId(pinned)),
    )


async def read_all(
    harness: RouterHarness,
    *,
    max_tokens: int = 8,
    request_id: str = "r1",
    sampling: Sampling | None = None,
    pinned: int | None = None,
) -> list[int]:
    """Send one request and return its tokens."""
    request = generate_request(max_tokens=max_tokens, request_id=request_id, sampling=sampling, pinned=pinned)
    async with harness.service.requests.generate(request) as generation:
        return [token async for chunk in generation for token in chunk.token_ids]
