"""The page of pairs: which setting is for which fleet, each bar with what was measured, and which fail."""

from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from statistics import mean, stdev

import msgspec

from benchmarks.choice.aggregated import FEW_SEEDS, best_of
from benchmarks.choice.page import joined, ms
from benchmarks.choice.pairs import (
    AGGREGATED,
    ASSUMED,
    AT_ONCE,
    BAR_SHARE,
    BLOCKS_RULE,
    EVEN,
    GIVEN,
    JOINT,
    LEARNED,
    NEVER,
    PRICE_WEIGHT,
    PRICED,
    TIME,
    PairCell,
    PairFigures,
)
from benchmarks.http_replay.machine import Commit, Machine
from benchmarks.replay.cases import CASES, LATE_S

OF_THE_BEST = 1.0 - 0.176
P99_OF_THE_BEST = 0.8
"""Where links differ: TTFTs on the conversation trace over those of the best published rule, at most."""

LOSS = 0.01
P99_LOSS = 0.03
"""Where links are alike: the upper bound of what is lost to the best published rule."""

OF_THE_TABLE = 0.95
"""Learned links: the share of what a given table gains."""

OF_KNOWING = 0.9
"""A link at a tenth: the share of what knowing it at once gains."""

SAVED = 0.9
PRICED_LOSS = 0.03
"""Prices: the share of the cost that is saved, for so much of the p99 TTFT at most."""

SHORT_NAMES = {
    JOINT: "joint",
    TIME: "sequential",
    BLOCKS_RULE: "blocks",
    EVEN: "joint, weight 16",
    PRICED: "joint, priced",
}


class PairStudy(msgspec.Struct, frozen=True):
    """All that was measured of pairs in one run."""

    form: str
    measured_at: str
    commit: Commit
    machine: Machine
    rows: int
    seeds: int
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


def best_rule(cell: PairCell) -> PairFigures:
    """Return the best of the published rules."""
    return best_of(each for each in cell.figures if each.policy not in SHORT_NAMES)


def _of(cell: PairCell, policy: str, links: str = GIVEN) -> PairFigures:
    return next(each for each in cell.figures if (each.policy, each.links) == (policy, links))


def _links_missed(cell: PairCell) -> Iterator[str]:
    if cell.share != BAR_SHARE:
        return
    ours, best = _of(cell, JOINT), best_rule(cell)
    if cell.fleet == "alike":
        for what, one, other, most in (
            ("mean TTFT", ours.ttft_ms, best.ttft_ms, LOSS),
            ("mean ITL", ours.itl_ms, best.itl_ms, LOSS),
            ("requests not good", _not_good(ours), _not_good(best), LOSS),
            ("p99 TTFT", ours.ttft_p99_ms, best.ttft_p99_ms, P99_LOSS),
        ):
            bound = upper_bound(one, other)
            if round(bound, 4) > most:
                yield f"{what} up to {100 * bound:.1f} % more than under {best.policy}, wanted {100 * most:g}"
    elif CASES[cell.case].name == "conversation":
        for what, one, other, most in (
            ("mean TTFT", ours.ttft_ms, best.ttft_ms, OF_THE_BEST),
            ("p99 TTFT", ours.ttft_p99_ms, best.ttft_p99_ms, P99_OF_THE_BEST),
        ):
            if round(mean(one) / mean(other), 3) > most:
                yield f"{what} {mean(one) / mean(other):.3f} of {best.policy}'s, wanted {most:g}"
    if cell.fleet == "tiers" and (share := gained(cell)) is not None and round(share, 3) < OF_THE_TABLE:
        yield f"learned links gain {100 * share:.0f} % of what given ones do, wanted {100 * OF_THE_TABLE:g}"


def _not_good(figures: PairFigures) -> tuple[float, ...]:
    """The share of requests that are not good, added to 1, so that a ratio of them is a change in goodput."""
    return tuple(2.0 - good for good in figures.good)


