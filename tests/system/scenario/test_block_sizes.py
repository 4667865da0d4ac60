"""Workers of one model whose cards name different block sizes: that of most of them is the model's."""

import asyncio

import pytest
from msgspec import structs

from kvrouter.core.errors import NoEligibleWorker
from kvrouter.core.ids import ModelName, WorkerId
from kvrouter.core.requests import FinishReason, Leg
from kvrouter.core.workers import LoadReport, ModelInput, WorkerCard
from kvrouter.router import router_service
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.event_ingest import EventIngest
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.records.port import Gone
from tests.testing.calls import WatchCalls
from tests.testing.constants import SetConstants
from tests.testing.router_harness import (
    BLOCK_SIZE,
    RouterHarness,
    card,
    decode_card,
    prefill_card,
    read_all,
    router_harness,
)
from tests.testing.scripted_transport import ScriptedTransport, address_of

OTHER = 2 * BLOCK_SIZE


def odd(worker_id: int) -> WorkerCard:
    return structs.replace(card(worker_id), block_size=OTHER)


def ids(harness: RouterHarness) -> set[int]:
    return {int(each.worker_id) for each in harness.model.fleet}


def bench_of_streams() -> RouterHarness:
    return RouterHarness(ScriptedTransport(lambda stream: stream.tokens(1, finish=FinishReason.STOP)))


async def test_the_majority_of_cards_overrides_the_first_ones_block_size() -> None:
    harness = bench_of_streams()
    await harness.start(odd(1))
    harness.discovery.put(card(2))
    assert (harness.model.fleet.block_size, ids(harness)) == (OTHER, {1}), "one against one: the first stays"
    harness.discovery.put(card(3))
    assert (harness.model.fleet.block_size, ids(harness)) == (BLOCK_SIZE, {2, 3})
    assert await read_all(harness) == [1]
    harness.discovery.put(odd(4))
    assert (harness.model.fleet.block_size, ids(harness)) == (BLOCK_SIZE, {2, 3}), "two against two"


async def test_workers_without_a_block_size_join_any_and_have_no_vote() -> None:
    unknown = [structs.replace(card(worker_id), block_size=None, context_length=None) for worker_id in (1, 2)]
    harness = bench_of_streams()
    await harness.start(*unknown)
    assert (harness.model.fleet.block_size, harness.model.fleet.context_length_tokens) == (16, None)
    assert await read_all(harness) == [1]
    harness.discovery.put(structs.replace(card(3), block_size=64))
    assert (harness.model.fleet.block_size, ids(harness)) == (64, {1, 2, 3})
    assert await read_all(harness) == [1]


async def test_refused_workers_take_over_once_they_are_the_majority() -> None:
    harness = bench_of_streams()
    await harness.start(card(1), card(2), odd(3), odd(4))
    assert ids(harness) == {1, 2}
    harness.discovery.drop(2)
    assert (harness.model.fleet.block_size, ids(harness)) == (OTHER, {3, 4})
    harness.discovery.drop(3)
    assert ids(harness) == {4}
    harness.discovery.drop(4)
    assert (harness.model.fleet.block_size, ids(harness)) == (BLOCK_SIZE, {1})
    assert await read_all(harness) == [1]


async def test_a_refused_worker_that_left_has_no_vote() -> None:
    harness = bench_of_streams()
    await harness.start(card(1), odd(2))
    harness.discovery.drop(2)
    harness.discovery.put(odd(3))
    assert ids(harness) == {1}


