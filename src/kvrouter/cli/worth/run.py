"""``kvrouter worth``: what each transfer policy and router mode would change, and whether to switch."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.cli.output import json_text
from kvrouter.cli.progress import Progress, working
from kvrouter.cli.replay.input_options import InputOptions, WorthOptions
from kvrouter.cli.replay.inputs import ReplayInputs, open_inputs
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import INTERRUPTED, ConfigError
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.settings.problems import read_document
from kvrouter.settings.setting import installed_version
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.comparison import NOTHING
from kvrouter.sim.replay.percentiles import samples_needed
from kvrouter.sim.replay.simulation import Beat
from kvrouter.sim.replay.summary import Objective
from kvrouter.sim.replay.timetable import TimetableEntry, entry_of
from kvrouter.sim.replay.variant import VARIANTS_MAX, Variant
from kvrouter.sim.worth.advice import Advice, Alternative, advise, n_decisive
from kvrouter.sim.worth.transfer_choices import (
    COMPARED_COSTS,
    TransferChoice,
    check_events,
    choice_of,
    other_choices,
    variant_of,
)
from kvrouter.sim.worth.upgraded import UpgradedWorkers, pair_capacity_of, parse_upgraded, upgraded_fleet
from kvrouter.sim.worth.worth import (
    PARTS,
    Change,
    Changes,
    Figure,
    FigureName,
    Rows,
    changes_of,
    check_length,
    compared_figures,
    figures_of,
    rows_of,
)


class Today(msgspec.Struct, frozen=True):
    """The fleet file as it is: its choice, the number of its replayed seeds, its figures."""

    name: str
    choice: TransferChoice
    seeds: int
    figures: dict[FigureName, float]


class AmidUpgrade(msgspec.Struct, frozen=True):
    """Today's choice while some ``prefill`` workers, and some of those that ``decode``, have another KV
    format: the share of the capacity of pairs that is left, and how figures change.
    """

    name: str
    prefill: UpgradedWorkers
    decode: UpgradedWorkers
    pair_capacity: float
    seeds: int
    changes: Changes


class WorthReport(msgspec.Struct, frozen=True):
    """The report of a comparison, as written to JSON. KV crosses between domains of ``level``.

    Interrupted, ``today`` is None if it was not replayed to its end, and ``alternatives`` are the finished
    ones; ``events`` happened in all of them. ``advice`` is about them, None without any. ``upgrades`` are
    today's choice in fleets amid an upgrade.
    """

    version: str
    trace: str
    format: str
    dispatch: str
    objective: Objective
    requests: int
    parts: int
    threshold: float
    level: str
    is_whole: bool
    events: tuple[TimetableEntry, ...]
    today: Today | None
    alternatives: tuple[Alternative, ...]
    advice: Advice | None
    upgrades: tuple[AmidUpgrade, ...] = ()
    notes: tuple[str, ...] = ()
    """What the trace does not say, and the changes of a recording's fleet."""


def worth(options: WorthOptions, input_options: InputOptions, console: Console) -> int:
    """Replay today's choice and every other one; print changes and an advice, and write the requested files.
    Returns the exit code; the partial result of an interrupted run is printed and written too.

    Raises ConfigError, before any replay, for invalid inputs.
    """
    threshold = options.threshold / 100.0
    if not 0.0 <= threshold < 1.0:
        raise ConfigError(f"threshold: {threshold * 100.0:g} % is not from 0 to below 100", param="threshold")
    input_options.output.check()
    document = read_document(options.fleet)
    file = load_fleet(document).fleet
    levels = file.topology.levels
    modes, costs = dict.fromkeys(map(RouterMode, options.modes)), dict.fromkeys(options.costs)
    others = other_choices(file, tuple(modes) or tuple(RouterMode), tuple(costs) or COMPARED_COSTS)
    inputs = open_inputs(input_options)
    check_events(inputs.timetable)
    choice = choice_of(file)
    today = Variant(choice.name, file, lambda: None, "this router")
    variants = [variant_of(document, other) for other in others]
    upgrades = [*dict.fromkeys(parse_upgraded(text, file) for text in options.upgraded)]
    variants += [today._replace(name=each.name, fleet=upgraded_fleet(file, each)) for each in upgrades]
    if (n_variants := len(variants)) >= VARIANTS_MAX:
        must = f"{n_variants} alternatives with these; at most {VARIANTS_MAX - 1}"
        raise ConfigError(f"upgraded: {must}", param="upgraded")
    inputs = inputs.over(None, [today, *variants])
    size = inputs.check([today, *variants])
    n_rows = size.n_rows
    check_length(n_rows)
    places = Places(file, choice.level or levels[0])
    figures = compared_figures(places)
    n_compared = n_decisive(len(others), has_prices=places.has_prices)
    with working("replaying", total=n_rows * input_options.seeds * (1 + len(variants))) as progress:
        replays = _Replays(inputs, places, progress, n_rows)
        own, found = replays.compared(today, variants, figures, n_compared)
    alternatives = [
        Alternative(other.name, other, other.is_looser_than(choice, levels), *each)
        for other, each in zip(others, found, strict=False)
    ]
    amid = [
        AmidUpgrade(upgrade.name, *upgrade, pair_capacity_of(variant.fleet), *each)
        for upgrade, variant, each in zip(
            upgrades, variants[len(others) :], found[len(others) :], strict=False
        )
    ]
    report = WorthReport(
        version=installed_version(),
        trace=input_options.trace_name,
        format=inputs.trace.info.format,
        dispatch=inputs.dispatch.name,
        objective=inputs.objective,
        requests=n_rows,
        parts=PARTS,
        threshold=threshold,
        level=places.level,
        is_whole=len(found) == len(variants),
        events=tuple(map(entry_of, inputs.timetable)),
        today=None if own is None else Today(choice.name, choice, len(own), figures_of(own, figures)),
        alternatives=tuple(alternatives),
        advice=advise(choice, alternatives, threshold, levels) if alternatives else None,
        upgrades=tuple(amid),
        notes=(*inputs.trace.info.notes, *size.notes, *inputs.changes.notes),
    )
    input_options.output.show(lambda: json_text(report), lambda: show_worth(report, console))
    return 0 if report.is_whole else INTERRUPTED


