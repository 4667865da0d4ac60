"""The tables of the page: the comparison, KV by pair of domains, errors and refusals by reason."""

from collections.abc import Sequence
from itertools import groupby

from kvrouter.sim.comparison import NOTHING, Better, Column, reasons_over, shown_columns
from kvrouter.sim.page.markup import Markup, element
from kvrouter.sim.page.series import style
from kvrouter.sim.summary import Carriage, Interval, Summary, VariantReport
from kvrouter.sim.timetable_entry import TimetableEntry
from kvrouter.topology.links import BYTES_PER_GB


def comparison(variants: Sequence[VariantReport]) -> Markup:
    """Return a row for each variant, with intervals over seeds; the best figures are bold."""
    listed = shown_columns(summary for variant in variants for summary in variant.summaries)
    groups = [(group, list(columns)) for group, columns in groupby(listed, lambda column: column.group)]
    begins = {columns[0] for _, columns in groups}
    found = {column: [column.over(variant.summaries) for variant in variants] for column in listed}
    best = {column: _best(column, found[column]) for column in listed}
    head = [
        element(
            "tr",
            element("th", "policy", rowspan="2", scope="col", class_="left"),
            *(
                element("th", group, colspan=str(len(columns)), scope="colgroup", class_="begins")
                for group, columns in groups
            ),
        ),
        element("tr", *(element("th", c.name, scope="col", class_=_border(c in begins)) for c in listed)),
    ]
    rows = [
        element(
            "tr",
            _policy(variant, index),
            *(
                _cell(column.shown(found[column][index]), column in begins, index in best[column])
                for column in listed
            ),
        )
        for index, variant in enumerate(variants)
    ]
    return _table("figures of each policy", head, rows)


def timetable(entries: Sequence[TimetableEntry]) -> Markup | None:
    """Return a row for each event, by the number that it has in the plots over time; None without any."""
    rows = [
        element(
            "tr",
            element("th", str(number), scope="row", class_="number"),
            element("td", f"{entry.at_s:,g} s", class_="left"),
            *(
                element("td", text or NOTHING, class_="left")
                for text in (entry.what, entry.which, entry.change)
            ),
        )
        for number, entry in enumerate(entries, 1)
    ]
    names = ("number", "time", "what", "which", "change")
    heads = (element("th", name, scope="col", class_="left") for name in names)
    return _table("events", [element("tr", *heads)], rows) if rows else None


def carried(variants: Sequence[VariantReport]) -> Markup | None:
    """Return a row for each variant and pair of domains, by the mean over seeds; None where no KV went from
    worker to worker. Costs stand there where one is known.
    """
    with_costs = any(pair.cost is not None for variant in variants for pair in _pairs(variant.summaries))
    rows: list[Markup] = []
    for index, variant in enumerate(variants):
        seeds = len(variant.summaries)
        pairs = sorted(_pairs(variant.summaries), key=lambda pair: (pair.src, pair.dst))
        for (src, dst), group in groupby(pairs, lambda pair: (pair.src, pair.dst)):
            of_pair = list(group)
            costs = [pair.cost for pair in of_pair if pair.cost is not None]
            rows.append(
                element(
                    "tr",
                    _policy(variant, index),
                    element("td", src, class_="left"),
                    element("td", dst, class_="left"),
                    element("td", "yes" if src != dst else "no", class_="crosses" if src != dst else None),
                    element("td", _mean(sum(pair.transfers for pair in of_pair), seeds, 0)),
                    element("td", _mean(sum(pair.bytes for pair in of_pair) / BYTES_PER_GB, seeds, 2)),
                    *(
                        [element("td", _mean(sum(costs), seeds, 2) if costs else NOTHING)]
                        if with_costs
                        else []
                    ),
                )
            )
    names = ("policy", "from", "to", "crosses", "transfers", "GB", *(["cost"] if with_costs else []))
    return _table("KV between domains", [_head(names)], rows) if rows else None


def reasons(variants: Sequence[VariantReport]) -> Markup | None:
    """Return how many requests of each variant ended with which error, and were refused for which reason:
    means over seeds. None where all ended well.
    """
    rows: list[Markup] = []
    for index, variant in enumerate(variants):
        requests = sum(summary.requests for summary in variant.summaries) / len(variant.summaries)
        for kind, counts in (
            ("error", [summary.errors for summary in variant.summaries]),
            ("refused", [summary.refusals for summary in variant.summaries]),
        ):
            for reason in reasons_over(counts):
                share = reason.found.mean / requests
                rows.append(
                    element(
                        "tr",
                        _policy(variant, index),
                        element("td", kind, class_="left"),
                        element("td", reason.name, class_="left"),
                        element("td", reason.shown),
                        element("td", f"{share * 100.0:.1f}"),
                    )
                )
    names = ("policy", "kind", "reason", "requests", "% of all")
    return _table("errors and refusals", [_head(names)], rows) if rows else None


def _pairs(summaries: Sequence[Summary]) -> list[Carriage]:
    return [pair for summary in summaries for pair in summary.carried]


def _policy(variant: VariantReport, index: int) -> Markup:
    return element("th", element("span", class_=f"key {style(index)}"), variant.name, scope="row")


def _cell(text: str, begins: bool, is_best: bool) -> Markup:
    classes = [name for name, given in (("begins", begins), ("best", is_best)) if given]
    mean, sign, within = text.partition(" ±")
    return element(
        "td",
        mean,
        *([element("span", f"{sign}{within}", class_="within")] if sign else []),
        class_=" ".join(classes) or None,
    )


def _border(begins: bool) -> str | None:
    return "begins" if begins else None


def _best(column: Column, found: Sequence[Interval | None]) -> set[int]:
    """The best figure and those whose interval meets its own; nobody where that is all of them."""
    known = [(index, each) for index, each in enumerate(found) if each is not None]
    if column.better is Better.NEITHER or not known:
        return set()
    choose = min if column.better is Better.LOWER else max
    _, top = choose(known, key=lambda each: each[1].mean)
    best = {i for i, each in known if abs(each.mean - top.mean) <= each.within + top.within}
    texts = {column.shown(each) for _, each in known}
    return set() if len(best) == len(known) or len(texts) == 1 else best


def _mean(total: float, seeds: int, digits: int) -> str:
    return f"{total / seeds:,.{digits}f}"


def _head(names: Sequence[str]) -> Markup:
    """A row of headings, three of texts and then those of numbers."""
    cells = (
        element("th", name, scope="col", class_="left" if at < 3 else None) for at, name in enumerate(names)
    )
    return element("tr", *cells)


def _table(label: str, head: Sequence[Markup], rows: Sequence[Markup]) -> Markup:
    """A table that scrolls by itself where it is too wide for the page, by keyboard too."""
    table = element("table", element("thead", *head), element("tbody", *rows))
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)