async def test_outnumbered_workers_with_lapsed_leases_lose_their_block_size() -> None:
    plane = ScriptedTransport(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    harness = await router_harness(plane, card(1), card(2))
    for worker_id in (1, 2):
        harness.discovery.drop(worker_id, why=Gone.EXPIRED)
    assert ids(harness) == {1, 2}, "they answer"
    harness.discovery.put(odd(3), odd(4), odd(5))
    assert (harness.model.fleet.block_size, ids(harness)) == (OTHER, {3, 4, 5})
    for worker_id in (4, 5):
        harness.discovery.drop(worker_id)
    assert (harness.model.fleet.block_size, ids(harness)) == (OTHER, {3})
    assert await read_all(harness) == [1]
    assert plane.legs()[-1][1] == address_of(3)
    harness.discovery.put(card(1), card(2))
    assert (harness.model.fleet.block_size, ids(harness)) == (BLOCK_SIZE, {1, 2}), (
        "announced again, they count"
    )
    assert not harness.service.liveness.has_lapsed(WorkerId(1))


async def test_a_card_unusable_for_another_reason_has_no_vote() -> None:
    harness = bench_of_streams()
    await harness.start(card(1), odd(2))
    harness.discovery.put(structs.replace(odd(2), model_input=ModelInput.Text))
    harness.discovery.put(odd(3))
    assert ids(harness) == {1}


async def test_an_unusable_card_replacing_a_worker_lets_refused_ones_join() -> None:
    harness = bench_of_streams()
    await harness.start(card(1), odd(2))
    harness.discovery.put(structs.replace(card(1, incarnation=2), model_input=ModelInput.Text))
    assert (harness.model.fleet.block_size, ids(harness)) == (OTHER, {2})


async def test_a_worker_dying_after_its_lease_lets_refused_ones_join() -> None:
    plane = ScriptedTransport(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    harness = await router_harness(plane, card(1), odd(2))
    harness.discovery.drop(1, why=Gone.EXPIRED)
    assert ids(harness) == {1}, "it answers"
    plane.followers[address_of(1)](False)
    assert (harness.model.fleet.block_size, ids(harness)) == (OTHER, {2})


async def test_a_worker_changing_its_model_lets_refused_ones_join() -> None:
    harness = bench_of_streams()
    await harness.start(card(1), odd(2))
    harness.discovery.put(structs.replace(card(1, incarnation=2), model=ModelName("other")))
    assert (harness.model.fleet.block_size, ids(harness)) == (OTHER, {2})


async def test_a_refused_worker_counts_until_its_own_incarnation_leaves() -> None:
    harness = bench_of_streams()
    await harness.start(card(1), odd(2))
    harness.discovery.drop(2, incarnation=7)
    harness.discovery.put(odd(3))
    assert ids(harness) == {2, 3}


@pytest.mark.parametrize("all_leave", [False, True])
async def test_busy_thresholds_survive_a_block_size_change(all_leave: bool) -> None:
    harness = bench_of_streams()
    await harness.start(card(1))
    harness.model.placer.set_busy_thresholds(
        decode_blocks=0.75, prefill_tokens=4096, now_s=harness.model.clock()
    )
    if all_leave:
        harness.discovery.drop(1)
    harness.discovery.put(odd(2), odd(3))
    settings = harness.model.placer.settings
    assert harness.model.fleet.block_size == OTHER
    assert settings.active_decode_blocks_threshold == 0.75
    assert settings.active_prefill_tokens_threshold == 4096


@pytest.mark.parametrize("all_leave", [False, True])
async def test_the_index_of_the_old_block_size_is_closed(all_leave: bool, watch_calls: WatchCalls) -> None:
    closed = watch_calls(EventIngest, "close")
    harness = bench_of_streams()
    await harness.start(card(1))
    old = harness.model.cache
    assert isinstance(old, EventCacheView)
    if all_leave:
        harness.discovery.drop(1)
    harness.discovery.put(odd(2), odd(3))
    assert harness.model.fleet.block_size == OTHER
    assert [call.arguments for call in closed] == [(old.ingest,)]


async def test_eviction_keeps_models_with_set_busy_thresholds(
    set_constants: SetConstants,
) -> None:
    def of(model: str, worker_id: int) -> WorkerCard:
        return structs.replace(card(worker_id), model=ModelName(model))

    def known(harness: RouterHarness) -> list[str]:
        return [model.fleet.model for model in harness.service.models()]

    set_constants(router_service, MODELS_MAX=2)
    harness = bench_of_streams()
    await harness.start(of("set", 1), of("plain", 2))
    other = harness.service.model(ModelName("set"))
    other.placer.set_busy_thresholds(decode_blocks=0.75, prefill_tokens=None, now_s=other.clock())
    harness.discovery.drop(1)
    harness.discovery.drop(2)
    harness.discovery.put(of("third", 3))
    assert known(harness) == ["set", "third"]
    harness.discovery.put(of("fourth", 4))
    assert known(harness) == ["third", "fourth"], "there was no other"


async def test_running_requests_end_when_the_block_size_changes() -> None:
    """An answer goes on where it is; one that needs another worker, or waits for one, is refused at once."""
    plane = ScriptedTransport()
    config = KvRouterConfig(active_decode_blocks_threshold=0.5, admission_queue_max=1, admission_wait_s=600.0)
    harness = await router_harness(plane, card(1), config=config)
    first = asyncio.create_task(read_all(harness, max_tokens=2))
    second = asyncio.create_task(read_all(harness, max_tokens=2, request_id="r2"))
    one, two = await plane.wait_for(Leg.AGGREGATED), await plane.wait_for(Leg.AGGREGATED, nth=1)
    for stream in (one, two):
        stream.tokens(1)
    harness.load(LoadReport(card(1).ranks()[0], active_blocks=900, total_blocks=1024))
    waiting = asyncio.create_task(read_all(harness, request_id="r3"))
    await harness.until_parked()
    harness.discovery.put(odd(2), odd(3))
    with pytest.raises(NoEligibleWorker):
        await asyncio.wait_for(waiting, 60)
    two.die()
    with pytest.raises(NoEligibleWorker):
        await asyncio.wait_for(second, 60)
    one.tokens(2, finish=FinishReason.LENGTH)
    assert await asyncio.wait_for(first, 60) == [1, 2]
    assert harness.booked() == 0


async def test_a_block_size_change_refuses_requests_waiting_for_a_domain() -> None:
    config = KvRouterConfig(router_domain_wait_s=600.0)
    harness = await router_harness(
        ScriptedTransport(), prefill_card(1), decode_card(2, zone="b"), config=config
    )
    waiting = asyncio.create_task(read_all(harness))
    await harness.until_parked()
    harness.discovery.put(odd(3), odd(4), odd(5))
    with pytest.raises(NoEligibleWorker):
        await asyncio.wait_for(waiting, 60)
