"""Fleets of mock engines with a router before them, and a request plane that a test looks through."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from kvrouter.app.mock_fleet import MockFleet
from kvrouter.app.router_build import build_service
from kvrouter.core.constraints import Pin, RoutingConstraints
from kvrouter.core.ids import DpRank, ModelName, RequestId, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, EngineRequest, GenerateRequest, Leg, Sampling, TokenBuffer
from kvrouter.core.workers import Role
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.generation import Generation
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.router_service import RouterService
from kvrouter.settings.problems import parse_document
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Telemetry
from kvrouter.transports.requests.memory import memory_address
from kvrouter.transports.requests.port import AliveSink, RequestTransport, SentLeg, TokenSink
from kvrouter.worker import Worker, new_incarnation
from tests.testing.blocks import Blocks, blocks, blocks_of_cache, reported_by
from tests.testing.waits import until

MOCK = ModelName("mock")
BLOCK = 16

LONG_TOKENS = 1200
"""An answer that comes in several chunks on any machine: a stream holds 512 tokens at most."""

PATIENT_S = 1.0e6
"""Simulated: KV waits for the router however slow the machine is that runs both."""

PAIRS = """
version: 1
models: [{{name: mock, block_size: 16, context_length: 4096}}]
topology:
  levels: [zone]
  links:
    within: {{zone: {{latency_s: {latency_s}, bandwidth_bytes_per_s: 12.5e9}}}}
    across: {{latency_s: 0.002, bandwidth_bytes_per_s: 3.125e9}}
{policy}
workers:
  - {{name: prefill-a, role: prefill, replicas: {prefill}, domains: {{zone: a}}, engine: {engine}}}
  - {{name: decode-a, role: decode, replicas: {decode}, domains: {{zone: a}}, engine: {engine}}}
  - {{name: prefill-b, role: prefill, replicas: {prefill}, domains: {{zone: b}}, engine: {engine}}}
  - {{name: decode-b, role: decode, replicas: {decode}, domains: {{zone: b}}, engine: {engine}}}
speedup: {speedup}
"""
"""Two zones with prefill and decode workers. Ids count in the order of the file."""

ALIKE = """
version: 1
models: [{{name: mock, block_size: 16, context_length: 200000}}]
workers:
  - {{name: worker, role: both, replicas: {replicas}, dp_size: {dp_size}, engine: {engine}}}
speedup: {speedup}
"""
"""Workers that both prefill and decode."""


def fleet_file(text: str) -> FleetFile:
    return load_fleet(parse_document(text, "test.yaml")).fleet


def zoned_fleet(
    *,
    handoff: str = "bootstrap",
    enforcement: str | None = "required",
    prefill: int = 1,
    decode: int = 2,
    speedup: float = 1000.0,
    latency_s: float = 0.0005,
) -> FleetFile:
    """Two zones. With one prefill and two decode workers each: 1 | 2, 3 in zone a and 4 | 5, 6 in zone b."""
    policy = ""
    if enforcement is not None:
        weight = ", preferred_weight: 0.9" if enforcement == "preferred" else ""
        policy = f"kv_transfer: {{domain: zone, enforcement: {enforcement}{weight}}}"
    return fleet_file(
        PAIRS.format(
            engine=f"{{handoff: {handoff}, kv_wait_expiry_s: {PATIENT_S}}}",
            policy=policy,
            prefill=prefill,
            decode=decode,
            speedup=speedup,
            latency_s=latency_s,
        )
    )


def uniform_fleet(
    *, replicas: int = 2, dp_size: int = 1, engine: str = "{}", speedup: float = 1000.0
) -> FleetFile:
    """Workers 1 to ``replicas``; ``engine`` is a mapping in YAML."""
    return fleet_file(ALIKE.format(replicas=replicas, dp_size=dp_size, engine=engine, speedup=speedup))


def prompt(*, tokens: int = 100, first: int = 0) -> TokenBuffer:
    """Token ids that differ from any other ``first``'s in their first block."""
    return array("I", (256 + (first * 7919 + n) % 2000 for n in range(tokens)))


@dataclass(frozen=True, slots=True)
class SeenChunk:
    """A leg that was accepted (``chunk`` is None, before its first read), or a chunk on its way back."""

    request: EngineRequest
    worker_id: WorkerId
    chunk: EngineChunk | None
    tokens: int
    """How many tokens this leg has sent, this chunk's included."""


Hook = Callable[[SeenChunk], Awaitable[None]]


ChunkCondition = Callable[[SeenChunk], bool]


def accepted(leg: Leg) -> ChunkCondition:
    """A worker has taken such a leg."""
    return lambda seen: seen.request.leg is leg and seen.chunk is None


