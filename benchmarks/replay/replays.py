"""One replay, and the figures of several that differ by their seed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.replay.cases import Rows
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.sim.replay.dispatch import ByTimeStamp, ClosedLoop
from kvrouter.sim.replay.simulation import Result, Simulation
from kvrouter.sim.replay.summary import Objective, Summary
from kvrouter.sim.replay.timetable import TimetableEvent
from kvrouter.sim.rules.rule import PublishedRule
from kvrouter.sim.traces.trace_request import TraceRequest

OBJECTIVE = Objective(ttft_s=2.0, itl_s=0.05)


def replayed(
    file: FleetFile,
    rows: Iterable[TraceRequest],
    of: Rows,
    seed: int,
    *,
    rule: PublishedRule | None = None,
    timetable: Sequence[TimetableEvent] = (),
) -> Result:
    """Replay ``rows`` once, which are all of ``of`` or some. Raises KeyboardInterrupt for a replay that was
    stopped, so that a part of one is never taken for the whole.
    """
    result = Simulation(
        file,
        rows,
        config=file.router,
        dispatch=ClosedLoop() if of.is_closed else ByTimeStamp(),
        piece_tokens=of.piece_tokens,
        rule=rule,
        seed=seed,
        timetable=timetable,
    ).run()
    if not result.is_whole:
        raise KeyboardInterrupt
    return result


def over_seeds(replay: Callable[[int], Summary], seeds: int) -> list[Summary]:
    """Return the summary of each seed. Where the first two are the same, nothing is drawn from seeds, and the
    others are not replayed.
    """
    found: list[Summary] = []
    for seed in range(seeds):
        if len(found) == 2 and found[0] == found[1]:
            return [*found, *(found[0] for _ in range(seed, seeds))]
        found.append(replay(seed))
    return found


def figures(rows: Sequence[Summary]) -> dict[str, Any]:
    """Return what ``Figures`` has, of each seed."""
    return {
        "ttft_ms": tuple(row.ttft_ms.mean or 0.0 for row in rows),
        "ttft_p99_ms": tuple(row.ttft_ms.p99 or 0.0 for row in rows),
        "good": tuple(row.good_share for row in rows),
        "good_per_s": tuple(row.good_per_s or 0.0 for row in rows),
        "cached": tuple(row.cached_share for row in rows),
        "failed": tuple(sum(row.errors.values()) for row in rows),
    }
