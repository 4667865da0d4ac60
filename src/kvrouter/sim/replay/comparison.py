"""The columns in which variants are compared, in the terminal and on the page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from kvrouter.kernel.topology.link_table import BYTES_PER_GB
from kvrouter.sim.replay.percentiles import samples_needed
from kvrouter.sim.replay.summary import Interval, Spread, Summary, VariantReport, interval, over_seeds

NOTHING = "–"
"""Stands for a missing figure."""

SURVIVORS = "*"
"""Marks a time that is of the answered requests alone."""

SEEDS_MIN = 5
"""With fewer seeds no figure is marked as the best: their intervals are rough."""


class Better(StrEnum):
    """Which of two figures is better."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


class Column(NamedTuple):
    """One figure of a replay; columns of a ``group`` are next to each other. ``is_time``: a time of answers,
    which a policy can shorten by refusing slow requests.
    """

    group: str
    name: str
    digits: int
    better: Better
    figure: Callable[[Summary], float | None]
    is_time: bool = False

    def over(self, summaries: Sequence[Summary]) -> Interval | None:
        """Return the figure's interval over seeds; None where a replay lacks it."""
        return over_seeds(summaries, self.figure)

    def is_of_survivors(self, summaries: Sequence[Summary]) -> bool:
        """Whether the figure leaves out requests that failed, or had not ended at an interrupt."""
        return self.is_time and any(summary.has_survivors for summary in summaries)

    def shown(self, summaries: Sequence[Summary]) -> str:
        """Return the figure as text, with its interval where several seeds were replayed."""
        mark = SURVIVORS if self.is_of_survivors(summaries) else ""
        return shown(self.over(summaries), self.digits, mark)


def shown(found: Interval | None, digits: int, mark: str = "") -> str:
    """Return ``mean ± within`` with ``digits`` digits, and ``mark`` after the mean."""
    if found is None:
        return NOTHING
    within = f" ± {found.within:,.{digits}f}" if round(found.within, digits) else ""
    return f"{found.mean:,.{digits}f}{mark}{within}"


class ReasonCount(NamedTuple):
    """How many requests had a reason, over seeds: ``shown`` is that as text."""

    name: str
    found: Interval
    shown: str


def reasons_over(counts: Sequence[Mapping[str, int]]) -> list[ReasonCount]:
    """Return how many requests had each reason, by name; ``counts`` has an entry for each seed."""
    rows: list[ReasonCount] = []
    for name in sorted({name for of_seed in counts for name in of_seed}):
        found = interval([float(of_seed.get(name, 0)) for of_seed in counts])
        rows.append(ReasonCount(name, found, shown(found, 0 if len(counts) == 1 else 1)))
    return rows


def crossing_gb(summary: Summary) -> float:
    """Return how many gigabytes crossed between domains."""
    return sum(pair.bytes for pair in summary.carried if pair.src != pair.dst) / BYTES_PER_GB


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by


TTFT_MEAN = Column("TTFT ms", "mean", 0, Better.LOWER, lambda row: row.ttft_ms.mean, is_time=True)
TTFT_P99 = Column("TTFT ms", "p99", 0, Better.LOWER, lambda row: row.ttft_ms.p99, is_time=True)
ITL_MEAN = Column("ITL ms", "mean", 1, Better.LOWER, lambda row: row.itl_ms.mean, is_time=True)
E2E_P50 = Column(
    "end to end s", "p50", 2, Better.LOWER, lambda row: _scaled(row.e2e_ms.p50, 1e-3), is_time=True
)
GOOD = Column("good", "%", 1, Better.HIGHER, lambda row: row.good_share * 100.0)
CACHED = Column("cached", "%", 1, Better.HIGHER, lambda row: row.cached_share * 100.0)
CEILING = Column("cached", "ceiling %", 1, Better.NEITHER, lambda row: _scaled(row.ceiling_share, 100.0))
IMBALANCE = Column("imbalance", "", 2, Better.LOWER, lambda row: row.imbalance)
CROSSING = Column("KV crossing", "GB", 1, Better.LOWER, crossing_gb)
COST = Column("cost", "", 2, Better.LOWER, lambda row: row.cost)

COLUMNS = (
    TTFT_MEAN,
    Column("TTFT ms", "p50", 0, Better.LOWER, lambda row: row.ttft_ms.p50, is_time=True),
    TTFT_P99,
    ITL_MEAN,
    Column("ITL ms", "p99", 1, Better.LOWER, lambda row: row.itl_ms.p99, is_time=True),
    E2E_P50,
    GOOD,
    Column("good", "per s", 2, Better.HIGHER, lambda row: row.good_per_s),
    CACHED,
    CEILING,
    Column("failed", "", 0, Better.LOWER, lambda row: float(sum(row.errors.values()))),
    IMBALANCE,
    CROSSING,
    COST,
)
"""The figures of the comparison, from left to right."""

