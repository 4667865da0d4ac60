"""``kvrouter replay``: a trace over a fleet, by one rule or several, and what came of it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrouter.app.atomic_file import check_folder, write_atomic
from kvrouter.cli.output import json_text
from kvrouter.cli.progress import Progress, working
from kvrouter.cli.replay.input_options import FileOptions, PolicyOptions, ReplayInputOptions
from kvrouter.cli.replay.inputs import ReplayInputs, open_inputs
from kvrouter.cli.replay.recorded_inputs import replayed_fleet, write_recorded
from kvrouter.core.errors import INTERRUPTED, ConfigError
from kvrouter.settings.setting import installed_version
from kvrouter.sim.replay.carriage import Places
from kvrouter.sim.replay.comparison import class_lines, reasons_over, seeds_note, shown_columns, times_notes
from kvrouter.sim.replay.simulation import Result
from kvrouter.sim.replay.summary import ReplayReport, Summary, VariantReport, summarize
from kvrouter.sim.replay.timetable import entry_of
from kvrouter.sim.replay.tuning import candidates, first_half, merit, second_half
from kvrouter.sim.replay.variant import Variant, parse_sweep, split_policies, variants
from kvrouter.sim.traces.trace_request import TraceRequest

TUNED = "parameters tuned on the first half of the trace, figures of the second"

DEFAULT_TIMING = "no --timing: engines have the default timing of mock engines, which says nothing of yours"

TUNED_ROWS_MIN = 20
"""Fewer requests are not cut into halves."""


def replay(
    policy: PolicyOptions, input_options: ReplayInputOptions, files: FileOptions, console: Console
) -> int:
    """Replay every variant with every seed; print a table, and write the requested files. Returns the exit
    code; the partial result of an interrupted run is printed and written too.

    Raises ConfigError, before any replay, for invalid inputs.
    """
    for path in filter(None, (files.report, files.write_fleet, files.write_events)):
        check_folder(path)
    input_options.output.check()
    inputs = replace(open_inputs(input_options), critical_share=input_options.critical_share)
    fleet = replayed_fleet(policy.fleet, inputs.trace, input_options.trace)
    document = fleet.document
    policies = (*policy.policies, *split_policies(policy.compare)) or ("kvrouter",)
    sweeps = [parse_sweep(sweep) for sweep in policy.sweeps]
    compared = (
        candidates(document, policies, sweeps)
        if policy.tune
        else [[variant] for variant in variants(document, policies, sweeps)]
    )
    first_of_each = [chosen_from[0] for chosen_from in compared]
    inputs = inputs.over(fleet.recorded, first_of_each)
    size = inputs.check(first_of_each)
    n_rows = size.n_rows
    if policy.tune and n_rows < TUNED_ROWS_MIN:
        raise ConfigError(
            f"tune: the trace has {n_rows} requests; halves need {TUNED_ROWS_MIN}", param="tune"
        )
    write_recorded(fleet.recorded, inputs.changes, fleet_to=files.write_fleet, events_to=files.write_events)
    reports: list[VariantReport] = []
    with working("replaying") as progress:
        runner = _Runner(inputs, progress, n_rows, tunes=policy.tune)
        runner.expect(compared)
        for chosen_from in compared:
            found = runner.report(chosen_from)
            if found is not None:
                reports.append(found)
            if not runner.is_whole:
                break
    dispatch = inputs.dispatch.name
    timing_notes = (DEFAULT_TIMING,) if policy.fleet is None and input_options.timing is None else ()
    report = ReplayReport(
        installed_version(),
        input_options.trace_name,
        inputs.trace.info.format,
        f"{dispatch}; {TUNED}" if policy.tune else dispatch,
        inputs.objective,
        runner.is_whole,
        tuple(reports),
        tuple(map(entry_of, inputs.timetable)),
        (*inputs.trace.info.notes, *size.notes, *fleet.notes, *timing_notes, *inputs.changes.notes),
    )
    input_options.output.show(lambda: json_text(report), lambda: show_report(report, console))
    if files.report is not None:
        from kvrouter.sim.report.document import render_page  # noqa: PLC0415 - most replays draw no page

        write_atomic(files.report, render_page(report))
    return 0 if runner.is_whole else INTERRUPTED


class _Runner:
    """The replays of one command, one after the other, and their progress. ``is_whole``: none was stopped."""

    def __init__(self, inputs: ReplayInputs, progress: Progress, n_rows: int, *, tunes: bool) -> None:
        self.is_whole = True
        self._inputs = inputs
        self._progress = progress
        self._n_rows = n_rows
        self._tunes = tunes
        self._first_half = first_half(inputs.trace, n_rows) if tunes else []
        self._done = 0

    def expect(self, compared: Sequence[Sequence[Variant]]) -> None:
        """Announce the replays to come."""
        n_tried = sum(len(chosen_from) for chosen_from in compared if len(chosen_from) > 1)
        n_seeds = len(self._inputs.options.all_seeds)
        self._progress.total = n_tried * len(self._first_half) + len(compared) * n_seeds * self._n_rows

    def report(self, chosen_from: Sequence[Variant]) -> VariantReport | None:
        """Replay the variant that does best on the first half with every seed. Interrupted, the report has
        the seeds that were replayed to their end, else the partial first one; None without any.
        """
        variant: Variant | None = None
        summaries: list[Summary] = []
        try:
            variant = self._chosen(chosen_from)
            if variant is not None:
                self._summarize(variant, summaries)
        except KeyboardInterrupt:  # between two replays
            self.is_whole = False
        if variant is None or not summaries:
            return None
        seeds = self._inputs.options.all_seeds[: len(summaries)]
        return VariantReport(variant.name, variant.source, seeds, tuple(summaries))

    def _chosen(self, chosen_from: Sequence[Variant]) -> Variant | None:
        """Return the variant that does best on the first half; None when that was stopped."""
        if len(chosen_from) == 1:
            return chosen_from[0]
        merits: list[tuple[tuple[int, float], int]] = []
        for number, variant in enumerate(chosen_from):
            rows = self._first_half
            result = self._run(variant, self._inputs.options.seed, len(rows), f"tuning {variant.name}", rows)
            if not result.is_whole:
                return None
            merits.append((merit(result.outcomes), number))
        return chosen_from[min(merits)[1]]

    def _summarize(self, variant: Variant, summaries: list[Summary]) -> None:
        """Replay with every seed, and add what came of it to ``summaries``: a replay that was stopped is no
        figure to put next to whole ones.
        """
        places = Places(variant.fleet)
        for at, seed in enumerate(self._inputs.options.all_seeds):
            result = self._run(variant, seed, self._n_rows, f"replaying {variant.name}", None)
            if at and not self.is_whole:
                return
            if self._tunes:
                result = second_half(result, self._n_rows, places)
            summaries.append(summarize(result, self._inputs.objective, places))
            if not self.is_whole:
                return

    def _run(
        self, variant: Variant, seed: int, n_rows: int, shown: str, rows: Iterable[TraceRequest] | None
    ) -> Result:
        progress, done = self._progress, self._done
        progress.show(shown, done=done)
        simulation = self._inputs.simulation(variant, seed, rows)
        simulation.on_beat = lambda beat: progress.show(done=done + beat.arrived)
        result = simulation.run()
        self._done += n_rows
        self.is_whole = result.is_whole
        return result


def show_report(report: ReplayReport, console: Console) -> None:
    """Print a row for each variant, with 95 % intervals where several seeds were replayed."""
    table = Table(title=Text(f"{report.trace}: {report.format}, dispatched {report.dispatch}"))
    table.add_column("policy", overflow="fold")
    group = ""
    columns = shown_columns(summary for variant in report.variants for summary in variant.summaries)
    for column in columns:
        heading = column.name if column.group == group else f"{column.group} {column.name}".rstrip()
        table.add_column(heading, justify="right")
        group = column.group
    for variant in report.variants:
        cells = (column.shown(variant.summaries) for column in columns)
        table.add_row(Text(variant.name), *cells)
    console.print(table)
    for variant in report.variants:
        for name, counts in (
            ("errors", [summary.errors for summary in variant.summaries]),
            ("refused", [summary.refusals for summary in variant.summaries]),
        ):
            listed = ", ".join(f"{reason.shown} {reason.name}" for reason in reasons_over(counts))
            if listed:
                console.print(Text(f"{variant.name}: {name}: {listed}"))
        for line in class_lines(variant):
            console.print(Text(line), soft_wrap=True)
    objective = report.objective
    console.print(
        f"good: first token within {objective.ttft_s:g} s, tokens {objective.itl_s:g} s apart on average; "
        "per s: by the time from the first arrival to the last",
        soft_wrap=True,
    )
    of_figures = (*times_notes(report.variants), seeds_note(report.variants)) if report.variants else ()
    for note in (*of_figures, *report.notes):
        console.print(Text(note), soft_wrap=True)
    if not report.is_whole:
        console.print("interrupted: the last row is what was known until then")
