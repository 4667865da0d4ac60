"""The time rule: the cost in predicted seconds, from each rank's queue and learned speed::

    cost = (overlap_score_weight · (queue_s + prefill_s) + memory_s + decode_s + others_s + turnover_s
            + transfer_s + price_s) · multiplier

With t tokens of the prompt that are not cached there, a chunk of :data:`CHUNK_TOKENS` prompt tokens per step,
and the settings' ``timing`` of a step::

    queue_s    = what is left of the step that runs, where tokens are queued
                 + slowness · q · step of a chunk / chunk
                 + (1 + (q + t) / chunk) · d
                 the step that runs takes slowness · (up to a chunk of the queued tokens) + d, and
                 where it is late, as long as it is late, but at most half of it
                 q = queued tokens beyond that step
                 d = interference · decode slowness · the step of decode there, where requests decode
    prefill_s  = slowness · (the steps that t tokens take, full ones first)
    memory_s   = decode slowness · answer_s · max(missing blocks / blocks + 0.5 / answers there,
                                                  where blocks are missing,
                                                  requests without a seat / seats)     (Little's law)
    decode_s   = decode slowness · decode_weight · the step of decode with this request
    others_s   = 0.5 · (requests that wait there + later)
                 · (prefill_s + decode slowness · answer_s · new blocks / blocks, if blocks are missing)
                 + 16 · requests that are answered there · prefill_s · decode_s
                   / (decode slowness · answer_s), if a decode worker prefills for itself
                 later = 12 · (requests that wait on average at a rank that takes new ones - 1.5), between 0
                 and 12, if one worker prefills and decodes the request
    turnover_s = 0.03 · slowness · (step of a chunk / chunk) · prompt tokens · turnover

The first three are the request's own waiting time; the mock engine's tests compare them with measured times.
``others_s`` lets an overloaded fleet keep requests where they are cheap, to the benefit of all waiting
requests: weights between 0.3 and 1 give the same mean time to the first token below saturation, and less than
half of the time without it above. Where more than 1.5 requests wait at a rank on average, a queue lasts, and
what a request adds to it also delays those who come later. ``turnover_s`` is the loss of a prompt's next turn
when blocks are evicted sooner: if gaps between uses are log-uniform, a cache that is replaced e times as fast
misses a constant share more (Che's approximation of a least-recently-used cache).

A decode worker that prefills for itself delays each request that it answers once by prefill_s, which over the
steps of an answer weighs sixteen times as much as a slower decode step. With weight 10 the mean time to the
first token is a seventh less and the time between tokens 4 % more, which is more than under round-robin; with
20 they are a tenth more and 3 % less (32 + 32 mock workers, equal links, conversations).
"""

from functools import lru_cache, partial
from math import inf
from operator import is_

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from kvrouter._native import Predictor, RankColumns
from kvrouter.core.constraints import PdSelection
from kvrouter.core.ids import Slot
from kvrouter.core.requests import Leg
from kvrouter.core.timing import Timing
from kvrouter.kernel.fleet.columns import BoolColumn, FloatColumn, IntColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.fleet_links import price_seconds
from kvrouter.kernel.routing.interface import (
    Columns,
    CostInput,
    CostRule,
    LegInput,
    Needs,
    RouteRequest,
    Speeds,
    Timed,
    Times,
    View,
)
from kvrouter.kernel.routing.masks import ready

_PREFILL, _DECODE, _AGGREGATED, _JOINT = Leg.PREFILL, Leg.DECODE, Leg.AGGREGATED, PdSelection.JOINT
"""Constants, because access to an enumeration's members is slow before Python 3.12."""

CHUNK_TOKENS = 8192
"""The prompt tokens that an engine computes in one step: the default of vLLM and SGLang on large GPUs."""

OTHERS_WEIGHT = 0.5
LATER_WEIGHT = 12.0
STALLS_WEIGHT = 16.0
TURNOVER_WEIGHT = 0.03

ANSWER_S = 5.0
"""The assumed time that an answer holds its blocks, before the first measurement."""


