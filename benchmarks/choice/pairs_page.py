"""The page of pairs: which setting is for which fleet, each bar with what was measured, and which fail."""

from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from benchmarks.choice.aggregated import BLOCKS_RULE, TIME
from benchmarks.choice.pairs import (
    ASSUMED,
    AT_ONCE,
    BAR_SHARE,
    EVEN,
    FEW_SEEDS,
    GIVEN,
    JOINT,
    LEARNED,
    NEVER,
    PRICE_WEIGHT,
    PRICED,
    PairCell,
    PairFigures,
)
from benchmarks.replay.cases import CASES, LATE_S
from benchmarks.replay.fleets import AGGREGATED, SAME_LINKS, TIERS
from benchmarks.replay.kept import Study
from benchmarks.replay.table import joined

OF_THE_TABLE = 0.95
"""Learned links: the share of what a given table gains."""

OF_KNOWING = 0.9
"""A link at a tenth: the share of what knowing it at once gains."""

SAVED = 0.9
PRICED_LOSS = 0.03
"""Prices: the share of the cost that is saved, for so much of the p99 TTFT at most."""

SHORT_NAMES = {JOINT: "joint", TIME: "sequential"}


class PairStudy(Study, frozen=True, kw_only=True):
    """All that was measured of pairs in one run."""

    cells: tuple[PairCell, ...]


def missed_of(cell: PairCell) -> list[str]:
    """Return which bars do not hold in a cell."""
    checks: dict[str, Callable[[PairCell], Iterator[str]]] = {
        "links": _links_missed,
        "a link at a tenth": _fall_missed,
        "prices": _price_missed,
        "local prefill": _split_missed,
    }
    return list(checks[cell.study](cell))


def _of(cell: PairCell, policy: str, links: str = GIVEN) -> PairFigures:
    return next(each for each in cell.figures if (each.policy, each.links) == (policy, links))


def _links_missed(cell: PairCell) -> Iterator[str]:
    if cell.share != BAR_SHARE or cell.fleet != TIERS:
        return
    if (share := gained(cell)) is not None and round(share, 3) < OF_THE_TABLE:
        yield f"learned links gain {100 * share:.0f} % of what given ones do, wanted {100 * OF_THE_TABLE:g}"


def gained(cell: PairCell) -> float | None:
    """Return what share of a given table's gain learned links have, prefill picked first; None where a table
    gains nothing.
    """
    given, learned, assumed = (mean(_of(cell, TIME, links).ttft_ms) for links in (GIVEN, LEARNED, ASSUMED))
    return None if assumed <= 1.02 * given else (assumed - learned) / (assumed - given)


def shifted(cell: PairCell, policy: str) -> float | None:
    """Return the share of the gain of knowing a link's fall at once; None where that gains nothing."""
    at_once, seen, never = (mean(_of(cell, policy, links).ttft_ms) for links in (AT_ONCE, GIVEN, NEVER))
    return None if never <= 1.02 * at_once else (never - seen) / (never - at_once)


def _fall_missed(cell: PairCell) -> Iterator[str]:
    for policy in (JOINT, TIME):
        share = shifted(cell, policy)
        if share is not None and round(share, 3) < OF_KNOWING:
            yield (
                f"{SHORT_NAMES[policy]} has {100 * share:.0f} % of the gain of knowing it at once, "
                f"wanted {100 * OF_KNOWING:g}"
            )


def _price_missed(cell: PairCell) -> Iterator[str]:
    free, priced = _of(cell, JOINT), _of(cell, PRICED)
    saved = 1.0 - mean(priced.cost) / mean(free.cost) if mean(free.cost) else 1.0
    if round(saved, 3) < SAVED:
        yield f"{100 * saved:.0f} % of the cost saved, wanted {100 * SAVED:g}"
    loss = mean(priced.ttft_p99_ms) / mean(free.ttft_p99_ms) - 1.0
    if round(loss, 3) > PRICED_LOSS:
        yield f"p99 TTFT {100 * loss:.1f} % more, wanted {100 * PRICED_LOSS:g}"


def _split_missed(cell: PairCell) -> Iterator[str]:
    ours = mean(_of(cell, JOINT).good)
    better = max(mean(_of(cell, TIME).good), mean(_of(cell, TIME, AGGREGATED).good))
    if CASES[cell.case].name == "coding agents" and round(ours, 4) < round(better, 4):
        yield f"{ours:.4f} of requests are good, {better:.4f} under the better of all split and aggregated"


