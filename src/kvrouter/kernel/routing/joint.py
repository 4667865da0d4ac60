"""Joint selection: the pair of lowest cost, in seconds, or a decode worker that prefills for itself.

With the parts of :mod:`kvrouter.kernel.routing.costs.time`, p at the prefill and d at the decode rank::

    own_s     = p.queue_s + p.prefill_s
    pair_cost = (overlap_score_weight · own_s + p.others_s + p.turnover_s) · p.multiplier
              + (max(0, d.memory_s − own_s) + transfer_s + price_s
                 + d.queue_s + d.decode_s + d.others_s + d.turnover_s) · d.multiplier

The decode rank frees memory while the prompt is computed, so only the longer part of that wait counts; the
transfer follows the later of the two. If decode ranks prefill too, ``d.queue_s`` is one step of prompts, a
full one at most. ``transfer_s`` and ``price_s`` are those of :mod:`kvrouter.kernel.routing.fleet_links`. A
decode rank that prefills for itself costs as much as an aggregated one, and delays its own requests.

Eligibility is the same as for a sequential pick. A request that was refused a pair because no domain has one
is not prefilled on a decode rank either; one without a pair for its KV formats alone is.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec import structs

from kvrouter._native import Senders
from kvrouter.core.ids import Slot, Taint, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.kernel.fleet.columns import FloatColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.costs.leg import leg_costs, multiplier_of, overlap_of, preferred_taints
from kvrouter.kernel.routing.costs.time import LegTimes, timed_at
from kvrouter.kernel.routing.explain import busy_steps, receiver_steps, refuse_pair, rows_of, sender_steps
from kvrouter.kernel.routing.fleet_links import kv_bytes_per_token, links_of
from kvrouter.kernel.routing.formats import format_groups
from kvrouter.kernel.routing.interface import Candidate, Columns, Costs, Pick, RouteRequest, Timed, View
from kvrouter.kernel.routing.masks import (
    Followers,
    Screen,
    Screens,
    Sides,
    Step,
    constraint_of,
    eligible,
    first_refusals,
    followers_of,
    is_parted_by_formats,
    mask_of,
    screen_ranks,
    tiers_of,
)
from kvrouter.kernel.routing.pick import Rules, pick_at, pick_by
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.kernel.topology.policy import (
    Fallback,
    Preferred,
    Required,
    RouterTopologyDefault,
    TransferConstraint,
)


class _Senders:
    """The constraint of each prefill rank on its decode rank, by number, and its form for the native core."""

    def __init__(self, fleet: Fleet, key: tuple[LinkTable, RouterTopologyDefault | None]) -> None:
        table, default = key
        links = links_of(fleet, table)
        numbers: dict[TransferConstraint | None, int] = {None: 0}
        slots = [Slot(slot) for slot in range(fleet.n_slots)]
        sends = fleet.columns.prefill
        constraint_at = [
            numbers.setdefault(constraint_of(fleet, slot, default), len(numbers)) if sends[slot] else 0
            for slot in slots
        ]
        self.constraints = tuple(numbers)
        self.prefers = any(each is not None and isinstance(each.policy, Preferred) for each in numbers)
        self.native = Senders(
            links.map,
            [_native_constraint(constraint, fleet, links.domains) for constraint in self.constraints],
            constraint_at,
            [float(kv_bytes_per_token(fleet, slot)) for slot in slots],
            [
                (np.flatnonzero(each.senders).tolist(), np.flatnonzero(each.receivers).tolist())
                for each in format_groups(fleet)
            ],
        )


def _native_constraint(
    constraint: TransferConstraint | None, fleet: Fleet, domains: tuple[str, ...]
) -> tuple[str, tuple[int, int] | None]:
    if constraint is None:
        return "anywhere", None
    rule = {Required: "required", Fallback: "fallback", Preferred: "preferred"}[type(constraint.policy)]
    domain, value = constraint.domain, constraint.value
    value_id = None if value is None else fleet.places.value_id(domain, value)
    if value_id is None or domain not in domains:
        return rule, None
    return rule, (domains.index(domain), value_id)


class PairCosts:
    """The costs of one request's pairs."""

    def __init__(self, request: RouteRequest, view: View, sides: Sides, rules: Rules) -> None:
        self._request, self._view, self._sides = request, view, sides
        fleet, settings = view.fleet, view.settings
        if settings.links is None:
            raise ValueError("links: pairs that are chosen together need some")
        self._links = links_of(fleet, settings.links)
        self._links.use(None if view.cost_input is None else view.cost_input.transfers)
        self._senders = fleet.derived_from_places(_Senders, (settings.links, settings.topology_default))
        self._overlap = overlap_of(view)
        weight = rules.overlap_score_weight
        self.prefill = leg_costs(request, view, Leg.PREFILL, weight)
        self._legs = tuple(
            LegTimes(request, view, leg, self._overlap, overlap_score_weight=weight, stalls=leg is Leg.DECODE)
            for leg in (Leg.PREFILL, Leg.DECODE)
        )

    def least(self) -> FloatColumn:
        """Return the lowest pair cost of each rank that may send KV; infinity elsewhere. Decode ranks that
        its KV did not reach lately are left out.
        """
        fleet, sides = self._view.fleet, self._sides
        near: list[FloatColumn | None] = [None] * len(self._senders.constraints)
        if self._senders.prefers:
            near = self._near()
        prefill, decode = self._legs
        out: FloatColumn = np.empty(fleet.n_slots)
        self._links.map.least_pairs(
            out,
            prefill.predictor,
            prefill.columns,
            (prefill.inputs, decode.inputs),
            self._senders.native,
            (sides.senders.allowed, sides.receivers.allowed),
            (self.prefill.multiplier, self._multiplier(None), near),
            self._view.settings.price_weight,
        )
        for worker_id in fleet.broken_pairs.senders() if fleet.broken_pairs else ():
            for slot in fleet.slots_of(worker_id):
                if sides.senders.allowed[slot] and fleet.unreached_from(slot) is not None:
                    followers, costs = self.decode_costs(slot)
                    reached = costs.cost[followers.chosen.mask.allowed]
                    out[slot] = self.prefill.cost[slot] + reached.min(initial=np.inf)
        return out

    def decode_costs(self, sender: Slot) -> "_DecodeCosts":
        """Return the decode ranks that may follow one prefill rank, and the cost that each adds."""
        followers = followers_of(sender, self._sides, self._view)
        prefill, decode = self._legs
        cost: FloatColumn = np.empty(self._view.fleet.n_slots)
        multiplier = self._multiplier(followers.constraint)
        self._links.map.pair_costs(
            cost,
            prefill.predictor,
            prefill.columns,
            (prefill.inputs, decode.inputs),
            self._senders.native,
            sender,
            multiplier,
            self._view.settings.price_weight,
        )
        timed = partial(self._timed, sender)
        return _DecodeCosts(followers, Costs(self._overlap, None, multiplier, Columns(cost, timed=timed)))

    def _timed(self, sender: Slot, slot: Slot, overlap_blocks: int) -> Timed:
        request, view = self._request, self._view
        prefill, decode = self._legs
        own = prefill.at(sender)
        missing_tokens = max(0, request.isl_tokens - overlap_blocks * view.fleet.block_size)
        kv_bytes = missing_tokens * kv_bytes_per_token(view.fleet, sender)
        transfer_s, price = self._links.transfer(sender, slot, kv_bytes)
        times = decode.at(slot, transfer_s=transfer_s, price_s=price * view.settings.price_weight)
        waits_s = max(0.0, times.memory_s - own.queue_s - own.prefill_s)
        return timed_at(request, view, Leg.DECODE, slot, overlap_blocks, times._replace(memory_s=waits_s))

    def _multiplier(self, constraint: TransferConstraint | None) -> FloatColumn | None:
        return multiplier_of(self._view.fleet, preferred_taints(self._request, Leg.DECODE, constraint))

    def _near(self) -> list[FloatColumn | None]:
        """Return the multiplier columns within each preferred domain: one column for each weight."""
        columns: dict[tuple[Taint | None, float], FloatColumn] = {}
        own = preferred_taints(self._request, Leg.DECODE, None)
        near: list[FloatColumn | None] = []
        for constraint in self._senders.constraints:
            if constraint is None or not isinstance(constraint.policy, Preferred):
                near.append(None)
                continue
            weights = dict(preferred_taints(self._request, Leg.DECODE, constraint))
            weight = 0.0 if constraint.taint is None else weights.pop(constraint.taint, 0.0)
            key = constraint.taint if constraint.taint in own else None, weight
            column = columns.get(key)
            if column is None:
                column = columns[key] = self._everywhere(weights, weight)
            near.append(column)
        return near

    def _everywhere(self, weights: Mapping[Taint, float], weight: float) -> FloatColumn:
        """Return the multiplier of each rank as if it were in a domain of this weight."""
        fleet = self._view.fleet
        column = multiplier_of(fleet, weights, everywhere=weight)
        return np.ones(fleet.n_slots) if column is None else column