class _NativeColumns:
    """The native form of a fleet's columns: readings reuse their arrays, so it is made once for many."""

    __slots__ = ("_columns", "_native", "_takes_whole")

    def __init__(self, fleet: Fleet, last_resort: bool) -> None:
        self._takes_whole = ready(fleet, _AGGREGATED, last_resort=last_resort).allowed
        self._columns: tuple[IntColumn | FloatColumn | None, ...] = ()
        self._native: RankColumns | None = None

    def of(self, n_slots: int, columns: tuple[IntColumn | FloatColumn | None, ...]) -> RankColumns:
        """Return the native form of these arrays, whose content may change."""
        native = self._native
        if native is None or not all(map(is_, columns, self._columns)):
            native = self._native = RankColumns(n_slots, (*columns, self._takes_whole))
            self._columns = columns
        return native


class LegTimes:
    """The predicted times of one leg. With ``stalls`` they include, for a prompt, the delay of requests that
    are answered at its rank, and for a decode leg the prompts that are prefilled at its rank.
    """

    __slots__ = ("_at", "columns", "inputs", "predictor")

    def __init__(
        self,
        request: RouteRequest,
        view: View,
        leg: Leg,
        overlap: IntColumn | None,
        *,
        overlap_score_weight: float,
        stalls: bool = False,
    ) -> None:
        fleet, settings = view.fleet, view.settings
        n_slots = fleet.n_slots
        cost_input = view.cost_input or CostInput(_none(n_slots), _none(n_slots))
        speeds = cost_input.speeds or unlearned(n_slots)
        columns = fleet.columns
        self._at = self.predictor = predictor_of(settings.timing, settings.decode_weight)
        if request.soonest:
            self.predictor = predictor_of(settings.timing, 0.0, weighs_others=False)
        self.columns = fleet.derived(_NativeColumns, request.last_resort).of(
            n_slots,
            (
                overlap,
                view.not_active,
                view.prefill_tokens,
                view.active_blocks,
                cost_input.requests,
                cost_input.waiting,
                columns.total_blocks,
                columns.seats,
                speeds.slowness,
                speeds.decode_slowness,
                speeds.turnover,
                speeds.step_began_s,
            ),
        )
        self.inputs = (
            (
                request.isl_tokens,
                request.total_blocks,
                fleet.block_size,
                speeds.answer_s,
                speeds.interference,
                overlap_score_weight,
                speeds.now_s,
            ),
            (
                leg is not _DECODE,
                leg is not _PREFILL,
                settings.track_prefill_tokens,
                settings.track_active_blocks,
                stalls,
            ),
        )

    def costs(self, n_slots: int, among: BoolColumn | None) -> FloatColumn:
        """Return the sum of the parts at each slot; infinity at slots that are not ``among``."""
        cost: FloatColumn = np.empty(n_slots)
        self.predictor.totals(cost, self.columns, self.inputs, among)
        return cost

    def at(self, slot: Slot, *, transfer_s: float = 0.0, price_s: float = 0.0) -> Times:
        """Return the parts at one slot."""
        return Times(*self._at.parts(slot, self.columns, self.inputs), transfer_s, price_s)


def own_s(request: RouteRequest, view: View, leg: Leg) -> float:
    """Return the seconds that a leg of this kind adds to a rank without any of its blocks."""
    settings, seconds = view.settings, 0.0
    if leg is not _DECODE and settings.track_prefill_tokens:
        seconds += prompt_s(settings.timing, request.isl_tokens)
    if leg is not _PREFILL and settings.track_active_blocks:
        speeds = None if view.cost_input is None else view.cost_input.speeds
        answer_s = ANSWER_S if speeds is None else speeds.answer_s
        total = view.fleet.columns.total_blocks
        finite = total[np.isfinite(total)]
        if len(finite):
            seconds += answer_s * request.total_blocks / float(finite.mean())
    return seconds


def prompt_s(timing: Timing, tokens: int) -> float:
    """Return the seconds that a prompt of ``tokens`` takes an engine of slowness 1, in separate steps."""
    full, rest = divmod(tokens, CHUNK_TOKENS)
    steps_ms = full * timing.prefill_ms(CHUNK_TOKENS) + timing.prefill_ms(rest)
    return (steps_ms + timing.prefill_attention * tokens * (tokens + 1) / 2) / 1e3


