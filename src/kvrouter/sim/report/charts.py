"""The page's plots: distributions of latencies, and figures over time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.sim.replay.summary import Objective, Part, Spread, Summary, VariantReport
from kvrouter.sim.replay.timetable import TimetableEntry
from kvrouter.sim.report.plot import Line, Mark, Plot
from kvrouter.sim.report.scale import (
    Scale,
    clock,
    latencies,
    latencies_over_time,
    linear,
    milliseconds,
    percent,
    plain,
    shares,
)
from kvrouter.sim.report.series import Figure, course, distribution, ends_s, references


class Drawing(NamedTuple):
    """A plot under its title; None without data."""

    title: str
    about: str
    plot: Plot | None = None


PAIRS_SHOWN = 6
"""So many pairs of domains have a plot of what KV between them cost over time."""


class _Latency(NamedTuple):
    """A latency with its objective in seconds."""

    title: str
    spread: Callable[[Summary], Spread]
    objective_s: Callable[[Objective], float | None]


_LATENCIES = (
    _Latency("Time to first token", lambda row: row.ttft_ms, lambda objective: objective.ttft_s),
    _Latency("Between tokens", lambda row: row.itl_ms, lambda objective: objective.itl_s),
    _Latency("End to end", lambda row: row.e2e_ms, lambda _: None),
)


@dataclass(frozen=True, slots=True)
class _Chart:
    """A figure over time. ``reference`` is drawn dotted; ``is_rare``: no plot where it is 0 throughout."""

    title: str
    about: str
    figure: Figure
    scale: Callable[[Sequence[float]], Scale]
    reference: tuple[str, Figure] | None = None
    is_rare: bool = False


def _from_zero(values: Sequence[float]) -> Scale:
    return linear(max(values), plain)


def _up_to_largest(values: Sequence[float]) -> Scale:
    return linear(max(values), percent)


def _all(_: Sequence[float]) -> Scale:
    return shares()


def _good_per_s(part: Part, length_s: float) -> float:
    return part.good_share * part.requests / length_s


def _arrivals_per_s(part: Part, length_s: float) -> float:
    return part.requests / length_s


def _cost_an_hour(src: str | None = None, dst: str | None = None) -> Figure:
    """Return what KV that moved in a part cost an hour, of all pairs of domains or of one."""

    def figure(part: Part, length_s: float) -> float | None:
        pairs = part.carried if src is None else [p for p in part.carried if (p.src, p.dst) == (src, dst)]
        return sum(pair.cost or 0.0 for pair in pairs) * 3_600.0 / length_s

    return figure


_CHARTS = (
    _Chart(
        "Time to first token",
        "mean of the answered requests",
        lambda part, _: part.ttft_ms,
        latencies_over_time,
    ),
    _Chart(
        "Between tokens", "mean of the answered requests", lambda part, _: part.itl_ms, latencies_over_time
    ),
    _Chart("End to end", "mean of the answered requests", lambda part, _: part.e2e_ms, latencies_over_time),
    _Chart("Good requests", "share that met the objective", lambda part, _: part.good_share, _all),
    _Chart(
        "Goodput",
        "good requests a second; dotted: all arrivals",
        _good_per_s,
        _from_zero,
        reference=("arrivals", _arrivals_per_s),
    ),
    _Chart(
        "Cached prompt tokens",
        "share found in caches; dotted: the ceiling",
        lambda part, _: part.cached_share,
        _all,
        reference=("ceiling", lambda part, _: part.ceiling_share),
    ),
    _Chart(
        "Imbalance",
        "prefill tokens of the busiest worker over the mean",
        lambda part, _: part.imbalance,
        _from_zero,
    ),
    _Chart(
        "KV crossing",
        "share of requests whose KV left its domain",
        lambda part, _: part.crossing / part.requests,
        _up_to_largest,
        is_rare=True,
    ),
    _Chart(
        "Cost of KV transfers",
        "an hour, by the prices of the links",
        _cost_an_hour(),
        _from_zero,
        is_rare=True,
    ),
    _Chart(
        "Failed",
        "share of requests that ended with an error",
        lambda part, _: part.failed / part.requests,
        _up_to_largest,
        is_rare=True,
    ),
)


def distributions(variants: Sequence[VariantReport], objective: Objective) -> list[Drawing]:
    """Return a plot for each latency: the share of requests within each time."""
    return [_distribution(variants, latency, objective) for latency in _LATENCIES]


def courses(variants: Sequence[VariantReport], events: Sequence[TimetableEntry] = ()) -> list[Drawing]:
    """Return a plot for each figure over time, by when requests arrived; each event is a numbered line."""
    marks = [Mark(event.at_s, str(number)) for number, event in enumerate(events, 1)]
    charts = (*_CHARTS, *_pair_charts(variants))
    return [found for chart in charts if (found := _course(variants, chart, marks)) is not None]


def _pair_charts(variants: Sequence[VariantReport]) -> list[_Chart]:
    """Return a chart for the cost of each pair of domains, the costliest ones of many; empty for a single
    pair, whose cost is the total.
    """
    costs: dict[tuple[str, str], float] = {}
    for pair in (pair for each in variants for summary in each.summaries for pair in summary.carried):
        if pair.cost:
            costs[pair.src, pair.dst] = costs.get((pair.src, pair.dst), 0.0) + pair.cost
    if len(costs) < 2:
        return []
    costliest = sorted(costs, key=lambda pair: (-costs[pair], pair))[:PAIRS_SHOWN]
    return [
        _Chart(
            f"Cost of KV from {src} to {dst}", "an hour", _cost_an_hour(src, dst), _from_zero, is_rare=True
        )
        for src, dst in costliest
    ]


def _distribution(variants: Sequence[VariantReport], latency: _Latency, objective: Objective) -> Drawing:
    found = [
        distribution(variant.name, index, [latency.spread(summary) for summary in variant.summaries])
        for index, variant in enumerate(variants)
    ]
    lines = [line for line in found if line is not None]
    about = "share of the answered requests that took at most this long"
    if not lines:
        return Drawing(latency.title, about)
    values = _coordinates(lines, 0)
    objective_s = latency.objective_s(objective)
    marks: list[Mark] = []
    if objective_s is not None:
        limit_ms = objective_s * 1e3
        marks.append(Mark(limit_ms, f"objective {milliseconds(limit_ms)}"))
        if min(values) / 10 <= limit_ms <= max(values) * 10:
            values.append(limit_ms)
    x = latencies(values)
    label = f"{latency.title}: {about}"
    return Drawing(latency.title, _about(about, x), Plot(label, x, shares(), lines, marks))


def _course(variants: Sequence[VariantReport], chart: _Chart, marks: Sequence[Mark]) -> Drawing | None:
    found = [course(variant, index, chart.figure) for index, variant in enumerate(variants)]
    lines = [line for line in found if line is not None]
    if chart.is_rare and not any(_coordinates(lines, 1)):
        return None
    if not lines:
        return Drawing(chart.title, chart.about)
    if chart.reference is not None:
        name, figure = chart.reference
        lines = [*lines, *references(variants, figure, name)]
    x = clock(max(ends_s(summary) for variant in variants for summary in variant.summaries))
    y = chart.scale(_coordinates(lines, 1))
    label = f"{chart.title} over time: {chart.about}"
    return Drawing(chart.title, _about(chart.about, y), Plot(label, x, y, lines, marks))


def _about(about: str, scale: Scale) -> str:
    return f"{about} (logarithmic scale)" if scale.is_log else about


def _coordinates(lines: Sequence[Line], axis: int) -> list[float]:
    """Every x (0) or y (1) of the lines and of what their seeds cover."""
    return [point[axis] for line in lines for run in (*line.runs, *line.bands) for point in run]
