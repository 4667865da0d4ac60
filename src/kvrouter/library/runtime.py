"""Namespaces, components and endpoints, and a client that sends without KV routing.

::

    async with mock_fleet() as runtime:
        client = await runtime.namespace("default").component("backend").endpoint("generate").client()
        async for piece in await client.round_robin({"token_ids": [1, 2, 3]}):
            ...
"""

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from kvrouter.api.fleet_schema import ExpectedEngine, ExpectedState
from kvrouter.app.attach.program_engines import ProgramEngines, described_engine, program_engines
from kvrouter.app.mock_fleet import MockFleet
from kvrouter.app.router_transports import open_router_transports
from kvrouter.core.errors import (
    ConfigError,
    InvalidRequest,
    KvrouterError,
    NoEligibleWorker,
    Reason,
    ShuttingDown,
)
from kvrouter.core.ids import DpRank, Epoch, WorkerId, WorkerRank, new_request_id
from kvrouter.core.requests import Bootstrap, EngineRequest, KvTransferParams, Leg
from kvrouter.core.workers import CONTEXT_TOKENS_UNKNOWN, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.fleetfile.fleet_checks import default_fleet_document, load_fleet, settled
from kvrouter.fleetfile.fleet_engines import MockEngineSpec
from kvrouter.fleetfile.fleet_workers import link_table
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.library.inputs import (
    AnswerPieces,
    answers_of,
    check_length,
    converted,
    sampling_of,
    token_buffer,
)
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.settings.planes import refuse_clusters
from kvrouter.settings.problems import dotted, read_document
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.sources import load_settings
from kvrouter.settings.tree import Settings
from kvrouter.telemetry import Event, Telemetry, log_event
from kvrouter.transports.events.port import EventSubscriber
from kvrouter.transports.records.port import CordonStore, Discovery, Gone
from kvrouter.transports.requests.port import RequestTransport

_log = logging.getLogger(__name__)

NO_PORT = 0
"""A program has no frontend; NATS connections are otherwise named after its port."""


REASONS_MAX = 4
"""The most workers and engines that one error names as absent."""


