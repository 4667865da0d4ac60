"""Routers that share what they book, on one loop, each with its own view of one fleet."""

from array import array
from collections.abc import Iterable
from zlib import crc32

from kvrouter.core.ids import Epoch, RequestId, RouterId, WorkerId, WorkerRank
from kvrouter.core.requests import GenerateRequest, Sampling
from kvrouter.fleetfile.routing_settings import routing_settings
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.ledger.port import NativeLedger
from kvrouter.kernel.placement.cache_view import NoCacheView
from kvrouter.kernel.placement.placement import Placement
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.model_router import DecisionLog, ModelRouter
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Telemetry
from kvrouter.transports.sync.port import SyncTransport
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card

HASTE = {"heartbeat_s": 0.02, "silent_after_s": 20.0, "ask_again_s": 0.05}
"""Clocks for tests: often, and a silence that no busy machine brings about."""


class ReplicaRouter:
    """A model's router with its replica sync."""

    def __init__(
        self,
        name: str,
        transport: SyncTransport,
        *,
        workers: Iterable[int] = range(4),
        config: KvRouterConfig | None = None,
        silent_after_s: float = HASTE["silent_after_s"],
    ) -> None:
        config = config or KvRouterConfig()
        self.sync = ReplicaSync(
            transport,
            RouterId(name),
            heartbeat_s=HASTE["heartbeat_s"],
            silent_after_s=silent_after_s,
            ask_again_s=HASTE["ask_again_s"],
        )
        self.model = ModelRouter(
            fleet=Fleet(MODEL, BLOCK_SIZE),
            cache=NoCacheView(),
            ledger=NativeLedger(),
            router_id=RouterId(name),
            config=config,
            settings=routing_settings(config, None),
            decisions=DecisionLog(requests_max=16),
            instrumentation=ServiceInstrumentation(Telemetry()).of_model(MODEL),
            seed=1,
            sync=self.sync,
        )
        self.name = name
        self._n_requests = 0
        for worker in workers:
            self.join(worker)

    def join(self, worker: int, *, incarnation: int = 1) -> None:
        change = self.model.fleet.join(card(worker, incarnation=incarnation))
        for slot in change.freed:
            self.model.ledger.drop_slot(slot)
        self.model.placer.fleet_changed(now_s=self.model.clock())

    def leave(self, worker: int, *, incarnation: int = 1) -> None:
        for slot in self.model.fleet.leave(WorkerId(worker), Epoch(incarnation)):
            self.model.ledger.drop_slot(slot)
        self.model.placer.fleet_changed(now_s=self.model.clock())

    async def place(self, *, n_blocks: int = 4) -> Placement:
        """Book a request with a prompt of its own."""
        self._n_requests += 1
        first = crc32(f"{self.name}-{self._n_requests}".encode()) % 2**31
        tokens = array("I", range(first, first + n_blocks * BLOCK_SIZE))
        request = GenerateRequest(
            RequestId(f"{self.name}-{self._n_requests}"), MODEL, tokens, Sampling(max_tokens=16)
        )
        return await self.model.place(request, tokens, attempt=0, excluded=frozenset())

    def loads(self) -> dict[WorkerId, tuple[int, int]]:
        """Prefill tokens and active blocks by worker, as this router counts them; idle workers left out."""
        self.model.ledger.ensure_slots(self.model.fleet.n_slots)
        columns = self.model.ledger.columns()
        found = {}
        for of in self.model.fleet:
            slot = self.model.fleet.slot_of(WorkerRank(of.worker_id, of.ranks()[0].dp_rank))
            assert slot is not None
            load = int(columns.prefill_tokens[slot]), int(columns.active_blocks[slot])
            if load != (0, 0):
                found[of.worker_id] = load
        return found
