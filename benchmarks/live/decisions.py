"""A decision with all that it was made from, by worker rank, so that another router can make it again."""

from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import DpRank, RequestId, Slot, WorkerId, WorkerRank
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.routing.interface import Decision, RouteRequest, RoutingSettings, View
from kvrouter.kernel.routing.masks import constraint_of
from kvrouter.kernel.routing.route import route, route_decode

Count = TypeVar("Count", np.uint32, np.int64)


class Choice(NamedTuple):
    """The ranks that a decision picked; ``prefill`` is None where one rank does all of it."""

    decode: WorkerRank
    prefill: WorkerRank | None


class RankReading(msgspec.Struct, frozen=True):
    """What a view says of one worker rank. ``overlap_blocks`` and ``not_active`` are None where the router
    does not read them.
    """

    overlap_blocks: int | None
    prefill_tokens: int
    active_blocks: int
    not_active: int | None
    is_open: bool
    """Whether it answers, is not draining, its circuit is closed, and its context holds the request."""


class SeenDecision(msgspec.Struct, frozen=True):
    """One booked decision. ``sender`` is where the KV waited of a request whose decode was picked again."""

    route_request: RouteRequest
    readings: dict[str, RankReading]
    """By worker rank, as :func:`rank_name` writes it."""

    seed: int
    turn: int
    unseen: float
    choice: Choice
    sender: WorkerRank | None = None

    @property
    def key(self) -> tuple[RequestId, int, bool]:
        """Which decision of the request it is."""
        return self.route_request.request_id, self.route_request.attempt, self.sender is not None


def rank_name(rank: WorkerRank) -> str:
    """Return ``worker/rank``."""
    return f"{rank.worker_id}/{rank.dp_rank}"


def parse_rank(name: str) -> WorkerRank:
    """Return what :func:`rank_name` wrote."""
    worker_id, _, dp_rank = name.partition("/")
    return WorkerRank(WorkerId(int(worker_id)), DpRank(int(dp_rank)))


def see(
    route_request: RouteRequest, view: View, decision: Decision, *, prefill: WorkerRank | None = None
) -> SeenDecision:
    """Copy a decision out of a router. Raises ValueError for a router with busy thresholds: what it reads of
    load reports is not copied.
    """
    settings, fleet = view.settings, view.fleet
    thresholds = settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold
    if thresholds != (None, None):
        raise ValueError("a router with busy thresholds decides by load reports, which are not compared")
    columns, overlap, not_active = fleet.columns, view.overlap_blocks, view.not_active
    is_open = columns.alive & ~columns.draining & ~columns.engine_silent & ~columns.circuit_open
    is_open &= columns.context_length >= route_request.context_tokens
    readings = {
        rank_name(rank): RankReading(
            overlap_blocks=None if overlap is None else int(overlap[slot]),
            prefill_tokens=int(view.prefill_tokens[slot]),
            active_blocks=int(view.active_blocks[slot]),
            not_active=None if not_active is None else int(not_active[slot]),
            is_open=bool(is_open[slot]),
        )
        for slot, rank in ranks_of(fleet)
    }
    return SeenDecision(
        route_request=route_request,
        readings=readings,
        seed=view.seed,
        turn=view.turn,
        unseen=view.unseen,
        choice=choice_of(decision, prefill),
        sender=prefill,
    )


def choice_of(decision: Decision, sender: WorkerRank | None = None) -> Choice:
    """Return the ranks of a decision; ``sender`` prefilled where decode alone was decided."""
    return Choice(decision.decode.rank, sender if decision.prefill is None else decision.prefill.rank)


def ranks_of(fleet: Fleet) -> list[tuple[Slot, WorkerRank]]:
    """Return the slots that a worker rank is at."""
    slots = map(Slot, range(fleet.n_slots))
    return [(slot, rank) for slot in slots if (rank := fleet.rank_at(slot)) is not None]


def decide_again(seen: SeenDecision, placer: Placer) -> Choice:
    """Return what another router picks for a view that it is given. Its fleet has the same worker ranks.

    Raises ValueError where the ranks are others, or where one was not open: the other fleet's are.
    """
    fleet = placer.fleet
    ranks = ranks_of(fleet)
    if {rank_name(rank) for _, rank in ranks} != seen.readings.keys():
        raise ValueError(f"{seen.route_request.request_id}: decided among {sorted(seen.readings)}")
    closed = [name for name, reading in seen.readings.items() if not reading.is_open]
    if closed:
        raise ValueError(f"{seen.route_request.request_id}: decided while {closed} took no requests")
    readings = [(slot, seen.readings[rank_name(rank)]) for slot, rank in ranks]

    def column(name: str, of: type[Count]) -> npt.NDArray[Count]:
        filled = np.zeros(fleet.n_slots, of)
        for slot, reading in readings:
            filled[slot] = getattr(reading, name) or 0
        return filled

    some = next(iter(seen.readings.values()))
    view = View(
        fleet=fleet,
        settings=placer.settings,
        overlap_blocks=None if some.overlap_blocks is None else column("overlap_blocks", np.uint32),
        prefill_tokens=column("prefill_tokens", np.int64),
        active_blocks=column("active_blocks", np.int64),
        not_active=None if some.not_active is None else column("not_active", np.uint32),
        seed=seen.seed,
        turn=seen.turn,
        unseen=seen.unseen,
    )
    if seen.sender is None:
        return choice_of(route(seen.route_request, view))
    slot = fleet.slot_of(seen.sender)
    if slot is None:
        raise ValueError(f"{seen.route_request.request_id}: its KV waited at {rank_name(seen.sender)}")
    constraint = constraint_of(fleet, slot, placer.settings.topology_default)
    return choice_of(route_decode(seen.route_request, view, constraint, prefill=seen.sender), seen.sender)


def have_equal_views(one: SeenDecision, other: SeenDecision, settings: RoutingSettings) -> bool:
    """Whether two routers with ``settings`` decided the same question from the same readings. What they drew
    counts where it is read.
    """
    if (one.readings, one.sender) != (other.readings, other.sender) or _asked(one) != _asked(other):
        return False
    mode = one.route_request.override.router_mode or settings.mode
    if mode is RouterMode.ROUND_ROBIN:
        return one.turn == other.turn
    if mode is RouterMode.RANDOM or settings.temperature > 0.0 or one.unseen or other.unseen:
        return (one.seed, one.unseen) == (other.seed, other.unseen)
    return True


def _asked(seen: SeenDecision) -> RouteRequest:
    """The question without its context, which a replay does not say: the readings say whom it leaves out."""
    return structs.replace(seen.route_request, context_tokens=0)
