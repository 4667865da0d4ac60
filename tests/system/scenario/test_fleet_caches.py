"""What the router believes of caches, next to what the engines of a mock fleet hold."""

import asyncio
import random

import pytest
from msgspec import structs

from kvrouter.core.constraints import RouterMode
from kvrouter.core.events import Cleared, KvBatch, Stored, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import Leg, TokenBuffer
from kvrouter.core.workers import LoadReport, ModelRuntimeConfig
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.kernel.feed.states import FeedState
from kvrouter.kernel.placement.cache_view import NoCacheView, PredictedCacheView
from kvrouter.router import index_check
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.constants import SetConstants
from tests.testing.log_events import events_of
from tests.testing.mock_fleet import (
    BLOCK,
    LONG_TOKENS,
    MOCK,
    MockFleetHarness,
    accepted,
    on_first,
    prompt,
    running_mock_fleet,
    uniform_fleet,
    zoned_fleet,
)
from tests.testing.router_harness import RouterHarness
from tests.testing.router_harness import card as worker_card
from tests.testing.scripted_transport import ScriptedTransport
from tests.testing.waits import until

SMALL = "{total_kv_blocks: 64, engine_hashing: opaque}"
"""Caches that overflow all the time."""


def conversations(*, turns: int, seed: int) -> list[TokenBuffer]:
    """Prompts of a few conversations, mixed: each turn is the turn before and more."""
    draw = random.Random(seed)
    prompts, grown = [], {n: prompt(tokens=20 + 30 * n, first=n) for n in range(5)}
    for _ in range(turns):
        n = draw.randrange(5)
        grown[n] = grown[n] + prompt(tokens=draw.randrange(1, 70), first=draw.randrange(50))
        prompts.append(grown[n])
    return prompts


@pytest.mark.parametrize(
    "fleet",
    [
        uniform_fleet(replicas=3, dp_size=2),
        uniform_fleet(replicas=2, engine=SMALL),
        zoned_fleet(handoff="bootstrap"),
        zoned_fleet(handoff="synchronous"),
    ],
    ids=["aggregated-dp2", "evicting-opaque", "bootstrap", "synchronous"],
)
async def test_the_index_equals_the_engines_caches_after_traffic(fleet: FleetFile) -> None:
    async with running_mock_fleet(fleet) as harness:
        prompts = conversations(turns=40, seed=1)
        for n in range(0, 40, 8):
            requests = [harness.request(each, max_tokens=30) for each in prompts[n : n + 8]]
            await asyncio.gather(*(harness.read(request) for request in requests))
        await harness.until_index_is_true()
        index = harness.cache_of().index
        total = sum(sum(harness.held(rank).values()) for rank in harness.ranks())
        assert total > 0
        slots = [harness.model.fleet.slot_of(rank) for rank in harness.ranks()]
        assert sum(index.held(slot) for slot in slots if slot is not None) == index.stats().blocks[0]
        counted = harness.telemetry.feed_events
        assert counted.value(MOCK, "blocks_stored") > 0
        assert counted.value(MOCK, "blocks_orphaned") == counted.value(MOCK, "gaps") == 0


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("engine", ["{}", "{engine_hashing: opaque, total_kv_blocks: 128}"])
async def test_the_predicted_overlap_equals_the_engines_cached_tokens(dp_size: int, engine: str) -> None:
    """On a quiet fleet a prediction is exact: whole blocks, less the block of which one token is computed."""
    async with running_mock_fleet(uniform_fleet(replicas=2, dp_size=dp_size, engine=engine)) as harness:
        for each in conversations(turns=30, seed=2):
            await harness.until_index_is_true()
            _, generation = await harness.read(harness.request(each, max_tokens=5))
            assert generation.placement is not None
            predicted = generation.placement.decision.decode.overlap_blocks * BLOCK
            if predicted == len(each):
                predicted -= BLOCK
            assert generation.usage.cached_tokens == predicted
        telemetry = harness.telemetry
        assert telemetry.cached_tokens.value(MOCK) > 0
        assert telemetry.prompt_tokens.value(MOCK) > telemetry.cached_tokens.value(MOCK)


@pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])
async def test_a_pairs_predicted_overlap_equals_the_prefill_engines(handoff: str) -> None:
    async with running_mock_fleet(zoned_fleet(handoff=handoff, prefill=2)) as harness:
        for each in conversations(turns=20, seed=3):
            await harness.until_index_is_true()
            _, generation = await harness.read(harness.request(each, max_tokens=5))
            assert generation.placement is not None
            predicted = generation.placement.prefill_pick.overlap_blocks * BLOCK
            if predicted == len(each):
                predicted -= BLOCK
            assert generation.usage.cached_tokens == predicted
        assert harness.telemetry.cached_tokens.value(MOCK) > 0


