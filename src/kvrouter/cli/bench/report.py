"""What a bench found: the figures of each arm, where ours loses, and why a difference is small."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.cli.bench.counters import CacheCounts
from kvrouter.cli.bench.load import ArmRound
from kvrouter.cli.bench.workload import TURNS, Caches, WorkloadSize
from kvrouter.settings.setting import installed_version

ALIKE = 0.02
"""Ratios, and shares of hits, that differ by less are alike."""

SMALL_GAIN = 0.30
"""A smaller gain of hit rate is explained."""

MISSED = 0.05
"""A hit rate that is further below what is possible is explained."""

FAILURE_CHARS = 300


class ArmRounds(NamedTuple):
    """All rounds of one arm, and what the engines counted in them, where they count."""

    name: str
    via: str
    rounds: list[ArmRound]
    counts: list[CacheCounts]


class Measured(NamedTuple):
    """The conditions of a bench."""

    model: str
    url: str
    engines: int
    caches: Caches
    concurrency: int
    answer_tokens: int
    size: WorkloadSize
    running_before: int
    is_by_load: bool
    """The router does not look at caches; a note says why."""


class ArmReport(msgspec.Struct, frozen=True, kw_only=True):
    """One arm. ``cached_tokens`` are the engines' own count: in their answers, or else on their pages of
    metrics; None where they say none. ``counted`` is what those pages counted meanwhile, None without.
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
    """A comparison. ``possible_hit_rate`` is that of an endless cache that all engines share; ``losses`` are
    sentences on what ours does worse, ``notes`` on what the figures depend on.
    """

    version: str
    url: str
    model: str
    engines: int
    rounds: int
    concurrency: int
    conversations: int
    turns: int
    prompt_tokens_longest: int
    answer_tokens: int
    distinct_tokens: int
    cache_tokens: int | None
    possible_hit_rate: float
    arms: Sequence[ArmReport]
    losses: Sequence[str]
    notes: Sequence[str]


class _Figure(NamedTuple):
    """A row of the table: a figure of an arm, and whether more of it is better."""

    label: str
    name: str
    is_more_better: bool
    is_share: bool
    unit: str


_FIGURES = (
    _Figure("TTFT p50", "ttft_p50_ms", False, False, "ms"),
    _Figure("TTFT p99", "ttft_p99_ms", False, False, "ms"),
    _Figure("hit rate", "hit_rate", True, True, "%"),
    _Figure("output tokens/s", "output_tokens_per_s", True, False, ""),
    _Figure("errors", "errors", False, False, ""),
)


def report_of(measured: Measured, found: Sequence[ArmRounds], notes: Sequence[str]) -> BenchReport:
    """Return the report of all rounds; ours is the first arm, round-robin the second one."""
    arms = [_arm_report(each) for each in found]
    size = measured.size
    return BenchReport(
        version=installed_version(),
        url=measured.url,
        model=measured.model,
        engines=measured.engines,
        rounds=len(found[0].rounds),
        concurrency=measured.concurrency,
        conversations=size.conversations,
        turns=TURNS,
        prompt_tokens_longest=size.prompt_tokens,
        answer_tokens=measured.answer_tokens,
        distinct_tokens=size.distinct_tokens,
        cache_tokens=measured.caches.cache_tokens,
        possible_hit_rate=size.possible_hit_rate,
        arms=arms,
        losses=[loss for other in arms[1:] for loss in _losses(arms[0], other)],
        notes=[*notes, *_notes(measured, arms)],
    )