MEANINGS = (
    ("TTFT, time to first token", "from a request's arrival to the first token of its answer"),
    ("ITL, between tokens", "the mean over an answer's tokens, for each request"),
    ("end to end", "from a request's arrival to the last token of its answer"),
    ("good, goodput", "requests that met the objective: their share, and how many for a second of arrivals"),
    ("cached", "the share of prompt tokens that engines found in their caches"),
    ("ceiling", "what an endless cache shared by all workers would have held of the same requests"),
    ("imbalance", "prefill tokens of the busiest worker over the mean of all that prefill; 1 is even"),
    ("KV crossing", "KV cache that went from one domain, such as a zone, to another"),
    ("cost", "what KV transfers cost by the prices of the fleet file's links, in its currency"),
    ("failed", "requests that ended with an error, those that were refused among them"),
)
"""What the figures mean, for the page: the name of each group of columns begins one of these, unit apart."""


def shown_columns(summaries: Iterable[Summary]) -> tuple[Column, ...]:
    """Return the columns for these replays; the cost is among them if a replay has one."""
    if any(summary.cost is not None for summary in summaries):
        return COLUMNS
    return tuple(column for column in COLUMNS if column is not COST)


_TIMES: tuple[tuple[str, Callable[[Summary], Spread]], ...] = (
    ("TTFT", lambda row: row.ttft_ms),
    ("ITL", lambda row: row.itl_ms),
    ("end to end", lambda row: row.e2e_ms),
)


def seeds_note(variants: Sequence[VariantReport]) -> str:
    """Return what the number of seeds is worth."""
    seeds = least_seeds(variants)
    if seeds < 2:
        return "One seed: small differences may be chance."
    rough = f": fewer than {SEEDS_MIN} seeds say little of chance" if seeds < SEEDS_MIN else ""
    return f"Means over {seeds} seeds with 95 % intervals{rough}."


def least_seeds(variants: Sequence[VariantReport]) -> int:
    """Return the seeds of the variant with the fewest."""
    return min((len(variant.seeds) for variant in variants), default=0)


def times_notes(variants: Sequence[VariantReport]) -> list[str]:
    """Return how many requests the times are of, and which of them are no whole picture."""
    counts = {variant.name: _samples(variant.summaries) for variant in variants}
    if len(set(counts.values())) == 1:
        counts = {"times": counts[variants[0].name]}
    notes = [f"{name}: {samples}" for name, samples in counts.items()]
    summaries = [summary for variant in variants for summary in variant.summaries]
    if any(summary.has_survivors for summary in summaries):
        notes.append(
            f"{SURVIVORS} of the answered requests alone: those that failed or had not ended may be slow ones"
        )
    if any(of(row).samples and of(row).p99 is None for _, of in _TIMES for row in summaries):
        notes.append(
            f"{NOTHING} stands for a percentile of too few requests: a p99 needs {samples_needed(99)}"
        )
    return notes


def class_lines(variant: VariantReport) -> list[str]:
    """Return the figures of critical requests and of the others, a line each; none without critical ones."""
    lines: list[str] = []
    found = [summary.classes for summary in variant.summaries if summary.classes]
    for each in zip(*found, strict=True):
        name = "critical" if each[0].is_critical else "others"
        figures = (
            (over_seeds(each, lambda row: float(row.requests)), 0, "{} requests"),
            (over_seeds(each, lambda row: row.ttft_ms.p99), 0, "TTFT p99 {} ms"),
            (over_seeds(each, lambda row: 100.0 * row.in_time_share), 1, "{} % in time"),
            (over_seeds(each, lambda row: row.in_time_per_s), 2, "{} in time per s"),
            (over_seeds(each, lambda row: float(row.failed)), 0, "{} failed"),
        )
        listed = ", ".join(form.format(shown(value, digits)) for value, digits, form in figures)
        lines.append(f"{variant.name}: {name}: {listed}")
    return lines


def _samples(summaries: Sequence[Summary]) -> str:
    """Return ``TTFT of 290, ITL of 290, end to end of 280 of 300 requests``, by the seed with the fewest."""
    listed = [f"{name} of {min(of(row).samples for row in summaries):,}" for name, of in _TIMES]
    requests = min(row.requests for row in summaries)
    return f"{', '.join(listed)} of {requests:,} requests"
