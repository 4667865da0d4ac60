"""The decision: one request and one view in, one decision or one refusal out; nothing is changed.

The whole of it is made before anything is sent, so that a request whose KV may not leave its domain is
refused while it has cost nothing.

Workers whose circuit is open are passed over. Where nobody else may take a request they are its last resort:
a worker that may be well again is better than a refusal. One that is only busy is somebody else.
"""

from msgspec import structs

from kvrouter.core.constraints import PdSelection, RouterMode
from kvrouter.core.errors import NoEligibleWorker, Reason, RoutingRefused
from kvrouter.core.ids import WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.fleet import Fleet
from kvrouter.routing.eligibility import Step, able, not_busy, ready, screen
from kvrouter.routing.explain import (
    busy_steps,
    candidates,
    decode_steps,
    handoff_steps,
    has_legal_decode,
    prefill_steps,
    refuse_leg,
    refuse_pair,
)
from kvrouter.routing.joint import route_together
from kvrouter.routing.pair import (
    constraint_of,
    crosses_domain,
    decode_mask,
    knows_its_place,
    prefill_mask,
    reached_decode_mask,
    reaching,
    screens_of,
    tiers_of,
)
from kvrouter.routing.pick import pick_leg, rules_of
from kvrouter.routing.request import Candidate, Decision, RouteRequest, View
from kvrouter.topology import TransferConstraint

_JOINT, _KV = PdSelection.JOINT, RouterMode.KV
"""An enumeration's attributes are slow before Python 3.12."""


def route(request: RouteRequest, view: View, *, explain: bool = False) -> Decision:
    """Decide where ``request`` goes: to a pair of ranks, or to one when no prefill worker is there or the
    request asks for one, or when prefill is all that is decided here.

    Raises NoEligibleWorker when nobody may take it, AllWorkersBusy when somebody could and everybody who
    could is busy; both count the ranks of the leg that they name by reason. With ``explain`` they carry the
    rows of every leg, as a decision does; those of the named leg are the ones that were counted.
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

    ``prefill`` is where its KV waits, which counts only with a link table. Raises what :func:`route` raises.
    """
    try:
        return _route_decode(request, view, constraint, prefill=prefill, explain=explain)
    except NoEligibleWorker:
        widened = _last_resort(request, view.fleet)
        if widened is None:
            raise
    return _route_decode(widened, view, constraint, prefill=prefill, explain=explain)


def _last_resort(request: RouteRequest, fleet: Fleet) -> RouteRequest | None:
    """What to ask for when nobody may take ``request``: also those whose circuit is open. None where there
    are none.
    """
    if request.last_resort or not fleet.has_open_circuits:
        return None
    return structs.replace(request, last_resort=True)


