"""What a bench found: the figures of each arm, where ours loses, and why a difference is small."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvrouter.cli.bench.arms import BenchedFleet
from kvrouter.cli.bench.counters import CacheCounts
from kvrouter.cli.bench.load import ArmRound
from kvrouter.cli.bench.workload import TURNS, Caches, WorkloadSize
from kvrouter.cli.doctor.reading import counted
from kvrouter.cli.timed_stream import TimedCompletion
from kvrouter.settings.setting import installed_version
from kvrouter.sim.replay.percentiles import percentile, samples_needed

ALIKE = 0.02
"""Ratios, and shares of hits, that differ by less are alike."""

SMALL_GAIN = 0.30
"""A smaller gain of hit rate is explained."""

MISSED = 0.05
"""A hit rate that is further below what is possible is explained."""

FAILURE_CHARS = 300


class ArmRounds(NamedTuple):
    """All rounds of one arm."""

    name: str
    via: str
    rounds: list[ArmRound]

    @property
    def answers(self) -> Sequence[TimedCompletion]:
        """Those of all rounds."""
        return [answer for each in self.rounds for answer in each.answers]

    @property
    def prompt_tokens(self) -> int:
        """Of all requests with an answer."""
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def counted(self) -> CacheCounts | None:
        """What was counted in all rounds; None where a round has no count."""
        counts = [each.counted for each in self.rounds if each.counted is not None]
        return CacheCounts.total(counts) if 0 < len(counts) == len(self.rounds) else None


HitRateSource = Literal["answers", "counters"]
"""What the hit rates of all arms come from: the usage in answers, or counters on pages of metrics."""


class ArmReport(msgspec.Struct, frozen=True, kw_only=True):
    """One arm. ``cached_tokens`` and ``hit_rate`` are the engines' own count, None where it is unknown.
    ``counted`` is what counters on pages of metrics counted in all rounds, None where one is missing.
    """

    name: str
    via: str
    requests: int
    errors: int
    first_error: str | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    prompt_tokens: int
    cached_tokens: int | None
    hit_rate: float | None
    counted: CacheCounts | None
    output_tokens: int
    output_tokens_per_s: float
    wall_s: float


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison. ``possible_hit_rate`` is that of an endless cache that all engines share.
    ``hit_rate_source`` is that of all arms, None where no source has it of all. ``losses`` are sentences on
    what ours does worse, ``notes`` on what the figures depend on.
    """

    version: str
    model: str
    engines: int
    rounds: int
    concurrency: int
    conversations: int
    turns: int
    prompt_tokens_longest: int
    possible_hit_rate: float
    hit_rate_source: HitRateSource | None
    arms: Sequence[ArmReport]
    losses: Sequence[str]
    notes: Sequence[str]


class _Figure(NamedTuple):
    """A row of the table: a figure of an arm, and whether more of it is better."""

    label: str
    name: str
    is_more_better: bool
    unit: str
    """``%`` for a share."""


_FIGURES = (
    _Figure("TTFT p50", "ttft_p50_ms", False, "ms"),
    _Figure("TTFT p99", "ttft_p99_ms", False, "ms"),
    _Figure("hit rate", "hit_rate", True, "%"),
    _Figure("output tokens/s", "output_tokens_per_s", True, ""),
    _Figure("errors", "errors", False, ""),
)


def report_of(
    fleet: BenchedFleet, size: WorkloadSize, found: Sequence[ArmRounds], notes: Sequence[str]
) -> BenchReport:
    """Return the report of all rounds; ours is the first arm, round-robin the second one."""
    source = _hit_rate_source(fleet, found)
    arms = [_arm_report(each, source) for each in found]
    return BenchReport(
        version=installed_version(),
        model=fleet.model,
        engines=fleet.engines,
        rounds=len(found[0].rounds),
        concurrency=fleet.concurrency,
        conversations=size.conversations,
        turns=TURNS,
        prompt_tokens_longest=size.prompt_tokens,
        possible_hit_rate=size.possible_hit_rate(fleet.caches.block_size),
        hit_rate_source=source,
        arms=arms,
        losses=[loss for other in arms[1:] for loss in _losses(arms[0], other)],
        notes=[*fleet.notes, *notes, *_notes(fleet, size, source, arms)],
    )


