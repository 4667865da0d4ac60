"""Eligibility masks over slots, each with its refusal reason, and the masks of pairs.

Under ``required`` and ``fallback``, prefill ranks whose domain value some eligible decode rank shares are the
first tier (``home``). The second tier (``away``) are ``fallback`` ranks without such a decode rank: their KV
may leave the domain. A ``required`` rank without one is in neither tier: it gets no requests. Only decode
ranks that can take a prefill rank's KV count (:class:`~kvrouter.core.workers.KvFormat`).
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvrouter.core.constraints import Pin
from kvrouter.core.errors import Reason
from kvrouter.core.ids import Slot, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.taints import required_taints
from kvrouter.kernel.fleet.columns import INTEGER_MAX, UNKNOWN, UNKNOWN_VALUE, BoolColumn, IntColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.formats import FormatGroup, format_groups, takers_of
from kvrouter.kernel.routing.interface import RouteRequest, View
from kvrouter.kernel.topology.policy import (
    Fallback,
    Preferred,
    Required,
    RouterTopologyDefault,
    TransferConstraint,
    derive,
)


def fitted(column: IntColumn, n_slots: int) -> IntColumn:
    """Return the first ``n_slots`` entries; raises ValueError when the column is shorter."""
    length = len(column)
    if length == n_slots:
        return column
    if length < n_slots:
        raise ValueError(f"a column of {length} entries for a fleet of {n_slots} slots")
    return column[:n_slots]


class Mask(NamedTuple):
    """A mask over slots, with the number of allowed slots."""

    allowed: BoolColumn
    n_allowed: int

    def within(self, other: BoolColumn) -> "Mask":
        """Return the slots that both allow."""
        return mask_of(self.allowed & other)


def mask_of(allowed: BoolColumn) -> Mask:
    """Return the mask that allows these slots."""
    return Mask(allowed, int(np.count_nonzero(allowed)))


class Step(NamedTuple):
    """One eligibility check: the slots that pass it, and the ``reason`` for which it refuses the others."""

    reason: Reason
    passed: BoolColumn


class Stopped(NamedTuple):
    """The slots first refused for ``reason``."""

    reason: Reason
    slots: BoolColumn


class Screen(msgspec.Struct, frozen=True, gc=False):
    """The eligibility of ranks for one leg, before the other leg and load are considered.

    ``role`` are the worker ranks of the leg's role; ``steps`` are the checks in order, after those of whether
    a rank accepts new requests.
    """

    leg: Leg
    role: BoolColumn
    steps: tuple[Step, ...]
    mask: Mask


class _RoleColumns(NamedTuple):
    role: BoolColumn
    steps: tuple[Step, ...]
    ready: Mask
    has_prompt_ranges: bool
    """Whether some worker accepts only a range of prompt lengths."""


_PREFILL, _DECODE, _AGGREGATED = Leg.PREFILL, Leg.DECODE, Leg.AGGREGATED
"""Constants, because access to an enumeration's members is slow before Python 3.12."""


def screen_ranks(request: RouteRequest, fleet: Fleet, leg: Leg) -> Screen:
    """Return the eligibility of all ranks for ``leg`` of this request."""
    columns = fleet.derived(_role_columns, (leg, request.last_resort))
    pin = request.prefill_pin if leg is _PREFILL else request.pin
    required = required_taints(request.constraints, prefill=leg is _PREFILL)
    context_tokens = _context_tokens(request, leg)
    is_short_for_some = context_tokens > fleet.shortest_context_tokens
    near = None if leg is _DECODE else request.near
    is_bound = near is not None and near.is_required
    # the length of a prompt that its engine tokenizes is unknown (0)
    is_ranged = columns.has_prompt_ranges and leg is not _DECODE and request.isl_tokens > 0
    is_special = request.excluded or is_short_for_some or is_bound or is_ranged
    if not required and pin is None and not is_special:
        return Screen(leg, columns.role, columns.steps, columns.ready)
    steps = list(columns.steps)
    if request.excluded:
        steps.append(Step(Reason.EXCLUDED, _not_workers(fleet, request.excluded)))
    if is_short_for_some:
        fits = fleet.columns.context_length >= context_tokens
        steps.append(Step(Reason.CONTEXT_TOO_SHORT, fits))
    if is_ranged:
        tokens, ranges = request.isl_tokens, fleet.columns
        passed = (ranges.prompt_tokens_min <= tokens) & (tokens <= ranges.prompt_tokens_max)
        steps.append(Step(Reason.PROMPT_OUT_OF_RANGE, passed))
    if pin is not None:
        steps.append(Step(Reason.PINNED_ELSEWHERE, _pinned(fleet, pin)))
    if near is not None and near.is_required:
        no_slots = np.zeros(fleet.n_slots, np.bool_)
        passed = no_slots if near.taint is None else fleet.places.carries(near.taint)
        steps.append(Step(Reason.FAR_FROM_FRONTEND, passed))
    steps.extend(Step(Reason.TAINT_MISSING, fleet.places.carries(taint)) for taint in sorted(required))
    allowed = columns.ready.allowed
    for step in steps:
        allowed = allowed & step.passed
    return Screen(leg, columns.role, tuple(steps), mask_of(allowed))


