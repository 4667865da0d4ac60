"""``kvrouter hit-rate``: the ladder of a recording's hit rate, from the possible hits to the actual ones."""

from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.cli.hit_rate.flags import HitRateOptions
from kvrouter.cli.output import json_text
from kvrouter.cli.progress import working
from kvrouter.cli.replay.input_options import name_shown
from kvrouter.cli.replay.recorded_inputs import open_past
from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_engines import MockEngineSpec
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.fleet_workers import numbered_workers
from kvrouter.recording.schema import Worker
from kvrouter.settings.problems import read_document
from kvrouter.settings.setting import installed_version
from kvrouter.sim.past.fleet_history import FleetHistory
from kvrouter.sim.past.hit_ladder import CAUSES, HitCounts, HitLadder, Rung, RungFigure
from kvrouter.sim.past.hit_rate import hit_ladder
from kvrouter.sim.past.recorded_fleet import group_place, match, place_of

_RUNGS = {
    Rung.PROMPTS: "all prompt tokens",
    Rung.ENDLESS: "an endless cache, shared by all",
    Rung.FLEET: "one cache of the fleet's size",
    Rung.PERFECT: "perfect routing: most of its prefix, whatever the load",
    Rung.NEAREST: "the worker that had most, at each decision",
    Rung.CHOSEN: "the worker that was chosen",
    Rung.EXPECTED: "ours: what the router expected there",
    Rung.ENGINES: "the engines' own count",
}


class HitRateReport(msgspec.Struct, frozen=True):
    """The ladder, and its inputs; ``fleet`` is the file with the workers' sizes, None for the recorded."""

    version: str
    recording: str
    model: str
    fleet: str | None
    from_s: float
    ladder: HitLadder


def run_hit_rate(options: HitRateOptions, console: Console) -> int:
    """Read a recording, and print its ladder. Returns the exit code. Raises ConfigError."""
    options.output.check()
    report = hit_rate_of(options.recording, options.model, options.fleet)
    options.output.show(lambda: json_text(report), lambda: show_hit_rate(report, console))
    return 0


def hit_rate_of(recording: Path, model: str | None, fleet: Path | None = None) -> HitRateReport:
    """Return the ladder of a recording; ``fleet`` is a fleet file with other sizes of its workers. Raises
    ConfigError.
    """
    with working(f"reading {name_shown(recording)}"):
        past = open_past(recording, model)
    sizes = None
    if fleet is not None:
        sizes = _sizes_in(load_fleet(read_document(fleet)).fleet, past.fleet, fleet)
    with working("filling caches with what was recorded", total=1.0) as progress:
        ladder = hit_ladder(past, sizes, on_share=lambda share: progress.show(done=share))
    return HitRateReport(
        version=installed_version(),
        recording=name_shown(recording),
        model=past.fleet.model,
        fleet=None if fleet is None else name_shown(fleet),
        from_s=past.from_s,
        ladder=ladder,
    )


def _sizes_in(file: FleetFile, history: FleetHistory, path: Path) -> Callable[[Worker], int | None]:
    """Return the recorded workers' numbers of KV blocks in a fleet file with the same workers.

    Raises ConfigError for other workers. A worker that joined later has the blocks of its role and domains.
    """
    found, mismatch = match(history, file)
    if found is None:
        raise ConfigError(f"fleet: {path} has not the recorded workers: {mismatch}", param="fleet")
    numbers = found.numbers
    by_id: dict[int, int] = {}
    by_place: dict[Hashable, int] = {}
    for worker_id, group in numbered_workers(file):
        if isinstance(group.engine, MockEngineSpec):
            by_id[worker_id] = group.engine.total_kv_blocks
            by_place.setdefault(group_place(group), group.engine.total_kv_blocks)

    def kv_blocks_of(worker: Worker) -> int | None:
        number = numbers.get(worker.worker)
        known = None if number is None else by_id.get(number)
        return by_place.get(place_of(worker), worker.kv_blocks) if known is None else known

    return kv_blocks_of


