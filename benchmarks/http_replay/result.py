"""What one replay found: summed up per router mode, and judged."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.http_replay.client import Answer
from benchmarks.http_replay.machine import Commit, Machine
from benchmarks.http_replay.observe import FleetWorker, Handoffs, crossings, shares
from kvrouter.core.constraints import RouterMode
from kvrouter.core.workers import Role

ERRORS_SHOWN = 5
"""Different errors that a result keeps."""

CEILING_TOLERANCE = 1e-9
LATE_SHARE_MAX = 0.1
"""A client whose delay is a larger part of what it measures (p99 of both) measures itself."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (nearest rank); NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Latency(msgspec.Struct, frozen=True):
    """In real milliseconds, as the client saw it; times the speed-up, it is the fleet's own time."""

    p50_ms: float
    p99_ms: float
    mean_ms: float


class ModeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One replay of all rows through a fresh fleet.

    ``itl`` is taken over requests, each with its mean time between tokens. ``handoffs`` counts pairs of
    prefill and decode domain, as the server's metrics do; ``crossed_handoffs`` are those with two values, and
    ``crossed_answers`` the answers whose headers name workers in two of them. ``prefill_share`` and
    ``decode_share`` are the parts of all answered requests that each worker had, by the same headers.
    """

    mode: RouterMode
    requests: int
    errors: int
    error_examples: tuple[str, ...]
    duration_s: float
    ttft: Latency
    itl: Latency
    late: Latency
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    handoffs: Mapping[str, int]
    crossed_handoffs: int
    crossed_answers: int
    prefill_share: Mapping[str, float]
    decode_share: Mapping[str, float]

    @property
    def cached_share(self) -> float:
        """Prompt tokens that were in a cache, of all prompt tokens; NaN of none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All modes of one run, with what they were measured with. ``ceiling`` is a share of prompt tokens."""

    commit: Commit
    machine: Machine
    rows: int
    conversations: int
    speedup: float
    compression: float
    ceiling: float
    domain: str
    required: bool
    modes: tuple[ModeResult, ...]


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one fleet next to the answers. ``domain`` is the one that KV transfers keep to."""

    duration_s: float
    handoffs: Handoffs
    workers: tuple[FleetWorker, ...]
    domain: str


def sum_up(mode: RouterMode, answers: Sequence[Answer], observed: Observed) -> ModeResult:
    """One column of the table. Failed requests count as errors and give no latency."""
    failed = [answer.error for answer in answers if answer.error is not None]
    answered = [answer for answer in answers if answer.error is None]
    return ModeResult(
        mode=mode,
        requests=len(answers),
        errors=len(failed),
        error_examples=tuple(text for text, _ in Counter(failed).most_common(ERRORS_SHOWN)),
        duration_s=observed.duration_s,
        ttft=_latency([answer.ttft_s for answer in answered if answer.ttft_s is not None]),
        itl=_latency([answer.itl_s for answer in answered if answer.itl_s is not None]),
        late=_latency([answer.late_s for answer in answers]),
        prompt_tokens=sum(answer.prompt_tokens for answer in answered),
        cached_tokens=sum(answer.cached_tokens for answer in answered),
        output_tokens=sum(answer.output_tokens for answer in answered),
        handoffs={
            f"{prefill} → {decode}": count for (prefill, decode), count in sorted(observed.handoffs.items())
        },
        crossed_handoffs=sum(
            count for (prefill, decode), count in observed.handoffs.items() if prefill != decode
        ),
        crossed_answers=crossings(answered, observed.workers, observed.domain),
        prefill_share=shares(
            (answer.prefill_worker for answer in answered if answer.prefill_worker is not None),
            (worker.worker_id for worker in observed.workers if worker.role is Role.PREFILL),
        ),
        decode_share=shares(
            (answer.decode_worker for answer in answered if answer.decode_worker is not None),
            (worker.worker_id for worker in observed.workers if worker.role is not Role.PREFILL),
        ),
    )


def _latency(seconds: Sequence[float]) -> Latency:
    return Latency(
        p50_ms=1000 * percentile(seconds, 0.5),
        p99_ms=1000 * percentile(seconds, 0.99),
        mean_ms=1000 * sum(seconds) / len(seconds) if seconds else math.nan,
    )


def problems(report: Report) -> list[str]:
    """What is not as it must be; empty when all is well. Each text names the mode and the numbers."""
    found: list[str] = []
    for result in report.modes:
        found.extend(_problems_of(result, report))
    by_mode = {result.mode: result for result in report.modes}
    kv, turns = by_mode.get(RouterMode.KV), by_mode.get(RouterMode.ROUND_ROBIN)
    if kv is not None and turns is not None:
        if not kv.cached_share > turns.cached_share:
            found.append(
                f"kv's cached share {kv.cached_share:.1%} is not above round-robin's {turns.cached_share:.1%}"
            )
        if not kv.ttft.p99_ms < turns.ttft.p99_ms:
            found.append(
                f"kv's TTFT p99 {kv.ttft.p99_ms:.0f} ms is not below round-robin's {turns.ttft.p99_ms:.0f} ms"
            )
    return found


def _problems_of(result: ModeResult, report: Report) -> list[str]:
    found: list[str] = []
    if result.requests != report.rows:
        found.append(f"{result.mode}: {result.requests} of {report.rows} requests were sent")
    if result.errors:
        found.append(f"{result.mode}: {result.errors} errors: {'; '.join(result.error_examples)}")
    if report.required and (result.crossed_handoffs or result.crossed_answers):
        found.append(
            f"{result.mode}: {result.crossed_handoffs} transfers by the metrics and {result.crossed_answers} "
            "by the headers crossed a domain that is required"
        )
    handed_off = sum(result.handoffs.values())
    if handed_off < result.requests - result.errors:
        found.append(f"{result.mode}: {handed_off} handoffs for {result.requests - result.errors} answers")
    if result.cached_share > report.ceiling + CEILING_TOLERANCE:
        found.append(
            f"{result.mode}: cached share {result.cached_share:.1%} is above the ceiling {report.ceiling:.1%}"
        )
    return found


def remarks(report: Report) -> list[str]:
    """What makes the figures less worth, though nothing is wrong: a client that could not keep up."""
    return [
        f"{result.mode}: the client sent {result.late.p99_ms:.0f} ms late (p99), against a TTFT of "
        f"{result.ttft.p99_ms:.0f} ms (p99): the machine was too busy to measure well"
        for result in report.modes
        if result.late.p99_ms > LATE_SHARE_MAX * result.ttft.p99_ms
    ]
