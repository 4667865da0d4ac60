"""Refusals that say who was asked and why each one may not, for somebody who reads them at 3 a.m."""

from collections.abc import Iterable

import numpy as np

from kvrouter.core.constraints import Pin
from kvrouter.core.errors import AllWorkersBusy, NoEligibleWorker, Reason, RoutingRefused
from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.fleet import BoolColumn, Fleet
from kvrouter.routing.cost import leg_costs
from kvrouter.routing.decision import Candidate
from kvrouter.routing.eligibility import Screen, Step, first_refusals
from kvrouter.routing.explain import rows_of
from kvrouter.routing.pair import Groups, Screens, tiers_of
from kvrouter.routing.reasons import (
    busy_steps,
    decode_steps,
    has_legal_decode,
    prefill_steps,
    reach_steps,
)
from kvrouter.routing.request import RouteRequest, View
from kvrouter.routing.settings import rules_of
from kvrouter.topology import Required, TransferConstraint

_VALUES_SHOWN = 3


def refuse_leg(
    request: RouteRequest,
    fleet: Fleet,
    who: Screen,
    not_busy: BoolColumn | None,
    constraint: TransferConstraint | None = None,
) -> RoutingRefused:
    """Return the refusal of a request whose one leg nobody may take."""
    domain = None
    domain_steps: tuple[Step, ...] = ()
    if constraint is not None and isinstance(constraint.policy, Required):
        domain, domain_steps = constraint.domain, decode_steps(fleet, constraint)
    values = () if constraint is None or constraint.value is None else (constraint.value,)
    return _refusal(request, fleet, who, (*domain_steps, *busy_steps(not_busy)), domain, values)


def refuse_pair(request: RouteRequest, fleet: Fleet, screens: Screens) -> RoutingRefused:
    """Return the refusal of a request for which no prefill rank has a legal decode rank.

    The leg it names is the one to look at: prefill when nobody may take that leg at all, or when every rank
    with a free decode rank is itself busy; else decode, with the domain that KV would have to leave.
    """
    groups, prefill, decode = screens.groups, screens.prefill, screens.decode
    if not prefill.mask.n_allowed:
        return _refusal(request, fleet, prefill, (), None, ())
    domain = _bound_domain(groups, prefill.mask.allowed)
    values = _values(fleet, domain, prefill.mask.allowed)
    reach = reach_steps(fleet, groups, prefill.mask.allowed, domain)
    if screens.not_busy is not None:
        ready = has_legal_decode(tiers_of(groups, fleet, decode.mask.within(screens.not_busy)))
        if (ready & prefill.mask.allowed).any():
            legal = has_legal_decode(tiers_of(groups, fleet, decode.mask))
            steps = (*prefill_steps(fleet, groups, legal), Step(Reason.BUSY, screens.not_busy & ready))
            return _refusal(request, fleet, prefill, steps, None, ())
    return _refusal(request, fleet, decode, (*reach, *busy_steps(screens.not_busy)), domain, values)


def leg_rows(
    request: RouteRequest,
    view: View,
    who: Screen,
    not_busy: BoolColumn | None,
    constraint: TransferConstraint | None = None,
) -> tuple[Candidate, ...]:
    """Return the rows of a request whose one leg nobody may take."""
    rules = rules_of(view.settings, request.override)
    costs = leg_costs(request, view, who.leg, rules, constraint=constraint)
    steps = (*decode_steps(view.fleet, constraint), *busy_steps(not_busy))
    return rows_of(who, view.fleet, steps, costs, None)


def pair_rows(request: RouteRequest, view: View, screens: Screens) -> tuple[Candidate, ...]:
    """Return the rows of both legs of a request for which no prefill rank has a legal decode rank.

    A prefill rank is refused for its domain where no decode rank could ever follow, busy or not; a decode
    rank where no prefill rank could reach it. A leg may show eligible ranks: then the other leg has none.
    """
    fleet, groups = view.fleet, screens.groups
    prefill, decode, busy = screens.prefill, screens.decode, busy_steps(screens.not_busy)
    rules = rules_of(view.settings, request.override)
    legal = has_legal_decode(tiers_of(groups, fleet, decode.mask)) | groups.unbound
    domain = _bound_domain(groups, prefill.mask.allowed)
    reach = reach_steps(fleet, groups, prefill.mask.allowed, domain)
    costs = {who.leg: leg_costs(request, view, who.leg, rules) for who in (prefill, decode)}
    return rows_of(
        prefill, fleet, (*prefill_steps(fleet, groups, legal), *busy), costs[prefill.leg], None
    ) + rows_of(decode, fleet, (*reach, *busy), costs[decode.leg], None)


def _refusal(
    request: RouteRequest,
    fleet: Fleet,
    who: Screen,
    later: Iterable[Step],
    domain: str | None,
    values: tuple[str, ...],
) -> RoutingRefused:
    _, stopped = first_refusals(who, fleet, later)
    refusals: dict[Reason, int] = {}
    for reason, slots in stopped:
        count = int(np.count_nonzero(slots))
        if count:
            refusals[reason] = refusals.get(reason, 0) + count
    role = _role(who.leg)
    if not refusals:
        refusals[Reason.WRONG_ROLE] = int(np.count_nonzero(fleet.columns.present))
        why = f"{refusals[Reason.WRONG_ROLE]} worker ranks are here, none of them for {role}"
    else:
        counts = ", ".join(f"{count} {reason}" for reason, count in refusals.items())
        why = f"of {int(np.count_nonzero(who.role))} {role} ranks: {counts}"
    if domain is not None:
        where = ", ".join(values) if values else "whose value the prefill worker does not publish"
        why += f"; KV keeps to {domain} {where}"
    why += _about_pin(request, fleet, who)
    busy = Reason.BUSY in refusals
    kind = AllWorkersBusy if busy else NoEligibleWorker
    subject = f"every {role} worker" if busy else f"no {role} worker"
    verb = "that may take this request is busy" if busy else "may take this request"
    return kind(f"{subject} {verb} ({why})", refusals=refusals, role=role, domain=domain)


def _role(leg: Leg) -> str:
    return Leg.PREFILL.value if leg is Leg.PREFILL else Leg.DECODE.value


def _about_pin(request: RouteRequest, fleet: Fleet, who: Screen) -> str:
    pin: Pin | None = request.prefill_pin if who.leg is Leg.PREFILL else request.pin
    if pin is None:
        return ""
    rank = "" if pin.dp_rank is None else f"/{pin.dp_rank}"
    card = fleet.card(pin.worker_id)
    known = "which is not here" if card is None else f"a worker for {card.role}"
    return f"; pinned to {pin.worker_id}{rank}, {known}"


def _bound_domain(groups: Groups, prefill: BoolColumn) -> str | None:
    for group in groups.bound:
        if (group.members & prefill).any():
            return group.policy.domain
    return None


def _values(fleet: Fleet, domain: str | None, prefill: BoolColumn) -> tuple[str, ...]:
    if domain is None:
        return ()
    at = (fleet.domain_value_at(domain, Slot(slot)) for slot in np.flatnonzero(prefill).tolist())
    found = sorted({value for value in at if value is not None})
    return tuple(found[:_VALUES_SHOWN]) + (("…",) if len(found) > _VALUES_SHOWN else ())