def _route(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    if view.settings.prefill_alone:
        return _route_prefill(request, view, explain=explain)
    prefill = ready(view.fleet, Leg.PREFILL, last_resort=request.last_resort)
    if request.prefill_pin is not None or (prefill.n_allowed and not request.whole):
        pair = _route_pair(request, view, explain=explain)
        return _instead_of_broken_pair(request, view, pair, explain=explain) or pair
    return _route_whole(request, view, explain=explain)


def _instead_of_broken_pair(
    request: RouteRequest, view: View, pair: Decision, *, explain: bool
) -> Decision | None:
    """One worker for all of the request, where the pair's KV was lost lately, as that of every pair which
    could be made; None where the pair is the better try.
    """
    fleet, prefill = view.fleet, pair.prefill
    if (
        not fleet.broken_pairs
        or not request.whole_if_broken
        or request.prefill_pin is not None
        or prefill is None
    ):
        return None
    unreached = fleet.unreached_from(prefill.slot)
    if unreached is None or not unreached[pair.decode.slot] or fleet.broken_pairs.whole_failed:
        return None
    try:
        whole = _route_whole(request, view, explain=explain)
    except RoutingRefused:
        return None
    left_out = tuple(
        structs.replace(
            row, refused=row.refused or Reason.KV_LOST, picked=False, pair_cost=None, partner=None
        )
        for row in pair.rows
        if row.leg is Leg.PREFILL
    )
    return structs.replace(whole, rows=left_out + whole.rows)


def _route_decode(
    request: RouteRequest,
    view: View,
    constraint: TransferConstraint | None,
    *,
    prefill: WorkerRank | None,
    explain: bool,
) -> Decision:
    fleet = view.fleet
    who, free = screen(request, fleet, Leg.DECODE), not_busy(view)
    receivers = able(who, free)
    sender = None if prefill is None else fleet.slot_of(prefill)
    if sender is None:
        chosen = decode_mask(receivers, fleet, constraint)
    else:
        chosen = reached_decode_mask(receivers, fleet, constraint, sender)
    if not chosen.mask.n_allowed:
        raise refuse_leg(
            request, view, who, free, constraint=constraint, prefill_slot=sender, explain=explain
        )
    rules = rules_of(view.settings, request.override)
    decode = pick_leg(
        request, view, Leg.DECODE, rules, chosen.mask,
        turn=view.turn, constraint=constraint, prefill_slot=sender, explain=explain,
    )  # fmt: skip
    rows: tuple[Candidate, ...] = ()
    if explain:
        steps = () if chosen.fallback_used else decode_steps(fleet, constraint)
        rows = candidates(who, fleet, (*steps, *handoff_steps(chosen.reached), *busy_steps(free)), decode)
    return Decision(
        request_id=request.request_id,
        attempt=request.attempt,
        mode=rules.mode,
        decode=decode.pick,
        constraint=constraint,
        fallback_used=chosen.fallback_used,
        cross_domain=crosses_domain(fleet, constraint, decode.pick.slot),
        last_resort=request.last_resort,
        rows=rows,
    )


def _route_whole(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    fleet = view.fleet
    who, free = screen(request, fleet, Leg.AGGREGATED), not_busy(view)
    mask = able(who, free)
    if not mask.n_allowed:
        raise refuse_leg(request, view, who, free, explain=explain)
    rules = rules_of(view.settings, request.override)
    whole = pick_leg(request, view, Leg.AGGREGATED, rules, mask, turn=view.turn, explain=explain)
    rows = candidates(who, fleet, busy_steps(free), whole) if explain else ()
    return Decision(
        request_id=request.request_id,
        attempt=request.attempt,
        mode=rules.mode,
        decode=whole.pick,
        last_resort=request.last_resort,
        rows=rows,
    )


def _route_prefill(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    """Pick for prefill, and return the constraint on the decode pick.

    A worker whose KV must stay in a domain that it does not know is not picked: nobody could obey it.
    """
    fleet, router_default = view.fleet, view.settings.topology_default
    who, free = screen(request, fleet, Leg.PREFILL), not_busy(view)
    placed = knows_its_place(fleet, router_default)
    if not placed.all():
        steps = (*who.steps, Step(Reason.DOMAIN_UNKNOWN, placed))
        who = who._replace(steps=steps, mask=who.mask.within(placed))
    mask = able(who, free)
    if not mask.n_allowed:
        raise refuse_leg(request, view, who, free, explain=explain)
    rules = rules_of(view.settings, request.override)
    prefill = pick_leg(request, view, Leg.PREFILL, rules, mask, turn=view.turn, explain=explain)
    rows = candidates(who, fleet, busy_steps(free), prefill) if explain else ()
    return Decision(
        request_id=request.request_id,
        attempt=request.attempt,
        mode=rules.mode,
        decode=prefill.pick,
        constraint=constraint_of(fleet, prefill.pick.slot, router_default),
        last_resort=request.last_resort,
        rows=rows,
    )


def _route_pair(request: RouteRequest, view: View, *, explain: bool) -> Decision:
    fleet, router_default = view.fleet, view.settings.topology_default
    free = not_busy(view)
    screens = screens_of(request, fleet, router_default, free)
    rules = rules_of(view.settings, request.override)
    if view.settings.pd_selection is _JOINT and rules.mode is _KV and view.rule is None:
        return route_together(request, view, screens, rules, explain=explain)
    receivers = able(screens.decode, free)
    senders = prefill_mask(screens, fleet, receivers, router_default)
    if not senders.n_allowed:
        raise refuse_pair(request, view, screens, explain=explain)
    reach = reaching(senders, fleet, receivers, router_default)
    if reach is not None:
        senders = senders.within(reach)
    prefill = pick_leg(request, view, Leg.PREFILL, rules, senders, turn=view.turn, explain=explain)
    constraint = constraint_of(fleet, prefill.pick.slot, router_default)
    chosen = reached_decode_mask(receivers, fleet, constraint, prefill.pick.slot)
    decode = pick_leg(
        request, view, Leg.DECODE, rules, chosen.mask,
        turn=view.turn // senders.n_allowed,  # or each prefill rank would always meet the same decode rank
        constraint=constraint, prefill_slot=prefill.pick.slot, explain=explain,
    )  # fmt: skip
    rows: tuple[Candidate, ...] = ()
    if explain:
        tiers = tiers_of(screens.groups, fleet, receivers)
        passed = tiers.home if (senders.allowed & tiers.home).any() else has_legal_decode(tiers)
        near = () if chosen.fallback_used else decode_steps(fleet, constraint)
        far = prefill_steps(fleet, screens.groups, passed)
        far, near = (*far, *handoff_steps(reach)), (*near, *handoff_steps(chosen.reached))
        rows = candidates(screens.prefill, fleet, (*far, *busy_steps(free)), prefill)
        rows += candidates(screens.decode, fleet, (*near, *busy_steps(free)), decode)
    return Decision(
        request_id=request.request_id,
        attempt=request.attempt,
        mode=rules.mode,
        decode=decode.pick,
        prefill=prefill.pick,
        constraint=constraint,
        fallback_used=chosen.fallback_used,
        cross_domain=crosses_domain(fleet, constraint, decode.pick.slot),
        last_resort=request.last_resort,
        rows=rows,
    )
