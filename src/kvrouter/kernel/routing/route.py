"""The routing decision: one request and one view in, one decision or one refusal out, without side effects.

The decision covers all legs before any leg is sent, so that a request whose KV may not leave its domain is
refused before it has cost anything.

Workers with an open circuit are skipped. If no other worker is eligible, they are the last resort: a worker
that may have recovered is better than a refusal. A worker that is only busy counts as eligible.
"""

from msgspec import structs

from kvrouter.core.constraints import PdSelection, RouterMode
from kvrouter.core.errors import NoEligibleWorker, Reason, RoutingRefused
from kvrouter.core.ids import Slot, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.columns import BoolColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.explain import candidates, receiver_steps, refuse_leg, refuse_pair, sender_steps
from kvrouter.kernel.routing.formats import takers_of_peer
from kvrouter.kernel.routing.interface import Candidate, Decision, RouteRequest, View
from kvrouter.kernel.routing.joint import pick_jointly
from kvrouter.kernel.routing.masks import (
    DecodeMask,
    Screen,
    Step,
    constraint_of,
    crosses_domain,
    domain_is_known,
    eligible,
    followers_of,
    is_parted_by_formats,
    not_busy,
    reached_decode_mask,
    ready,
    screen_ranks,
    screens_of,
    sides_of,
)
from kvrouter.kernel.routing.pick import pick_leg, rules_of
from kvrouter.kernel.topology.policy import TransferConstraint

_PREFILL, _AGGREGATED = Leg.PREFILL, Leg.AGGREGATED
_JOINT, _KV = PdSelection.JOINT, RouterMode.KV
"""Constants, because access to an enumeration's members is slow before Python 3.12."""


def route(request: RouteRequest, view: View, *, explain: bool = False) -> Decision:
    """Decide where ``request`` goes: to a pair of ranks; or to one rank if there is no prefill worker, the
    request asks for one, or only prefill is decided.

    Raises NoEligibleWorker when no rank may take it, and AllWorkersBusy when every rank that may is busy;
    both count the ranks of the leg that they name by reason. With ``explain`` they carry the rows of every
    leg, as a decision does; those of the named leg are the counted ones.
    """
    if view.settings.near is not None:
        request = structs.replace(request, near=view.settings.near)
    try:
        return _route(request, view, explain=explain)
    except NoEligibleWorker:
        widened = _last_resort(request, view.fleet)
        if widened is None:
            raise
    return _route(widened, view, explain=explain)


def route_decode(
    request: RouteRequest,
    view: View,
    constraint: TransferConstraint | None,
    *,
    prefill: WorkerRank | None = None,
    explain: bool = False,
) -> Decision:
    """Pick the decode rank again for a request whose prefill is done, under the constraint of its decision.

    ``prefill`` is the rank where its KV waits, which may have left; ``request.kv_sender`` is its worker as it
    was. Raises the errors of :func:`route`.
    """
    try:
        return _route_decode(request, view, constraint, prefill=prefill, explain=explain)
    except NoEligibleWorker:
        widened = _last_resort(request, view.fleet)
        if widened is None:
            raise
    return _route_decode(widened, view, constraint, prefill=prefill, explain=explain)


def _last_resort(request: RouteRequest, fleet: Fleet) -> RouteRequest | None:
    """Return ``request`` extended to ranks with an open circuit; None when it already is, or none is open."""
    if request.last_resort or not fleet.has_open_circuits:
        return None
    return structs.replace(request, last_resort=True)


