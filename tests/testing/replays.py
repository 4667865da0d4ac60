"""Small replays: a fleet in a line of YAML, rows in a line of Python."""

from array import array
from collections.abc import Iterable, Sequence

from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.problems import parse_document
from kvrouter.sim.replay.dispatch import ByTimeStamp, Dispatch
from kvrouter.sim.replay.outcome import Outcome
from kvrouter.sim.replay.simulation import Result, Simulation
from kvrouter.sim.replay.timetable import TimetableEvent
from kvrouter.sim.rules.rule import PublishedRule
from kvrouter.sim.traces.trace_request import TraceRequest, Wait

PIECE_TOKENS = 64

TWO_ZONES = """
topology:
  levels: [zone]
  links:
    within: {zone: {latency_s: 0.0, bandwidth_bytes_per_s: 13107200.0}}
    across: {latency_s: 1.0, bandwidth_bytes_per_s: 1310720.0}
workers:
- {name: pa, role: prefill, domains: {zone: a}}
- {name: da, role: decode, domains: {zone: a}}
- {name: pb, role: prefill, domains: {zone: b}}
- {name: db, role: decode, domains: {zone: b}}
"""


def fleet(text: str = "workers: [{name: w, replicas: 2}]", *, block_size: int = 64) -> FleetFile:
    """A fleet of one model."""
    head = f"version: 1\nmodels: [{{name: m, block_size: {block_size}}}]\n"
    return load_fleet(parse_document(head + text, "fleet.yaml")).fleet


def row(
    number: int,
    at_s: float,
    pieces: Sequence[int],
    *,
    output_tokens: int = 4,
    input_tokens: int | None = None,
    session: str = "",
    waits: tuple[Wait, ...] = (),
    not_before_s: float = 0.0,
) -> TraceRequest:
    """One request, whose prompt is these pieces of 64 tokens."""
    return TraceRequest(
        number=number,
        at_s=at_s,
        input_tokens=PIECE_TOKENS * len(pieces) if input_tokens is None else input_tokens,
        output_tokens=output_tokens,
        piece_tokens=PIECE_TOKENS,
        pieces=array("Q", pieces),
        session=session,
        waits=waits,
        not_before_s=not_before_s,
    )


def replayed(
    rows: Iterable[TraceRequest],
    file: FleetFile | None = None,
    *,
    rule: PublishedRule | None = None,
    dispatch: Dispatch | None = None,
    seed: int = 0,
    timetable: Sequence[TimetableEvent] = (),
) -> Result:
    """Replay to the end; whatever engines and ledger hold then is a mistake."""
    file = file or fleet()
    simulation = Simulation(
        file,
        rows,
        config=file.router,
        dispatch=dispatch or ByTimeStamp(),
        piece_tokens=PIECE_TOKENS,
        rule=rule,
        seed=seed,
        timetable=timetable,
    )
    result = simulation.run()
    assert simulation.fleet.fabric.check_integrity() == []
    assert simulation.fleet.fabric.idle
    assert len(simulation.fleet.placer.ledger) == 0
    assert not simulation.fleet.loads.in_flight.any()
    assert len(simulation.fleet.placer.transfers.state) == 0
    return result


def by_number(result: Result) -> list[Outcome]:
    """The outcomes in the order of arrivals."""
    return sorted(result.outcomes, key=lambda outcome: outcome.number)
