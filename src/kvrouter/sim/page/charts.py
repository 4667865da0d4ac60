"""The page's plots: distributions of latencies, and figures over time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.sim.page.markup import Markup, element
from kvrouter.sim.page.plot import Line, Mark, plot
from kvrouter.sim.page.scale import (
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
from kvrouter.sim.page.series import Figure, course, distribution, ends_s, references, style
from kvrouter.sim.summary import Objective, Part, Spread, Summary, VariantReport


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


_CHARTS = (
    _Chart("Time to first token", "mean", lambda part, _: part.ttft_ms, latencies_over_time),
    _Chart("Between tokens", "mean", lambda part, _: part.itl_ms, latencies_over_time),
    _Chart("End to end", "mean", lambda part, _: part.e2e_ms, latencies_over_time),
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
        "Failed",
        "share of requests that ended with an error",
        lambda part, _: part.failed / part.requests,
        _up_to_largest,
        is_rare=True,
    ),
)


def distributions(variants: Sequence[VariantReport], objective: Objective) -> list[Markup]:
    """Return a plot for each latency: the share of requests that took at most so long."""
    return [_distribution(variants, latency, objective) for latency in _LATENCIES]


def courses(variants: Sequence[VariantReport]) -> list[Markup]:
    """Return a plot for each figure over time, by when requests arrived."""
    return [found for chart in _CHARTS if (found := _course(variants, chart)) is not None]


def legend(variants: Sequence[VariantReport]) -> Markup:
    """Return the name of each variant next to a piece of its line."""
    return element("ul", *(_entry(v.name, style(index)) for index, v in enumerate(variants)), class_="legend")


def _entry(name: str, of: str) -> Markup:
    line = element("path", d="M1 5H29", class_="line")
    swatch = element("svg", line, viewBox="0 0 30 10", class_="swatch", aria_hidden="true")
    return element("li", swatch, element("span", name), class_=of)


def _figure(title: str, about: str, *content: Markup) -> Markup:
    caption = element("figcaption", element("h3", title), element("p", about, class_="about"))
    return element("figure", caption, *content)


def _distribution(variants: Sequence[VariantReport], latency: _Latency, objective: Objective) -> Markup:
    found = [
        distribution(variant.name, index, [latency.spread(summary) for summary in variant.summaries])
        for index, variant in enumerate(variants)
    ]
    lines = [line for line in found if line is not None]
    about = "share of requests that took at most this long"
    if not lines:
        return _figure(latency.title, about, _nothing())
    values = _coordinates(lines, 0)
    objective_s = latency.objective_s(objective)
    mark = None
    if objective_s is not None:
        limit_ms = objective_s * 1e3
        mark = Mark(limit_ms, f"objective {milliseconds(limit_ms)}")
        if min(values) / 10 <= limit_ms <= max(values) * 10:
            values.append(limit_ms)
    x = latencies(values)
    label = f"{latency.title}: {about}"
    return _figure(latency.title, _about(about, x), plot(label, x, shares(), lines, mark))


def _course(variants: Sequence[VariantReport], chart: _Chart) -> Markup | None:
    found = [course(variant, index, chart.figure) for index, variant in enumerate(variants)]
    lines = [line for line in found if line is not None]
    if chart.is_rare and not any(_coordinates(lines, 1)):
        return None
    if not lines:
        return _figure(chart.title, chart.about, _nothing())
    if chart.reference is not None:
        name, figure = chart.reference
        lines = [*lines, *references(variants, figure, name)]
    x = clock(max(ends_s(summary) for variant in variants for summary in variant.summaries))
    y = chart.scale(_coordinates(lines, 1))
    label = f"{chart.title} over time: {chart.about}"
    return _figure(chart.title, _about(chart.about, y), plot(label, x, y, lines))


def _about(about: str, scale: Scale) -> str:
    return f"{about} (logarithmic scale)" if scale.is_log else about


def _coordinates(lines: Sequence[Line], axis: int) -> list[float]:
    """Every x (0) or y (1) of the lines and of what their seeds cover."""
    return [point[axis] for line in lines for run in (*line.runs, *line.bands) for point in run]


def _nothing() -> Markup:
    return element("p", "Nothing to show.", class_="about")