def ended(leg: Leg) -> ChunkCondition:
    """The last chunk of such a leg is here."""
    return lambda seen: seen.request.leg is leg and seen.chunk is not None and seen.chunk.finish is not None


def streaming(leg: Leg, *, tokens: int = 1) -> ChunkCondition:
    """So many tokens of such a leg are here, and more will come."""
    return lambda seen: (
        seen.request.leg is leg
        and seen.tokens >= tokens
        and seen.chunk is not None
        and seen.chunk.finish is None
    )


def on_first(when: ChunkCondition, do: Hook) -> Hook:
    """Do something the first time that something is seen."""
    done: list[SeenChunk] = []

    async def hook(seen: SeenChunk) -> None:
        if not done and when(seen):
            done.append(seen)
            await do(seen)

    return hook


class Pause:
    """A hook that holds all legs from a certain moment on, until it lets them go."""

    def __init__(self, when: ChunkCondition) -> None:
        self.reached = asyncio.Event()
        self.go = asyncio.Event()
        self._when = when

    async def __call__(self, seen: SeenChunk) -> None:
        if self.reached.is_set() or self._when(seen):
            self.reached.set()
            await self.go.wait()


class WatchedStream:
    def __init__(self, inner: SentLeg, plane: "WatchedTransport", request: EngineRequest, address: str):
        self.inner = inner
        self.request = request
        self.worker_id = WorkerId(int(address.split("/")[2]))
        self.cancelled_for: str | None = None
        self._plane = plane
        self._tokens = 0
        self._begun = False

    @property
    def is_accepted(self) -> bool:
        return self.inner.is_accepted

    async def accepted(self) -> None:
        await self.inner.accepted()

    async def hand_over(self, sink: TokenSink) -> None:
        """Every chunk is seen: tokens are only read."""

    def __aiter__(self) -> "WatchedStream":
        return self

    async def __anext__(self) -> EngineChunk:
        if not self._begun:
            self._begun = True
            await self._plane.tell(SeenChunk(self.request, self.worker_id, None, 0))
        chunk = await self.inner.__anext__()
        self._tokens += len(chunk.token_ids)
        await self._plane.tell(SeenChunk(self.request, self.worker_id, chunk, self._tokens))
        return chunk

    def cancel(self, reason: str) -> None:
        self.cancelled_for = reason
        self.inner.cancel(reason)


class WatchedTransport:
    """Passes everything on, and tells ``hook`` of it first: what the hook awaits, the router waits for."""

    def __init__(self, inner: RequestTransport) -> None:
        self.inner = inner
        self.opened: list[WatchedStream] = []
        self.hook: Hook | None = None

    def open_now(self, address: str, request: EngineRequest) -> None:
        """The router waits for :meth:`open`."""

    async def open(self, address: str, request: EngineRequest) -> WatchedStream:
        stream = WatchedStream(await self.inner.open(address, request), self, request, address)
        self.opened.append(stream)
        return stream

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        return self.inner.follow(address, on_alive)

    async def tell(self, seen: SeenChunk) -> None:
        if self.hook is not None:
            await self.hook(seen)

    async def close(self) -> None:
        await self.inner.close()


async def revive(fleet: MockFleet, old: Worker) -> Worker:
    """Start a worker again that died or left: the same id, another incarnation, an empty cache."""
    incarnation = new_incarnation()
    worker_id = old.card.worker_id
    address = memory_address(worker_id, incarnation)
    card = replace(old.card, incarnation=incarnation, address=address, draining=False)
    worker = fleet.workers[worker_id] = Worker(
        old.engine,
        card,
        discovery=fleet.transports.discovery,
        events=fleet.transports.events,
        requests=fleet.transports.requests,
        recovery=fleet.transports.events,
    )
    await worker.start()
    return worker


