"""The summary of a replay: its figures, their spread over seeds, and their course over time."""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from kvrouter.core.errors import ConfigError
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.intervals import CONFIDENCE, student_t
from kvrouter.sim.replay.outcomes import Flags, Floats, OutcomeTable
from kvrouter.sim.replay.percentiles import percentile
from kvrouter.sim.replay.simulation import Result
from kvrouter.sim.replay.timetable import TimetableEntry

PARTS = 24
"""How many parts of equal length a replay's time is cut into."""


class Objective(msgspec.Struct, frozen=True):
    """A request is good when its first token comes, and its tokens follow each other, within these."""

    ttft_s: float = 2.0
    itl_s: float = 0.05

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                raise ConfigError(
                    f"slo.{name}: {value} is not a number of seconds above 0", param=f"slo.{name}"
                )

    def are_met(self, table: OutcomeTable) -> Flags:
        """Return which requests ended well and in time; an answer of one token has no ITL."""
        itl_s = table.itl_s
        flags: Flags = ~table.failed & (table.ttft_s <= self.ttft_s)
        return flags & (np.isnan(itl_s) | (itl_s <= self.itl_s))


class Spread(msgspec.Struct, frozen=True):
    """A distribution of ``samples`` requests, in milliseconds; all None if it is empty.

    A percentile is None too where the samples are too few for it. ``quantiles`` are its 0, 1, 2, … 100 %
    points, empty if it is empty.
    """

    samples: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None
    quantiles: tuple[float, ...] = ()


class Carriage(msgspec.Struct, frozen=True):
    """KV that went from one domain to another, and what that cost, None where it has no price."""

    src: str
    dst: str
    transfers: int
    bytes: int
    cost: float | None = None


class Part(msgspec.Struct, frozen=True):
    """One part of the time, by the requests that arrived in it.

    ``failed`` of them ended with an error, the KV of ``crossing`` left its domain. ``imbalance`` is over the
    same workers as that of the whole replay. ``carried`` is the KV that their answers began with,
    by pair of domains.
    """

    begins_s: float
    requests: int
    ttft_ms: float | None
    itl_ms: float | None
    good_share: float
    cached_share: float
    e2e_ms: float | None
    ceiling_share: float | None
    failed: int
    crossing: int
    imbalance: float | None
    carried: tuple[Carriage, ...] = ()


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of the requests with a strict priority above 0, or of the others. ``in_time_share`` is the
    share of all of them whose first token came within the objective, and ``in_time_per_s`` how many these are
    for a second of arrivals.
    """

    is_critical: bool
    requests: int
    failed: int
    ttft_ms: Spread
    in_time_share: float
    in_time_per_s: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one replay. Shares are of prompt tokens, or of requests for ``good_share``.

    ``arrivals_s`` is from the first arrival to the last, ``duration_s`` until the last request ended.
    ``good_per_s`` is the goodput: requests that met the objective, by ``arrivals_s``, so that a policy which
    is long in answering is not compared over a longer time; None if all arrived at once. ``ceiling_share`` is
    the share in an endless cache shared by all, None if the trace has too many blocks. ``imbalance`` is the
    prefill tokens of the busiest worker over those of the average one, idle ones among them. ``cost`` is the
    price of all KV transfers, None if no link has a price.
    """

    requests: int
    completed: int
    errors: dict[str, int]
    refusals: dict[str, int]
    arrivals_s: float
    duration_s: float
    is_whole: bool
    ttft_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    good_per_s: float | None
    good_share: float
    cached_share: float
    ceiling_share: float | None
    predicted_share: float
    retried: int
    crossing: int
    imbalance: float | None
    carried: tuple[Carriage, ...]
    cost: float | None = None
    classes: tuple[ClassFigures, ...] | UnsetType = UNSET
    """The critical requests and the others; absent without critical requests."""
    parts: tuple[Part, ...]

    @property
    def has_survivors(self) -> bool:
        """Whether times are those of survivors: some requests failed, or had not ended at an interrupt."""
        return self.completed < self.requests or not self.is_whole


def summarize(result: Result, objective: Objective, places: Places | None = None) -> Summary:
    """Return the figures of ``result``; without ``places`` the traffic of each part and all costs are
    unknown.
    """
    table = result.outcomes.table()
    workers = max(result.prefill_workers, len(table.computed_tokens))
    parts = _parts(table, objective, places, workers, ceiling_known=result.ceiling_known)
    costs = None if places is None or not places.has_prices else _costs(parts)
    carried = tuple(
        Carriage(
            pair.src_domain,
            pair.dst_domain,
            carried.transfers,
            carried.arrived_bytes,
            None if costs is None else costs.get((pair.src_domain, pair.dst_domain)),
        )
        for pair, carried in sorted(result.carried.items())
    )
    input_tokens = table.total("input_tokens")
    good = int(objective.are_met(table).sum())
    arrivals_s = float(np.ptp(table.rows["arrived_s"])) if len(table) else 0.0
    return Summary(
        requests=len(table),
        completed=int((~table.failed).sum()),
        errors=table.counts("error"),
        refusals=table.counts("reason"),
        arrivals_s=arrivals_s,
        duration_s=result.ended_s,
        is_whole=result.is_whole,
        ttft_ms=_spread(table.ttft_s),
        itl_ms=_spread(table.itl_s),
        e2e_ms=_spread(table.e2e_s),
        good_per_s=good / arrivals_s if arrivals_s else None,
        good_share=_share(good, len(table)),
        cached_share=_share(table.total("cached_tokens"), input_tokens),
        ceiling_share=(_share(table.total("ceiling_tokens"), input_tokens) if result.ceiling_known else None),
        predicted_share=_share(table.total("predicted_tokens"), input_tokens),
        retried=int((table.rows["attempts"] > 1).sum()),
        crossing=table.total("crosses"),
        imbalance=_imbalance(table, workers),
        carried=carried,
        cost=None if costs is None else sum(costs.values()),
        classes=_classes(table, objective, arrivals_s),
        parts=parts,
    )


