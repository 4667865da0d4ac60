"""The fleet of a replay: mock engines on their links, and the placer that routes to them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvrouter.config.decision import circuit_settings, routing_settings, waiting_limits
from kvrouter.config.fleet import FleetFile, WorkerGroup
from kvrouter.config.fleet_workers import (
    BOOTSTRAP_PORT,
    bootstraps,
    link_table,
    mock_config,
    mock_links,
    numbered_workers,
    worker_card,
)
from kvrouter.config.router import KvRouterConfig
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, ModelName, RouterId, Slot, WorkerId
from kvrouter.core.workers import LoadReport, WorkerCard
from kvrouter.fleet import Fault, Fleet
from kvrouter.index import NativeApproximateIndex, NativeBlockIndex
from kvrouter.ledger.port import NativeLedger
from kvrouter.mock import Fabric, MockConfig, Peer, Timing
from kvrouter.placement.cache_view import CacheView, NoCacheView, PredictedCacheView
from kvrouter.placement.placer import Placer
from kvrouter.routing.request import SlotRule
from kvrouter.sim.cache import EventCacheView

VOCABULARY = 32_000
"""Nobody reads the tokens of a replay."""


class NoListener:
    """Circuits that open and close are in the outcomes of requests."""

    def opened(self, worker_id: WorkerId, fault: Fault, *, for_s: float) -> None:
        """A worker failed too often in a row."""

    def closed(self, worker_id: WorkerId) -> None:
        """A worker brought something again."""

    def pair_opened(self, prefill: WorkerId, decode: WorkerId, *, for_s: float) -> None:
        """KV of a pair was lost."""

    def pair_closed(self, prefill: WorkerId, decode: WorkerId) -> None:
        """KV of a pair arrived again."""


class SlotLoads:
    """Load by slot, as the router sees it and as engines last reported it."""

    def __init__(self) -> None:
        self.in_flight: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        self.waiting: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        self.running: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        self.kv_use: npt.NDArray[np.float64] = np.zeros(16)
        self.lives: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        """How often the slot was freed: what was placed there before that is load no more."""

    def ensure_slots(self, n_slots: int) -> None:
        """Make room for so many slots."""
        if n_slots > len(self.in_flight):
            more = 2 * n_slots - len(self.in_flight)
            self.in_flight = np.concatenate((self.in_flight, np.zeros(more, np.int64)))
            self.waiting = np.concatenate((self.waiting, np.zeros(more, np.int64)))
            self.running = np.concatenate((self.running, np.zeros(more, np.int64)))
            self.kv_use = np.concatenate((self.kv_use, np.zeros(more)))
            self.lives = np.concatenate((self.lives, np.zeros(more, np.int64)))

    def reported(self, slot: Slot, report: LoadReport) -> None:
        """An engine reported its load."""
        self.waiting[slot] = report.waiting_requests or 0
        self.running[slot] = report.running_requests or 0
        self.kv_use[slot] = report.active_blocks / (report.total_blocks or 1)

    def freed(self, slot: Slot) -> None:
        """The slot's worker rank is gone."""
        self.in_flight[slot] = self.waiting[slot] = self.running[slot] = 0
        self.kv_use[slot] = 0.0
        self.lives[slot] += 1