async def test_tenants_do_not_share_blocks() -> None:
    async with running_mock_fleet(uniform_fleet(replicas=1)) as harness:
        overlaps = []
        for namespace in (None, "a", "b", "a", None):
            _, generation = await harness.read(harness.request(cache_namespace=namespace))
            assert generation.placement is not None
            overlap = generation.placement.decision.decode.overlap_blocks
            assert generation.usage.cached_tokens == overlap * BLOCK
            overlaps.append(overlap)
            await harness.until_index_is_true()
        assert overlaps == [0, 0, 0, 6, 6]


async def test_a_dead_workers_blocks_are_removed_and_a_restart_is_empty() -> None:
    async with running_mock_fleet(uniform_fleet(replicas=2)) as harness:
        for n in range(6):
            await harness.read(harness.request(prompt(first=n), worker_id=1 + n % 2))
        await harness.until_index_is_true()
        old = harness.fleet.workers[WorkerId(1)]
        rank = WorkerRank(WorkerId(1), old.card.ranks()[0].dp_rank)
        assert harness.held(rank)
        blocks = harness.cache_of().index.stats().blocks[0]
        gone = sum(harness.held(rank).values())
        await harness.fleet.kill(WorkerId(1))
        assert harness.cache_of().index.stats().blocks[0] == blocks - gone
        assert harness.cache_of().index.stats().ranks == 1
        new = await harness.revive(old)
        assert new.card.incarnation != old.card.incarnation
        await harness.until_index_is_true()
        assert not harness.believed(rank)
        slot = harness.model.fleet.slot_of(rank)
        feeds = dict(harness.cache_of().ingest.feed_readings())
        assert slot is not None
        assert feeds[slot].state is FeedState.LIVE
        await harness.read(harness.request(worker_id=1))
        await harness.until_index_is_true()
        assert harness.believed(rank)


async def test_a_worker_restarting_in_mid_traffic_is_indexed_correctly() -> None:
    async with running_mock_fleet(uniform_fleet(replicas=2)) as harness:

        async def restart(_: object) -> None:
            old = harness.fleet.workers[WorkerId(1)]
            await harness.fleet.kill(WorkerId(1))
            await harness.revive(old)

        for n in range(4):
            harness.plane.hook = on_first(accepted(Leg.AGGREGATED), restart)
            requests = [harness.request(prompt(first=n * 10 + m), max_tokens=50) for m in range(6)]
            answers = await asyncio.gather(*(harness.read(request) for request in requests))
            assert all(len(tokens) == 50 for tokens, _ in answers)
        await harness.until_index_is_true()


async def test_a_router_started_late_learns_the_cached_blocks() -> None:
    async with running_mock_fleet(zoned_fleet()) as first:
        for n in range(6):
            await first.read(first.request(prompt(first=n)))
        second = MockFleetHarness(first.fleet)
        await second.service.start()
        try:
            await second.until_index_is_true()
            _, generation = await second.read(second.request(prompt(first=2)))
            assert generation.usage.cached_tokens == 96
        finally:
            second.service.stop()


async def test_decisions_predict_the_caches_without_events() -> None:
    async with running_mock_fleet(uniform_fleet(replicas=3), KvRouterConfig(kv_events=False)) as harness:
        assert isinstance(harness.model.cache, PredictedCacheView)
        first, generation = await harness.read(harness.request())
        assert generation.usage.cached_tokens == 0
        again, generation = await harness.read(harness.request())
        assert again == first
        assert generation.placement is not None
        assert generation.placement.decision.decode.overlap_blocks == 6
        assert generation.usage.cached_tokens == 96
        assert len(set(harness.legs(Leg.AGGREGATED))) == 1
        await harness.fleet.kill(harness.legs(Leg.AGGREGATED)[0])
        _, generation = await harness.read(harness.request())
        assert generation.placement is not None
        assert generation.placement.decision.decode.overlap_blocks == 0, (
            "a dead worker's blocks are forgotten"
        )


async def test_a_prediction_covers_both_workers_of_a_pair() -> None:
    async with running_mock_fleet(zoned_fleet(decode=1), KvRouterConfig(kv_events=False)) as harness:
        for _ in range(3):
            _, generation = await harness.read(harness.request())
        assert generation.usage.cached_tokens == 96
        assert len(set(harness.legs(Leg.PREFILL))) == 1
        explained = harness.model.explain(harness.request())
        overlaps = {row.rank.worker_id: row.overlap_blocks for row in explained.rows}
        expected = {harness.legs(Leg.PREFILL)[0]: 6, harness.legs(Leg.DECODE)[0]: 6}
        assert {worker_id: blocks for worker_id, blocks in overlaps.items() if blocks} == expected