def upper_bound(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return the upper 95 % bound of how much more ours is, over seeds that are paired."""
    losses = [one / other - 1.0 for one, other in zip(ours, others, strict=True)]
    spread = stdev(losses) / sqrt(len(losses)) if len(losses) > 1 else 0.0
    return mean(losses) + 1.96 * spread


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
        f"{study.rows:,} requests of each trace, {study.seeds} seeds for what has bars, {FEW_SEEDS} for the "
        "rest and one for loads without bars, each of which delays every request by up to "
        f"{1e3 * LATE_S:g} ms, commit "
        f"{study.commit.id}{' with changes' * study.commit.changed}, {study.machine.cpu}, "
        f"{study.machine.cores} cores. All figures are in [results](results/pairs-{study.form}.json). Mock "
        "engines answer by a formula: the page compares rules, it predicts no fleet. Figures are of the "
        "second half of the requests.",
        "",
        "## Which setting for which fleet",
        "",
        *_advice(links, by_study),
        "",
        *_why_sequential(links),
        *_without_policy(links),
        "## Links that differ, and links that are alike",
        "",
        "32 prefill and 32 decode workers in four tiers (a host, a rack of 4, a zone of 16, another zone: "
        "400, 100, 50 and 20 Gbit/s, and all of 100), 256 KiB of KV a token, at shares of the load under "
        "which round-robin keeps 90 % of requests within 2 s to the first token and 50 ms between tokens. "
        "`joint` and `sequential` are `--router-pd-selection` under `--router-cost time`. The best rule is "
        "the best of the published ones, each with the parameters that did best on the first half at 0.8.",
        "",
        "| trace | links | share | joint: TTFT mean ms | p99 | ITL | good | sequential: mean | p99 | ITL "
        "| best rule | mean | p99 | ITL | good | joint / best |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|",
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
    yield (
        "| your fleet | set | mean TTFT, all four traces, over the best published rule's, none with a "
        "transfer policy |"
    )
    yield "|---|---|--:|"
    names = {"tiers": "links differ (racks, zones)", "alike": "links are alike"}
    for fleet, name in names.items():
        cells = [cell for cell in links if cell.fleet == fleet and cell.share == BAR_SHARE]
        for policy, setting in (
            (JOINT, "`--router-cost time --router-pd-selection joint`"),
            (EVEN, "the same, `--router-decode-weight 16`: even steps matter more"),
            (TIME, "nothing: `--router-cost time` is the default"),
        ):
            ratios = [mean(_of(cell, policy).ttft_ms) / mean(best_rule(cell).ttft_ms) for cell in cells]
            itl = [mean(_of(cell, policy).itl_ms) / mean(best_rule(cell).itl_ms) for cell in cells]
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


BOUND = (
    "Who knows the links binds them: with `required` on host, Dynamo's rule takes 259 ms on conversations "
    "over tiers, where joint takes 244 without a policy (0.94; commit b8c2e502), and in two zones joint "
    "takes 0.72 of a rule that is bound to the zone."
)
"""Measured aside from this page's replays, whose published rules have no policy."""


def _without_policy(links: Sequence[PairCell]) -> Iterator[str]:
    """What the comparison with rules that no policy binds means, and what becomes of `blocks` then."""
    blocks = [
        mean(_of(cell, BLOCKS_RULE).ttft_ms) / 1e3
        for cell in links
        if cell.fleet == "tiers" and cell.share == BAR_SHARE
    ]
    if blocks:
        yield (
            "The published rules run here without a transfer policy, so they send KV over the slowest links "
            f"too, and so does `blocks`: its mean is {min(blocks):.0f} to {max(blocks):.0f} s over tiers. "
            "So the column says what the cost of time finds without an operator who knows the links, and "
            f"not how far it is ahead of peers that are set up for them. {BOUND}"
        )
        yield ""


def _links_line(cell: PairCell) -> str:
    ours, sequential, best = _of(cell, JOINT), _of(cell, TIME), best_rule(cell)
    cells = [CASES[cell.case].name, cell.fleet, f"{cell.share:g}"]
    cells += [*_times(ours), f"{mean(ours.good):.3f}", *_times(sequential)]
    cells += [best.policy, *_times(best), f"{mean(best.good):.3f}"]
    return joined([*cells, f"{mean(ours.ttft_ms) / mean(best.ttft_ms):.3f}"])


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
