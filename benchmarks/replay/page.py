"""The page of the results: tables, and a plot for each trace."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import msgspec

from benchmarks.http_replay.machine import Commit, Machine
from benchmarks.replay.cases import Cell
from benchmarks.replay.measure import ZoneCell
from kvrouter.sim.page.markup import element
from kvrouter.sim.summary import interval
from kvrouter.sim.variant import OURS

BAR_PX = 16
WIDTH_PX = 760
NAME_PX = 300
LEAST_MS = 1.0


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


def markdown(study: Study, plots: Sequence[str]) -> str:
    """The page."""
    head = [
        "# What replays say of policies",
        "",
        f"Written by `python -m benchmarks.replay --form {study.form}`: the first {study.rows:,} requests of "
        f"each trace, {study.seeds} seeds, commit {study.commit.id}, {study.machine.cpu}, "
        f"{study.machine.cores} cores. The figures stand in [results](results/{study.form}.json). "
        "Mock engines answer by a formula: the page compares policies, it predicts no fleet.",
        "",
        "A policy's figures are of the second half of the requests. One that has parameters has those that "
        "did best on the first half ([tuned](../../docs/replay.md#policies)); `kvrouter` stands there as "
        "it is set by default, tuned, and under the transfer policies that keep KV in its zone. ± is a 95 % "
        "interval over seeds; rules that draw nothing have none.",
        "",
    ]
    return "\n".join(
        [*head, *_zones(study.zones), *_ranking(study.cells), *_lost(study.cells), *_plots(plots)]
    )


def _zones(cells: Sequence[ZoneCell]) -> list[str]:
    lines = [
        "## One deployment over zones, or one for each",
        "",
        "The workaround for engines that must not send KV across zones is a deployment for each zone behind "
        "a gateway that takes turns. Both have 2 prefill and 2 decode workers a zone; the conversation trace "
        "comes twice as fast. In the lower rows zone a loses its decode workers after a third of the time.",
        "",
        "| zones | setup | decoders of a | TTFT mean ms | p99 ms | good % | cached % | failed |",
        "|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {cell.zones} | {cell.setup} | {'lost' if cell.loses_decoders else 'there'} "
        f"| {spread(cell.ttft_ms)} | {spread(cell.ttft_p99_ms)} | {spread(cell.good, 100, 1)} "
        f"| {spread(cell.cached, 100, 1)} | {spread([float(count) for count in cell.failed])} |"
        for cell in sorted(cells, key=lambda cell: (cell.loses_decoders, cell.zones))
    ]
    return [*lines, ""]


def groups(cells: Sequence[Cell]) -> dict[tuple[str, float, float], list[Cell]]:
    """The cells of each trace, load and ratio; the best first: few failed, soon answered."""
    found: dict[tuple[str, float, float], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.case, cell.load, cell.ratio), []).append(cell)
    for group in found.values():
        group.sort(key=lambda cell: (mean(cell.failed), mean(cell.ttft_ms)))
    return found


def _ranking(cells: Sequence[Cell]) -> list[str]:
    lines = ["## Policies, links and loads", ""]
    for (case, load, ratio), group in groups(cells).items():
        links = "all links alike" if ratio == 1 else f"links between zones {ratio:g} times slower"
        lines += [
            f"### {case}, {load:g} times as fast, {links}",
            "",
            "| policy | TTFT mean ms | p99 ms | good % | cached % | failed | GB between zones |",
            "|---|--:|--:|--:|--:|--:|--:|",
        ]
        lines += [
            f"| {cell.policy} | {spread(cell.ttft_ms)} | {spread(cell.ttft_p99_ms)} "
            f"| {spread(cell.good, 100, 1)} | {spread(cell.cached, 100, 1)} "
            f"| {spread([float(count) for count in cell.failed])} | {spread(cell.crossing_gb)} |"
            for cell in group
        ]
        lines.append("")
    return lines


def _lost(cells: Sequence[Cell]) -> list[str]:
    lines = [
        "## Where ours loses",
        "",
        "The best of ours, over what a peer's tuned rule has, where that has less mean TTFT.",
        "",
        "| trace | load | ratio of links | ours | ms | peer's | ms | ours / theirs |",
        "|---|--:|--:|---|--:|---|--:|--:|",
    ]
    for (case, load, ratio), group in groups(cells).items():
        ours = next(cell for cell in group if cell.policy.split(":")[0].split(",")[0] == OURS)
        for cell in group:
            if cell is ours:
                break
            times = mean(ours.ttft_ms) / max(LEAST_MS, mean(cell.ttft_ms))
            lines.append(
                f"| {case} | {load:g} | {ratio:g} | {ours.policy} | {spread(ours.ttft_ms)} | {cell.policy} "
                f"| {spread(cell.ttft_ms)} | {times:.2f} |"
            )
    return [*lines, ""]


def _plots(plots: Sequence[str]) -> list[str]:
    return ["## Plots", "", *(f"![mean TTFT by policy: {Path(name).stem}]({name})\n" for name in plots)]


def plot(case: str, cells: Sequence[Cell]) -> str:
    """Bars of mean TTFT by policy, at the most load of a trace; a group for each ratio of links."""
    load = max(cell.load for cell in cells)
    parts: list[str] = []
    y = 0
    for (_, _, ratio), group in groups([cell for cell in cells if cell.load == load]).items():
        most = max(mean(cell.ttft_ms) for cell in group) or LEAST_MS
        y += BAR_PX + 4
        parts.append(_text(0, y, f"{case}, {load:g} times as fast; links {ratio:g} : 1", weight="bold"))
        for cell in group:
            y += BAR_PX + 4
            value = mean(cell.ttft_ms)
            width = (WIDTH_PX - NAME_PX - 80) * value / most
            colour = "#2563eb" if cell.policy.startswith(OURS) else "#94a3b8"
            parts.append(_text(NAME_PX - 8, y, cell.policy, anchor="end"))
            parts.append(
                element(
                    "rect", x=NAME_PX, y=y - BAR_PX + 4, width=round(width, 1), height=BAR_PX, fill=colour
                )
            )
            parts.append(_text(NAME_PX + width + 6, y, f"{value:,.0f} ms"))
        y += BAR_PX
    background = element("rect", width=WIDTH_PX, height=y, fill="white")
    return str(
        element(
            "svg", background, *parts, xmlns="http://www.w3.org/2000/svg", width=WIDTH_PX, height=y,
            role="img", font_family="sans-serif", font_size=12,
        )
    )  # fmt: skip


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return element("text", text, x=round(x, 1), y=y, text_anchor=anchor, font_weight=weight, fill="#0f172a")