class SimFleet:
    """The workers of a fleet file, as mock engines that leap over steps in which nothing changes.

    ``rule`` picks instead of the router's own costs. Raises ConfigError for what a replay cannot run: other
    engines than mock ones, and more than one model.
    """

    def __init__(
        self,
        file: FleetFile,
        *,
        config: KvRouterConfig,
        rule: SlotRule | None,
        seed: int,
        call_soon: Callable[[Callable[[], None]], object],
        timing: Timing | None = None,
    ) -> None:
        _check(file)
        model = file.models[0]
        self.file = file
        self.block_size = model.mock_block_size
        self.fabric = Fabric(mock_links(file), leaps=True)
        self.fleet = Fleet(ModelName(model.name), self.block_size)
        self.loads = SlotLoads()
        self.cache = _cache_view(config, needs_overlap=rule is not None)
        self.placer = Placer(
            fleet=self.fleet,
            cache=self.cache,
            ledger=NativeLedger(64),
            router_id=RouterId("replay"),
            settings=routing_settings(config, link_table(file)),
            tracks_active_blocks=config.track_active_blocks,
            circuits=circuit_settings(config),
            circuit_seed=seed,
            circuit_listener=NoListener(),
            waiting=waiting_limits(config),
            call_soon=call_soon,
            now_s=0.0,
            rule=rule,
        )
        self._timing = timing
        self._groups: dict[WorkerId, WorkerGroup] = {}
        self._incarnations = 0
        for worker_id, group in numbered_workers(file):
            self._groups[worker_id] = group
            self.join(worker_id, now_s=0.0)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of prompt and answer together that each of its engines has room for."""
        specs = [self._config(worker_id, group, None) for worker_id, group in self._groups.items()]
        return min(spec.total_kv_blocks * spec.block_size for spec in specs)

    @property
    def said_context_tokens(self) -> int | None:
        """The context length that the file says, if it says one."""
        return self.file.models[0].context_length

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The workers of the file."""
        return tuple(self._groups)

    def join(self, worker_id: WorkerId, *, now_s: float) -> None:
        """A worker of the file joins, with an empty cache."""
        group = self._groups[worker_id]
        self._incarnations += 1
        bootstrap = Peer(f"mock-{worker_id}", BOOTSTRAP_PORT) if bootstraps(group) else None
        card = worker_card(
            self.file,
            group,
            worker_id,
            incarnation=Epoch(self._incarnations),
            address=f"replay://{worker_id}",
            bootstrap=bootstrap,
        )
        self.fabric.add(self._config(worker_id, group, bootstrap), worker_id=worker_id, domains=group.domains)
        self._apply(card, now_s=now_s)

    def leave(self, worker_id: WorkerId, *, now_s: float) -> None:
        """A worker dies: its engine is gone at once, and the router knows."""
        card = self.fleet.card(worker_id)
        if card is None:
            return
        self.fabric.remove(now_s, worker_id)
        for slot in self.fleet.leave(worker_id, card.incarnation):
            self._freed(slot)
        self.placer.fleet_changed(now_s=now_s)

    def reported(self, report: LoadReport, *, now_s: float) -> None:
        """An engine reported its load."""
        slot = self.fleet.slot_of(report.rank)
        if slot is not None:
            self.loads.reported(slot, report)
            self.placer.reported(report, slot, now_s=now_s)

    def _apply(self, card: WorkerCard, *, now_s: float) -> None:
        change = self.fleet.join(card)
        for slot in change.freed:
            self._freed(slot)
        self.loads.ensure_slots(self.fleet.n_slots)
        for slot in change.joined:
            rank = self.fleet.rank_at(slot)
            if rank is not None and card.publishes_kv_events:
                self.cache.joined(rank, slot, card.incarnation)
        self.placer.fleet_changed(now_s=now_s)

    def _freed(self, slot: Slot) -> None:
        self.placer.freed(slot)
        self.loads.freed(slot)

    def _config(self, worker_id: WorkerId, group: WorkerGroup, bootstrap: Peer | None) -> MockConfig:
        config = mock_config(
            self.file,
            group,
            worker_id,
            bootstrap=bootstrap,
            vocab_size=VOCABULARY,
            answer_ids=None,
            eos_token_id=0,
        )
        config = replace(config, eos_every=None)  # a trace says how long answers are
        return config if self._timing is None else replace(config, timing=self._timing)


def _cache_view(config: KvRouterConfig, *, needs_overlap: bool) -> CacheView:
    """As the live router's: no index where overlap weighs nothing, else events, or predictions."""
    is_idle = config.overlap_score_weight == 0.0 or config.router_mode is not RouterMode.KV
    if is_idle and not needs_overlap:
        return NoCacheView()
    if config.kv_events:
        return EventCacheView(NativeBlockIndex())
    return PredictedCacheView(
        NativeApproximateIndex(
            ttl_s=config.router_ttl_s,
            max_blocks=config.router_max_tree_size,
            prune_target_ratio=config.router_prune_target_ratio,
        )
    )


def _check(file: FleetFile) -> None:
    if len(file.models) > 1:
        names = ", ".join(model.name for model in file.models)
        raise ConfigError(f"models: a replay has one model, not {names}", param="models")
    for position, group in enumerate(file.workers):
        field = f"workers[{position}]"
        if group.engine.kind != "mock":
            raise ConfigError(
                f"{field}.engine.kind: a replay runs mock engines, not {group.engine.kind}; give the sizes "
                "and the timing of such an engine to a mock one",
                param=f"{field}.engine.kind",
            )
        if group.topology_env:
            raise ConfigError(
                f"{field}.topology_env: a replay reads no files of nodes; say domains instead",
                param=f"{field}.topology_env",
            )