class _DecodeCosts(NamedTuple):
    """The decode ranks that may follow one prefill rank, and the cost that each adds."""

    followers: Followers
    costs: Costs


class JointPick(NamedTuple):
    """The picks of a pair; ``prefill`` and ``followers`` are None when a decode rank prefills for itself."""

    prefill: Pick | None
    decode: Pick
    followers: Followers | None
    rows: tuple[Candidate, ...]


def pick_jointly(
    request: RouteRequest, view: View, sides: Sides, rules: Rules, *, explain: bool
) -> JointPick:
    """Pick the cheapest pair, or a decode worker that prefills for itself. Raises RoutingRefused."""
    fleet, screens = view.fleet, sides.screens
    local_screen = _local(request, fleet, screens)
    if local_screen is None:
        local_mask = mask_of(np.zeros(fleet.n_slots, np.bool_))
    else:
        local_mask = eligible(local_screen, screens.not_busy)
    allowed = mask_of(sides.senders.allowed | local_mask.allowed)
    if not allowed.n_allowed:
        raise refuse_pair(request, view, screens, explain=explain)

    costs = PairCosts(request, view, sides, rules)
    total = least = costs.least()
    local: Costs | None = None
    if local_screen is not None:
        local = leg_costs(request, view, Leg.AGGREGATED, rules.overlap_score_weight, stalls=True)
        total = np.where(local_mask.allowed, local.cost, least)

    slot, unseen = pick_by(total, request, view, Leg.PREFILL, rules, allowed)
    prefill, decode_costs = None, None
    if local is not None and local_mask.allowed[slot]:
        decode = pick_at(slot, Leg.AGGREGATED, fleet, local, allowed.n_allowed, unseen=unseen)
    else:
        prefill = pick_at(slot, Leg.PREFILL, fleet, costs.prefill, allowed.n_allowed, unseen=unseen)
        decode_costs = costs.decode_costs(slot)
        chosen = decode_costs.followers.chosen.mask
        follower, unseen = pick_by(decode_costs.costs.cost, request, view, Leg.DECODE, rules, chosen)
        decode = pick_at(follower, Leg.DECODE, fleet, decode_costs.costs, chosen.n_allowed, unseen=unseen)
    followers = None if decode_costs is None else decode_costs.followers
    if not explain:
        return JointPick(prefill, decode, followers, ())

    rows = _prefill_rows(costs, sides, fleet, least, prefill)
    if sides.senders.n_allowed:
        best = Slot(int(least.argmin())) if prefill is None else slot
        decode_costs = decode_costs or costs.decode_costs(best)
        steps = receiver_steps(fleet, *decode_costs.followers, screens.not_busy)
        own, partner = costs.prefill.cost.item(best), fleet.rank_at(best)
        rows += _rows(screens.decode, fleet, steps, decode_costs.costs, decode, own=own, partner=partner)
    if local_screen is not None and local is not None:
        rows += _rows(local_screen, fleet, busy_steps(screens.not_busy), local, decode)
    return JointPick(prefill, decode, followers, rows)


