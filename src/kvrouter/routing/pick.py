"""Which one of the eligible ranks: lowest cost, softmax, round-robin or random.

Nothing here depends on the order in which workers joined: ties, draws and turns go by worker rank.
"""

from zlib import crc32

import numpy as np

from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import RequestId, Slot
from kvrouter.fleet import Fleet, FloatColumn, SlotColumn, mix64
from kvrouter.routing.eligibility import Mask
from kvrouter.routing.settings import Rules

_TOP = float(np.finfo(np.float64).max) / 4


def pick_slot(
    cost: FloatColumn,
    mask: Mask,
    fleet: Fleet,
    rules: Rules,
    *,
    request_id: RequestId,
    draw: int,
    turn: int,
) -> Slot:
    """Return the slot that ``rules`` pick; ``mask`` allows at least one. ``draw`` is 64 random bits."""
    if rules.mode is RouterMode.KV:
        if rules.temperature > 0.0:
            return _softmax(cost, _in_rank_order(mask, fleet), rules.temperature, draw)
        return _lowest(cost, mask, fleet, request_id)
    eligible = _in_rank_order(mask, fleet)
    at = turn if rules.mode is RouterMode.ROUND_ROBIN else mix64(draw)
    return Slot(int(eligible[at % len(eligible)]))


def _lowest(cost: FloatColumn, mask: Mask, fleet: Fleet, request_id: RequestId) -> Slot:
    open_cost = cost
    if mask.n_allowed != len(cost):
        open_cost = cost.copy()
        np.putmask(open_cost, mask.refused, np.inf)
    at = int(open_cost.argmin())
    best = open_cost.item(at)
    tied = open_cost == best
    if best == np.inf:  # a cost that overflowed looks like a refusal
        tied &= mask.allowed
    if np.count_nonzero(tied) == 1:
        return Slot(int(tied.argmax()))
    slots = np.flatnonzero(tied)
    return Slot(int(slots[_spread(fleet, slots, request_id).argmin()]))


def _spread(
    fleet: Fleet, slots: SlotColumn, request_id: RequestId
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return 64 bits per slot, from the request id and the worker rank alone."""
    bits = fleet.columns.rank_hash[slots] ^ np.uint64(mix64(crc32(request_id.encode())))
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(32)
    bits *= np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(29))


def _softmax(cost: FloatColumn, eligible: SlotColumn, temperature: float, draw: int) -> Slot:
    """Draw with p ∝ exp(−(cost − min) / ((max − min) · temperature)); uniform when all costs are equal."""
    costs = cost[eligible].clip(-_TOP, _TOP)
    lowest = costs.min()
    spread = costs.max() - lowest
    shares = np.ones(len(costs))
    if spread > 0.0:
        with np.errstate(over="ignore", under="ignore"):
            shares = np.exp(-((costs - lowest) / spread) / temperature)
    reached = np.cumsum(shares)
    aim = (mix64(draw) >> 11) * 2.0**-53 * reached[-1]
    at = min(int(np.searchsorted(reached, aim, side="right")), len(eligible) - 1)
    return Slot(int(eligible[at]))


def _in_rank_order(mask: Mask, fleet: Fleet) -> SlotColumn:
    order = fleet.rank_order
    return order[mask.allowed[order]]