class MockFleetHarness:
    """A fleet of mock engines and a router."""

    def __init__(self, fleet: MockFleet, config: KvRouterConfig | None = None) -> None:
        self.fleet = fleet
        self.telemetry = Telemetry()
        self.plane = WatchedTransport(fleet.requests)
        self.service: RouterService = build_service(
            config or fleet.fleet.router,
            request_transport=self.plane,
            discovery=fleet.discovery,
            subscriber=fleet.events,
            telemetry=self.telemetry,
        )
        self._n = 0

    @property
    def model(self) -> ModelRouter:
        return self.service.model(MOCK)

    def request(
        self,
        token_ids: TokenBuffer | None = None,
        *,
        max_tokens: int = 8,
        sampling: Sampling | None = None,
        model: ModelName = MOCK,
        constraints: RoutingConstraints | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        prefill_worker_id: int | None = None,
        cache_namespace: str | None = None,
    ) -> GenerateRequest:
        self._n += 1
        pin = None
        if worker_id is not None:
            pin = Pin(WorkerId(worker_id), None if dp_rank is None else DpRank(dp_rank))
        return GenerateRequest(
            request_id=RequestId(f"r{self._n}"),
            model=model,
            token_ids=prompt() if token_ids is None else token_ids,
            sampling=sampling or Sampling(max_tokens=max_tokens, temperature=0.0),
            constraints=constraints or RoutingConstraints(),
            pin=pin,
            prefill_pin=None if prefill_worker_id is None else Pin(WorkerId(prefill_worker_id)),
            cache_namespace=cache_namespace,
        )

    async def read(self, request: GenerateRequest) -> tuple[list[int], Generation]:
        """Return the whole answer, and the generation that it came from."""
        async with self.service.requests.generate(request) as generation:
            tokens = [token async for chunk in generation for token in chunk.token_ids]
        return tokens, generation

    def kill(self, why: str = "killed") -> Hook:
        """A hook that lets the worker die that is reported to it."""

        async def hook(seen: SeenChunk) -> None:
            await self.fleet.kill(seen.worker_id, why)

        return hook

    async def revive(self, old: Worker) -> Worker:
        """Start a dead worker again: the same id, another incarnation, an empty cache."""
        return await revive(self.fleet, old)

    def zone_of(self, worker_id: int) -> str:
        return self.fleet.workers[WorkerId(worker_id)].card.runtime_config.topology_domains["zone"]

    def workers(self, role: Role, zone: str | None = None) -> list[WorkerId]:
        return [
            worker_id
            for worker_id, worker in self.fleet.workers.items()
            if worker.card.role is role and zone in (None, self.zone_of(worker_id))
        ]

    def legs(self, leg: Leg) -> list[WorkerId]:
        """The workers that accepted such a leg, in order."""
        return [stream.worker_id for stream in self.plane.opened if stream.request.leg is leg]

    def crossed(self) -> int:
        """Transfers that began in one domain and ended in another."""
        carried = self.fleet.cluster.carried().items()
        return sum(what.transfers for pair, what in carried if pair.src_domain != pair.dst_domain)

    def booked(self) -> int:
        """Active blocks and prefill tokens over all models and ranks."""
        columns = [model.ledger.columns() for model in self.service.models()]
        return sum(int(each.active_blocks.sum() + each.prefill_tokens.sum()) for each in columns)

    # What the index believes, next to what the engines hold

    def believed(self, rank: WorkerRank, model: ModelName = MOCK) -> Blocks:
        """(engine hash, sequence hash) of each block of the rank in the index, as often as it was stored."""
        room = self.service.model(model)
        slot = room.fleet.slot_of(rank)
        assert slot is not None
        return blocks(self.cache_of(model).index.dump(slot))

    def held(self, rank: WorkerRank) -> Blocks:
        """The same from the engine's own cache."""
        return blocks_of_cache(reported_by(self.fleet.workers[rank.worker_id], rank.dp_rank))

    def ranks(self) -> list[WorkerRank]:
        return [rank for worker in self.fleet.workers.values() for rank in worker.card.ranks()]

    def cache_of(self, model: ModelName = MOCK) -> EventCacheView:
        cache = self.service.model(model).cache
        assert isinstance(cache, EventCacheView)
        return cache

    async def until_index_is_true(self) -> None:
        """Return once the index holds of every rank exactly what the rank's engine holds."""

        def differing() -> list[WorkerRank]:
            workers = self.fleet.workers
            return [
                rank
                for rank in self.ranks()
                if self.believed(rank, workers[rank.worker_id].card.model) != self.held(rank)
            ]

        pumps = [self.cache_of(model.fleet.model).ingest for model in self.service.models()]
        await until(lambda: all(ingest.all_score for ingest in pumps) and not differing())

    async def until_quiet(self) -> None:
        """Return once nothing runs; then nothing may be left over anywhere."""
        await until(lambda: self.fleet.cluster.idle and not self.service.requests.running)
        assert self.fleet.check_integrity() == []
        assert self.booked() == 0
        for model in self.service.models():
            assert len(model.ledger) == 0
            assert len(model.placer.waiting) == 0


@asynccontextmanager
async def running_mock_fleet(
    fleet: FleetFile, config: KvRouterConfig | None = None
) -> AsyncIterator[MockFleetHarness]:
    """A fleet that serves; at the end of a test that passes nothing may be left over."""
    async with MockFleet(fleet) as mock:
        harness = MockFleetHarness(mock, config)
        await harness.service.start()
        try:
            yield harness
            harness.plane.hook = None
            await harness.until_quiet()
        finally:
            harness.service.stop()
