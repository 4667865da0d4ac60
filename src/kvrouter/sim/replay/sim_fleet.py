"""The fleet of a replay: mock engines on their links, and the placer that routes to them."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import Epoch, ModelName, RequestId, RouterId, Slot, WorkerId
from kvrouter.core.timing import Timing
from kvrouter.core.workers import LoadReport, Role, WorkerCard
from kvrouter.engines.mock_engine.config import EngineHashing, MockConfig
from kvrouter.engines.mock_engine.fabric import Fabric
from kvrouter.engines.mock_engine.remote import Peer
from kvrouter.fleetfile.fleet_file import FleetFile, WorkerGroup
from kvrouter.fleetfile.fleet_workers import (
    BOOTSTRAP_PORT,
    bootstraps,
    link_table,
    mock_config,
    mock_links,
    numbered_workers,
    worker_card,
)
from kvrouter.fleetfile.routing_settings import circuit_settings, routing_settings, waiting_limits
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.index import ContentIndex, NativeApproximateIndex
from kvrouter.kernel.ledger.port import NativeLedger
from kvrouter.kernel.placement.cache_view import CacheView, NoCacheView, PredictedCacheView
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.placement.placement_events import PlacementEvents
from kvrouter.kernel.placement.placer import Placer
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.sim.replay.cache import EventCacheView
from kvrouter.sim.replay.fleet_check import check_fleet
from kvrouter.sim.replay.timetable import WorkersEvent
from kvrouter.sim.replay.timetable_plan import Step, relabelled
from kvrouter.sim.rules.rule import PublishedRule

VOCABULARY = 16
"""Nobody reads the tokens of a replay."""


class SlotLoads:
    """Load by slot, as the router sees it and as engines last reported it."""

    def __init__(self) -> None:
        self.in_flight: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        self.waiting: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        self.kv_use: npt.NDArray[np.float64] = np.zeros(16)
        self.lives: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        """How often the slot was freed: requests placed there before no longer count as its load."""
        self.timing: npt.NDArray[np.int64] = np.zeros(16, np.int64)
        self.timings: list[Timing] = []
        self.session_of: Callable[[RequestId], str] = lambda _request_id: ""
        """See :class:`~kvrouter.sim.rules.rule.Gateway`; a simulation sets it."""
        self._booked: dict[int, list[tuple[Slot, int]]] = {}
        """By placement: the slots that it loads, and the life of each."""

    def ensure_slots(self, n_slots: int) -> None:
        """Make room for ``n_slots`` slots."""
        if n_slots > len(self.in_flight):
            more = 2 * n_slots - len(self.in_flight)
            self.in_flight = np.concatenate((self.in_flight, np.zeros(more, np.int64)))
            self.waiting = np.concatenate((self.waiting, np.zeros(more, np.int64)))
            self.kv_use = np.concatenate((self.kv_use, np.zeros(more)))
            self.lives = np.concatenate((self.lives, np.zeros(more, np.int64)))
            self.timing = np.concatenate((self.timing, np.zeros(more, np.int64)))

    def joined(self, slot: Slot, timing: Timing) -> None:
        """An engine with this timing joined at the slot."""
        if timing not in self.timings:
            self.timings.append(timing)
        self.timing[slot] = self.timings.index(timing)

    def booked(self, placement: Placement) -> None:
        """The workers of a placement have one request more."""
        decision = placement.decision
        slots = [pick.slot for pick in (decision.decode, decision.prefill) if pick is not None]
        self._booked[id(placement)] = [(slot, int(self.lives[slot])) for slot in slots]
        for slot in slots:
            self.in_flight[slot] += 1

    def released(self, placement: Placement) -> None:
        """Subtract the request from its slots, unless they were freed meanwhile."""
        for slot, life in self._booked.pop(id(placement), ()):
            if self.lives[slot] == life:
                self.in_flight[slot] -= 1

    def reported(self, slot: Slot, report: LoadReport) -> None:
        """An engine reported its load."""
        self.waiting[slot] = report.waiting_requests or 0
        self.kv_use[slot] = report.active_blocks / (report.total_blocks or 1)

    def freed(self, slot: Slot) -> None:
        """The slot's worker rank is gone."""
        self.in_flight[slot] = self.waiting[slot] = 0
        self.kv_use[slot] = 0.0
        self.lives[slot] += 1