@dataclass(slots=True)
class _Replays:
    """Replays a variant with every seed, and shows the progress."""

    inputs: ReplayInputs
    places: Places
    progress: Progress
    n_rows: int
    n_variants: int = 0

    def compared(
        self, today: Variant, variants: Sequence[Variant], figures: Sequence[Figure], n_compared: int
    ) -> tuple[list[Rows] | None, list[tuple[int, Changes]]]:
        """Return today's replays, None when interrupted, and of each variant that was replayed by then the
        number of its seeds, and how figures change.
        """
        own: list[Rows] | None = None
        found: list[tuple[int, Changes]] = []
        try:
            own = self.of(today)
            for variant in variants:
                rows = None if own is None else self.of(variant)
                if own is None or rows is None:
                    break
                found.append((len(rows), changes_of(own, rows, figures, n_compared)))
        except KeyboardInterrupt:  # between two replays
            pass
        return own, found

    def of(self, variant: Variant) -> list[Rows] | None:
        """Return a replay for each seed, at most two if those are equal; None when interrupted."""
        options = self.inputs.options
        seeds = options.all_seeds
        found: list[Rows] = []
        for at, seed in enumerate(seeds):
            done = (self.n_variants * len(seeds) + at) * self.n_rows
            self.progress.show(f"replaying {variant.name}", done=done)

            def show(beat: Beat, done: int = done) -> None:
                self.progress.show(done=done + beat.arrived)

            simulation = self.inputs.simulation(variant, seed)
            simulation.on_beat = show
            result = simulation.run()
            if not result.is_whole:
                return None
            found.append(rows_of(result.outcomes, self.inputs.objective, self.places))
            if at and found[-1].is_like(found[-2]):
                break
        self.n_variants += 1
        return found


_SHOWN = {
    FigureName.TTFT_MEAN: ("TTFT mean ms", 0, 1.0),
    FigureName.TTFT_P90: ("TTFT p90 ms", 0, 1.0),
    FigureName.TTFT_P99: ("TTFT p99 ms", 0, 1.0),
    FigureName.GOODPUT: ("good %", 1, 100.0),
    FigureName.FAILED: ("failed %", 1, 100.0),
    FigureName.CROSSING: ("GB across {level}", 1, 1.0),
    FigureName.COST: ("cost", 2, 1.0),
}


def show_worth(report: WorthReport, console: Console) -> None:
    """Print today's figures, how each alternative changes them, and the advice."""
    today = report.today
    if today is None:
        console.print("interrupted before today's policy was replayed: nothing is known")
        return
    table = Table(title=Text(f"{report.trace}: {report.format}, dispatched {report.dispatch}"))
    table.add_column("policy", overflow="fold")
    rows: list[Alternative | AmidUpgrade] = [*report.alternatives, *report.upgrades]
    compared = {figure for each in rows for figure in each.changes}
    shown = [figure for figure in _SHOWN if figure in today.figures and figure in (compared or today.figures)]
    for figure in shown:
        table.add_column(_SHOWN[figure][0].format(level=report.level), justify="right")
    table.add_row(
        Text(f"today: {today.name}"),
        *(f"{today.figures[figure] * _SHOWN[figure][2]:,.{_SHOWN[figure][1]}f}" for figure in shown),
        end_section=True,
    )
    for at, each in enumerate(rows, 1):
        cells = (_cell(figure, each.changes.get(figure)) for figure in shown)
        table.add_row(Text(each.name), *cells, end_section=at == len(report.alternatives))
    console.print(table)
    objective = report.objective
    console.print(
        f"changes against today over {report.requests:,} requests in {report.parts} parts, with 95 % "
        f"intervals; good: first token within {objective.ttft_s:g} s, tokens {objective.itl_s:g} s apart on "
        "average; TTFT of the requests that were answered in both replays",
        soft_wrap=True,
    )
    if FigureName.TTFT_P99 not in shown:
        console.print(
            f"no p99: it needs {samples_needed(99)} answered requests in each of {report.parts} parts",
            soft_wrap=True,
        )
    for upgrade in report.upgrades:
        console.print(f"{upgrade.name}: {upgrade.pair_capacity:.0%} of the capacity of pairs is left")
    for note in report.notes:
        console.print(Text(note), soft_wrap=True)
    if not report.is_whole:
        console.print("interrupted: the alternatives that are missing were not replayed to their end")
    for sentence in () if report.advice is None else report.advice.sentences:
        console.print(Text(sentence), soft_wrap=True)


def _cell(figure: FigureName, change: Change | None) -> str:
    if change is None:
        return NOTHING
    _, digits, scale = _SHOWN[figure]
    if not change.change and not change.within:
        return "0"
    return f"{change.change * scale:+,.{digits}f} ± {change.within * scale:,.{digits}f}"