def add_reasons(error: KvrouterError, reasons: Sequence[str], *, param: str | None = None) -> None:
    """Add to an error why workers are absent; ``param`` is the field at fault, if there is one."""
    if reasons:
        more = len(reasons) - REASONS_MAX
        listed = (*reasons[:REASONS_MAX], *((f"and {more} more",) if more > 0 else ()))
        error.add("; ".join(listed), param=param)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The transports that the objects of a program share."""

    discovery: Discovery
    requests: RequestTransport
    events: EventSubscriber
    router_config: KvRouterConfig = field(default_factory=KvRouterConfig)
    """The default configuration of a :class:`KvRouter` of this runtime."""

    replica_sync: Callable[[], ReplicaSync | None] = lambda: None
    """Returns the replica sync of a router; None when the runtime was connected without it."""

    cordons: CordonStore | None = None
    """The store of the cordons that a :class:`KvRouter` of this runtime obeys; None: a store in memory."""

    links: LinkTable | None = None
    """The links between workers, as a fleet file has them."""

    engines: ProgramEngines | None = None
    """What attaches engines to this runtime; None where it attaches none."""

    @classmethod
    @asynccontextmanager
    async def connect(cls, settings: Settings | None = None) -> AsyncIterator[Self]:
        """Connect to the worker processes that ``settings`` find, as a frontend does, until the context ends.

        ``settings`` are those of the transports and of the router; None reads the environment, as commands
        do. Raises ConfigError that names the setting, NatsUnreachable when a NATS that is needed is away.
        """
        if settings is None:
            settings = load_settings(flags={}, environ=os.environ).settings
        async with open_router_transports(settings, Telemetry(), http_port=NO_PORT) as transports:
            yield cls(
                transports.discovery,
                transports.requests,
                transports.events,
                settings.router,
                transports.replica_sync,
                transports.cordons,
            )

    @classmethod
    @asynccontextmanager
    async def in_process(cls, settings: Settings | None = None) -> AsyncIterator[Self]:
        """Run the workers of engines that :meth:`attach` adds in this process, until the context ends.

        Of ``settings`` the namespace and the router's are used; None reads the environment, as commands do.
        """
        if settings is None:
            settings = load_settings(flags={}, environ=os.environ).settings
        settings = _without_others(settings)
        async with program_engines(settings, environ=os.environ) as engines:
            yield cls._with_engines(engines, settings)

    @classmethod
    @asynccontextmanager
    async def from_fleet(cls, path: str | os.PathLike[str]) -> AsyncIterator[Self]:
        """Run the workers of a fleet file's engines in this process, as ``kvrouter up --fleet`` does, until
        the context ends; variables win over the file's settings.

        Inside, each engine that answered has its worker. Others get theirs once they answer: :meth:`expected`
        and the errors of routing say why they have none. Raises ConfigError, with a line for each mistake in
        the file, and for each engine that contradicts it.
        """
        document = read_document(Path(path))
        loaded = load_settings(flags={}, environ=os.environ, document=document)
        settings = _without_others(loaded.settings)
        fleet, warnings = settled(load_fleet(document).fleet, settings)
        for note in (*loaded.warnings, *warnings):
            log_event(_log, Event.CONFIG_WARNING, detail=note)
        async with program_engines(settings, fleet, environ=os.environ) as engines:
            yield cls._with_engines(engines, settings, link_table(fleet))

    @classmethod
    def _with_engines(
        cls, engines: ProgramEngines, settings: Settings, links: LinkTable | None = None
    ) -> Self:
        transports = engines.transports
        return cls(
            transports.discovery,
            transports.requests,
            transports.events,
            settings.router,
            links=links,
            engines=engines,
        )

    async def attach(
        self,
        kind: str,
        url: str,
        *,
        role: str = Role.BOTH,
        model: str | None = None,
        block_size: int | None = None,
        context_length: int | None = None,
        dp_size: int | None = None,
        kv_events: bool = True,
        kv_events_endpoint: str | None = None,
        kv_events_replay_endpoint: str | None = None,
        api_key: str | None = None,
        runtime_config: ModelRuntimeConfig | None = None,
        wait_s: float = 0.0,
    ) -> WorkerCard:
        """Attach an engine that runs: ``kind`` is ``vllm``, ``sglang`` or ``trtllm``, ``url`` its server.
        Returns the card of its worker, which then serves in this process.

        The engine is asked for all that is None; what is given must be what it says, and a shorter context is
        kept to. The endpoints of KV events are those of rank 0, ``tcp://HOST:PORT``; each further rank has
        the next port. ``kv_events=False`` listens to none.
        ``runtime_config`` has the worker's place, taints and transfer policy. Without ``api_key`` the engine
        gets the key of ``KVROUTER_ENGINE_API_KEY``, if there is one. ``wait_s`` is how long its first answer
        may take: an engine loads its model before.

        Raises ConfigError whose ``param`` names the argument: one that is invalid or contradicted by the
        engine, and ``url`` for an engine that is attached already, or does not answer in time. An engine that
        ends or restarts later gets nothing until it answers again.
        """
        engines = self._own_engines()
        optional = {
            "model": model,
            "block_size": block_size,
            "context_length": context_length,
            "dp_size": dp_size,
            "kv_events_endpoint": kv_events_endpoint,
            "kv_events_replay_endpoint": kv_events_replay_endpoint,
        }
        given = {name: value for name, value in optional.items() if value is not None}
        spec = described_engine(
            {"kind": kind, "url": url, "role": role, "kv_events": kv_events, **given},
            api_key=api_key,
            runtime_config=runtime_config or ModelRuntimeConfig(),
            wait_s=wait_s,
            environ=os.environ,
        )
        return await engines.attach(spec)

    async def detach(self, worker_id: int, *, drain_limit_s: float = 30.0) -> None:
        """Let no new request go to an engine that was attached, wait for running ones up to ``drain_limit_s``
        seconds, and end its worker; the engine itself goes on. Raises :class:`InvalidRequest` for others.
        """
        await self._own_engines().detach(WorkerId(worker_id), drain_limit_s=drain_limit_s)

    def expected(self) -> list[ExpectedEngine]:
        """The engines of the fleet file and those that were attached: the state of each, and why it has no
        worker.
        """
        return [] if self.engines is None else self.engines.expected()

    def why_absent(self) -> list[str]:
        """A line for each of these engines that has no worker."""
        return [str(each) for each in self.expected() if each.state != ExpectedState.JOINED]

    def _own_engines(self) -> ProgramEngines:
        if self.engines is None:
            raise ConfigError(
                "this runtime attaches no engines: use Runtime.in_process() or Runtime.from_fleet(path)"
            )
        return self.engines

    def namespace(self, name: str) -> "Namespace":
        """The namespace ``name``."""
        return Namespace(self, name)


def _without_others(settings: Settings) -> Settings:
    """Return settings without replica sync, for a runtime that has its workers and its router itself. Raises
    ConfigError where other clusters are named.
    """
    refuse_clusters(settings.planes, "a runtime with engines of its own discovers no workers")
    if not settings.router.replica_sync:
        return settings
    note = "router.replica_sync has no effect here: Runtime.connect joins other routers"
    log_event(_log, Event.CONFIG_WARNING, detail=note)
    router = settings.router.model_copy(update={"replica_sync": False})
    return settings.model_copy(update={"router": router})


@dataclass(frozen=True, slots=True)
class Namespace:
    """Separates deployments that share a fleet."""

    runtime: Runtime
    name: str

    def component(self, name: str) -> "Component":
        """The component ``name``."""
        return Component(self.runtime, self.name, name)


@dataclass(frozen=True, slots=True)
class Component:
    """A group of interchangeable workers."""

    runtime: Runtime
    namespace: str
    name: str

    def endpoint(self, name: str) -> "Endpoint":
        """The endpoint ``name`` of these workers."""
        return Endpoint(self.runtime, self.namespace, self.name, name)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service of a component's workers, such as ``generate``."""

    runtime: Runtime
    namespace: str
    component: str
    name: str

    def serves(self, card: WorkerCard) -> bool:
        """Whether the worker belongs to this endpoint."""
        return (card.namespace, card.component, card.endpoint) == (self.namespace, self.component, self.name)

    async def client(self) -> "Client":
        """Return a client that follows the endpoint's workers from now on."""
        client = Client(self)
        await client.follow()
        return client


