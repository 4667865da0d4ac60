"""A fleet is scaled from six workers to two and back, on the simulated clock: what its clients notice."""

import random
from collections.abc import Sequence

import pytest

from kvrouter.core.ids import WorkerId
from kvrouter.sim.replay.outcome import Outcome
from kvrouter.sim.replay.timetable import DieEvent, DrainEvent, JoinEvent
from kvrouter.sim.traces.trace_request import TraceRequest
from tests.testing.replays import by_number, fleet, replayed, row

FLEET = "workers: [{name: stays, replicas: 2}, {name: scaled, replicas: 4}]"
SCALED = {WorkerId(number) for number in (3, 4, 5, 6)}
SIGTERM_S, GONE_S, BACK_S, END_S = 40.0, 70.0, 100.0, 150.0
SCALING = (
    DrainEvent(at_s=SIGTERM_S, group="scaled"),
    DieEvent(at_s=GONE_S, group="scaled"),
    JoinEvent(at_s=BACK_S, group="scaled"),
)
TURNS_PER_S = 4.0
TURNS = 5


def conversations(seed: int) -> list[TraceRequest]:
    """Conversations of five turns, each of which sends all of the turns before it again."""
    draw = random.Random(seed)
    turns: list[tuple[float, int, int]] = []
    began_s = 0.0
    for session in range(int(END_S * TURNS_PER_S / TURNS)):
        began_s += draw.expovariate(TURNS_PER_S / TURNS)
        at_s = began_s
        for turn in range(TURNS):
            turns.append((at_s, session, turn))
            at_s += draw.uniform(10.0, 30.0)
    return [
        row(
            number,
            at_s,
            [1_000 * session + piece for piece in range(8 + 4 * turn)],
            output_tokens=64,
            session=str(session),
        )
        for number, (at_s, session, turn) in enumerate(sorted(turns))
    ]


def ttft_p99_s(outcomes: Sequence[Outcome], since_s: float, until_s: float) -> float:
    """Of the requests that arrived in this time."""
    found = sorted(
        each.ttft_s for each in outcomes if since_s <= each.arrived_s < until_s and each.ttft_s is not None
    )
    return found[int(0.99 * len(found))]


@pytest.mark.parametrize("seed", range(3))
def test_scaling_six_workers_to_two_and_back_costs_at_most_half_a_ttft_p99(seed: int) -> None:
    rows = conversations(seed)
    steady = by_number(replayed(rows, fleet(FLEET)))
    scaled = by_number(replayed(rows, fleet(FLEET), timetable=SCALING))
    assert [(each.error, each.attempts) for each in scaled] == [("", 1)] * len(rows)
    away = [each for each in scaled if SIGTERM_S <= each.arrived_s < BACK_S]
    assert not SCALED & {each.decode for each in away}
    assert SCALED & {each.decode for each in scaled if each.arrived_s >= BACK_S}
    assert ttft_p99_s(scaled, SIGTERM_S, END_S) <= 1.5 * ttft_p99_s(steady, SIGTERM_S, END_S)