def _route(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    if view.settings.prefill_alone:
        return _route_prefill(request, view, explain=explain)
    prefill = ready(view.fleet, _PREFILL, last_resort=request.last_resort)
    if request.prefill_pin is not None or (prefill.n_allowed and not request.aggregated):
        try:
            pair = _route_pair(request, view, explain=explain)
        except RoutingRefused as refused:
            alone = _instead_of_parted_pair(request, view, refused, explain=explain)
            if alone is None:
                raise
            return alone
        return _instead_of_broken_pair(request, view, pair, explain=explain) or pair
    return _route_aggregated(request, view, explain=explain)


def _instead_of_parted_pair(
    request: RouteRequest, view: View, refused: RoutingRefused, *, explain: bool
) -> Decision | None:
    """Return the decision for one worker if KV formats leave no pair; None if a policy does, or no worker may
    take the whole request.
    """
    screens = screens_of(request, view.fleet, view.settings.topology_default, None)
    if request.prefill_pin is not None or not is_parted_by_formats(screens, view.fleet):
        return None
    try:
        aggregated = _route_aggregated(request, view, explain=explain)
    except NoEligibleWorker:
        return None
    left_out = tuple(row for row in refused.rows if isinstance(row, Candidate) and row.leg is Leg.PREFILL)
    return structs.replace(aggregated, rows=left_out + aggregated.rows)


def _instead_of_broken_pair(
    request: RouteRequest, view: View, pair: Decision, *, explain: bool
) -> Decision | None:
    """Return the decision for one aggregated worker if KV was lost lately between the picked pair, and so
    between every possible pair; None if the pair is the better try.
    """
    fleet, prefill = view.fleet, pair.prefill
    if (
        not fleet.broken_pairs
        or not request.aggregated_if_broken
        or request.prefill_pin is not None
        or prefill is None
    ):
        return None
    unreached = fleet.unreached_from(prefill.slot)
    if unreached is None or not unreached[pair.decode.slot] or fleet.broken_pairs.aggregated_failed:
        return None
    try:
        aggregated = _route_aggregated(request, view, explain=explain)
    except RoutingRefused:
        return None
    left_out = tuple(
        structs.replace(
            row, refused=row.refused or Reason.KV_LOST, picked=False, pair_cost=None, partner=None
        )
        for row in pair.rows
        if row.leg is Leg.PREFILL
    )
    return structs.replace(aggregated, rows=left_out + aggregated.rows)


def _route_decode(
    request: RouteRequest,
    view: View,
    constraint: TransferConstraint | None,
    *,
    prefill: WorkerRank | None,
    explain: bool,
) -> Decision:
    fleet = view.fleet
    screen, free = screen_ranks(request, fleet, Leg.DECODE), not_busy(view)
    receivers = eligible(screen, free)
    sender = None if prefill is None else fleet.slot_of(prefill)
    takers = takers_of_peer(fleet, request.kv_sender)
    chosen = reached_decode_mask(receivers, fleet, takers, constraint, sender)
    return _one_leg(
        request, view, screen, free, chosen, constraint=constraint, prefill_slot=sender, explain=explain
    )


def _route_aggregated(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    screen, free = screen_ranks(request, view.fleet, _AGGREGATED), not_busy(view)
    return _one_leg(request, view, screen, free, DecodeMask(eligible(screen, free), False), explain=explain)


def _route_prefill(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    """Pick the prefill rank, and return its constraint for the later decode pick.

    A worker whose KV must stay in a domain that it does not know is not picked: no decode pick could comply.
    """
    fleet, router_default = view.fleet, view.settings.topology_default
    screen, free = screen_ranks(request, fleet, Leg.PREFILL), not_busy(view)
    placed = domain_is_known(fleet, router_default)
    if not placed.all():
        steps = (*screen.steps, Step(Reason.DOMAIN_UNKNOWN, placed))
        screen = structs.replace(screen, steps=steps, mask=screen.mask.within(placed))
    decision = _one_leg(
        request, view, screen, free, DecodeMask(eligible(screen, free), False), explain=explain
    )
    return structs.replace(decision, constraint=constraint_of(fleet, decision.decode.slot, router_default))


def _one_leg(
    request: RouteRequest,
    view: View,
    screen: Screen,
    free: BoolColumn | None,
    chosen: DecodeMask,
    *,
    explain: bool,
    constraint: TransferConstraint | None = None,
    prefill_slot: Slot | None = None,
) -> Decision:
    """Decide for one leg among the ``chosen`` ranks; ``screen`` and ``free`` explain refusals."""
    fleet = view.fleet
    if not chosen.mask.n_allowed:
        raise refuse_leg(
            request, view, screen, free,
            constraint=constraint, prefill_slot=prefill_slot, takers=chosen.takers, explain=explain,
        )  # fmt: skip
    rules = rules_of(view.settings, request.override)
    picked = pick_leg(
        request, view, screen.leg, rules, chosen.mask,
        turn=view.turn, constraint=constraint, prefill_slot=prefill_slot, explain=explain,
    )  # fmt: skip
    rows: tuple[Candidate, ...] = ()
    if explain:
        rows = candidates(screen, fleet, receiver_steps(fleet, constraint, chosen, free), picked)
    return Decision(
        request_id=request.request_id,
        attempt=request.attempt,
        mode=rules.mode,
        decode=picked.pick,
        constraint=constraint,
        fallback_used=chosen.fallback_used,
        cross_domain=constraint is not None and crosses_domain(fleet, constraint, picked.pick.slot),
        last_resort=request.last_resort,
        rows=rows,
    )


def _route_pair(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    fleet, sides = view.fleet, sides_of(request, view)
    rules = rules_of(view.settings, request.override)
    rows: tuple[Candidate, ...] = ()
    is_joint = view.settings.pd_selection is _JOINT and rules.mode is _KV and view.rule is None
    if is_joint:
        prefill, decode, followers, rows = pick_jointly(request, view, sides, rules, explain=explain)
    else:
        screens, senders = sides.screens, sides.senders
        if not senders.n_allowed:
            raise refuse_pair(request, view, screens, explain=explain)
        first = pick_leg(request, view, Leg.PREFILL, rules, senders, turn=view.turn, explain=explain)
        followers = followers_of(first.pick.slot, sides, view)
        second = pick_leg(
            request, view, Leg.DECODE, rules, followers.chosen.mask,
            turn=view.turn // senders.n_allowed,  # else a prefill rank always gets the same decode rank
            constraint=followers.constraint, prefill_slot=first.pick.slot, explain=explain,
        )  # fmt: skip
        prefill, decode = first.pick, second.pick
        if explain:
            rows = candidates(screens.prefill, fleet, sender_steps(fleet, sides), first)
            steps = receiver_steps(fleet, *followers, screens.not_busy)
            rows += candidates(screens.decode, fleet, steps, second)
    constraint, chosen = followers or (None, None)
    return Decision(
        request_id=request.request_id,
        attempt=request.attempt,
        mode=rules.mode,
        decode=decode,
        prefill=prefill,
        constraint=constraint,
        fallback_used=chosen is not None and chosen.fallback_used,
        cross_domain=crosses_domain(fleet, constraint, decode.slot),
        last_resort=request.last_resort,
        together=is_joint,
        rows=rows,
    )
