"""Explanations and refusals: one row for each candidate, read from the columns of the decision."""

from collections.abc import Iterable

import numpy as np

from kvrouter.core.constraints import Pin
from kvrouter.core.errors import AllWorkersBusy, NoEligibleWorker, Reason, RoutingRefused
from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.columns import UNKNOWN_VALUE, BoolColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.costs.leg import leg_costs
from kvrouter.kernel.routing.interface import Candidate, Costs, RouteRequest, View
from kvrouter.kernel.routing.masks import (
    DecodeMask,
    Mask,
    Screen,
    Screens,
    SenderGroups,
    Sides,
    Step,
    Stopped,
    first_refusals,
    policy_tiers,
    shares_domain,
    tiers_of,
)
from kvrouter.kernel.routing.pick import Picked, pick_at, rules_of
from kvrouter.kernel.topology.policy import Fallback, Preferred, Required, TransferConstraint


def rows_of(
    screen: Screen, fleet: Fleet, stopped: Iterable[Stopped], costs: Costs, picked: Slot | None
) -> tuple[Candidate, ...]:
    """Return a row for each rank of the leg's role and each other rank in ``stopped``, in the order of ranks.

    ``picked`` is None for a refusal.
    """
    candidate_slots = screen.role.copy()
    refused_for: dict[int, Reason] = {}
    for reason, slots in stopped:
        candidate_slots |= slots
        refused_for.update(dict.fromkeys(np.flatnonzero(slots).tolist(), reason))
    rows = []
    for slot in map(Slot, fleet.rank_order[candidate_slots[fleet.rank_order]].tolist()):
        pick = pick_at(slot, screen.leg, fleet, costs, 0)
        rows.append(
            Candidate(
                slot=slot,
                rank=pick.rank,
                leg=pick.leg,
                overlap_blocks=pick.overlap_blocks,
                prefill_blocks=pick.prefill_blocks,
                decode_blocks=pick.decode_blocks,
                transfer_blocks=pick.transfer_blocks,
                multiplier=pick.multiplier,
                cost=pick.cost,
                refused=refused_for.get(slot),
                picked=slot == picked,
                times=pick.times,
            )
        )
    return tuple(rows)


def candidates(screen: Screen, fleet: Fleet, later: Iterable[Step], picked: Picked) -> tuple[Candidate, ...]:
    """Return a row for every rank of the leg's role; ``later`` are the steps after the screen's."""
    stopped = first_refusals(screen, fleet, later)
    return rows_of(screen, fleet, stopped, picked.costs, picked.pick.slot)


def busy_steps(not_busy: BoolColumn | None) -> tuple[Step, ...]:
    """Return the step that refuses busy ranks; empty when no threshold is set."""
    return () if not_busy is None else (Step(Reason.BUSY, not_busy),)


def handoff_steps(reached: BoolColumn | None) -> tuple[Step, ...]:
    """Return the step that refuses ranks between which KV was lost lately; empty when there are none."""
    return () if reached is None else (Step(Reason.KV_LOST, reached),)


def format_steps(takers: BoolColumn | None) -> tuple[Step, ...]:
    """Return the step that refuses decode ranks that cannot take the KV; empty when there are none."""
    return () if takers is None else (Step(Reason.CANNOT_TRANSFER, takers),)


def decode_steps(fleet: Fleet, constraint: TransferConstraint | None) -> tuple[Step, ...]:
    """Return the steps of a decode rank that must share the domain of one prefill worker."""
    if constraint is None or isinstance(constraint.policy, Preferred):
        return ()
    known = fleet.places.ids(constraint.domain) != UNKNOWN_VALUE
    if constraint.value is None:
        known = np.zeros(fleet.n_slots, np.bool_)
    return (
        Step(Reason.DOMAIN_UNKNOWN, known),
        Step(Reason.DOMAIN_MISMATCH, shares_domain(fleet, constraint)),
    )


def prefill_steps(fleet: Fleet, groups: SenderGroups, receivers: Mask, *, at_home: bool) -> tuple[Step, ...]:
    """Return the steps of a prefill rank that needs one of ``receivers``, in its domain if ``at_home``."""
    by_policy, tiers = policy_tiers(groups, fleet, receivers), tiers_of(groups, fleet, receivers)
    near = by_policy.home if at_home else by_policy.served
    known = near | groups.unbound
    for group in groups.bound:
        known = known | (group.members & (fleet.places.ids(group.policy.domain) != UNKNOWN_VALUE))
    takers = None if not groups.formats else tiers.home if at_home else tiers.served
    return (
        Step(Reason.DOMAIN_UNKNOWN, known),
        Step(Reason.DOMAIN_MISMATCH, near),
        *format_steps(takers),
    )


