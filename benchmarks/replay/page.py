"""The page of the results, and a second one with the figures of every policy."""

from collections.abc import Callable, Sequence
from statistics import mean

import msgspec

from benchmarks.http_replay.machine import Commit, Machine
from benchmarks.replay.cases import Cell, ZoneCell
from benchmarks.replay.plots import Bar, Group, is_ours, plot
from benchmarks.replay.policies import TUNED
from benchmarks.replay.zones import ONE
from kvrouter.sim.replay.summary import interval

LEAST_MS = 1.0
CLOSE = 1.05
"""A policy whose mean TTFT is at most so many times the best one's is close to it."""

Where = tuple[str, float, float]
"""A trace, a load and a ratio of links."""


class Study(msgspec.Struct, frozen=True):
    """All that was measured in one run."""

    form: str
    measured_at: str
    commit: Commit
    machine: Machine
    rows: int
    seeds: int
    zones: tuple[ZoneCell, ...]
    cells: tuple[Cell, ...]


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 0) -> str:
    """A mean with its 95 % interval over seeds."""
    found = interval([value * scale for value in values])
    shown = f"{found.mean:,.{digits}f}"
    within = f"{found.within:,.{digits}f}"
    return shown if float(within.replace(",", "")) == 0.0 else f"{shown} ± {within}"


def ranked(cells: Sequence[Cell]) -> dict[Where, list[Cell]]:
    """The cells of each trace, load and ratio; the best first: few failed, soon answered."""
    found: dict[Where, list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.case, cell.load, cell.ratio), []).append(cell)
    for group in found.values():
        group.sort(key=lambda cell: (mean(cell.failed), mean(cell.ttft_ms)))
    return found


def rule(policy: str) -> str:
    """Return a policy without its parameters; those of ours stay apart by how they are set."""
    return policy.partition(":")[0] if is_ours(policy) else policy.partition(":")[0].partition(",")[0]


def markdown(study: Study, plots: Sequence[tuple[str, str]]) -> str:
    """Return the page; ``plots`` are titles and paths."""
    head = [
        "# What replays say of policies",
        "",
        f"Written by `python -m benchmarks.replay --form {study.form}`: the first {study.rows:,} requests of "
        f"each trace, {study.seeds} seeds, commit {study.commit.id}{' with changes' * study.commit.changed}, "
        f"{study.machine.cpu}, {study.machine.cores} cores. All figures, and all that was tried, stand in "
        f"[results](results/{study.form}.json), those of every policy [in tables](results/{study.form}.md). "
        "Mock engines answer by a formula: the page compares policies, it predicts no fleet.",
        "",
        "Two zones have 2 prefill and 2 decode workers each; links between them are as fast as those "
        "within, 4 times or 20 times slower. A policy's figures are of the second half of the requests, "
        "with the parameters that did best on the first half, of 12 points at most. For a peer's rule, "
        "keeping KV in its zone (`required`) is one of them. `kvrouter` stands there as its default was at"
        " that commit, under `preferred` and under `required`, and tuned. Sessions of coding agents are "
        "replayed in a closed loop, the other traces by time stamp. good / s is by the time of arrivals. "
        "± is a 95 % interval over seeds; what draws nothing has none. Round-robin takes its turns for "
        "prefill and for decode in step, so its pairs stay in a zone without a policy. The conversation "
        "trace names no sessions: there sticky sessions are the fewest requests.",
        "",
    ]
    return "\n".join([*head, *_zones(study.zones), *_wins(study.cells), *_lost(study.cells), *_plots(plots)])


def _zones(cells: Sequence[ZoneCell]) -> list[str]:
    lines = [
        "## One deployment over zones, or one for each",
        "",
        "The workaround for engines that must not send KV across zones is a deployment for each zone behind "
        "a gateway that takes turns. Both have 2 prefill and 2 decode workers a zone; the conversation trace "
        "comes twice as fast. In the lower rows zone a loses its decode workers after a third of the time.",
        "",
        "| zones | setup | decoders of a | TTFT mean ms | p99 ms | good % | good / s | cached % | failed |",
        "|--:|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {cell.zones} | {cell.setup} | {'lost' if cell.loses_decoders else 'there'} "
        f"| {spread(cell.ttft_ms)} | {spread(cell.ttft_p99_ms)} | {spread(cell.good, 100, 1)} "
        f"| {spread(cell.good_per_s, 1, 2)} | {spread(cell.cached, 100, 1)} | {_count(cell.failed)} |"
        for cell in sorted(cells, key=lambda cell: (cell.loses_decoders, cell.zones))
    ]
    return [*lines, ""]