def _prefill_rows(
    costs: PairCosts, sides: Sides, fleet: Fleet, least: FloatColumn, picked: Pick | None
) -> tuple[Candidate, ...]:
    """Return a row for each prefill rank, with the decode rank of its lowest pair cost."""
    stopped = first_refusals(sides.screens.prefill, fleet, sender_steps(fleet, sides))
    slot = None if picked is None else picked.slot
    rows = []
    for row in rows_of(sides.screens.prefill, fleet, stopped, costs.prefill, slot):
        if row.refused is None and sides.senders.allowed[row.slot]:
            followers, decode_costs = costs.decode_costs(row.slot)
            added = np.where(followers.chosen.mask.allowed, decode_costs.cost, np.inf)
            partner = fleet.rank_at(Slot(int(added.argmin())))
            rows.append(structs.replace(row, pair_cost=least.item(row.slot), partner=partner))
        else:
            rows.append(row)
    return tuple(rows)


def _rows(
    screen: Screen,
    fleet: Fleet,
    steps: tuple[Step, ...],
    costs: Costs,
    picked: Pick,
    *,
    own: float = 0.0,
    partner: WorkerRank | None = None,
) -> tuple[Candidate, ...]:
    """Return a row for each decode rank, as a follower of ``partner``, whose cost is ``own``, or as a rank
    that prefills for itself.
    """
    slot = picked.slot if picked.leg is screen.leg else None
    return tuple(
        structs.replace(row, pair_cost=own + row.cost, partner=partner) if row.refused is None else row
        for row in rows_of(screen, fleet, first_refusals(screen, fleet, steps), costs, slot)
    )


def _local(request: RouteRequest, fleet: Fleet, screens: Screens) -> Screen | None:
    """Return the ranks that may prefill for themselves. None when a prefill worker is pinned, or a policy
    leaves no pair even without load: it fails closed.
    """
    if request.prefill_pin is not None:
        return None
    served = tiers_of(screens.groups, fleet, screens.decode.mask).served
    if not (screens.prefill.mask.allowed & served).any() and not is_parted_by_formats(screens, fleet):
        return None
    return screen_ranks(request, fleet, Leg.AGGREGATED)