class SimFleet:
    """The workers of a fleet file, as mock engines that skip steps without a change.

    ``rule`` picks instead of the router's own costs. ``steps`` is its timetable. Raises ConfigError for a
    file that a replay cannot run: with engines that are not mock ones, or with several models.
    """

    def __init__(
        self,
        file: FleetFile,
        *,
        config: KvRouterConfig,
        rule: PublishedRule | None,
        seed: int,
        call_soon: Callable[[Callable[[], None]], object],
        timing: Timing | None = None,
        steps: Sequence[Step] = (),
    ) -> None:
        check_fleet(file)
        model = file.models[0]
        self.file = file
        self.block_size = model.mock_block_size
        self.fabric = Fabric(mock_links(file), leaps=True)
        self.fleet = Fleet(ModelName(model.mock_name), self.block_size)
        self.loads = SlotLoads()
        if rule is not None:
            rule.gateway = self.loads
        self.cache = _cache_view(
            [config, *(step.file.router for step in steps)], needs_overlap=rule is not None
        )
        self.placer = Placer(
            fleet=self.fleet,
            cache=self.cache,
            ledger=NativeLedger(64),
            router_id=RouterId("replay"),
            settings=routing_settings(config, link_table(file)),
            tracks_active_blocks=config.track_active_blocks,
            circuits=circuit_settings(config),
            circuit_seed=seed,
            events=PlacementEvents(),  # what circuits and slow ranks cost is in the outcomes of requests
            waiting=waiting_limits(config),
            call_soon=call_soon,
            now_s=0.0,
            rule=rule,
        )
        self._timing = timing
        self._groups: dict[WorkerId, WorkerGroup] = {}
        self._incarnations = 0
        self._draining: set[WorkerId] = set()
        self._awaited: set[WorkerId] = set()
        """Workers that will be added, and are not there yet."""
        for worker_id, group in numbered_workers(file):
            self._groups[worker_id] = group
            self.join(worker_id, now_s=0.0)
        for worker_id, group in (worker for step in steps for worker in step.added):
            self._groups[worker_id] = group
            self._awaited.add(worker_id)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of prompt and answer together that each of its engines has room for, at any time."""
        specs = [self._config(worker_id, group, None) for worker_id, group in self._groups.items()]
        return min(spec.total_kv_blocks * spec.block_size for spec in specs)

    @property
    def stated_context_tokens(self) -> int | None:
        """The context length in the file; None without one."""
        return self.file.models[0].context_length

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The workers that are or were here."""
        return tuple(worker_id for worker_id in self._groups if worker_id not in self._awaited)

    @property
    def n_prefill_workers(self) -> int:
        """How many of the workers that are or were here prefill, alone or with the rest."""
        return sum(self._groups[worker_id].role is not Role.DECODE for worker_id in self.workers)

    def selected(self, event: WorkersEvent) -> list[WorkerId]:
        """The workers that an event happens to, dead ones too."""
        return [worker_id for worker_id in self.workers if event.selects(worker_id, self._groups[worker_id])]

    def join(self, worker_id: WorkerId, *, now_s: float) -> None:
        """A worker joins, with an empty cache."""
        group = self._groups[worker_id]
        self._awaited.discard(worker_id)
        self._incarnations += 1
        config = self._config(worker_id, group, self._bootstrap(worker_id))
        self.fabric.add(config, worker_id=worker_id, domains=group.domains)
        self._apply(self._card(worker_id, Epoch(self._incarnations)), now_s=now_s)

    def drain(self, worker_id: WorkerId, *, now_s: float) -> None:
        """A worker gets no new requests from now on; its engine goes on."""
        if self.fleet.card(worker_id) is not None and worker_id not in self._draining:
            self._draining.add(worker_id)
            self._publish_again(worker_id, now_s=now_s)

    def come_back(self, worker_id: WorkerId, *, now_s: float) -> None:
        """A worker that died joins again; one that drains gets new requests again."""
        if self.fleet.card(worker_id) is None:
            self.join(worker_id, now_s=now_s)
        elif worker_id in self._draining:
            self._draining.remove(worker_id)
            self._publish_again(worker_id, now_s=now_s)

    def label(self, worker_id: WorkerId, labels: Mapping[str, str | None], *, now_s: float) -> None:
        """The labels of a worker's node change: it publishes its card again. Its engine goes on, and later
        transfers go from and to where it is now.
        """
        group = self._groups[worker_id]
        self._groups[worker_id] = relabelled(group, labels)
        if self._groups[worker_id].domains != group.domains and self.fleet.card(worker_id) is not None:
            self.fabric.move(now_s, worker_id, self._groups[worker_id].domains)
            self._publish_again(worker_id, now_s=now_s)

    def switch(self, file: FleetFile, *, now_s: float) -> None:
        """The transfer policy and the router's settings are those of ``file`` from now on: workers publish
        their cards again, and the router decides by the new settings.
        """
        before, self.file = self.file, file
        if file.router != before.router:
            self.placer.set_routing(routing_settings(file.router, link_table(file)), now_s=now_s)
        if file.kv_transfer != before.kv_transfer:
            for card in tuple(self.fleet):
                self._publish_again(card.worker_id, now_s=now_s)

    def leave(self, worker_id: WorkerId, *, now_s: float) -> None:
        """A worker dies: its engine is gone at once, and the router knows."""
        card = self.fleet.card(worker_id)
        if card is None:
            return
        self._draining.discard(worker_id)
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

    def _publish_again(self, worker_id: WorkerId, *, now_s: float) -> None:
        card = self.fleet.card(worker_id)
        if card is not None:
            self._apply(self._card(worker_id, card.incarnation), now_s=now_s)

    def _card(self, worker_id: WorkerId, incarnation: Epoch) -> WorkerCard:
        card = worker_card(
            self.file,
            self._groups[worker_id],
            worker_id,
            incarnation=incarnation,
            address=f"replay://{worker_id}",
            bootstrap=self._bootstrap(worker_id),
        )
        return replace(card, draining=True) if worker_id in self._draining else card

    def _bootstrap(self, worker_id: WorkerId) -> Peer | None:
        return Peer(f"mock-{worker_id}", BOOTSTRAP_PORT) if bootstraps(self._groups[worker_id]) else None

    def _apply(self, card: WorkerCard, *, now_s: float) -> None:
        change = self.fleet.join(card)
        for slot in change.freed:
            self._freed(slot)
        self.loads.ensure_slots(self.fleet.n_slots)
        for slot in change.joined:
            self.loads.joined(slot, self._config(card.worker_id, self._groups[card.worker_id], None).timing)
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
        # A trace says how long answers are, and names change nothing that happens.
        config = replace(config, eos_every=None, engine_hashing=EngineHashing.DETERMINISTIC)
        return config if self._timing is None else replace(config, timing=self._timing)


def _cache_view(configs: Sequence[KvRouterConfig], *, needs_overlap: bool) -> CacheView:
    """As the live router's: no index where overlap never weighs anything, else events, or predictions."""
    config = configs[0]
    weighs = any(each.overlap_score_weight > 0.0 and each.router_mode is RouterMode.KV for each in configs)
    if not weighs and not needs_overlap:
        return NoCacheView()
    predicted = NativeApproximateIndex(
        ttl_s=config.router_ttl_s,
        max_blocks=config.router_max_tree_size,
        prune_target_ratio=config.router_prune_target_ratio,
    )
    if config.kv_events:
        return EventCacheView(ContentIndex(), predicted)
    return PredictedCacheView(predicted)