def ready(fleet: Fleet, leg: Leg, *, last_resort: bool) -> Mask:
    """Return the ranks of the leg's role that are alive with their engines, not draining, not cordoned and,
    except as a ``last_resort``, without an open circuit. It is the same object until the fleet changes.
    """
    return fleet.derived(_role_columns, (leg, last_resort)).ready


def not_busy(view: View) -> BoolColumn | None:
    """Return the slots that are below every busy threshold; None when no threshold is set.

    The load is the worker's last report plus the bookings and ends since then, and at least the booked load,
    so that simultaneous requests count each other. Before the first report, and for tokens that an engine
    does not report, the booked load alone counts. When the number of a worker's blocks is unknown, the
    threshold of blocks does not apply to it.
    """
    fraction, tokens = (
        view.settings.active_decode_blocks_threshold,
        view.settings.active_prefill_tokens_threshold,
    )
    if fraction is None and tokens is None:
        return None
    if view.not_busy is not None:
        return view.not_busy
    columns, n_slots = view.fleet.columns, view.fleet.n_slots
    free = np.ones(n_slots, np.bool_)
    if fraction is not None:
        reported = np.where(columns.has_report, columns.report_active_blocks, UNKNOWN)
        active_blocks = load_by_slot(view.active_blocks, reported, view.blocks_at_report)
        free &= active_blocks / columns.total_blocks <= fraction
    if tokens is not None:
        reported = columns.report_prefill_tokens
        free &= load_by_slot(view.prefill_tokens, reported, view.tokens_at_report) <= tokens
    return free


def load_by_slot(booked: IntColumn, reported: IntColumn, at_report: IntColumn | None) -> IntColumn:
    """Return max(booked, reported + booked - at_report) by slot; if None, at_report is ``booked``."""
    booked = fitted(booked, len(reported))
    if at_report is None:
        return np.maximum(booked, reported)
    by_report = reported + booked - fitted(at_report, len(reported))
    return np.where(reported == UNKNOWN, booked, np.maximum(booked, by_report))


def eligible(screen: Screen, not_busy: BoolColumn | None) -> Mask:
    """Return the ranks in ``screen``, and in ``not_busy`` if given."""
    return screen.mask if not_busy is None else screen.mask.within(not_busy)


def first_refusals(screen: Screen, fleet: Fleet, later: Iterable[Step] = ()) -> list[Stopped]:
    """Return for each reason the slots of the leg's role that it refused first.

    ``later`` are the steps after the screen's: domain, then busy. When no rank has the role, every rank in
    the fleet is refused for its role.
    """
    columns = fleet.columns
    left = screen.role
    if not left.any():
        return [Stopped(Reason.WRONG_ROLE, columns.present)]
    stopped = []
    liveness = (
        Step(Reason.NOT_ALIVE, columns.alive),
        Step(Reason.DRAINING, ~columns.draining),
        Step(Reason.CORDONED, ~columns.cordoned),
        Step(Reason.ENGINE_SILENT, ~columns.engine_silent),
    )
    for step in (*liveness, *screen.steps, *later):
        stopped.append(Stopped(step.reason, left & ~step.passed))
        left = left & step.passed
    return stopped


def _context_tokens(request: RouteRequest, leg: Leg) -> int:
    """Return the context that the leg needs at a rank, in tokens: a prefill worker generates one token."""
    if leg is _PREFILL and request.context_tokens:
        return request.isl_tokens + 1
    return request.context_tokens


