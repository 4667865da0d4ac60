"""One reading of everything that the router believes of its workers, for the fleet page and the gauges."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvrouter.core.events import Medium
from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.core.workers import WorkerCard
from kvrouter.feed.words import FeedState
from kvrouter.fleet import UNKNOWN, CircuitState
from kvrouter.service.cache_view import EventCacheView, PredictedCacheView
from kvrouter.service.engine_accounts import AccountReading
from kvrouter.service.event_pump import FeedReading
from kvrouter.service.model_router import ModelRouter


@dataclass(frozen=True, slots=True)
class RankReading:
    """One worker rank. What is not known is None: no report yet, no index, no feed."""

    rank: WorkerRank
    active_blocks: int
    prefill_tokens: int
    total_blocks: int | None
    report_active_blocks: int | None
    report_prefill_tokens: int | None
    report_running_requests: int | None
    report_waiting_requests: int | None
    held_blocks: int | None
    feed: FeedState | None
    stale_s: float | None
    lag_s: float | None
    silent_s: float | None
    kv_events_missing: bool | None
    account: AccountReading


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One worker and its ranks."""

    card: WorkerCard
    alive: bool
    circuit: CircuitState
    ranks: tuple[RankReading, ...]


@dataclass(frozen=True, slots=True)
class IndexReading:
    """The size of a model's index. ``blocks`` is by medium."""

    blocks: dict[str, int]
    bytes: int


def read_workers(model: ModelRouter) -> Iterator[WorkerReading]:
    """Yield every worker of a model, in the order of worker ids."""
    fleet = model.fleet
    model.ledger.ensure_slots(fleet.n_slots)
    loads = model.ledger.columns()
    feeds: dict[Slot, FeedReading] = {}
    held_of = None
    if isinstance(model.cache, EventCacheView):
        feeds = dict(model.cache.pump.feed_readings())
        held_of = model.cache.index.held
    columns = fleet.columns
    for card in sorted(fleet, key=lambda card: card.worker_id):
        ranks = []
        for rank, slot in zip(card.ranks(), fleet.slots_of(card.worker_id), strict=True):
            total_blocks = float(columns.total_blocks[slot])
            reported = bool(columns.has_report[slot])
            prefill_tokens = int(columns.report_prefill_tokens[slot])
            feed = feeds.get(slot)
            ranks.append(
                RankReading(
                    rank=rank,
                    active_blocks=int(loads.active_blocks[slot]),
                    prefill_tokens=int(loads.prefill_tokens[slot]),
                    total_blocks=int(total_blocks) if np.isfinite(total_blocks) else None,
                    report_active_blocks=int(columns.report_active_blocks[slot]) if reported else None,
                    report_prefill_tokens=None if prefill_tokens == UNKNOWN else prefill_tokens,
                    report_running_requests=int(columns.report_running_requests[slot]) if reported else None,
                    report_waiting_requests=int(columns.report_waiting_requests[slot]) if reported else None,
                    held_blocks=None if held_of is None else held_of(slot),
                    feed=None if feed is None else _state(card, feed),
                    stale_s=None if feed is None else feed.stale_s,
                    lag_s=None if feed is None else feed.lag_s,
                    silent_s=None if feed is None else feed.silent_s,
                    kv_events_missing=None if feed is None else feed.is_missing,
                    account=model.accounts.reading(slot),
                )
            )
        is_alive, circuit = fleet.is_alive(card.worker_id), model.circuits.state_of(card.worker_id)
        yield WorkerReading(card, is_alive, circuit, tuple(ranks))


def _state(card: WorkerCard, feed: FeedReading) -> FeedState:
    """How far what is known of a rank can be trusted. All that its worker tells may have come, and yet the
    worker itself may know its engine's cache in part only.
    """
    if card.cache_is_partial and feed.state is FeedState.LIVE:
        return FeedState.PARTIAL
    return feed.state


def read_index(model: ModelRouter) -> IndexReading | None:
    """Return the size of a model's index; None when none is kept."""
    cache = model.cache
    if isinstance(cache, EventCacheView):
        stats = cache.index.stats()
        blocks = {medium.name.lower(): stats.blocks[medium] for medium in Medium}
        return IndexReading(blocks, stats.bytes)
    if isinstance(cache, PredictedCacheView):
        predicted = cache.index.stats()
        return IndexReading({Medium.GPU.name.lower(): predicted.blocks}, predicted.bytes)
    return None
