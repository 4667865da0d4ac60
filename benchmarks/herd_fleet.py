"""Routers and workers on a clock that jumps: real decisions, ledgers and sync, simulated engines."""

import asyncio
import random
import selectors
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.herd_load import Arrival
from kvrouter.core.ids import Epoch, ModelName, RequestId, RouterId, WorkerId
from kvrouter.core.replica_messages import SyncMessage
from kvrouter.core.requests import GenerateRequest, Sampling
from kvrouter.core.workers import Role, WorkerCard
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
from kvrouter.transports.sync.port import MessageSink

MODEL = ModelName("bench")
BLOCK_SIZE = 16
PREFILL_TOKENS_PER_S = 16_000.0
TOKEN_GAP_S = 0.010
"""Between two tokens of one answer that runs alone; each other answer next to it adds to it."""

TOKEN_GAP_EACH_S = 0.0002


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer, so that a minute takes as long as its work."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0:
            self._loop.now_s += timeout
        return ready


class SlowSyncTransport:
    """The sync plane with a way of random length: what one router sends arrives in its order."""

    def __init__(self, chance: random.Random, *, delay_s: tuple[float, float]) -> None:
        self._chance = chance
        self._delay_s = delay_s
        self._sinks: dict[RouterId, MessageSink] = {}
        self._arrived_s: dict[tuple[RouterId, RouterId], float] = {}

    def publish(self, message: SyncMessage, *, to: RouterId | None = None) -> bool:
        loop = asyncio.get_running_loop()
        for router_id, on_message in self._sinks.items():
            if router_id != message.router_id and to in (None, router_id):
                way = (message.router_id, router_id)
                arrives_s = max(
                    loop.time() + self._chance.uniform(*self._delay_s), self._arrived_s.get(way, 0.0)
                )
                self._arrived_s[way] = arrives_s
                loop.call_at(arrives_s, on_message, message)
        return True

    async def subscribe(self, router_id: RouterId, on_message: MessageSink) -> Callable[[], Awaitable[None]]:
        self._sinks[router_id] = on_message

        async def end() -> None:
            del self._sinks[router_id]

        return end


@dataclass(slots=True, eq=False)
class Running:
    """One request at a worker."""

    placement: Placement
    router: ModelRouter
    waiting_tokens: int
    left_tokens: int
    arrived_s: float
    output_blocks: int = 0


class Worker:
    """A simulated engine: prefill one after the other, decode all at once; more at once is slower."""

    def __init__(self, first_tokens_s: list[float]) -> None:
        self.running: set[Running] = set()
        self._first_tokens_s = first_tokens_s
        self._prefill_free_s = 0.0

    @property
    def load_blocks(self) -> float:
        """Blocks that its requests hold, and those that wait for prefill: what a request's cost counts."""
        return sum(
            run.placement.prompt.total_blocks + run.output_blocks + run.waiting_tokens / BLOCK_SIZE
            for run in self.running
        )

    def take(self, run: Running) -> None:
        loop = asyncio.get_running_loop()
        self.running.add(run)
        self._prefill_free_s = (
            max(loop.time(), self._prefill_free_s) + run.waiting_tokens / PREFILL_TOKENS_PER_S
        )
        loop.call_at(self._prefill_free_s, self._first_token, run)

    def _first_token(self, run: Running) -> None:
        self._first_tokens_s.append(asyncio.get_running_loop().time() - run.arrived_s)
        run.waiting_tokens = 0
        run.router.first_token(run.placement)
        self._next_block(run)

    def _next_block(self, run: Running) -> None:
        n_tokens = min(BLOCK_SIZE, run.left_tokens)
        gap_s = TOKEN_GAP_S + TOKEN_GAP_EACH_S * len(self.running)
        asyncio.get_running_loop().call_later(n_tokens * gap_s, self._block_done, run, n_tokens)

    def _block_done(self, run: Running, n_tokens: int) -> None:
        run.left_tokens -= n_tokens
        if run.left_tokens > 0:
            run.output_blocks += 1
            run.router.placer.output_blocks(run.placement, 1, now_s=run.router.clock())
            self._next_block(run)
        else:
            self.running.discard(run)
            run.router.release(run.placement)


def make_router(name: str, n_workers: int, sync: ReplicaSync | None) -> ModelRouter:
    """A model's router, as the composition root makes it, with every worker in its fleet."""
    config = KvRouterConfig(router_cost="blocks")
    router = ModelRouter(
        fleet=Fleet(MODEL, BLOCK_SIZE),
        cache=NoCacheView(),
        ledger=NativeLedger(),
        router_id=RouterId(name),
        config=config,
        settings=routing_settings(config, None),
        decisions=DecisionLog(requests_max=16),
        instrumentation=ServiceInstrumentation(Telemetry()).of_model(MODEL),
        seed=len(name),
        sync=sync,
    )
    for worker in range(n_workers):
        router.fleet.join(
            WorkerCard(
                worker_id=WorkerId(worker),
                incarnation=Epoch(1),
                model=MODEL,
                role=Role.BOTH,
                block_size=BLOCK_SIZE,
                context_length=131_072,
                address=f"bench://{worker}",
            )
        )
    router.placer.fleet_changed(now_s=router.clock())
    return router


class Outcome(NamedTuple):
    """What one run showed."""

    busiest_over_mean: list[float]
    """The busiest worker's load over the mean of all, sampled at equal distances."""

    first_tokens_ms: list[float]


async def run_fleet(
    arrivals: list[Arrival],
    *,
    n_routers: int,
    n_workers: int,
    sync_delay_s: tuple[float, float] | None,
    warm_s: float,
    sample_s: float,
    seed: int,
) -> Outcome:
    """Send the arrivals through the routers; sample from ``warm_s`` to the last one. Needs a JumpingLoop."""
    loop = asyncio.get_running_loop()
    chance = random.Random(seed)
    syncs: list[ReplicaSync | None] = [None] * n_routers
    if sync_delay_s is not None:
        plane = SlowSyncTransport(chance, delay_s=sync_delay_s)
        syncs = [ReplicaSync(plane, RouterId(f"router-{number}")) for number in range(n_routers)]
    routers = [make_router(f"router-{number}", n_workers, sync) for number, sync in enumerate(syncs)]
    for sync in syncs:
        if sync is not None:
            await sync.start()
    first_tokens_s: list[float] = []
    workers = [Worker(first_tokens_s) for _ in range(n_workers)]
    ratios: list[float] = []
    next_sample_s = warm_s
    for number, arrival in enumerate(arrivals):
        while next_sample_s <= arrival.at_s:
            await asyncio.sleep(next_sample_s - loop.time())
            loads = [worker.load_blocks for worker in workers]
            ratios.append(max(loads) * n_workers / sum(loads))
            next_sample_s += sample_s
        await asyncio.sleep(arrival.at_s - loop.time())
        router = routers[arrival.lot % n_routers]
        tokens = array("I", chance.randbytes(4 * arrival.isl_tokens))
        request = GenerateRequest(
            RequestId(f"{seed}-{number}"), MODEL, tokens, Sampling(max_tokens=arrival.osl_tokens)
        )
        placement = await router.place(request, tokens, attempt=0, excluded=frozenset())
        run = Running(placement, router, arrival.isl_tokens, arrival.osl_tokens, arrival.at_s)
        workers[placement.decision.decode.rank.worker_id].take(run)
    for sync in syncs:
        if sync is not None:
            await sync.stop()
    return Outcome(ratios, [1000.0 * seconds for seconds in first_tokens_s])