def _role_columns(fleet: Fleet, key: tuple[Leg, bool]) -> _RoleColumns:
    leg, last_resort = key
    columns = fleet.columns
    role = columns.prefill if leg is _PREFILL else columns.decode_or_both
    if leg is _AGGREGATED:
        role = role & ~columns.decode_only
    has_ranges = bool(
        (columns.prompt_tokens_min > 0).any() or (columns.prompt_tokens_max < INTEGER_MAX).any()
    )
    available = role & columns.alive & ~(columns.draining | columns.cordoned | columns.engine_silent)
    if last_resort or not fleet.has_open_circuits:
        return _RoleColumns(role, (), mask_of(available), has_ranges)
    circuits = Step(Reason.CIRCUIT_OPEN, ~columns.circuit_open)
    return _RoleColumns(role, (circuits,), mask_of(available & circuits.passed), has_ranges)


def _not_workers(fleet: Fleet, workers: Iterable[WorkerId]) -> BoolColumn:
    passed = np.ones(fleet.n_slots, np.bool_)
    for worker_id in workers:
        passed[list(fleet.slots_of(worker_id))] = False
    return passed


def _pinned(fleet: Fleet, pin: Pin) -> BoolColumn:
    passed = np.zeros(fleet.n_slots, np.bool_)
    if pin.dp_rank is None:
        passed[list(fleet.slots_of(pin.worker_id))] = True
    else:
        slot = fleet.slot_of(WorkerRank(pin.worker_id, pin.dp_rank))
        if slot is not None:
            passed[slot] = True
    return passed


class DomainGroup(NamedTuple):
    """The prefill ranks, alive or not, whose policy binds their KV to one domain."""

    policy: Required | Fallback
    members: BoolColumn


class SenderGroups(NamedTuple):
    """The prefill ranks by policy; ``unbound`` ranks have no policy, or one that only affects the cost. And
    by KV format: ``formats`` is empty when every decode rank can take all KV. ``format_of`` numbers the
    format of each prefill rank, and ``takers`` has a row of decode ranks for each number, the last one empty.
    """

    bound: tuple[DomainGroup, ...]
    unbound: BoolColumn
    formats: tuple[FormatGroup, ...]
    format_of: npt.NDArray[np.intp]
    takers: npt.NDArray[np.bool_]


class Tiers(NamedTuple):
    """The prefill ranks by tier; see the module."""

    home: BoolColumn
    away: BoolColumn

    @property
    def served(self) -> BoolColumn:
        """The prefill ranks with a legal decode rank, in either tier."""
        return self.home | self.away


class Screens(NamedTuple):
    """The eligibility for both legs of a pair, each without regard to the other."""

    prefill: Screen
    decode: Screen
    groups: SenderGroups
    not_busy: BoolColumn | None


class DecodeMask(msgspec.Struct, frozen=True, gc=False):
    """The decode ranks that may follow one prefill worker, and whether its ``fallback`` left the domain.
    ``takers`` excludes ranks that cannot take its KV, ``reached`` those that it did not reach lately; None
    when none is excluded.
    """

    mask: Mask
    fallback_used: bool
    takers: BoolColumn | None = None
    reached: BoolColumn | None = None


def screens_of(
    request: RouteRequest,
    fleet: Fleet,
    router_default: RouterTopologyDefault | None,
    not_busy: BoolColumn | None,
) -> Screens:
    """Return the eligibility for both legs of a pair, each without regard to the other."""
    return Screens(
        screen_ranks(request, fleet, Leg.PREFILL),
        screen_ranks(request, fleet, Leg.DECODE),
        fleet.derived(_groups, router_default),
        not_busy,
    )


class Sides(NamedTuple):
    """The ranks that may send and receive a pair's KV now. ``reach`` excludes prefill ranks whose KV reached
    no possible decode rank lately; None when none is excluded.
    """

    screens: Screens
    senders: Mask
    receivers: Mask
    reach: BoolColumn | None


def sides_of(request: RouteRequest, view: View) -> Sides:
    """Return the ranks that may send KV and that may receive it."""
    fleet, router_default = view.fleet, view.settings.topology_default
    screens = screens_of(request, fleet, router_default, not_busy(view))
    receivers = eligible(screens.decode, screens.not_busy)
    senders = prefill_mask(screens, fleet, receivers, router_default)
    reach = reach_mask(senders, fleet, receivers, screens.groups, router_default)
    return Sides(screens, senders if reach is None else senders.within(reach), receivers, reach)


class Followers(NamedTuple):
    """The decode ranks that may follow one prefill rank, and its constraint on them."""

    constraint: TransferConstraint | None
    chosen: DecodeMask


