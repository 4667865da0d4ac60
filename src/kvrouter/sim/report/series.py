"""The lines of a variant in the plots: means over seeds, and the range that the seeds cover."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from kvrouter.sim.replay.summary import Part, Spread, Summary, VariantReport
from kvrouter.sim.report.plot import Line, Point


def style(index: int) -> str:
    """Return the class that gives the variant of this number its colour and its dashes."""
    return f"v{index}"


def lengths_s(summary: Summary) -> float:
    """Return the length of each part of the summary, in seconds."""
    return next((after.begins_s - before.begins_s for before, after in pairwise(summary.parts)), 0.0)


def ends_s(summary: Summary) -> float:
    """Return when the last part ends, in seconds."""
    return summary.parts[-1].begins_s + lengths_s(summary) if summary.parts else 0.0


def distribution(name: str, index: int, spreads: Sequence[Spread]) -> Line | None:
    """Return the share of requests (y) within so many milliseconds (x): the mean of each quantile over seeds.
    None if a seed has no data.
    """
    seeds = [spread.quantiles for spread in spreads]
    if not seeds or not all(seeds):
        return None
    by_quantile = list(zip(*seeds, strict=True))
    shares = [at / (len(by_quantile) - 1) for at in range(len(by_quantile))]
    run = [Point(fmean(values), share) for values, share in zip(by_quantile, shares, strict=True)]
    least = [Point(min(values), share) for values, share in zip(by_quantile, shares, strict=True)]
    most = [Point(max(values), share) for values, share in zip(by_quantile, shares, strict=True)]
    return Line(name, style(index), [run], [[*least, *reversed(most)]] if len(seeds) > 1 else [])


Figure = Callable[[Part, float], float | None]
"""A figure of a part with this length in seconds; None without data."""


def course(variant: VariantReport, index: int, figure: Figure) -> Line | None:
    """Return a figure of each part over the middle of its time, by its mean over seeds.

    A part in which a seed had no request, or has no data, is a gap. None if all are gaps.
    """
    runs: list[list[Point]] = [[]]
    bands: list[tuple[list[Point], list[Point]]] = [([], [])]
    lengths = [lengths_s(summary) for summary in variant.summaries]
    for parts in zip(*(summary.parts for summary in variant.summaries), strict=False):
        values = [
            value
            for part, length_s in zip(parts, lengths, strict=True)
            if part.requests and (value := figure(part, length_s)) is not None
        ]
        if len(values) == len(parts):
            at_s = fmean(part.begins_s + length_s / 2 for part, length_s in zip(parts, lengths, strict=True))
            runs[-1].append(Point(at_s, fmean(values)))
            bands[-1][0].append(Point(at_s, min(values)))
            bands[-1][1].append(Point(at_s, max(values)))
        elif runs[-1]:
            runs.append([])
            bands.append(([], []))
    found = [run for run in runs if run]
    areas = [[*low, *reversed(high)] for low, high in bands if len(low) > 1]
    if not found:
        return None
    return Line(variant.name, style(index), found, areas if len(variant.summaries) > 1 else [])


def references(variants: Sequence[VariantReport], figure: Figure, name: str) -> list[Line]:
    """Return the reference lines for the variants: one line if all have the same, else one each."""
    found = [course(variant, index, figure) for index, variant in enumerate(variants)]
    lines = [line for line in found if line is not None]
    if len({_rounded(line) for line in lines}) == 1:
        return [Line(name, "reference dotted", lines[0].runs)]
    return [Line(f"{line.name}: {name}", f"{line.style} dotted", line.runs) for line in lines]


def _rounded(line: Line) -> tuple[tuple[float, float], ...]:
    return tuple((round(point.x, 6), round(point.y, 9)) for run in line.runs for point in run)