class Client:
    """Sends requests to an endpoint's workers: to a random, the next, or a named one. ``close`` it after use.

    A request is sent at once. Read its answer to the last piece, or leave it with ``aclose`` or the end of an
    ``async with``: otherwise the worker keeps generating.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._cards: dict[WorkerId, WorkerCard] = {}
        self._changed = asyncio.Event()
        self._stop: Callable[[], None] | None = None
        self._turn = 0
        self._random = random.Random()

    async def follow(self) -> None:
        """Begin to follow discovery."""
        self._stop = await self._endpoint.runtime.discovery.watch(self._on_card, self._on_gone)

    def close(self) -> None:
        """Stop following discovery; every later send raises :class:`ShuttingDown`."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def instance_ids(self) -> list[WorkerId]:
        """The workers that take requests, in order."""
        return sorted(worker_id for worker_id, card in self._cards.items() if card.takes_new_requests)

    async def wait_for_instances(self) -> list[WorkerId]:
        """Return the workers as soon as there is one."""
        self._refuse_when_closed()
        while not self.instance_ids():
            self._changed.clear()
            await self._changed.wait()
        return self.instance_ids()

    async def generate(self, request: Mapping[str, object]) -> AnswerPieces:
        """Send to a random worker."""
        return await self.random(request)

    async def random(self, request: Mapping[str, object]) -> AnswerPieces:
        """Send to a random worker."""
        return await self.direct(request, self._random.choice(self._some()))

    async def round_robin(self, request: Mapping[str, object]) -> AnswerPieces:
        """Send to the workers in turn."""
        workers = self._some()
        self._turn += 1
        return await self.direct(request, workers[(self._turn - 1) % len(workers)])

    async def direct(self, request: Mapping[str, object], worker_id: int) -> AnswerPieces:
        """Send to the worker ``worker_id``.

        ``request`` has ``token_ids`` and may have ``stop_conditions``, ``sampling_options`` and ``dp_rank``.
        A prefill worker only prefills, and its last piece says where the KV is. A request with those fields
        (``kv_transfer_params`` or ``bootstrap``, and ``prefill_worker_id``) is only decoded.
        Raises :class:`InvalidRequest` for an unknown worker or a request that it can't serve,
        ``WorkerUnreachable`` when it does not accept, :class:`ShuttingDown` after :meth:`close`.
        """
        self._refuse_when_closed()
        card = self._cards.get(WorkerId(worker_id))
        if card is None:
            raise InvalidRequest(f"worker_id: {worker_id} does not serve this endpoint", param="worker_id")
        stream = await self._endpoint.runtime.requests.open(card.address, _engine_request(request, card))
        return answers_of(stream)

    def _refuse_when_closed(self) -> None:
        if self._stop is None:
            raise ShuttingDown("this client was closed; make another one")

    def _some(self) -> list[WorkerId]:
        self._refuse_when_closed()
        workers = self.instance_ids()
        if not workers:
            refusals = Counter(
                Reason.DRAINING if card.draining else Reason.ENGINE_SILENT for card in self._cards.values()
            )
            error = NoEligibleWorker("no worker serves this endpoint", refusals=refusals)
            add_reasons(error, self._endpoint.runtime.why_absent())
            raise error
        return workers

    def _on_card(self, card: WorkerCard) -> None:
        if self._endpoint.serves(card):
            self._cards[card.worker_id] = card
            self._changed.set()

    def _on_gone(self, worker_id: WorkerId, incarnation: Epoch, _why: Gone) -> None:
        card = self._cards.get(worker_id)
        if card is not None and card.incarnation == incarnation:
            del self._cards[worker_id]


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request dictionary of :meth:`Client.direct`."""

    token_ids: list[int]
    stop_conditions: dict[str, object] = {}
    sampling_options: dict[str, object] = {}
    dp_rank: int | None = None
    kv_transfer_params: KvTransferParams | None = None
    bootstrap: Bootstrap | None = None
    prefill_worker_id: int | None = None


def _engine_request(request: Mapping[str, object], card: WorkerCard) -> EngineRequest:
    parsed = converted(_Request, request, at="request")
    token_ids = token_buffer(parsed.token_ids)
    sampling = sampling_of(parsed.stop_conditions, parsed.sampling_options)
    check_length(
        token_ids,
        max_tokens=sampling.max_tokens,
        context_length_tokens=card.context_length or CONTEXT_TOKENS_UNKNOWN,
    )
    dp_rank = DpRank(card.dp_start if parsed.dp_rank is None else parsed.dp_rank)
    if WorkerRank(card.worker_id, dp_rank) not in card.ranks():
        raise InvalidRequest(f"dp_rank: worker {card.worker_id} has no rank {dp_rank}", param="dp_rank")
    leg = Leg.AGGREGATED
    if card.role is Role.PREFILL:
        leg, sampling = Leg.PREFILL, msgspec.structs.replace(sampling, max_tokens=1, min_tokens=0)
    elif parsed.kv_transfer_params is not None or parsed.bootstrap is not None:
        leg = Leg.DECODE
    return EngineRequest(
        request_id=new_request_id(),
        attempt=0,
        leg=leg,
        model=card.model,
        token_ids=token_ids,
        sampling=sampling,
        dp_rank=dp_rank,
        bootstrap=parsed.bootstrap,
        kv_transfer_params=parsed.kv_transfer_params,
        prefill_worker_id=None if parsed.prefill_worker_id is None else WorkerId(parsed.prefill_worker_id),
    )


@asynccontextmanager
async def mock_fleet(path: str | os.PathLike[str] | None = None) -> AsyncIterator[Runtime]:
    """Run the fleet of a fleet file (by default two zones, 1 prefill and 2 decode workers each).

    Raises ConfigError with a line for each mistake in the file, such as an engine that is not a mock engine.
    """
    document = default_fleet_document() if path is None else read_document(Path(path))
    described = load_fleet(document).fleet
    for position, group in enumerate(described.workers):
        if not isinstance(group.engine, MockEngineSpec):
            at = ("workers", position, "engine", "kind")
            raise ConfigError(f"{document.place(at)}: must be 'mock' here", param=dotted(at))
    async with MockFleet(described) as fleet:
        yield Runtime(fleet.discovery, fleet.requests, fleet.events)
