"""The replay of the rows that were sent live."""

from collections.abc import Sequence

from benchmarks.live.observe import Observed, Observer
from kvrouter.core.errors import ConfigError
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.sim.replay.dispatch import ByTimeStamp
from kvrouter.sim.replay.simulation import Simulation
from kvrouter.sim.traces.trace_request import TraceRequest


def simulation_of(rows: Sequence[TraceRequest], fleet: FleetFile, *, speedup: float) -> Simulation:
    """Return the replay of ``rows`` over ``fleet``, from its beginning. Raises ConfigError."""
    if not rows:
        raise ConfigError("trace: it has no requests", param="trace")
    return Simulation(
        fleet,
        rows,
        config=fleet.router,
        dispatch=ByTimeStamp(speedup),
        piece_tokens=rows[0].piece_tokens,
    )


def observe_replay(rows: Sequence[TraceRequest], fleet: FleetFile, *, speedup: float) -> Observed:
    """Replay ``rows``. Raises ConfigError for what cannot be replayed."""
    simulation = simulation_of(rows, fleet, speedup=speedup)
    observer = Observer()
    observer.watch(simulation.fleet.placer)
    simulation.fleet.fabric.watch_legs(observer.leg_ended)
    simulation.run()
    return observer.observed
