"""What the way of the KV costs: the link table over slots, from one prefill worker."""

import numpy as np
import numpy.typing as npt

from kvrouter.core.ids import Slot
from kvrouter.fleet import UNKNOWN_VALUE, Fleet, FloatColumn, IntColumn
from kvrouter.routing.request import RouteRequest, View
from kvrouter.topology import Link, LinkTable


def transfer_blocks(
    request: RouteRequest, view: View, overlap: IntColumn | None, prefill_slot: Slot
) -> FloatColumn | None:
    """Return what moving the KV from ``prefill_slot`` costs; None unless weight and links are given.

    kv_bytes = (isl_tokens − tokens cached on the decode worker) · kv_bytes_per_token of the prefill worker.
    Where that worker does not publish it, the latency alone counts.
    """
    settings, fleet = view.settings, view.fleet
    if settings.links is None or settings.kv_transfer_weight == 0.0:
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
        transfer_s: FloatColumn = latency_s + tokens * bytes_per_token / bandwidth_bytes_per_s
        transfer_s *= settings.kv_transfer_weight
    return transfer_s


def links_from(fleet: Fleet, table: LinkTable, prefill_slot: Slot) -> tuple[list[Link], npt.NDArray[np.intp]]:
    """Return the links, and per slot which of them leads there from ``prefill_slot``.

    The same link as ``table.link`` gives for the two workers' domain values, by the prefill worker's levels.
    """
    card = fleet.card_at(prefill_slot)
    levels = () if card is None else tuple(level.strip() for level in card.runtime_config.topology_levels)
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
