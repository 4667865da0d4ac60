"""The tables of the page: the comparison, KV by pair of domains, errors and refusals by reason."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from kvrouter.kernel.topology.link_table import BYTES_PER_GB
from kvrouter.sim.replay.comparison import (
    NOTHING,
    SEEDS_MIN,
    Better,
    Column,
    least_seeds,
    reasons_over,
    shown,
    shown_columns,
)
from kvrouter.sim.replay.summary import Carriage, Summary, VariantReport
from kvrouter.sim.report.series import style


class Cell(NamedTuple):
    """A text, and its uncertainty; ``style`` is its class."""

    text: str
    style: str = ""
    within: str = ""


class Row(NamedTuple):
    """A table's row on one variant, with the colour of the class ``style``."""

    name: str
    style: str
    cells: list[Cell]


class Comparison(NamedTuple):
    """A row for each variant; a group has a number of columns."""

    groups: list[tuple[str, int]]
    columns: list[Cell]
    rows: list[Row]


def comparison(variants: Sequence[VariantReport]) -> Comparison:
    """Return the figures of the variants, with intervals over seeds; the best figures are bold, if there are
    seeds enough to say so.
    """
    listed = shown_columns(summary for variant in variants for summary in variant.summaries)
    groups = [(group, list(columns)) for group, columns in groupby(listed, lambda column: column.group)]
    begins = {columns[0] for _, columns in groups}
    rows = [Row(variant.name, style(index), []) for index, variant in enumerate(variants)]
    for column in listed:
        best = _best(column, variants)
        for index, row in enumerate(rows):
            mean, sign, within = column.shown(variants[index].summaries).partition(" ±")
            classes = [
                name for name, given in (("begins", column in begins), ("best", index in best)) if given
            ]
            row.cells.append(Cell(mean, " ".join(classes), sign + within))
    heads = [Cell(column.name, "begins" if column in begins else "") for column in listed]
    return Comparison([(group, len(columns)) for group, columns in groups], heads, rows)


def carried(variants: Sequence[VariantReport]) -> tuple[list[str], list[Row]]:
    """Return headings, and a row for each variant and pair of domains, by the mean over seeds; no rows if no
    KV moved between workers. Costs are shown if one is known.
    """
    with_costs = any(pair.cost is not None for variant in variants for pair in _pairs(variant.summaries))
    rows: list[Row] = []
    for index, variant in enumerate(variants):
        seeds = len(variant.summaries)
        pairs = sorted(_pairs(variant.summaries), key=lambda pair: (pair.src, pair.dst))
        for (src, dst), group in groupby(pairs, lambda pair: (pair.src, pair.dst)):
            of_pair = list(group)
            costs = [pair.cost for pair in of_pair if pair.cost is not None]
            cells = [
                Cell(src, "left"),
                Cell(dst, "left"),
                Cell("yes", "crosses") if src != dst else Cell("no"),
                Cell(_mean(sum(pair.transfers for pair in of_pair), seeds, 0)),
                Cell(_mean(sum(pair.bytes for pair in of_pair) / BYTES_PER_GB, seeds, 2)),
            ]
            if with_costs:
                cells.append(Cell(_mean(sum(costs), seeds, 2) if costs else NOTHING))
            rows.append(Row(variant.name, style(index), cells))
    costs_head = ["cost"] if with_costs else []
    return ["policy", "from", "to", "crosses", "transfers", "GB", *costs_head], rows


def reasons(variants: Sequence[VariantReport]) -> list[Row]:
    """Return how many requests of each variant ended with each error, and were refused for each reason: means
    over seeds. Empty if all ended well.
    """
    rows: list[Row] = []
    for index, variant in enumerate(variants):
        requests = sum(summary.requests for summary in variant.summaries) / len(variant.summaries)
        for kind, counts in (
            ("error", [summary.errors for summary in variant.summaries]),
            ("refused", [summary.refusals for summary in variant.summaries]),
        ):
            for reason in reasons_over(counts):
                share = f"{reason.found.mean / requests * 100.0:.1f}"
                cells = [Cell(kind, "left"), Cell(reason.name, "left"), Cell(reason.shown), Cell(share)]
                rows.append(Row(variant.name, style(index), cells))
    return rows


def _pairs(summaries: Sequence[Summary]) -> list[Carriage]:
    return [pair for summary in summaries for pair in summary.carried]


def _best(column: Column, variants: Sequence[VariantReport]) -> set[int]:
    """Return the best figure and those with an overlapping interval; empty if that is all of them. Times of
    survivors are none of them.
    """
    found = [column.over(variant.summaries) for variant in variants]
    known = [(index, each) for index, each in enumerate(found) if each is not None]
    whole = [(i, each) for i, each in known if not column.is_of_survivors(variants[i].summaries)]
    if column.better is Better.NEITHER or not whole or least_seeds(variants) < SEEDS_MIN:
        return set()
    choose = min if column.better is Better.LOWER else max
    _, top = choose(whole, key=lambda each: each[1].mean)
    best = {i for i, each in whole if abs(each.mean - top.mean) <= each.within + top.within}
    texts = {shown(each, column.digits) for _, each in known}
    return set() if len(best) == len(known) or len(texts) == 1 else best


def _mean(total: float, seeds: int, digits: int) -> str:
    return f"{total / seeds:,.{digits}f}"
