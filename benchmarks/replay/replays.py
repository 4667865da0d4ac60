"""One replay, and the figures of several that differ by their seed."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from benchmarks.replay.cases import Rows
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.sim.replay.dispatch import ByTimeStamp, ClosedLoop
from kvrouter.sim.replay.simulation import Result, Simulation
from kvrouter.sim.replay.summary import Objective, Summary
from kvrouter.sim.replay.timetable import TimetableEvent
from kvrouter.sim.rules.rule import PublishedRule
from kvrouter.sim.traces.trace_request import TraceRequest

OBJECTIVE = Objective(ttft_s=2.0, itl_s=0.05)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one place; a value for each seed, in the order of seeds. Of fewer than 100 requests, as
    in the form ``check``, p99 is nearly their maximum.
    """

    policy: str
    ttft_ms: tuple[float, ...]
    ttft_p99_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    good: tuple[float, ...]
    good_per_s: tuple[float, ...]
    cached: tuple[float, ...]
    failed: tuple[int, ...]


def simulation_of(
    file: FleetFile,
    rows: Iterable[TraceRequest],
    of: Rows,
    seed: int,
    *,
    rule: PublishedRule | None = None,
    timetable: Sequence[TimetableEvent] = (),
) -> Simulation:
    """Return the replay of ``rows``, which are all of ``of`` or some."""
    return Simulation(
        file,
        rows,
        config=file.router,
        dispatch=ClosedLoop() if of.is_closed else ByTimeStamp(),
        piece_tokens=of.piece_tokens,
        rule=rule,
        seed=seed,
        timetable=timetable,
    )


def whole(simulation: Simulation) -> Result:
    """Return what comes of a replay. Raises KeyboardInterrupt for one that was stopped, so that a part of one
    is never taken for the whole.
    """
    result = simulation.run()
    if not result.is_whole:
        raise KeyboardInterrupt
    return result


def figures(policy: str, rows: Sequence[Summary]) -> Figures:
    """Return the figures of a policy; ``rows`` has a summary for each seed."""
    return Figures(policy=policy, **values(rows))


def values(rows: Sequence[Summary]) -> dict[str, Any]:
    """Return the figures of each seed, by name."""
    return {
        "ttft_ms": tuple(row.ttft_ms.mean or 0.0 for row in rows),
        "ttft_p99_ms": tuple(row.ttft_ms.quantiles[99] if row.ttft_ms.samples else 0.0 for row in rows),
        "itl_ms": tuple(row.itl_ms.mean or 0.0 for row in rows),
        "good": tuple(row.good_share for row in rows),
        "good_per_s": tuple(row.good_per_s or 0.0 for row in rows),
        "cached": tuple(row.cached_share for row in rows),
        "failed": tuple(sum(row.errors.values()) for row in rows),
    }
