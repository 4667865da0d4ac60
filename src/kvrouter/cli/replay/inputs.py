"""The common inputs of a command's replays: the trace, its dispatch, timing, events, and objective."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvrouter.cli.progress import Progress, working
from kvrouter.cli.replay.input_options import InputOptions
from kvrouter.cli.replay.recorded_inputs import (
    NO_CHANGES,
    NONE,
    RECORDED,
    RecordedChanges,
    recorded_changes,
    warn_reader,
)
from kvrouter.core.timing import Timing
from kvrouter.fleetfile.timing_file import read_timing
from kvrouter.sim.past.recorded_fleet import RecordedFleet
from kvrouter.sim.replay.dispatch import ByTimeStamp, ClosedLoop, Dispatch
from kvrouter.sim.replay.simulation import Simulation, TraceSize, check_room, size_of
from kvrouter.sim.replay.summary import Objective
from kvrouter.sim.replay.timetable import TimetableEvent, read_timetable
from kvrouter.sim.replay.timetable_plan import plan_timetable
from kvrouter.sim.replay.variant import Variant
from kvrouter.sim.traces.read import Trace, open_trace
from kvrouter.sim.traces.trace_request import TraceRequest

ROWS_SHOWN = 256
"""After so many rows of a trace the number of those that were read is shown again."""


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """The common inputs of a command's replays."""

    options: InputOptions
    trace: Trace
    timing: Timing | None
    timetable: tuple[TimetableEvent, ...]
    objective: Objective
    changes: RecordedChanges = NO_CHANGES
    critical_share: float = 0.0

    @property
    def dispatch(self) -> Dispatch:
        """When requests arrive; one replay uses it up."""
        options = self.options
        return ClosedLoop() if options.dispatch == "closed" else ByTimeStamp(options.speedup)

    def simulation(
        self, variant: Variant, seed: int, rows: Iterable[TraceRequest] | None = None
    ) -> Simulation:
        """Return one replay, from its beginning; of ``rows`` instead of the whole trace."""
        return Simulation(
            variant.fleet,
            self.trace if rows is None else rows,
            config=variant.fleet.router,
            dispatch=self.dispatch,
            piece_tokens=self.trace.info.piece_tokens,
            rule=variant.make_rule(),
            seed=seed,
            timing=self.timing,
            timetable=self.timetable,
            critical_share=self.critical_share,
        )

    def over(self, recorded: RecordedFleet | None, compared: Sequence[Variant]) -> "ReplayInputs":
        """Return the inputs with a recording's changes of its fleet, as far as they concern the compared
        fleets. Raises ConfigError if the changes were asked for and do not fit.
        """
        options = self.options
        changes = recorded_changes(
            self.trace.fleet,
            recorded,
            [variant.fleet for variant in compared],
            events=options.events,
            speedup=1.0 if options.dispatch == "closed" else ByTimeStamp(options.speedup).speedup,
        )
        return replace(self, timetable=self.timetable + changes.events, changes=changes)

    def check(self, compared: Sequence[Variant]) -> TraceSize:
        """Return the size of the trace, show how far it is read, and warn of answers that it
        lacks. Raises before any replay for what cannot be replayed: in its rows, in each fleet, in the
        timetable.
        """
        self.dispatch.check(self.trace.info)
        name = self.options.trace_name
        with working(f"reading {name}", total=self.options.rows) as progress:
            size = size_of(_shown(self.trace, name, progress))
        for note in size.notes:
            warn_reader(f"{name}: {note}")
        for variant in compared:
            plan_timetable(self.timetable, variant.fleet)
            check_room(size.longest, self.simulation(variant, self.options.seed).fleet)
        return size


def _shown(rows: Iterable[TraceRequest], name: str, progress: Progress) -> Iterator[TraceRequest]:
    """Yield the rows, and show how many there were."""
    for number, row in enumerate(rows):
        if not number % ROWS_SHOWN:
            progress.show(f"reading {name}, {number:,} requests", done=number)
        yield row


def open_inputs(options: InputOptions) -> ReplayInputs:
    """Open the trace and read its other inputs; raises ConfigError for unreadable ones."""
    return ReplayInputs(
        options,
        open_trace(
            options.trace,
            rows_max=options.rows,
            model=options.model,
            trace_format=options.trace_format,
            rate_per_s=options.rate_per_s,
            reuses_answers=options.reuse_answers,
            warn=warn_reader,
        ),
        None if options.timing is None else read_timing(options.timing),
        () if options.events in (None, NONE, RECORDED) else read_timetable(options.events),
        Objective(ttft_s=options.slo_ttft, itl_s=options.slo_itl),
    )