def markdown(study: PairStudy) -> str:
    """Return the page."""
    by_study: dict[str, list[PairCell]] = {}
    for cell in study.cells:
        by_study.setdefault(cell.study, []).append(cell)
    links = by_study.get("links", [])
    missed = [(cell, found) for cell in study.cells if (found := missed_of(cell))]
    text = [
        "# Which pair, over which link",
        "",
        f"Written by `python -m benchmarks.choice --part pairs --form {study.form}`: the first "
        f"{study.rows:,} requests of each trace, {study.seeds} seeds for what has bars, at most {FEW_SEEDS} "
        "for the rest and one for loads without bars, each of which delays every request by up to "
        f"{1e3 * LATE_S:g} ms, {study.origin}. All figures are in "
        f"[results](results/pairs-{study.form}.json). Mock engines answer by a formula: the page compares "
        "settings, it predicts no fleet. Figures are of the second half of the requests. How the default "
        "does against published rules that are tuned for such fleets: [policies](../replay/README.md).",
        "",
        "## Which setting for which fleet",
        "",
        *_advice(links, by_study),
        "",
        *_why_sequential(links),
        "## Links that differ, and links that are alike",
        "",
        "32 hosts with a prefill and a decode worker, in four tiers (a host, a rack of 4, a zone of 16, "
        "another zone: 400, 100, 50 and 20 Gbit/s, and all of 100), 256 KiB of KV a token, at shares of the "
        "load under which round-robin keeps 90 % of requests within 2 s to the first token and 50 ms "
        "between tokens; closed sessions wait for answers, and have one load. `sequential` (the default) "
        "and `joint` are `--router-pd-selection` under `--router-cost time`.",
        "",
        "| trace | fleet | share | joint: TTFT mean ms | p99 | ITL | good | sequential: mean | p99 | ITL "
        "| good | blocks: mean | joint / sequential |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *map(_links_line, links),
        "",
        "## Learned links",
        "",
        "At 0.8: the fleet file's links are given to the router, or it has to learn them from nothing, or it "
        "takes all for 25 Gbit/s and learns nothing. The share is of the mean TTFT that the table gains, "
        "prefill picked first; joint keeps prompts local where links are assumed to be slow.",
        "",
        "| trace | links | sequential: given | learned | assumed | share | joint: given | learned "
        "| assumed |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
        *(_learned_line(cell) for cell in links if cell.share == BAR_SHARE),
        "",
        "## A link that falls to a tenth",
        "",
        "Two zones of 2 prefill and 2 decode workers; KV within one of them travels at a tenth from one "
        "moment on. Mean TTFT of what arrived 5 s after it or later, ms.",
        "",
        "| trace | joint: known at once | learned | never known | share | sequential: known at once "
        "| learned | never known | share |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *map(_fall_line, by_study.get("a link at a tenth", [])),
        "",
        "## Prices",
        "",
        f"Links that are alike; KV between zones costs 0.02 a GB. `--router-price-weight {PRICE_WEIGHT:g}` "
        "against 0.",
        "",
        "| trace | cost | with the weight | p99 TTFT ms | with the weight |",
        "|---|--:|--:|--:|--:|",
        *map(_price_line, by_study.get("prices", [])),
        "",
        "## Prompts that stay where they are answered",
        "",
        "4 prefill and 4 decode workers: chosen together, where a decode worker may prefill for itself; all "
        "split; and 8 aggregated workers. Good: within 2 s and 50 ms.",
        "",
        "| trace | load | joint: TTFT mean ms | ITL | good | split: mean | ITL | good | aggregated: mean "
        "| ITL | good |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *map(_split_line, by_study.get("local prefill", [])),
        "",
        "## Bars that do not hold",
        "",
        *([f"- {cell.study}, {cell.key}: {'; '.join(found)}" for cell, found in missed] or ["All hold."]),
        "",
    ]
    return "\n".join(text)