@pytest.mark.parametrize(
    "config",
    [
        KvRouterConfig(overlap_score_weight=0.0),
        KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN),
        KvRouterConfig(router_mode=RouterMode.RANDOM, kv_events=False),
    ],
)
async def test_no_index_is_built_if_overlap_has_no_weight(config: KvRouterConfig) -> None:
    async with running_mock_fleet(uniform_fleet(), config) as harness:
        assert isinstance(harness.model.cache, NoCacheView)
        for _ in range(4):
            _, generation = await harness.read(harness.request())
            assert generation.placement is not None
            assert generation.placement.decision.decode.overlap_blocks == 0


async def test_an_engine_ahead_of_its_events_gives_correct_answers() -> None:
    """Requests that overlap in time find less in the index than in the engine; the counters say how much."""
    async with running_mock_fleet(uniform_fleet(replicas=1)) as harness:
        requests = [harness.request(max_tokens=LONG_TOKENS) for _ in range(4)]
        answers = await asyncio.gather(*(harness.read(request) for request in requests))
        assert len({tuple(tokens) for tokens, _ in answers}) == 1
        await harness.until_index_is_true()
        assert isinstance(harness.model.cache, EventCacheView)
        await until(lambda: harness.fleet.cluster.idle)


async def test_an_index_that_engines_contradict_is_reported_and_relearned(
    set_constants: SetConstants, caplog: pytest.LogCaptureFixture
) -> None:
    set_constants(index_check, SPAN_S=0.0)
    caplog.set_level("WARNING")
    async with running_mock_fleet(uniform_fleet(replicas=1)) as harness:
        asked = prompt(tokens=20 * BLOCK)
        await harness.read(harness.request(asked))
        await harness.until_index_is_true()
        slot = harness.model.fleet.slot_of(harness.ranks()[0])
        assert slot is not None
        harness.cache_of().index.apply(slot, (Cleared(),))  # events were lost, and nobody saw it
        for _ in range(index_check.WINDOW_ANSWERS):
            await harness.read(harness.request(asked))
        await harness.until_index_is_true()
        rank = harness.ranks()[0]
        labels = (MOCK, str(rank.worker_id), str(rank.dp_rank))
        assert harness.telemetry.index_wrong.value(*labels) == 1
        assert harness.telemetry.feed_events.value(MOCK, "doubts") == 1
        assert events_of(caplog.records).count("index_wrong") == 1


@pytest.mark.parametrize("is_card_published_again", [False, True])
@pytest.mark.parametrize(("reported", "state"), [(9_000, FeedState.LIVE), (2_600, FeedState.OVER_LIMIT)])
async def test_a_load_report_with_more_blocks_than_the_card_raises_the_limit(
    reported: int, state: FeedState, is_card_published_again: bool
) -> None:
    """A worker may register before its engine knows how many blocks it has."""
    harness = RouterHarness(ScriptedTransport(lambda _stream: None))
    known = structs.replace(
        worker_card(1),
        publishes_kv_events=True,
        runtime_config=ModelRuntimeConfig(total_kv_blocks=2_500),
    )
    await harness.start(known)
    view, rank = harness.model.cache, WorkerRank(WorkerId(1), DpRank(0))
    assert isinstance(view, EventCacheView)
    ((_, feed),) = view.ingest.feeds()
    await until(lambda: feed.state is FeedState.LIVE)
    harness.load(LoadReport(rank, active_blocks=0, total_blocks=reported))
    if is_card_published_again:
        harness.discovery.put(structs.replace(known, cache_is_partial=True))
    blocks = pack_hashes(range(1, 10_001))
    harness.events.batch(KvBatch(rank, Epoch(1), EventId(0), (Stored(None, blocks, blocks),)))
    settled = (FeedState.LIVE, FeedState.OVER_LIMIT)
    await until(lambda: dict(view.ingest.feed_readings())[Slot(0)].state in settled)
    assert feed.state is state
    harness.service.stop()


async def test_a_card_without_a_capacity_gives_its_ranks_equal_shares() -> None:
    harness = RouterHarness(ScriptedTransport(lambda _stream: None))
    known = structs.replace(
        worker_card(1, dp_size=16), publishes_kv_events=True, runtime_config=ModelRuntimeConfig()
    )
    await harness.start(known)
    view = harness.model.cache
    assert isinstance(view, EventCacheView)
    capacities = [view.ingest._by_slot[Slot(at)].capacity for at in range(16)]
    assert sum(each.gpu for each in capacities) == sum(each.other for each in capacities) == 4 * 2**24
    harness.service.stop()
