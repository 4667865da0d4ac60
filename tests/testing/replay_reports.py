"""Small reports of replays, made by hand."""

from collections.abc import Sequence

import msgspec

from kvrouter.sim.replay.summary import (
    Carriage,
    Objective,
    Part,
    ReplayReport,
    Spread,
    Summary,
    VariantReport,
)
from kvrouter.sim.replay.timetable import TimetableEntry

NOTHING = Spread(0, None, None, None, None, None)


def spread(low: float, high: float, *, samples: int = 100) -> Spread:
    """An even distribution between two numbers of milliseconds."""
    quantiles = tuple(low + (high - low) * at / 100 for at in range(101))
    return Spread(samples, (low + high) / 2, quantiles[50], quantiles[90], quantiles[99], high, quantiles)


def part(at: int, **figures: object) -> Part:
    """A part of 10 s with four requests."""
    made = Part(
        begins_s=10.0 * at,
        requests=4,
        ttft_ms=100.0 + at,
        itl_ms=7.0,
        good_share=0.75,
        cached_share=0.25,
        e2e_ms=2_000.0,
        ceiling_share=0.5,
        failed=1,
        crossing=2,
        imbalance=1.5,
    )
    return msgspec.structs.replace(made, **figures)


def summary(scale: float = 1.0, **figures: object) -> Summary:
    """The figures of one replay; its TTFT is ``scale`` times 10 to 1,000 ms."""
    made = Summary(
        requests=106,
        completed=100,
        errors={"no_eligible_worker": 6},
        refusals={"domain_mismatch": 6},
        arrivals_s=240.0,
        duration_s=245.0,
        is_whole=True,
        ttft_ms=spread(10.0 * scale, 1_000.0 * scale),
        itl_ms=spread(6.0, 9.0),
        e2e_ms=spread(800.0, 9_000.0),
        good_per_s=0.31,
        good_share=0.79,
        cached_share=0.25,
        ceiling_share=0.5,
        predicted_share=0.25,
        retried=0,
        crossing=48,
        imbalance=1.25,
        carried=(Carriage("a", "a", 40, 4_000_000_000), Carriage("a", "b", 48, 5_250_000_000)),
        parts=tuple(part(at) for at in range(24)),
    )
    return msgspec.structs.replace(made, **figures)


def empty_summary() -> Summary:
    """The figures of a replay in which no request arrived."""
    return summary(
        requests=0,
        completed=0,
        errors={},
        refusals={},
        arrivals_s=0.0,
        duration_s=0.0,
        ttft_ms=NOTHING,
        itl_ms=NOTHING,
        e2e_ms=NOTHING,
        good_per_s=None,
        good_share=0.0,
        cached_share=0.0,
        ceiling_share=None,
        crossing=0,
        imbalance=None,
        carried=(),
        parts=(),
    )


def variant(name: str, summaries: Sequence[Summary], source: str = "a paper") -> VariantReport:
    """A variant with seeds from 0."""
    return VariantReport(name, source, tuple(range(len(summaries))), tuple(summaries))


def report(
    *variants: VariantReport,
    trace: str = "traces/day.jsonl",
    is_whole: bool = True,
    events: tuple[TimetableEntry, ...] = (),
) -> ReplayReport:
    """A report of these variants."""
    return ReplayReport("9.9", trace, "Mooncake", "by time stamp", Objective(), is_whole, variants, events)