def sender_steps(fleet: Fleet, sides: Sides) -> tuple[Step, ...]:
    """Return the steps of a pair's prefill rank: its domain and KV format, whether its KV arrived lately, and
    its load.
    """
    screens = sides.screens
    home = tiers_of(screens.groups, fleet, sides.receivers).home
    at_home = bool((sides.senders.allowed & home).any())
    partner = prefill_steps(fleet, screens.groups, sides.receivers, at_home=at_home)
    return (*partner, *handoff_steps(sides.reach), *busy_steps(screens.not_busy))


def receiver_steps(
    fleet: Fleet, constraint: TransferConstraint | None, chosen: DecodeMask, not_busy: BoolColumn | None
) -> tuple[Step, ...]:
    """Return the steps of a decode rank after a prefill rank, or of a rank that takes a leg alone."""
    domain = () if chosen.fallback_used else decode_steps(fleet, constraint)
    formats = format_steps(chosen.takers)
    return (*domain, *formats, *handoff_steps(chosen.reached), *busy_steps(not_busy))


def reach_steps(
    fleet: Fleet, groups: SenderGroups, prefill: BoolColumn, domain: str | None
) -> tuple[Step, ...]:
    """Return the steps of a decode rank to which some of the ``prefill`` ranks must be able to send KV.

    ``domain`` is the domain that the refusal names.
    """
    takers = None
    if groups.formats:
        takers = np.zeros(fleet.n_slots, np.bool_)
        for senders, receivers in groups.formats:
            takers = takers | (_reached(fleet, groups, prefill & senders) & receivers)
    formats = format_steps(takers)
    reached = _reached(fleet, groups, prefill)
    if domain is None or reached.all():
        return formats
    ids = fleet.places.ids(domain)
    senders_known = bool((ids[prefill] != UNKNOWN_VALUE).any())
    known = reached | (ids != UNKNOWN_VALUE) if senders_known else reached
    return (Step(Reason.DOMAIN_UNKNOWN, known), Step(Reason.DOMAIN_MISMATCH, reached), *formats)


def _reached(fleet: Fleet, groups: SenderGroups, prefill: BoolColumn) -> BoolColumn:
    """Return the slots to which policies let some of the ``prefill`` ranks send KV."""
    anywhere = groups.unbound
    reached = np.zeros(fleet.n_slots, np.bool_)
    for group in groups.bound:
        if isinstance(group.policy, Fallback):
            anywhere = anywhere | group.members
        ids = fleet.places.ids(group.policy.domain)
        values = np.zeros(fleet.places.n_ids(group.policy.domain) + 1, np.bool_)
        values[ids[group.members & prefill]] = True
        values[UNKNOWN_VALUE] = False
        reached = reached | values[ids]
    return ~reached | reached if (anywhere & prefill).any() else reached


_VALUES_SHOWN = 3


def refuse_leg(
    request: RouteRequest,
    view: View,
    screen: Screen,
    not_busy: BoolColumn | None,
    *,
    explain: bool,
    constraint: TransferConstraint | None = None,
    prefill_slot: Slot | None = None,
    takers: BoolColumn | None = None,
) -> RoutingRefused:
    """Return the refusal of a request without an eligible rank for its one leg."""
    fleet, domain = view.fleet, None
    domain_steps: tuple[Step, ...] = ()
    if constraint is not None and isinstance(constraint.policy, Required):
        domain, domain_steps = constraint.domain, decode_steps(fleet, constraint)
    values = () if constraint is None or constraint.value is None else (constraint.value,)
    steps = (*domain_steps, *format_steps(takers), *busy_steps(not_busy))
    stopped = first_refusals(screen, fleet, steps)
    refused = _refusal(request, fleet, screen, stopped, domain, values)
    if explain:
        weight = rules_of(view.settings, request.override).overlap_score_weight
        costs = leg_costs(request, view, screen.leg, weight, constraint=constraint, prefill_slot=prefill_slot)
        refused.rows = rows_of(screen, fleet, stopped, costs, None)
    return refused


def refuse_pair(request: RouteRequest, view: View, screens: Screens, *, explain: bool) -> RoutingRefused:
    """Return the refusal of a request for which no prefill rank has a legal decode rank.

    It names the leg to check: prefill, when no rank may take that leg, or every rank with a free decode rank
    is busy; else decode, with the domain that KV would have to leave. Explained, it has a row for each rank
    of both legs; ranks of the other leg may be eligible, without a partner.
    """
    fleet, prefill, decode = view.fleet, screens.prefill, screens.decode
    served = _served_now(screens, fleet)
    domain = _bound_domain(screens.groups, prefill.mask.allowed)
    if served is None and prefill.mask.n_allowed:
        named, to_keep = decode, domain
        values = _values(fleet, domain, prefill.mask.allowed)
    else:
        named, to_keep, values = prefill, None, ()
    stopped = _pair_stopped(named, screens, fleet, served, domain)
    refused = _refusal(request, fleet, named, stopped, to_keep, values)
    if explain:
        weight = rules_of(view.settings, request.override).overlap_score_weight
        rows: tuple[Candidate, ...] = ()
        for screen in (prefill, decode):
            leg_stopped = (
                stopped if screen is named else _pair_stopped(screen, screens, fleet, served, domain)
            )
            rows += rows_of(screen, fleet, leg_stopped, leg_costs(request, view, screen.leg, weight), None)
        refused.rows = rows
    return refused