def followers_of(sender: Slot, sides: Sides, view: View) -> Followers:
    """Return the decode ranks that may follow the rank at ``sender``."""
    constraint = constraint_of(view.fleet, sender, view.settings.topology_default)
    takers = takers_of(sides.screens.groups.formats, sender)
    return Followers(constraint, reached_decode_mask(sides.receivers, view.fleet, takers, constraint, sender))


def prefill_mask(
    screens: Screens, fleet: Fleet, decode: Mask, router_default: RouterTopologyDefault | None
) -> Mask:
    """Return the prefill ranks to choose among: of the first tier if one is eligible, else of the second.

    ``decode`` are the decode ranks that may take the request now.
    """
    prefill = screens.prefill.mask
    if screens.not_busy is not None:
        prefill = prefill.within(screens.not_busy)
    if not (screens.groups.bound or screens.groups.formats) and decode.n_allowed:
        return prefill
    if decode is ready(fleet, Leg.DECODE, last_resort=False):
        tiers = fleet.derived(_ready_tiers, router_default)
    else:
        tiers = tiers_of(screens.groups, fleet, decode)
    home = prefill.within(tiers.home)
    return home if home.n_allowed else prefill.within(tiers.away)


def tiers_of(groups: SenderGroups, fleet: Fleet, decode: Mask) -> Tiers:
    """Return the tiers of all prefill ranks for the decode ranks that may take the request."""
    if not groups.formats:
        return policy_tiers(groups, fleet, decode)
    takers, away = groups.takers & decode.allowed, np.zeros(fleet.n_slots, np.bool_)
    taken = np.asarray(takers.any(axis=1))[groups.format_of]
    home = groups.unbound & taken
    for group in groups.bound:
        ids = fleet.places.ids(group.policy.domain)
        formats, slots = takers.nonzero()
        served = np.zeros((len(takers), fleet.places.n_ids(group.policy.domain) + 1), np.bool_)
        served[formats, ids[slots]] = True
        served[:, UNKNOWN_VALUE] = False  # the last entry: workers without a value do not share one
        at_home = group.members & served[groups.format_of, ids]
        home = home | at_home
        if isinstance(group.policy, Fallback):
            away = away | (group.members & taken & ~at_home)
    return Tiers(home, away)


def policy_tiers(groups: SenderGroups, fleet: Fleet, decode: Mask) -> Tiers:
    """Return the tiers as if every decode rank could take all KV."""
    no_slots = np.zeros(fleet.n_slots, np.bool_)
    if not decode.n_allowed:
        return Tiers(no_slots, no_slots)
    home, away = groups.unbound, no_slots
    for group in groups.bound:
        ids = fleet.places.ids(group.policy.domain)
        served = np.zeros(fleet.places.n_ids(group.policy.domain) + 1, np.bool_)
        served[ids[decode.allowed]] = True
        served[UNKNOWN_VALUE] = False  # the last entry: workers without a value do not share one
        at_home = group.members & served[ids]
        home = home | at_home
        if isinstance(group.policy, Fallback):
            away = away | (group.members & ~at_home)
    return Tiers(home, away)


def is_parted_by_formats(screens: Screens, fleet: Fleet) -> bool:
    """Whether KV formats leave no pair, busy or not, of a prefill rank whose KV may leave its domain."""
    groups, senders = screens.groups, screens.prefill.mask.allowed
    if not groups.formats or (senders & tiers_of(groups, fleet, screens.decode.mask).served).any():
        return False
    for group in groups.bound:
        if isinstance(group.policy, Required):
            senders = senders & ~group.members
    return bool(senders.any())


def domain_is_known(fleet: Fleet, router_default: RouterTopologyDefault | None) -> BoolColumn:
    """Return the slots that either have a value of the domain that their policy requires, or require none."""
    placed = np.ones(fleet.n_slots, np.bool_)
    for group in fleet.derived(_groups, router_default).bound:
        if isinstance(group.policy, Required):
            placed &= ~group.members | (fleet.places.ids(group.policy.domain) != UNKNOWN_VALUE)
    return placed


def decode_mask(decode: Mask, fleet: Fleet, constraint: TransferConstraint | None) -> DecodeMask:
    """Return which of the ``decode`` ranks may follow under ``constraint``."""
    if constraint is None or isinstance(constraint.policy, Preferred):
        return DecodeMask(decode, False)
    same = decode.within(shares_domain(fleet, constraint))
    if isinstance(constraint.policy, Fallback) and not same.n_allowed:
        return DecodeMask(decode, True)
    return DecodeMask(same, False)


