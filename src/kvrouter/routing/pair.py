"""Prefill and decode together: which prefill ranks have a legal decode rank, and which decode ranks suit one.

Under ``required`` and ``fallback``, prefill ranks whose domain value some eligible decode rank shares are the
first tier (``home``). The second tier (``away``) are the ``fallback`` ranks without one: their KV may cross.
A ``required`` rank without one is in neither: it may not be sent anything.
"""

from typing import NamedTuple

import numpy as np

from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.fleet import UNKNOWN_VALUE, BoolColumn, Fleet
from kvrouter.routing.eligibility import Mask, Screen, ready, screen
from kvrouter.routing.request import RouteRequest
from kvrouter.topology import (
    Fallback,
    Preferred,
    Required,
    RouterTopologyDefault,
    TransferConstraint,
    derive,
)


class DomainGroup(NamedTuple):
    """The prefill ranks, alive or not, whose KV must or should keep to one domain."""

    policy: Required | Fallback
    members: BoolColumn


class DomainGroups(NamedTuple):
    """The prefill ranks by policy; ``unbound`` have none, or one that only weighs on cost."""

    bound: tuple[DomainGroup, ...]
    unbound: BoolColumn


class Tiers(NamedTuple):
    """Prefill ranks by what their decode leg would be; see the module."""

    home: BoolColumn
    away: BoolColumn


class Screens(NamedTuple):
    """Who may take either leg, before the one leg binds the other."""

    prefill: Screen
    decode: Screen
    groups: DomainGroups
    not_busy: BoolColumn | None


class DecodeMask(NamedTuple):
    """The decode ranks that suit one prefill worker, and whether none of its domain could. ``reached`` are
    all ranks but those that its KV did not reach lately; None where nobody was left out for that.
    """

    mask: Mask
    fallback_used: bool
    reached: BoolColumn | None = None


def screens_of(
    request: RouteRequest,
    fleet: Fleet,
    router_default: RouterTopologyDefault | None,
    not_busy: BoolColumn | None,
) -> Screens:
    """Ask everything of both legs that does not depend on the other leg."""
    return Screens(
        screen(request, fleet, Leg.PREFILL),
        screen(request, fleet, Leg.DECODE),
        fleet.derived(_groups, router_default),
        not_busy,
    )


def prefill_mask(
    screens: Screens, fleet: Fleet, decode: Mask, router_default: RouterTopologyDefault | None
) -> Mask:
    """Return the prefill ranks to choose among: of the first tier while there is one that may take it.

    ``decode`` are the decode ranks that may take the request now.
    """
    prefill = screens.prefill.mask
    if screens.not_busy is not None:
        prefill = prefill.within(screens.not_busy)
    if not screens.groups.bound and decode.n_allowed:
        return prefill
    if decode is ready(fleet, Leg.DECODE, last_resort=False):
        tiers = fleet.derived(_ready_tiers, router_default)
    else:
        tiers = tiers_of(screens.groups, fleet, decode)
    home = prefill.within(tiers.home)
    return home if home.n_allowed else prefill.within(tiers.away)


def tiers_of(groups: DomainGroups, fleet: Fleet, decode: Mask) -> Tiers:
    """Return the tiers of all prefill ranks, given the decode ranks that may take the request."""
    nobody = np.zeros(fleet.n_slots, np.bool_)
    if not decode.n_allowed:
        return Tiers(nobody, nobody)
    home, away = groups.unbound, nobody
    for group in groups.bound:
        ids = fleet.domain_ids(group.policy.domain)
        served = np.zeros(fleet.n_domain_ids(group.policy.domain) + 1, np.bool_)
        served[ids[decode.allowed]] = True
        served[UNKNOWN_VALUE] = False  # the last entry: no value is not a value that two workers share
        at_home = group.members & served[ids]
        home = home | at_home
        if isinstance(group.policy, Fallback):
            away = away | (group.members & ~at_home)
    return Tiers(home, away)


def knows_its_place(fleet: Fleet, router_default: RouterTopologyDefault | None) -> BoolColumn:
    """Return the slots whose KV is not required to stay in a domain of which they have no value."""
    placed = np.ones(fleet.n_slots, np.bool_)
    for group in fleet.derived(_groups, router_default).bound:
        if isinstance(group.policy, Required):
            placed &= ~group.members | (fleet.domain_ids(group.policy.domain) != UNKNOWN_VALUE)
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
    decode: Mask, fleet: Fleet, constraint: TransferConstraint | None, prefill_slot: Slot
) -> DecodeMask:
    """Return :func:`decode_mask` without the ranks that KV from ``prefill_slot`` did not reach lately; with
    them where nobody else is left.
    """
    unreached = fleet.unreached_from(prefill_slot)
    if unreached is not None:
        chosen = decode_mask(decode.within(~unreached), fleet, constraint)
        if chosen.mask.n_allowed:
            return chosen._replace(reached=~unreached)
    return decode_mask(decode, fleet, constraint)


def reaching(
    senders: Mask, fleet: Fleet, decode: Mask, router_default: RouterTopologyDefault | None
) -> BoolColumn | None:
    """Return all ranks but the ``senders`` whose KV reached nobody lately that may follow them in their
    domain; None where none are, or no other sender is left.
    """
    if not fleet.broken_pairs:
        return None
    cut_off = np.zeros(fleet.n_slots, np.bool_)
    for slot in (slot for worker_id in fleet.broken_pairs.senders() for slot in fleet.slots_of(worker_id)):
        unreached = fleet.unreached_from(slot) if senders.allowed[slot] else None
        if unreached is None:
            continue
        constraint = constraint_of(fleet, slot, router_default)
        usual = decode_mask(decode, fleet, constraint)
        cut_off[slot] = not (usual.mask.allowed & ~unreached).any()
    return ~cut_off if cut_off.any() and (senders.allowed & ~cut_off).any() else None


def shares_domain(fleet: Fleet, constraint: TransferConstraint) -> BoolColumn:
    """Return the slots whose value of the constraint's domain is the constraint's own, and known."""
    taint = constraint.taint
    return np.zeros(fleet.n_slots, np.bool_) if taint is None else fleet.carries(taint)


def crosses_domain(fleet: Fleet, constraint: TransferConstraint | None, decode: Slot) -> bool:
    """Whether KV at ``decode`` is not known to have kept to the constraint's domain."""
    return constraint is not None and not shares_domain(fleet, constraint)[decode]


def constraint_of(
    fleet: Fleet, prefill_slot: Slot, router_default: RouterTopologyDefault | None
) -> TransferConstraint | None:
    """Return what the worker at ``prefill_slot`` asks of its decode worker."""
    return fleet.derived(_constraint_at, (prefill_slot, router_default))


def _constraint_at(fleet: Fleet, key: tuple[Slot, RouterTopologyDefault | None]) -> TransferConstraint | None:
    slot, router_default = key
    card = fleet.card_at(slot)
    if card is None:
        return derive(None, router_default=router_default, required_elsewhere=fleet.required_domain)
    return derive(card.runtime_config, router_default=router_default)


def _groups(fleet: Fleet, router_default: RouterTopologyDefault | None) -> DomainGroups:
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
    return DomainGroups(
        tuple(DomainGroup(policy, members[policy]) for policy in sorted(members, key=repr)), unbound
    )


def _ready_tiers(fleet: Fleet, router_default: RouterTopologyDefault | None) -> Tiers:
    return tiers_of(
        fleet.derived(_groups, router_default), fleet, ready(fleet, Leg.DECODE, last_resort=False)
    )