def _advice(links: Sequence[PairCell], by_study: dict[str, list[PairCell]]) -> Iterator[str]:
    """One line for each kind of fleet, with the figures that say so."""
    yield "| your fleet | set | mean TTFT over the default's, all traces |"
    yield "|---|---|--:|"
    for fleet, name in ((TIERS, "links differ (racks, zones)"), (SAME_LINKS, "links are alike")):
        cells = [cell for cell in links if cell.fleet == fleet and cell.share == BAR_SHARE]
        for policy, setting in (
            (JOINT, "`--router-pd-selection joint`"),
            (EVEN, "the same, `--router-decode-weight 16`: even steps matter more"),
        ):
            ratios = [mean(_of(cell, policy).ttft_ms) / mean(_of(cell, TIME).ttft_ms) for cell in cells]
            itl = [mean(_of(cell, policy).itl_ms) / mean(_of(cell, TIME).itl_ms) for cell in cells]
            if ratios:
                yield (
                    f"| {name} | {setting} | {min(ratios):.2f} to {max(ratios):.2f} (between tokens "
                    f"{min(itl):.2f} to {max(itl):.2f}) |"
                )
    prices = by_study.get("prices", [])
    if prices:
        costs = [(mean(_of(cell, PRICED).cost), mean(_of(cell, JOINT).cost)) for cell in prices]
        saved = [1.0 - priced / free for priced, free in costs if free]
        if saved:
            setting = f"the first, and `--router-price-weight {PRICE_WEIGHT:g}`"
            yield f"| KV between zones costs money | {setting} | {min(saved):.0%} of it saved |"


def _why_sequential(links: Sequence[PairCell]) -> Iterator[str]:
    """What joint has over the default, and why it is none."""
    cells = [cell for cell in links if cell.share == BAR_SHARE]
    ratios = [mean(_of(cell, JOINT).ttft_ms) / mean(_of(cell, TIME).ttft_ms) for cell in cells]
    if ratios:
        yield (
            f"Picked together, the mean TTFT is {min(ratios):.2f} to {max(ratios):.2f} of the default's. It "
            "is not on by default for what it does besides: decode workers prefill what is short, which only "
            "an operator can say of engines that were set up to decode. "
            "[`kvrouter worth`](../../docs/worth.md) says what it would bring your traffic."
        )
        yield ""


def _links_line(cell: PairCell) -> str:
    ours, sequential = _of(cell, JOINT), _of(cell, TIME)
    cells = [CASES[cell.case].name, cell.fleet, f"{cell.share:g}"]
    for each in (ours, sequential):
        cells += [*_times(each), f"{mean(each.good):.3f}"]
    cells.append(ms(_of(cell, BLOCKS_RULE).ttft_ms))
    return joined([*cells, f"{mean(ours.ttft_ms) / mean(sequential.ttft_ms):.3f}"])


def _learned_line(cell: PairCell) -> str:
    cells = [CASES[cell.case].name, cell.fleet]
    cells += [ms(_of(cell, TIME, links).ttft_ms) for links in (GIVEN, LEARNED, ASSUMED)]
    cells.append(_share(gained(cell)))
    cells += [ms(_of(cell, JOINT, links).ttft_ms) for links in (GIVEN, LEARNED, ASSUMED)]
    return joined(cells)


def _fall_line(cell: PairCell) -> str:
    cells = [CASES[cell.case].name]
    for policy in (JOINT, TIME):
        cells += [ms(_of(cell, policy, links).ttft_ms) for links in (AT_ONCE, GIVEN, NEVER)]
        cells.append(_share(shifted(cell, policy)))
    return joined(cells)


def _price_line(cell: PairCell) -> str:
    free, priced = _of(cell, JOINT), _of(cell, PRICED)
    costs = [f"{mean(each.cost):.2f}" for each in (free, priced)]
    return joined([CASES[cell.case].name, *costs, ms(free.ttft_p99_ms), ms(priced.ttft_p99_ms)])


def _split_line(cell: PairCell) -> str:
    cells = [CASES[cell.case].name, f"{cell.load:g}"]
    for each in (_of(cell, JOINT), _of(cell, TIME), _of(cell, TIME, AGGREGATED)):
        cells += [ms(each.ttft_ms), f"{mean(each.itl_ms):.1f}", f"{mean(each.good):.4f}"]
    return joined(cells)


def _times(figures: PairFigures) -> list[str]:
    return [ms(figures.ttft_ms), ms(figures.ttft_p99_ms), f"{mean(figures.itl_ms):.1f}"]


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def ms(values: Sequence[float]) -> str:
    """Return their mean, in whole milliseconds."""
    return f"{mean(values):,.0f}"