def _hit_rate_source(fleet: BenchedFleet, found: Sequence[ArmRounds]) -> HitRateSource | None:
    """Return the source that has the hit rate of every arm with answers: two sources are not compared.
    Counters are one where they counted the prompts from here alone.
    """
    answered = [arm for arm in found if arm.answers]
    if not answered:
        return None
    cached = (answer.cached_tokens for arm in answered for answer in arm.answers)
    if not fleet.is_separate and all(tokens is not None for tokens in cached):
        return "answers"
    for arm in answered:
        counted_tokens = None if arm.counted is None else arm.counted.prompt_tokens
        if counted_tokens is None or abs(counted_tokens - arm.prompt_tokens) > ALIKE * arm.prompt_tokens:
            return None
    return "counters"


def _arm_report(arm: ArmRounds, source: HitRateSource | None) -> ArmReport:
    answers = arm.answers
    failures = [failure for each in arm.rounds for failure in each.failures]
    times_ms = np.array([(answer.first_s - answer.sent_s) * 1e3 for answer in answers], np.float64)
    output_tokens = sum(answer.output_tokens for answer in answers)
    wall_s = sum(each.wall_s for each in arm.rounds)
    cached_tokens = None
    if answers and source == "answers":
        cached_tokens = sum(answer.cached_tokens or 0 for answer in answers)
    elif answers and source == "counters" and arm.counted is not None:
        cached_tokens = arm.counted.cached_tokens
    return ArmReport(
        name=arm.name,
        via=arm.via,
        requests=len(answers) + len(failures),
        errors=len(failures),
        first_error=failures[0][:FAILURE_CHARS] if failures else None,
        ttft_p50_ms=percentile(times_ms, 50),
        ttft_p99_ms=percentile(times_ms, 99),
        prompt_tokens=arm.prompt_tokens,
        cached_tokens=cached_tokens,
        hit_rate=None if cached_tokens is None else cached_tokens / arm.prompt_tokens,
        counted=arm.counted,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / wall_s if wall_s > 0 else 0.0,
        wall_s=wall_s,
    )


def _losses(ours: ArmReport, other: ArmReport) -> Iterator[str]:
    for figure in _FIGURES:
        mine, theirs = getattr(ours, figure.name), getattr(other, figure.name)
        if mine is None or theirs is None:
            continue
        margin = ALIKE if figure.unit == "%" else ALIKE * max(mine, theirs)
        behind = theirs - mine if figure.is_more_better else mine - theirs
        if behind > margin:
            yield (
                f"kvrouter loses to {other.name} in {figure.label}: {_shown(mine, figure)} against "
                f"{_shown(theirs, figure)}"
            )


def _notes(
    fleet: BenchedFleet, size: WorkloadSize, source: HitRateSource | None, arms: Sequence[ArmReport]
) -> Iterator[str]:
    ours, round_robin = arms[0], arms[1]
    if fleet.running_requests:
        yield f"{fleet.running_requests} requests of others ran at the start: their load is in all figures"
    for arm in arms:
        others_tokens = 0 if arm.counted is None else arm.counted.prompt_tokens - arm.prompt_tokens
        if arm.first_error is not None:
            yield f"{arm.name}: {arm.errors} of {arm.requests} requests failed, the first: {arm.first_error}"
        elif others_tokens > ALIKE * arm.prompt_tokens:
            yield (
                f"others used the engines during {arm.name}: these counted {others_tokens:,} prompt tokens "
                "more than were sent from here, whose blocks took room in their caches"
            )
    if any(arm.ttft_p99_ms is None for arm in arms):
        yield f"TTFT p99 unknown: it needs {samples_needed(99)} answers of an arm"
    if source is None and any(arm.requests > arm.errors for arm in arms):
        why = (
            "an answer counts what decode had cached, not prefill"
            if fleet.is_separate
            else "some answers do not say cached tokens (vLLM: --enable-prompt-tokens-details, older ones "
            "omit 0; SGLang: --enable-cache-report)"
        )
        yield f"hit rate unknown: {why}, and no counters count just the prompts that were sent here"
    if ours.hit_rate == 0 and round_robin.hit_rate == 0:
        yield (
            "no engine found a cached token in any arm: is prefix caching off there, or every prompt shorter "
            f"than a block of {fleet.caches.block_size} tokens?"
        )
    if not ours.hit_rate or round_robin.hit_rate is None or fleet.is_by_load:
        return
    if ours.hit_rate - round_robin.hit_rate < SMALL_GAIN:
        yield from _why_small(fleet.caches, size)
    missed = size.possible_hit_rate(fleet.caches.block_size) - ours.hit_rate
    if missed > MISSED:
        yield (
            f"kvrouter found {100 * missed:.0f} points less than an endless cache would: the reason may be "
            "requests that would have waited longer at the engine with their blocks, or blocks that caches "
            "dropped for others (kvrouter explain and the page at /ui show each choice)"
        )