def _wins(cells: Sequence[Cell]) -> list[str]:
    groups = ranked(cells)
    best_of = {where: group[0] for where, group in groups.items()}
    rules = list(dict.fromkeys(rule(cell.policy) for cell in cells))
    lines = [
        "## Where each wins",
        "",
        "Of all traces, loads and ratios of links: how often a policy had the least mean TTFT, how often it "
        f"came within {CLOSE - 1:.0%} of that, and its mean TTFT over the least one, at the median and the "
        "worst. Who has more failures than another is behind it.",
        "",
        f"| policy | best of {len(groups)} | close | median × | worst × |",
        "|---|--:|--:|--:|--:|",
    ]
    found: list[tuple[int, int, float, str]] = []
    for name in rules:
        times = sorted(
            _times(cell, best_of[where])
            for where, group in groups.items()
            for cell in group
            if rule(cell.policy) == name
        )
        best = sum(rule(cell.policy) == name for cell in best_of.values())
        close = sum(each <= CLOSE for each in times)
        median = times[len(times) // 2]
        row = f"| {name} | {best} | {close} | {median:.2f} | {times[-1]:,.2f} |"
        found.append((-best, -close, median, row))
    lines += [row for *_, row in sorted(found)]
    lines += [
        "",
        "| trace | load | links | best | mean TTFT ms | next of another kind | × | round-robin × |",
        "|---|--:|--:|---|--:|---|--:|--:|",
    ]
    for (case, load, ratio), group in groups.items():
        first = group[0]
        other = next((cell for cell in group if is_ours(cell.policy) != is_ours(first.policy)), first)
        turns = next((cell for cell in group if rule(cell.policy) == "round-robin"), first)
        lines.append(
            f"| {case} | {load:g} | {ratio:g} | {first.policy} | {spread(first.ttft_ms)} | {other.policy} "
            f"| {_times(other, first):.2f} | {_times(turns, first):.2f} |"
        )
    return [*lines, ""]


def _lost(cells: Sequence[Cell]) -> list[str]:
    lines = [
        "## Where ours loses",
        "",
        "Ours as it is tuned, over a peer's tuned rule, where that has less mean TTFT, or fewer failures.",
        "",
        "| trace | load | links | ours | ms | peer's | ms | ours / theirs |",
        "|---|--:|--:|---|--:|---|--:|--:|",
    ]
    n_head = len(lines)
    for (case, load, ratio), group in ranked(cells).items():
        ours = next(cell for cell in group if rule(cell.policy) == TUNED)
        for cell in group:
            if cell is ours:
                break
            if is_ours(cell.policy):
                continue
            lines.append(
                f"| {case} | {load:g} | {ratio:g} | {ours.policy} | {spread(ours.ttft_ms)} | {cell.policy} "
                f"| {spread(cell.ttft_ms)} | {_times(ours, cell):.2f} |"
            )
    return [*lines, ""] if len(lines) > n_head else [*lines[:2], "Nowhere.", ""]


def _plots(plots: Sequence[tuple[str, str]]) -> list[str]:
    return ["## Plots", "", *(f"![{title}]({path})\n" for title, path in plots)]


def tables(study: Study) -> str:
    """Return the second page: the figures of every policy."""
    lines = [f"# Figures of every policy, {study.form} form", ""]
    for (case, load, ratio), group in ranked(study.cells).items():
        lines += [
            f"## {case}, {load:g} times as fast, {_links(ratio)}",
            "",
            "| policy | TTFT mean ms | p99 ms | good % | good / s | cached % | failed | GB between zones |",
            "|---|--:|--:|--:|--:|--:|--:|--:|",
        ]
        lines += [
            f"| {cell.policy} | {spread(cell.ttft_ms)} | {spread(cell.ttft_p99_ms)} "
            f"| {spread(cell.good, 100, 1)} | {spread(cell.good_per_s, 1, 2)} "
            f"| {spread(cell.cached, 100, 1)} | {_count(cell.failed)} | {spread(cell.crossing_gb)} |"
            for cell in group
        ]
        lines.append("")
    return "\n".join(lines)


def zones_plot(cells: Sequence[ZoneCell]) -> tuple[str, str]:
    """Return the title and the plot of one deployment against one for each zone."""
    figures: tuple[tuple[str, Callable[[ZoneCell], float], str], ...] = (
        ("cached, % of prompt tokens", lambda cell: mean(cell.cached) * 100, "{:.1f} %"),
        ("TTFT p99, ms", lambda cell: mean(cell.ttft_p99_ms), "{:,.0f} ms"),
        ("good requests a second", lambda cell: mean(cell.good_per_s), "{:.2f}"),
        ("failed requests", lambda cell: mean(cell.failed), "{:,.0f}"),
    )
    ordered = sorted(cells, key=lambda cell: (cell.loses_decoders, cell.zones))
    groups: list[Group] = []
    for title, value, form in figures:
        bars = [
            Bar(
                f"{cell.zones} zones, {cell.setup}{', decoders of a lost' * cell.loses_decoders}",
                value(cell),
                form.format(value(cell)),
                cell.setup == ONE,
            )
            for cell in ordered
        ]
        groups.append(Group(title, bars))
    title = "One deployment over zones against one for each"
    return title, plot(title, groups)


def case_plot(case: str, cells: Sequence[Cell]) -> tuple[str, str]:
    """Return the title and the plot of a trace: mean TTFT by policy, for each load and ratio of links."""
    groups = [
        Group(
            f"{case}, {load:g} times as fast, {_links(ratio)}",
            [
                Bar(cell.policy, mean(cell.ttft_ms), f"{mean(cell.ttft_ms):,.0f} ms", is_ours(cell.policy))
                for cell in group
            ],
        )
        for (_, load, ratio), group in ranked(cells).items()
    ]
    title = f"Mean TTFT by policy, {case}"
    return title, plot(title, groups)


def _times(cell: Cell, best: Cell) -> float:
    return max(LEAST_MS, mean(cell.ttft_ms)) / max(LEAST_MS, mean(best.ttft_ms))


def _count(values: Sequence[int]) -> str:
    return spread([float(value) for value in values])


def _links(ratio: float) -> str:
    return "all links alike" if ratio == 1 else f"links between zones {ratio:g} times slower"
