"""How long moving KV to each slot takes: the links of the table, and what else travels over them.

With n other transfers of B bytes in all on the link, and its bandwidth shared evenly::

    transfer_s = latency_s + (kv_bytes + min(B, n · kv_bytes)) / bandwidth_bytes_per_s
    kv_bytes   = (isl_tokens − tokens cached on the decode worker) · kv_bytes_per_token of the prefill worker

Others count under the cost of time alone: the blocks rule weighs a transfer as if it were alone.
"""

import numpy as np
import numpy.typing as npt

from kvrouter.core.constraints import CostRule
from kvrouter.core.ids import Slot
from kvrouter.fleet import UNKNOWN_VALUE, Fleet, FloatColumn, IntColumn
from kvrouter.routing.request import RouteRequest, View
from kvrouter.topology import Link, LinkLoads, LinkTable, SharedLink


def transfer_seconds(
    request: RouteRequest, view: View, overlap: IntColumn | None, prefill_slot: Slot
) -> FloatColumn | None:
    """Return how long moving the KV from ``prefill_slot`` takes; None where the links are not weighed.

    Where the prefill worker does not publish its bytes a token, the latency alone counts.
    """
    settings, fleet = view.settings, view.fleet
    if settings.links is None or (settings.kv_transfer_weight == 0.0 and settings.cost is not CostRule.TIME):
        return None
    links, which = links_from(fleet, settings.links, prefill_slot)
    latency_s = np.array([link.latency_s for link in links])[which]
    bandwidth_bytes_per_s = np.array([link.bandwidth_bytes_per_s for link in links])[which]
    tokens = np.full(fleet.n_slots, float(request.isl_tokens))
    if overlap is not None:
        tokens -= overlap * float(fleet.block_size)
        np.maximum(tokens, 0.0, out=tokens)
    bytes_per_token = max(0, int(fleet.columns.kv_bytes_per_token[prefill_slot]))
    with np.errstate(over="ignore"):
        kv_bytes = tokens * bytes_per_token
        loads = None if view.cost_input is None else view.cost_input.transfers
        if loads is not None:
            shared = shared_from(fleet, settings.links, prefill_slot, loads)
            kv_bytes += np.minimum(loads.bytes[shared], loads.count[shared] * kv_bytes)
        transfer_s: FloatColumn = latency_s + kv_bytes / bandwidth_bytes_per_s
    return transfer_s


VALUES_MAX = 64
"""To more values of one level than this, transfers are taken for alone on their links: of so many links each
is hardly ever shared.
"""


def links_from(fleet: Fleet, table: LinkTable, prefill_slot: Slot) -> tuple[list[Link], npt.NDArray[np.intp]]:
    """Return the links, and per slot which of them leads there from ``prefill_slot``.

    The same link as ``table.link`` gives for the two workers' domain values, by the prefill worker's levels.
    """
    levels = _levels_at(fleet, prefill_slot)
    links = [table.otherwise]
    which = np.zeros(fleet.n_slots, np.intp)
    together = np.ones(fleet.n_slots, np.bool_)
    at = 0
    for level in levels:
        if level in table.by_level:
            links.append(table.by_level[level])
            at = len(links) - 1
        ids = fleet.domain_ids(level)
        own = int(ids[prefill_slot])
        if own == UNKNOWN_VALUE:
            continue
        together &= (ids == own) | (ids == UNKNOWN_VALUE)
        which[together & (ids == own)] = at
    for (domain, one, other), link in reversed(tuple(table.pairs.items())):
        here = fleet.domain_value_at(domain, prefill_slot)
        for value, far in ((one, other), (other, one)):
            far_id = fleet.domain_value_id(domain, far)
            if here == value and far_id is not None:
                links.append(link)
                which[fleet.domain_ids(domain) == far_id] = len(links) - 1
    return links, which


def _levels_at(fleet: Fleet, slot: Slot) -> tuple[str, ...]:
    card = fleet.card_at(slot)
    return () if card is None else tuple(level.strip() for level in card.runtime_config.topology_levels)


def shared_from(fleet: Fleet, table: LinkTable, prefill_slot: Slot, loads: LinkLoads) -> npt.NDArray[np.intp]:
    """Return per slot the number of the link that leads there from ``prefill_slot``; kept until the fleet
    changes.
    """
    levels = _levels_at(fleet, prefill_slot)
    named = {domain for domain, _, _ in table.pairs}
    place = tuple((name, fleet.domain_value_at(name, prefill_slot)) for name in sorted({*levels, *named}))
    return fleet.derived(_shared, _From(table, loads, levels, place, prefill_slot))


class _From:
    """Where KV comes from. Equal where the place is, whichever worker is there."""

    __slots__ = ("_key", "levels", "loads", "slot", "table")

    def __init__(
        self,
        table: LinkTable,
        loads: LinkLoads,
        levels: tuple[str, ...],
        place: tuple[tuple[str, str | None], ...],
        slot: Slot,
    ) -> None:
        self.table, self.loads, self.levels, self.slot = table, loads, levels, slot
        self._key = (id(table), id(loads), levels, place)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _From) and self._key == other._key


def _shared(fleet: Fleet, of: _From) -> npt.NDArray[np.intp]:
    """As :meth:`kvrouter.mock.Links.shared` names links, but for the broader levels of a measured pair."""
    slot, loads, table = of.slot, of.loads, of.table
    shared = np.zeros(fleet.n_slots, np.intp)
    values: list[str | None] = []
    open_ = np.ones(fleet.n_slots, np.bool_)
    together = np.ones(fleet.n_slots, np.bool_)
    for level in of.levels:
        value = fleet.domain_value_at(level, slot)
        values.append(value)
        column = fleet.domain_ids(level)
        own = int(column[slot])
        if own == UNKNOWN_VALUE:
            continue
        differs = together & (column != own) & (column != UNKNOWN_VALUE)
        decides = differs & open_
        others = np.unique(column[decides]).tolist()
        for far in others if len(others) <= VALUES_MAX else ():
            at = decides & (column == far)
            name = SharedLink(level, tuple(values), fleet.domain_value_at(level, Slot(int(at.argmax()))))
            shared[at] = loads.number(name)
        together &= ~differs
        same = together & (column == own)
        if level in table.by_level:
            shared[same] = loads.number(SharedLink(level, tuple(values), value))
            open_ &= ~same
        else:
            at = same & open_
            if at.any():
                shared[at] = loads.number(SharedLink(level, tuple(values), value))
    for (domain, one, other), _ in reversed(tuple(table.pairs.items())):
        here = fleet.domain_value_at(domain, slot)
        for value, far_value in ((one, other), (other, one)):
            far_id = fleet.domain_value_id(domain, far_value)
            if here == value and far_id is not None:
                shared[fleet.domain_ids(domain) == far_id] = loads.number(
                    SharedLink(domain, (here,), far_value)
                )
    return shared