def _why_small(caches: Caches, size: WorkloadSize) -> Iterator[str]:
    if caches.number == 1:
        yield "one KV cache: every rule sends every request to it, and finds the same there"
    elif caches.cache_tokens is None:
        yield (
            "the router does not know how much KV its engines hold: where one cache holds all conversations, "
            "round-robin finds nearly as much; more --seconds send more"
        )
    elif size.distinct_tokens < 1.5 * caches.cache_tokens:
        yield (
            f"one cache holds {caches.cache_tokens:,} tokens, and a round has {size.distinct_tokens:,}: "
            "round-robin loses most where one cache cannot hold all conversations; more --seconds send more"
        )
    if caches.number == 2:
        yield "round-robin over two caches meets the one of the turn before by chance in half of the requests"


def show_report(report: BenchReport, console: Console) -> None:
    """Print what was sent, where ours loses, the figures, and the notes."""
    ours = report.arms[0]
    lines = [
        f"{report.model}, {counted(report.engines, 'engine')}: {ours.requests:,} requests of each arm, in "
        f"{counted(report.rounds, 'round')} of {counted(report.conversations, 'conversation')} with "
        f"{report.turns} turns, {report.concurrency} at a time; prompts up to "
        f"{report.prompt_tokens_longest:,} tokens, {ours.prompt_tokens:,} together",
        *(f"  {arm.name}: {arm.via}" for arm in report.arms),
    ]
    last = (
        "hit rate: prompt tokens that engines found in their caches, by their own count; at most "
        f"{100 * report.possible_hit_rate:.1f} % can be found in these conversations, which repeat more than "
        "most traffic: kvrouter worth says what routing brings on your own"
    )
    shown: list[Text | Table] = [*map(Text, lines), *(Text(loss, "bold red") for loss in report.losses)]
    if not report.losses and all(arm.requests > arm.errors for arm in report.arms):
        shown.append(Text("kvrouter loses in none of the figures that are known", "green"))
    for each in (*shown, _table(report), Text(last), *map(Text, report.notes)):
        console.print(each, soft_wrap=not isinstance(each, Table))


def _table(report: BenchReport) -> Table:
    ours, *others = report.arms
    names = [ours.name, *(name for each in others for name in (each.name, f"{ours.name} / {each.name}"))]
    columns = (Column(Text(name), justify="right", overflow="fold") for name in names)
    table = Table("", *columns, box=None, pad_edge=False, header_style="bold", show_edge=False)
    for figure in _FIGURES:
        mine, *theirs = (getattr(arm, figure.name) for arm in report.arms)
        compared = (text for each in theirs for text in (_shown(each, figure), _compared(mine, each, figure)))
        table.add_row(figure.label, _shown(mine, figure), *compared)
    return table


def _shown(value: float | None, figure: _Figure) -> str:
    if value is None:
        return "unknown"
    if figure.unit == "%":
        return f"{100 * value:.1f} %"
    number = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
    return f"{number} {figure.unit}".rstrip()


def _compared(mine: float | None, theirs: float | None, figure: _Figure) -> str:
    if mine is None or theirs is None or figure.name == "errors":
        return ""
    if figure.unit == "%":
        return f"{100 * (mine - theirs):+.1f} points"
    return f"{mine / theirs:.2f}" if theirs else ""
