"""The same rows live, over HTTP, and replayed: the same choices, and the same times by the engines' clock.

One after the other, nothing depends on how fast this machine is: an engine that is idle begins when the
request comes, and its clock knows no delays. So all must be equal there, to rounding; but for the way from
one leg to the other, which takes real time. Where answers overlap, a delay of this machine is a delay of an
arrival, and may change a view: then whatever was decided from equal views must be equal, and the replay's
router must make every live decision again, from what the live router saw.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from benchmarks.live.client import ask, plan, request_bytes, send
from benchmarks.live.compare import compare_choices, compare_latencies
from benchmarks.live.observe import Observed, Observer
from benchmarks.live.prompts import prompt_tokens
from benchmarks.live.replayed import observe_replay, simulation_of
from kvrouter.core.constraints import RouterMode
from kvrouter.core.requests import Leg
from kvrouter.engines.mock import MockEngineHandle
from kvrouter.engines.mock_engine.sequence import LegStamps
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.sim.traces.trace_request import TraceRequest
from tests.testing.mock_fleet import uniform_fleet, zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server
from tests.testing.replays import row
from tests.testing.waits import until

APART_S = 60.0
"""In the replay, no request comes before the answer to the one before it has ended."""

SLOW = "{timing: {prefill_base: 120.0, decode_min: 30.0}}"
"""Steps that are long next to the delays of a machine."""


def by_blocks(fleet: FleetFile) -> FleetFile:
    """The cost of time learns from the live clock, which no replay has."""
    return fleet.model_copy(update={"router": KvRouterConfig(router_cost="blocks")})


OVERLAPPING = {"aggregated": by_blocks(uniform_fleet(replicas=3, engine=SLOW, speedup=1.0))}

FLEETS = {
    "aggregated": by_blocks(uniform_fleet(replicas=3, speedup=20.0)),
    "bootstrap": by_blocks(zoned_fleet(prefill=2, speedup=20.0)),
    "synchronous": by_blocks(zoned_fleet(prefill=2, handoff="synchronous", speedup=20.0)),
}


def conversations(n: int, *, apart_s: float) -> list[TraceRequest]:
    """Five dialogues in turn that begin alike; each prompt goes on from the one before it."""
    return [
        row(
            at,
            at * apart_s,
            [7, *(1000 * (at % 5) + piece for piece in range(at // 5 + 1))],
            input_tokens=64 * (at // 5 + 2) - at % 7,
            output_tokens=3 + 5 * at % 23,
        )
        for at in range(n)
    ]


@asynccontextmanager
async def watched(fleet: FleetFile) -> AsyncIterator[tuple[MockServer, Observer]]:
    async with mock_server(fleet) as here:
        observer = Observer()
        here.system.fleet.cluster.watch_legs(observer.leg_ended)
        for model in here.system.service.models():
            observer.watch(model.placer)
        yield here, observer


async def live_in_turn(fleet: FleetFile, rows: Sequence[TraceRequest]) -> Observed:
    """Send each row when the answer to the one before it has ended, and all of it is known."""
    async with watched(fleet) as (here, observer):
        _, port = here.system.address
        for each in rows:
            await ask(port, request_bytes(each, prompt_tokens(each), model=MODEL))
            await here.until_quiet()
            await until(lambda: indexed_blocks(here) == held_blocks(here))
    return observer.observed


def indexed_blocks(here: MockServer) -> int:
    """What the router's index holds of all ranks."""
    (model,) = here.system.service.models()
    assert isinstance(model.cache, EventCacheView)
    return sum(model.cache.index.stats().blocks)


def held_blocks(here: MockServer) -> int:
    """What the engines hold."""
    held = 0
    for worker in here.system.fleet.workers.values():
        assert isinstance(worker.engine, MockEngineHandle)
        held += sum(worker.engine.held_blocks(rank.dp_rank) or 0 for rank in worker.card.ranks())
    return held


def by_leg(observed: Observed) -> dict[tuple[str, Leg], LegStamps]:
    return {(stamps.request_id, stamps.leg): stamps for stamps in observed.legs}


@pytest.mark.parametrize("shape", FLEETS)
async def test_sequential_requests_have_equal_choices_and_times_in_replay(shape: str) -> None:
    fleet, rows = FLEETS[shape], conversations(40, apart_s=APART_S)
    live = await live_in_turn(fleet, rows)
    replay = observe_replay(rows, fleet, speedup=1.0)
    choices = compare_choices(live, replay, simulation_of(rows, fleet, speedup=1.0).fleet.placer)
    assert choices.broken == choices.not_again == ()
    assert choices.equal_views == choices.decisions == len(live.decisions) == len(replay.decisions)
    assert choices.decisions == len(rows) * (2 if shape == "synchronous" else 1)
    ours, theirs = by_leg(live), by_leg(replay)
    assert ours.keys() == theirs.keys()
    for (_, leg), seen in ours.items():
        expected = theirs[seen.request_id, leg]
        assert seen.worker_id == expected.worker_id
        assert (seen.output_tokens, seen.cached_tokens) == (expected.output_tokens, expected.cached_tokens)
        assert seen.last_s - seen.first_s == pytest.approx(expected.last_s - expected.first_s, abs=1e-6)
        if leg is not Leg.DECODE:  # which waits for the other leg
            assert seen.first_s - seen.came_s == pytest.approx(expected.first_s - expected.came_s, abs=1e-6)


@pytest.mark.timed
@pytest.mark.parametrize("shape", OVERLAPPING)
async def test_overlapping_requests_with_equal_views_get_equal_choices(shape: str) -> None:
    fleet, rows = OVERLAPPING[shape], conversations(48, apart_s=0.1)
    async with watched(fleet) as (here, observer):
        _, port = here.system.address
        await send(plan(rows, model=MODEL, speedup=1.0), port)
        await here.until_quiet()
    live, replay = observer.observed, observe_replay(rows, fleet, speedup=1.0)
    choices = compare_choices(live, replay, simulation_of(rows, fleet, speedup=1.0).fleet.placer)
    assert choices.broken == choices.not_again == ()
    assert len(live.decisions) >= len(rows)
    assert choices.equal_views >= 1
    for figure in compare_latencies(live, replay):
        if figure.name.endswith("p50"):  # a machine that stands still for long may change any one request
            assert 0.5 < figure.live_ms / figure.replay_ms < 2.0, figure


@pytest.mark.parametrize(
    "router",
    [
        KvRouterConfig(router_mode=RouterMode.RANDOM),
        KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN),
        KvRouterConfig(router_cost="blocks", router_temperature=0.5),
    ],
    ids=["random", "round-robin", "temperature"],
)
async def test_equal_draws_give_equal_choices_live_and_in_replay(
    router: KvRouterConfig,
) -> None:
    fleet = uniform_fleet(replicas=5, speedup=20.0).model_copy(update={"router": router})
    rows = conversations(20, apart_s=0.01)
    async with watched(fleet) as (here, observer):
        _, port = here.system.address
        await send(plan(rows, model=MODEL, speedup=1.0), port)
    live, replay = observer.observed, observe_replay(rows, fleet, speedup=1.0)
    choices = compare_choices(live, replay, simulation_of(rows, fleet, speedup=1.0).fleet.placer)
    assert choices.decisions == len(rows)
    assert choices.broken == choices.not_again == ()
    assert len({seen.choice for seen in live.decisions}) > 1
