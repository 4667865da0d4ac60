"""Picks among eligible ranks: lowest cost, softmax, round-robin or random.

Nothing here depends on the order in which workers joined: ties, draws and turns go by worker rank.
"""

from zlib import crc32

import numpy as np

from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import RequestId, Slot
from kvrouter.fleet import Fleet, FloatColumn, SlotColumn, mix64
from kvrouter.routing.eligibility import Mask
from kvrouter.routing.request import Rules

_TOP = float(np.finfo(np.float64).max) / 4

UNSEEN_MAX = 64
"""How many unseen requests one decision makes room for."""


def draw_unseen(expected: float, draw: int) -> int:
    """Return how many requests to take for placed and unseen, when ``expected`` are: any number up to twice
    that is as likely, so that routers that decide at the same time decide differently.
    """
    if expected <= 0.0:
        return 0
    share = (mix64(draw ^ _UNSEEN_SALT) >> 11) * 2.0**-53
    return min(UNSEEN_MAX, int(share * (2.0 * expected + 1.0)))


_UNSEEN_SALT = 0x9E3779B97F4A7C15


def pick_slot(
    cost: FloatColumn,
    mask: Mask,
    fleet: Fleet,
    rules: Rules,
    *,
    request_id: RequestId,
    draw: int,
    turn: int,
    unseen: int = 0,
    own_blocks: float = 0.0,
) -> Slot:
    """Return the slot that ``rules`` pick; ``mask`` allows at least one. ``draw`` is 64 random bits.

    The lowest cost is what it would be after ``unseen`` requests went where they are cheapest, one by one,
    each of which adds ``own_blocks`` to its rank.
    """
    if rules.mode is RouterMode.KV:
        if rules.temperature > 0.0:
            return _softmax(cost, _in_rank_order(mask, fleet), rules.temperature, draw)
        if unseen:
            cost = _after(unseen, own_blocks, cost, mask)
        return _lowest(cost, mask, fleet, request_id)
    eligible = _in_rank_order(mask, fleet)
    at = turn if rules.mode is RouterMode.ROUND_ROBIN else mix64(draw)
    return Slot(int(eligible[at % len(eligible)]))


def _after(unseen: int, own_blocks: float, cost: FloatColumn, mask: Mask) -> FloatColumn:
    """Return the costs after so many requests went where they are cheapest."""
    cost = cost.copy()
    np.putmask(cost, mask.refused, np.inf)
    for _ in range(unseen):
        cost[cost.argmin()] += own_blocks
    return cost


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