def _classes(
    table: OutcomeTable, objective: Objective, arrivals_s: float
) -> tuple[ClassFigures, ...] | UnsetType:
    is_critical: Flags = table.rows["is_critical"] != 0
    if not is_critical.any():
        return UNSET
    return tuple(_class(table.where(flags), objective, arrivals_s) for flags in (is_critical, ~is_critical))


def _class(table: OutcomeTable, objective: Objective, arrivals_s: float) -> ClassFigures:
    in_time = int((~table.failed & (table.ttft_s <= objective.ttft_s)).sum())
    return ClassFigures(
        is_critical=bool(table.total("is_critical")),
        requests=len(table),
        failed=int(table.failed.sum()),
        ttft_ms=_spread(table.ttft_s),
        in_time_share=_share(in_time, len(table)),
        in_time_per_s=in_time / arrivals_s if arrivals_s else None,
    )


class Interval(msgspec.Struct, frozen=True):
    """A mean over seeds, and its 95 % confidence interval as a distance; 0 with one seed."""

    mean: float
    within: float


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of ``values`` with Student's interval."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return Interval(mean, 0.0)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return Interval(mean, student_t(CONFIDENCE, n - 1) * sqrt(variance / n))


Figures = TypeVar("Figures", Summary, ClassFigures)


def over_seeds(each: Sequence[Figures], figure: Callable[[Figures], float | None]) -> Interval | None:
    """Return a figure's interval over replays that differ by their seed; None where one of them lacks it."""
    values = [value for figures in each if (value := figure(figures)) is not None]
    return interval(values) if values and len(values) == len(each) else None


class VariantReport(msgspec.Struct, frozen=True):
    """One variant: its rule's source, and a summary for each seed."""

    name: str
    source: str
    seeds: tuple[int, ...]
    summaries: tuple[Summary, ...]


class ReplayReport(msgspec.Struct, frozen=True):
    """The report of replays, as written to JSON. ``events`` happened in each of them."""

    version: str
    trace: str
    format: str
    dispatch: str
    objective: Objective
    is_whole: bool
    variants: tuple[VariantReport, ...]
    events: tuple[TimetableEntry, ...] = ()
    notes: tuple[str, ...] = ()
    """What the trace does not say, and where the fleet is from."""


def _spread(seconds: Floats) -> Spread:
    """Return the distribution of those that are no NaN."""
    values = seconds[~np.isnan(seconds)] * 1e3
    if not len(values):
        return Spread(0, None, None, None, None, None)
    quantiles = tuple(float(value) for value in np.percentile(values, range(101)))
    return Spread(
        len(values),
        float(values.mean()),
        percentile(values, 50),
        percentile(values, 90),
        percentile(values, 99),
        quantiles[100],
        quantiles,
    )


def _carried(table: OutcomeTable, places: Places) -> tuple[Carriage, ...]:
    """Return the traffic between each pair of domains, with its cost if any of it had a price."""
    found: dict[tuple[str, str], Carriage] = {}
    for move, transfers in table.moved():
        src, dst, cost = places.moved(move)
        before = found.get((src, dst), Carriage(src, dst, 0, 0))
        costs = [each for each in (before.cost, cost) if each is not None]
        found[src, dst] = Carriage(
            src,
            dst,
            before.transfers + transfers,
            before.bytes + move.bytes,
            sum(costs) if costs else None,
        )
    return tuple(found[pair] for pair in sorted(found))


def _costs(parts: Sequence[Part]) -> dict[tuple[str, str], float]:
    """Return the cost of the traffic between each pair of domains, if any of it had a price."""
    costs: dict[tuple[str, str], float] = {}
    for part in parts:
        for pair in part.carried:
            if pair.cost is not None:
                costs[pair.src, pair.dst] = costs.get((pair.src, pair.dst), 0.0) + pair.cost
    return costs


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _imbalance(table: OutcomeTable, workers: int) -> float | None:
    """Return the busiest worker's computed tokens over the mean of ``workers`` workers."""
    computed = table.computed_tokens
    total = sum(computed.values())
    return max(computed.values()) * workers / total if total else None


def _parts(
    table: OutcomeTable, objective: Objective, places: Places | None, workers: int, *, ceiling_known: bool
) -> tuple[Part, ...]:
    if not len(table):
        return ()
    arrived_s = table.rows["arrived_s"]
    length_s = float(arrived_s.max()) / PARTS or 1.0
    numbers = np.minimum(PARTS - 1, (arrived_s / length_s).astype(np.int64))
    return tuple(
        _part(table.where(numbers == at), at * length_s, objective, places, workers, ceiling_known)
        for at in range(PARTS)
    )


def _part(
    table: OutcomeTable,
    begins_s: float,
    objective: Objective,
    places: Places | None,
    workers: int,
    ceiling_known: bool,
) -> Part:
    input_tokens = table.total("input_tokens")
    return Part(
        begins_s=begins_s,
        requests=len(table),
        ttft_ms=_spread(table.ttft_s).mean,
        itl_ms=_spread(table.itl_s).mean,
        good_share=_share(int(objective.are_met(table).sum()), len(table)),
        cached_share=_share(table.total("cached_tokens"), input_tokens),
        e2e_ms=_spread(table.e2e_s).mean,
        ceiling_share=_share(table.total("ceiling_tokens"), input_tokens) if ceiling_known else None,
        failed=int(table.failed.sum()),
        crossing=table.total("crosses"),
        imbalance=_imbalance(table, workers),
        carried=() if places is None else _carried(table, places),
    )