def _served_now(screens: Screens, fleet: Fleet) -> BoolColumn | None:
    """Return the prefill ranks with a legal, free decode rank; None when none may take the request."""
    if screens.not_busy is None:
        return None
    free = screens.decode.mask.within(screens.not_busy)
    served = tiers_of(screens.groups, fleet, free).served
    return served if (served & screens.prefill.mask.allowed).any() else None


def _pair_stopped(
    screen: Screen, screens: Screens, fleet: Fleet, served: BoolColumn | None, domain: str | None
) -> list[Stopped]:
    """Return the refused slots by reason for one leg of a pair without a legal combination.

    A prefill rank is refused for its domain when eligible decode ranks, busy or not, exist only outside of
    it, and for its KV format when none there can take its KV; a decode rank when no prefill rank reaches it,
    or could hand it KV. If some prefill ranks are ``served``, those with busy
    decode ranks count as busy too.
    """
    senders, receivers, free = screens.prefill.mask, screens.decode.mask, screens.not_busy
    steps: tuple[Step, ...] = ()
    if screen.leg is Leg.DECODE:
        steps = reach_steps(fleet, screens.groups, senders.allowed, domain)
    elif receivers.n_allowed:
        steps = prefill_steps(fleet, screens.groups, receivers, at_home=False)
    if screen.leg is Leg.PREFILL and free is not None and served is not None:
        free = free & served
    return first_refusals(screen, fleet, (*steps, *busy_steps(free)))


def _refusal(
    request: RouteRequest,
    fleet: Fleet,
    screen: Screen,
    stopped: Iterable[Stopped],
    domain: str | None,
    values: tuple[str, ...],
) -> RoutingRefused:
    refusals: dict[Reason, int] = {}
    for reason, slots in stopped:
        count = int(np.count_nonzero(slots))
        if count or reason is Reason.WRONG_ROLE:
            refusals[reason] = refusals.get(reason, 0) + count
    role = _role(screen.leg)
    if Reason.WRONG_ROLE in refusals:
        why = f"{refusals[Reason.WRONG_ROLE]} worker ranks are here, none of them for {role}"
    else:
        counts = ", ".join(f"{count} {reason}" for reason, count in refusals.items())
        why = f"of {int(np.count_nonzero(screen.role))} {role} ranks: {counts}"
    if domain is not None:
        value = ", ".join(values) if values else "whose value the prefill worker does not publish"
        why += f"; KV keeps to {domain} {value}"
    why += _about_pin(request, fleet, screen)
    busy = Reason.BUSY in refusals
    kind = AllWorkersBusy if busy else NoEligibleWorker
    subject = f"every {role} worker" if busy else f"no {role} worker"
    verb = "that may take this request is busy" if busy else "may take this request"
    return kind(f"{subject} {verb} ({why})", refusals=refusals, role=role, domain=domain)


def _role(leg: Leg) -> str:
    return Leg.PREFILL.value if leg is Leg.PREFILL else Leg.DECODE.value


def _about_pin(request: RouteRequest, fleet: Fleet, screen: Screen) -> str:
    pin: Pin | None = request.prefill_pin if screen.leg is Leg.PREFILL else request.pin
    if pin is None:
        return ""
    rank = "" if pin.dp_rank is None else f"/{pin.dp_rank}"
    card = fleet.card(pin.worker_id)
    known = "which is not here" if card is None else f"a worker for {card.role}"
    return f"; pinned to {pin.worker_id}{rank}, {known}"


def _bound_domain(groups: SenderGroups, prefill: BoolColumn) -> str | None:
    for group in groups.bound:
        if (group.members & prefill).any():
            return group.policy.domain
    return None


def _values(fleet: Fleet, domain: str | None, prefill: BoolColumn) -> tuple[str, ...]:
    if domain is None:
        return ()
    at = (fleet.places.value_at(domain, Slot(slot)) for slot in np.flatnonzero(prefill).tolist())
    found = sorted({value for value in at if value is not None})
    return tuple(found[:_VALUES_SHOWN]) + (("…",) if len(found) > _VALUES_SHOWN else ())