def _arm_report(arm: ArmRounds) -> ArmReport:
    answers = [answer for each in arm.rounds for answer in each.answers]
    failures = [failure for each in arm.rounds for failure in each.failures]
    times_ms = sorted(answer.ttft_s * 1e3 for answer in answers)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    output_tokens = sum(answer.output_tokens for answer in answers)
    wall_s = sum(each.wall_s for each in arm.rounds)
    counted = CacheCounts(
        sum(each.prompt_tokens for each in arm.counts), sum(each.cached_tokens for each in arm.counts)
    )
    by_counters = counted.cached_tokens / counted.prompt_tokens if counted.prompt_tokens > 0 else None
    cached_tokens, hit_rate = None, by_counters
    if answers and all(answer.cached_tokens is not None for answer in answers):
        cached_tokens = sum(answer.cached_tokens or 0 for answer in answers)
        hit_rate = cached_tokens / prompt_tokens
    elif by_counters is not None:
        cached_tokens = counted.cached_tokens
    return ArmReport(
        name=arm.name,
        via=arm.via,
        requests=len(answers) + len(failures),
        errors=len(failures),
        first_error=failures[0][:FAILURE_CHARS] if failures else None,
        ttft_p50_ms=_quantile(times_ms, 0.5),
        ttft_p99_ms=_quantile(times_ms, 0.99),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        hit_rate=hit_rate,
        counted=counted if arm.counts else None,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / wall_s if wall_s > 0 else 0.0,
        wall_s=wall_s,
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that ``share`` of the sorted ``values`` do not exceed."""
    return values[max(0, -int(-share * len(values) // 1) - 1)] if values else None


def _losses(ours: ArmReport, other: ArmReport) -> Iterator[str]:
    for figure in _FIGURES:
        mine, theirs = getattr(ours, figure.name), getattr(other, figure.name)
        if mine is None or theirs is None:
            continue
        margin = ALIKE if figure.is_share else ALIKE * max(mine, theirs)
        behind = theirs - mine if figure.is_more_better else mine - theirs
        if behind > margin:
            yield (
                f"kvrouter loses to {other.name} in {figure.label}: {_shown(mine, figure)} against "
                f"{_shown(theirs, figure)}"
            )


def _notes(measured: Measured, arms: Sequence[ArmReport]) -> Iterator[str]:
    ours, round_robin = arms[0], arms[1]
    for arm in arms:
        if arm.first_error is not None:
            yield f"{arm.name}: {arm.errors} of {arm.requests} requests failed, the first: {arm.first_error}"
    if measured.running_before:
        yield f"{measured.running_before} requests of others ran at the start: their load is in all figures"
    for arm in arms:
        others_tokens = 0 if arm.counted is None else arm.counted.prompt_tokens - arm.prompt_tokens
        if others_tokens > ALIKE * arm.prompt_tokens and not arm.errors:
            yield (
                f"others used the engines during {arm.name}: these counted {others_tokens:,} prompt tokens "
                "more than were sent from here, whose blocks took room in their caches"
            )
    silent = [arm.name for arm in arms if arm.hit_rate is None and arm.requests > arm.errors]
    if silent:
        yield (
            f"hit rate unknown for {', '.join(silent)}: neither answers nor the engines' metrics say cached "
            "tokens (vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report)"
        )
    if ours.hit_rate == 0 and round_robin.hit_rate == 0:
        yield (
            "no engine found a cached token in any arm: is prefix caching off there, or every prompt shorter "
            f"than a block of {measured.caches.block_size} tokens?"
        )
    if ours.hit_rate is None or round_robin.hit_rate is None or not ours.hit_rate:
        return
    if ours.hit_rate - round_robin.hit_rate < SMALL_GAIN:
        yield from _why_small(measured)
    missed = measured.size.possible_hit_rate - ours.hit_rate
    if missed > MISSED and not measured.is_by_load:
        yield (
            f"kvrouter found {100 * missed:.0f} points less than an endless cache would: it takes an engine "
            "without a prompt's blocks where it expects to wait longer at the one that has them, and what "
            "others send takes room in caches (kvrouter explain and the page at /ui show each choice)"
        )
    is_faster = _ratio(ours.ttft_p50_ms, round_robin.ttft_p50_ms) < 1 - ALIKE
    if ours.hit_rate > round_robin.hit_rate + ALIKE and not is_faster:
        yield (
            "more was cached, and half of the first tokens came no sooner: these engines compute what is "
            "missing in little time; longer prompts (--prompt-tokens) show more"
        )


def _ratio(mine: float | None, theirs: float | None) -> float:
    return 1.0 if mine is None or not theirs else mine / theirs


def _why_small(measured: Measured) -> Iterator[str]:
    if measured.is_by_load:
        return
    if measured.engines == 1:
        yield "one engine: every rule sends every request to it, and finds the same there"
        return
    cache_tokens, distinct = measured.caches.cache_tokens, measured.size.distinct_tokens
    if cache_tokens is None:
        yield (
            "the router does not know how much KV its engines hold: where all conversations fit into each "
            "engine's cache, round-robin finds nearly as much; more --seconds send more"
        )
    elif distinct < 1.5 * cache_tokens:
        yield (
            f"one engine's cache holds {cache_tokens:,} tokens, and a round has {distinct:,}: round-robin "
            "loses most where its engines cannot hold all conversations each; more --seconds send more"
        )
    if measured.engines == 2:
        yield (
            "round-robin over two engines meets the one of the turn before by chance in half of the "
            "requests, over four in a quarter"
        )


def show_report(report: BenchReport, console: Console) -> None:
    """Print what was sent, where ours loses, the figures, and the notes."""
    ours = report.arms[0]
    each = f"{ours.requests:,} requests of each arm"
    console.print(
        Text(
            f"{report.model}, {report.engines} engines: {each}, in {report.rounds} rounds of "
            f"{report.conversations} conversations with {report.turns} turns, {report.concurrency} at a "
            f"time; prompts up to {report.prompt_tokens_longest:,} tokens, {ours.prompt_tokens:,} together"
        ),
        soft_wrap=True,
    )
    for arm in report.arms:
        console.print(Text(f"  {arm.name}: {arm.via}"), soft_wrap=True)
    for loss in report.losses or ("kvrouter loses in none of these figures",):
        console.print(Text(loss, "bold red" if report.losses else "green"), soft_wrap=True)
    console.print(_table(report))
    console.print(
        Text(
            "hit rate: prompt tokens that engines found in their caches, by their own count; at most "
            f"{100 * report.possible_hit_rate:.1f} % can be found"
        ),
        soft_wrap=True,
    )
    for note in report.notes:
        console.print(Text(note), soft_wrap=True)


def _table(report: BenchReport) -> Table:
    ours, *others = report.arms
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("")
    table.add_column(ours.name, justify="right")
    for other in others:
        table.add_column(other.name, justify="right", overflow="fold")
        table.add_column(f"{ours.name} / {other.name}", justify="right", overflow="fold")
    for figure in _FIGURES:
        mine = getattr(ours, figure.name)
        row = [figure.label, _shown(mine, figure)]
        for other in others:
            theirs = getattr(other, figure.name)
            row += [_shown(theirs, figure), _compared(mine, theirs, figure)]
        table.add_row(*map(Text, row))
    return table


def _shown(value: float | None, figure: _Figure) -> str:
    if value is None:
        return "unknown"
    if figure.is_share:
        return f"{100 * value:.1f} %"
    number = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
    return f"{number} {figure.unit}".rstrip()


def _compared(mine: float | None, theirs: float | None, figure: _Figure) -> str:
    if mine is None or theirs is None or figure.name == "errors":
        return ""
    if figure.is_share:
        return f"{100 * (mine - theirs):+.1f} points"
    return f"{mine / theirs:.2f}" if theirs else ""
