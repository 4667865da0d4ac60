"""One step of a batch: what its sequences compute in it, and how long that takes."""

from dataclasses import dataclass

from kvrouter.mock.config import Timing
from kvrouter.mock.sequence import EngineSequence

Work = list[tuple[EngineSequence, int]]
"""The sequences of a step, with the tokens that each of them computes."""


@dataclass(slots=True)
class BatchStep:
    """A step in progress: its work, and when it ends.

    Such steps follow each other, this one included, and nothing but the number of tokens changes before the
    end of the last, at ``last_ends_at_s``, as long as nothing comes from outside. ``steps_s`` are their
    durations.
    """

    ends_at_s: float
    work: Work
    steps_s: list[float]
    last_ends_at_s: float


def steps_s(work: Work, timing: Timing, utilisation: float, *, repeats: int) -> list[float]:
    """Return how long ``repeats`` steps of ``work`` take, each in seconds, at this share of KV blocks in use.

    Several only where all decode; each reads a token more of every sequence than the one before.
    """
    prefill_tokens = n_decoding = kv_tokens = attended = 0
    for sequence, n_tokens in work:
        computed = sequence.computed_tokens
        if sequence.prefilling:
            prefill_tokens += n_tokens
            attended += n_tokens * computed + n_tokens * (n_tokens + 1) // 2
        else:
            n_decoding += 1
            kv_tokens += computed
    prefill_ms = timing.prefill_ms(prefill_tokens, attended)
    if not n_decoding:
        return [prefill_ms / 1_000.0]
    if prefill_tokens:
        prefill_ms += timing.mixed_ms(kv_tokens)
    n_distinct = repeats if timing.decode_kv_token else 1
    durations_s = [
        (prefill_ms + timing.decode_ms(utilisation, n_decoding, kv_tokens + at * n_decoding)) / 1_000.0
        for at in range(n_distinct)
    ]
    return durations_s if n_distinct == repeats else durations_s * repeats


def count_planned(work: Work) -> None:
    """A step was planned ahead: count its tokens, and those that it generates, with its sequences."""
    for sequence, n_tokens in work:
        sequence.planned_tokens += n_tokens
        begun_tokens = sequence.computed_tokens + sequence.planned_tokens
        sequence.planned_outputs += begun_tokens == sequence.n_tokens + sequence.planned_outputs


def settle(work: Work) -> None:
    """A step ended that was planned ahead; call it before its tokens are computed. Steps that were leapt over
    need none: as each of them began, another was planned.
    """
    for sequence, n_tokens in work:
        sequence.planned_outputs -= sequence.computed_tokens + n_tokens == sequence.n_tokens
        sequence.planned_tokens -= n_tokens