def show_hit_rate(report: HitRateReport, console: Console) -> None:
    """Print the rungs with the losses between them, and the remedy for the largest loss."""
    ladder = report.ladder
    title = f"{report.recording}: {ladder.facts.requests:,} requests, {ladder.facts.prompt_tokens:,} tokens"
    table = Table(title=Text(title))
    table.add_column("found in caches, and lost", overflow="fold")
    table.add_column("tokens", justify="right")
    table.add_column("%", justify="right")
    table.add_column("why", overflow="fold")
    for figure in ladder.rungs:
        table.add_row(Text(_RUNGS[figure.rung]), f"{figure.tokens:,}", _percent(figure.share), _note(figure))
        for loss in (each for each in ladder.losses if each.after is figure.rung):
            name = loss.cause.replace("_", " ")
            table.add_row(
                Text(f"  - {name}"), f"-{loss.tokens:,}", f"-{_percent(loss.share)}", Text(loss.why)
            )
        gained = ladder.facts.found_unexpected_tokens
        if figure.rung is Rung.EXPECTED and gained:
            share = gained / ladder.facts.prompt_tokens
            table.add_row("  + unseen", f"+{gained:,}", f"+{_percent(share)}", "found all the same, as above")
    console.print(table)
    if ladder.largest is not None:
        loss = next(each for each in ladder.losses if each.cause is ladder.largest)
        name = loss.cause.replace("_", " ")
        console.print(
            Text(f"Largest loss that can be changed: {name}, {_percent(loss.share)} %: {loss.why}."),
            soft_wrap=True,
        )
        console.print(Text(f"What helps: {CAUSES[loss.cause].remedy}."), soft_wrap=True)
    for larger in ladder.larger:
        console.print(
            f"with {larger.factor} times the KV blocks one cache of the fleet's size has "
            f"{_percent(larger.share)} %",
            soft_wrap=True,
        )
    for line in _count_lines(ladder.facts):
        console.print(Text(line), soft_wrap=True)


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f}"


def _note(figure: RungFigure) -> Text:
    if figure.simulated_tokens is None:
        return Text("")
    return Text(
        f"the model alone finds {figure.simulated_tokens:,}; a rung below shows that more is possible"
    )


def _count_lines(counts: HitCounts) -> Iterator[str]:
    if counts.fleet_blocks is not None:
        yield f"the fleet has {counts.fleet_blocks:,} KV blocks where prompts are computed"
    if counts.workers_without_size:
        yield (
            f"{counts.workers_without_size:,} workers do not say how many KV blocks they have: taken to be "
            "endless; --fleet says it"
        )
    if counts.warm_up_tokens:
        yield (
            f"{counts.warm_up_tokens:,} tokens first seen are the beginning of the recording: more than its "
            "last quarter has"
        )
    if counts.beyond_tokens:
        yield (
            f"{counts.beyond_tokens:,} tokens were cached although no recorded request had them: caches were "
            "warm at the start, and an answer is the beginning of a next turn"
        )
    if counts.found_unexpected_tokens:
        yield (
            f"{counts.found_unexpected_tokens:,} tokens were found by engines and not expected by the router"
            "; the engines' count may stand above the router's for them"
        )
    if counts.unreported:
        yield (
            f"{counts.unreported:,} requests ({counts.unreported_tokens:,} tokens) have no count of their "
            "engine; the last rung has what was expected"
        )
    if counts.left_out:
        yield f"{counts.left_out:,} requests reached no worker, and are left out"
    if counts.media:
        yield f"{counts.media:,} requests have prompts that are not all text"
    if counts.adapters:
        yield f"{counts.adapters:,} requests named an adapter: their blocks are those of no other one"
    if counts.workers_left:
        yield (
            f"{counts.workers_left:,} times a worker left or started again; {counts.blocks_left:,} cached "
            "blocks went with it"
        )