def reached_decode_mask(
    decode: Mask,
    fleet: Fleet,
    takers: BoolColumn | None,
    constraint: TransferConstraint | None,
    prefill_slot: Slot | None,
) -> DecodeMask:
    """Return :func:`decode_mask` of the ``takers``, without those that the KV of ``prefill_slot`` did not
    reach lately; these are included when no other rank is left.
    """
    if takers is not None:
        decode = decode.within(takers)
    unreached = None if prefill_slot is None else fleet.unreached_from(prefill_slot)
    if unreached is not None:
        chosen = decode_mask(decode.within(~unreached), fleet, constraint)
        if chosen.mask.n_allowed:
            return structs.replace(chosen, takers=takers, reached=~unreached)
    chosen = decode_mask(decode, fleet, constraint)
    return chosen if takers is None else structs.replace(chosen, takers=takers)


def reach_mask(
    senders: Mask,
    fleet: Fleet,
    decode: Mask,
    groups: SenderGroups,
    router_default: RouterTopologyDefault | None,
) -> BoolColumn | None:
    """Return all ranks except ``senders`` whose KV did not reach any decode rank that may follow them; None
    when there are none, or no other sender is left.
    """
    if not fleet.broken_pairs:
        return None
    cut_off = np.zeros(fleet.n_slots, np.bool_)
    for slot in (slot for worker_id in fleet.broken_pairs.senders() for slot in fleet.slots_of(worker_id)):
        unreached = fleet.unreached_from(slot) if senders.allowed[slot] else None
        if unreached is None:
            continue
        constraint, takers = constraint_of(fleet, slot, router_default), takers_of(groups.formats, slot)
        usual = decode_mask(decode if takers is None else decode.within(takers), fleet, constraint)
        cut_off[slot] = not (usual.mask.allowed & ~unreached).any()
    return ~cut_off if cut_off.any() and (senders.allowed & ~cut_off).any() else None


def shares_domain(fleet: Fleet, constraint: TransferConstraint) -> BoolColumn:
    """Return the slots with the constraint's value of its domain; empty when the value is unknown."""
    taint = constraint.taint
    return np.zeros(fleet.n_slots, np.bool_) if taint is None else fleet.places.carries(taint)


def crosses_domain(fleet: Fleet, constraint: TransferConstraint | None, decode: Slot) -> bool:
    """Whether the decode slot is not known to be in the constraint's domain."""
    return constraint is not None and not shares_domain(fleet, constraint)[decode]


def constraint_of(
    fleet: Fleet, prefill_slot: Slot, router_default: RouterTopologyDefault | None
) -> TransferConstraint | None:
    """Return the constraint of the worker at ``prefill_slot`` on its decode worker."""
    return fleet.derived(_constraint_at, (prefill_slot, router_default))


def _constraint_at(fleet: Fleet, key: tuple[Slot, RouterTopologyDefault | None]) -> TransferConstraint | None:
    slot, router_default = key
    card = fleet.card_at(slot)
    if card is None:
        return derive(None, router_default=router_default, required_elsewhere=fleet.policies.required_domain)
    return derive(card.runtime_config, router_default=router_default)


def _groups(fleet: Fleet, router_default: RouterTopologyDefault | None) -> SenderGroups:
    members: dict[Required | Fallback, BoolColumn] = {}
    unbound = np.zeros(fleet.n_slots, np.bool_)
    for own_policy, slots in fleet.policies:
        policy = own_policy
        if policy is None and router_default is not None:
            policy = router_default.policy
        if isinstance(policy, Required | Fallback):
            members.setdefault(policy, np.zeros(fleet.n_slots, np.bool_))[slots] = True
        else:
            unbound[slots] = True
    bound = tuple(DomainGroup(policy, members[policy]) for policy in sorted(members, key=repr))
    formats = format_groups(fleet)
    format_of = np.full(fleet.n_slots, len(formats), np.intp)
    takers = np.zeros((len(formats) + 1, fleet.n_slots), np.bool_)
    for number, (senders, receivers) in enumerate(formats):
        format_of[senders], takers[number] = number, receivers
    return SenderGroups(bound, unbound, formats, format_of, takers)


def _ready_tiers(fleet: Fleet, router_default: RouterTopologyDefault | None) -> Tiers:
    return tiers_of(
        fleet.derived(_groups, router_default), fleet, ready(fleet, Leg.DECODE, last_resort=False)
    )