@lru_cache(maxsize=64)
def predictor_of(timing: Timing, decode_weight: float, *, weighs_others: bool = True) -> Predictor:
    """Return the predictor for a timing; cached."""
    return Predictor(
        astuple(timing),
        chunk_tokens=CHUNK_TOKENS,
        others_weight=OTHERS_WEIGHT * weighs_others,
        later_weight=LATER_WEIGHT,
        stalls_weight=STALLS_WEIGHT * weighs_others,
        turnover_weight=TURNOVER_WEIGHT * weighs_others,
        decode_weight=decode_weight,
    )


@lru_cache(maxsize=64)
def unlearned(n_slots: int) -> Speeds:
    """Return the assumed speeds of ranks before any measurement."""
    slowness, turnover, began_s = np.ones(n_slots), np.zeros(n_slots), np.full(n_slots, -inf)
    slowness.flags.writeable = turnover.flags.writeable = began_s.flags.writeable = False
    return Speeds(slowness, slowness, turnover, began_s, 0.0, ANSWER_S)


@lru_cache(maxsize=64)
def _none(n_slots: int) -> npt.NDArray[np.int64]:
    column = np.zeros(n_slots, np.int64)
    column.flags.writeable = False
    return column


class TimeCost(CostRule):
    """The rule of predicted seconds to the first token, plus the request's cost to others."""

    needs = Needs(requests=True, learned=True)

    def columns(self, leg_input: LegInput) -> Columns:
        """Return the predicted seconds of each slot; infinity at slots that are not ``among``. The blocks of
        a slot are computed on demand.
        """
        view, leg, among = leg_input.view, leg_input.leg, leg_input.among
        times = LegTimes(
            leg_input.request,
            view,
            leg,
            leg_input.overlap_blocks,
            overlap_score_weight=leg_input.overlap_score_weight,
            stalls=leg_input.stalls or (leg is _DECODE and view.settings.pd_selection is _JOINT),
        )
        cost, price_s = times.costs(view.fleet.n_slots, among), None
        if leg_input.transfer_s is not None and leg_input.prefill_slot is not None:
            cost += leg_input.transfer_s
            price_s = price_seconds(leg_input.request, view, leg_input.overlap_blocks, leg_input.prefill_slot)
            if price_s is not None:
                cost += price_s
        return Columns(cost, timed=partial(_timed, leg_input, times, price_s))

    def own_cost(self, request: RouteRequest, view: View, leg: Leg, overlap_score_weight: float) -> float:  # noqa: ARG002 - the port's signature
        """Return the seconds of the request itself."""
        return own_s(request, view, leg)


def _timed(
    leg_input: LegInput, times: LegTimes, price_s: FloatColumn | None, slot: Slot, overlap_blocks: int
) -> Timed:
    at = times.at(
        slot,
        transfer_s=0.0 if leg_input.transfer_s is None else leg_input.transfer_s.item(slot),
        price_s=0.0 if price_s is None else price_s.item(slot),
    )
    return timed_at(leg_input.request, leg_input.view, leg_input.leg, slot, overlap_blocks, at)


def timed_at(
    request: RouteRequest, view: View, leg: Leg, slot: Slot, overlap_blocks: int, times: Times
) -> Timed:
    """Return the times of a leg at a slot, with its blocks to prefill and to decode there."""
    block_size = view.fleet.block_size
    prefill = decode = 0.0
    if leg is not _DECODE and view.settings.track_prefill_tokens:
        uncached = max(0, request.isl_tokens - overlap_blocks * block_size)
        prefill = (uncached + view.prefill_tokens.item(slot)) / block_size
    if leg is not _PREFILL and view.settings.track_active_blocks:
        new = request.total_blocks if view.not_active is None else view.not_active.item(slot)
        decode = float(view.active_blocks.item(slot) + new)
    return Timed(prefill, decode, times)


RULE = TimeCost()
