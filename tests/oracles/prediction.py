"""Predicted times as plain sums for one rank: what the native core has to equal."""

from typing import NamedTuple

from kvrouter.core.requests import Leg
from kvrouter.core.timing import Timing
from kvrouter.kernel.routing.costs.time import CHUNK_TOKENS, LATER_WEIGHT, OTHERS_WEIGHT, TURNOVER_WEIGHT
from kvrouter.kernel.routing.interface import Times


class RankLoad(NamedTuple):
    """One rank, and what of the request is there."""

    overlap_blocks: int
    not_active: int
    prefill_tokens: int
    active_blocks: int
    requests: int
    waiting: int
    total_blocks: float
    seats: float
    slowness: float
    decode_slowness: float
    turnover: float


def predicted(
    load: RankLoad,
    timing: Timing,
    leg: Leg,
    *,
    isl_tokens: int,
    block_size: int,
    answer_s: float,
    decode_weight: float,
    mean_waiting: float = 0.0,
    interference: float = 1.0,
) -> Times:
    """Return the parts of one leg at one rank, without a transfer."""
    token_s = timing.prefill_ms(CHUNK_TOKENS) / 1e3 / CHUNK_TOKENS
    running = max(0, load.requests - load.waiting)
    queue_s = prefill_s = memory_s = decode_s = held_s = 0.0
    if leg is not Leg.DECODE:
        new = max(0, isl_tokens - load.overlap_blocks * block_size)
        queued = load.prefill_tokens - min(load.prefill_tokens, CHUNK_TOKENS) / 2
        queue_s = load.slowness * queued * token_s
        full, rest = divmod(new, CHUNK_TOKENS)
        prefill_s = (full * timing.prefill_ms(CHUNK_TOKENS) + timing.prefill_ms(rest)) / 1e3
        attended = new * max(0, isl_tokens - new) + new * (new + 1) / 2
        prefill_s += timing.prefill_attention * attended / 1e3
        if running:
            use = min(1.0, load.active_blocks / load.total_blocks)
            step_s = timing.decode_ms(use, running, load.active_blocks * block_size) / 1e3
            queue_s += interference * load.decode_slowness * (1 + (queued + new) / CHUNK_TOKENS) * step_s
    if leg is not Leg.PREFILL:
        held = load.active_blocks + load.not_active
        lacking, unseated = held - load.total_blocks, load.requests + 1 - load.seats
        if lacking > 0:
            memory_s = answer_s * (lacking / load.total_blocks + 0.5 / max(1, running))
            held_s = load.not_active * answer_s / load.total_blocks
        if unseated > 0:
            memory_s = max(memory_s, unseated * answer_s / load.seats)
        step_ms = timing.decode_ms(min(1.0, held / load.total_blocks), running + 1, held * block_size)
        decode_s = decode_weight * step_ms / 1e3
    slowness = load.slowness
    delayed = float(load.waiting)
    if leg is Leg.AGGREGATED:
        delayed += LATER_WEIGHT * min(max(0.0, mean_waiting - 1.5), 1.0)
    return Times(
        queue_s=queue_s,
        prefill_s=slowness * prefill_s,
        memory_s=load.decode_slowness * memory_s,
        decode_s=load.decode_slowness * decode_s,
        others_s=OTHERS_WEIGHT * delayed * (slowness * prefill_s + load.decode_slowness * held_s),
        turnover_s=TURNOVER_WEIGHT * slowness * token_s * isl_tokens * load.turnover,
        transfer_s=0.0,
    )
