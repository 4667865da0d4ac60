"""One request's life against scripted workers: handoffs, losses, resumes, and that nothing is left behind."""

import asyncio

import pytest
from msgspec import structs

from kvrouter.config import KvRouterConfig
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import (
    AllWorkersBusy,
    NoEligibleWorker,
    ShuttingDown,
    WorkerFailed,
)
from kvrouter.core.ids import RequestId
from kvrouter.core.requests import EngineChunk, FinishReason, Leg, Sampling
from kvrouter.core.workers import Enforcement, LoadReport, Role
from tests.support.fleets import BLOCK_SIZE, Bench, card, generate_request, read_all
from tests.support.planes import ScriptedPlane, ScriptedStream, address_of


async def test_an_aggregated_request_is_booked_streamed_and_freed() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(card(1))
    async with bench.service.generate(generate_request()) as generation:
        reading = asyncio.create_task(anext(generation))
        stream = await plane.wait_for(Leg.AGGREGATED)
        assert bench.booked() == 40 + 3, "40 tokens to prefill, 3 blocks with the tail"
        stream.tokens(1, 2, cached=32)
        assert (await reading).token_ids == (1, 2)
        assert bench.booked() == 3, "the first token moves load from prefill to decode"
        stream.tokens(*range(3, 20))
        await anext(generation)
        assert bench.booked() == 4, "a block of output that became full counts"
        stream.tokens(20, finish=FinishReason.STOP)
        assert (await anext(generation)).finish is FinishReason.STOP
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
    assert bench.booked() == 0
    assert generation.usage.completion_tokens == 20
    assert generation.usage.cached_tokens == 32
    assert stream.cancelled_for is None


async def test_a_synchronous_handoff_hands_params_over_and_restores_max_tokens() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED), card(2, Role.DECODE, zone="a")
    )
    reading = asyncio.create_task(read_all(bench, max_tokens=2))
    prefill = await plane.wait_for(Leg.PREFILL)
    assert prefill.request.sampling.max_tokens == 1
    assert [leg for leg, _ in plane.legs()] == [Leg.PREFILL], "decode waits for the prefill answer"
    prefill.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
    decode = await plane.wait_for(Leg.DECODE)
    assert decode.request.kv_transfer_params == {"block": 7}
    assert decode.request.sampling.max_tokens == 2
    assert decode.request.prefill_worker_id == 1
    decode.tokens(1, 2, finish=FinishReason.LENGTH)
    assert await reading == [1, 2]
    assert bench.booked() == 0
    assert bench.telemetry.handoffs.value("a", "a") == 1


async def test_a_bootstrap_handoff_sends_both_legs_at_once_with_one_room() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="a", bootstrap=True, dp_size=4, enforcement=Enforcement.REQUIRED),
        card(2, Role.DECODE, zone="a"),
    )
    reading = asyncio.create_task(read_all(bench, max_tokens=1))
    prefill, decode = await plane.wait_for(Leg.PREFILL), await plane.wait_for(Leg.DECODE)
    assert prefill.request.bootstrap == decode.request.bootstrap
    assert prefill.request.bootstrap is not None
    assert prefill.request.bootstrap.room % 4 == prefill.request.dp_rank
    prefill.tokens(9, finish=FinishReason.LENGTH)
    decode.tokens(1, finish=FinishReason.LENGTH)
    assert await reading == [1]
    assert bench.booked() == 0


@pytest.mark.parametrize("bootstrap", [False, True])
async def test_a_client_that_leaves_cancels_both_legs(bootstrap: bool) -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="a", bootstrap=bootstrap, enforcement=Enforcement.REQUIRED),
        card(2, Role.DECODE, zone="a"),
    )
    async with bench.service.generate(generate_request()) as generation:
        reading = asyncio.create_task(anext(generation))
        prefill = await plane.wait_for(Leg.PREFILL)
        if not bootstrap:
            prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
        decode = await plane.wait_for(Leg.DECODE)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert decode.cancelled_for is not None
    assert prefill.cancelled_for is not None, "KV that waits on the prefill worker is given back"
    assert bench.booked() == 0
    assert bench.telemetry.cancellations.value("mock", "prefill") == 1


async def test_a_worker_that_dies_before_the_first_token_is_replaced() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(card(1), card(2), card(3))
    reading = asyncio.create_task(read_all(bench, sampling=Sampling(max_tokens=4, seed=1)))
    first = await plane.wait_for(Leg.AGGREGATED)
    first.die()
    second = await plane.wait_for(Leg.AGGREGATED, nth=1)
    assert second.address != first.address
    assert second.request.attempt == 1
    second.tokens(5, 6, finish=FinishReason.STOP)
    assert await reading == [5, 6]
    assert bench.booked() == 0
    assert bench.telemetry.retries.value("mock", "aggregated") == 1


async def test_an_unreachable_worker_costs_a_try_and_no_more() -> None:
    plane = ScriptedPlane(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    bench = Bench(plane)
    await bench.start(card(1), card(2))
    plane.unreachable = {address_of(1)}
    for number in range(4):
        assert await read_all(bench, request_id=f"r{number}") == [1]
    assert {address for _, address in plane.legs()} == {address_of(2)}


async def test_a_stream_goes_on_elsewhere_token_for_token() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(card(1), card(2))
    reading = asyncio.create_task(read_all(bench, max_tokens=6))
    first = await plane.wait_for(Leg.AGGREGATED)
    first.tokens(1, 2, 3, cached=16)
    first.die()
    second = await plane.wait_for(Leg.AGGREGATED, nth=1)
    assert list(second.request.token_ids[-3:]) == [1, 2, 3]
    assert second.request.resumed_tokens == 3
    assert second.request.sampling.max_tokens == 3
    second.tokens(4, 5, 6, finish=FinishReason.LENGTH, cached=40)
    assert await reading == [1, 2, 3, 4, 5, 6]
    assert bench.booked() == 0
    assert bench.telemetry.resumes.value("mock") == 1
    assert bench.telemetry.completion_tokens.value("mock") == 6


async def test_a_stream_that_cannot_be_resumed_ends_with_one_error() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(card(1), card(2))
    sampling = Sampling(max_tokens=6, temperature=0.5, seed=3)
    async with bench.service.generate(generate_request(sampling=sampling)) as generation:
        reading = asyncio.create_task(anext(generation))
        stream = await plane.wait_for(Leg.AGGREGATED)
        stream.tokens(1)
        await reading
        stream.die()
        with pytest.raises(WorkerFailed, match="after 1 tokens") as failed:
            await anext(generation)
        assert stream.address not in failed.value.message  # a client has no business with it
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
    assert len(plane.opened) == 1
    assert bench.booked() == 0


async def test_three_workers_at_most_meet_one_request() -> None:
    plane = ScriptedPlane(ScriptedStream.die)
    bench = Bench(plane)
    await bench.start(*(card(number) for number in range(1, 7)))
    with pytest.raises(WorkerFailed, match="try 3 of 3"):
        await read_all(bench)
    assert len({address for _, address in plane.legs()}) == 3
    assert bench.booked() == 0


async def test_when_nobody_is_left_the_refusal_counts_who_failed() -> None:
    plane = ScriptedPlane(ScriptedStream.die)
    bench = Bench(plane)
    await bench.start(card(1))
    with pytest.raises(NoEligibleWorker, match=r"worker 1 failed .* died\); after that") as refused:
        await read_all(bench)
    assert {str(reason): n for reason, n in refused.value.refusals.items()} == {"excluded": 1}
    assert bench.booked() == 0


async def test_a_failing_prefill_of_a_bootstrap_pair_frees_decode_and_goes_elsewhere() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="a", bootstrap=True, enforcement=Enforcement.REQUIRED),
        card(3, Role.PREFILL, zone="a", bootstrap=True, enforcement=Enforcement.REQUIRED),
        card(2, Role.DECODE, zone="a"),
    )
    reading = asyncio.create_task(read_all(bench, max_tokens=1))
    prefill, decode = await plane.wait_for(Leg.PREFILL), await plane.wait_for(Leg.DECODE)
    prefill.die()
    again = await plane.wait_for(Leg.PREFILL, nth=1)
    assert again.address != prefill.address
    assert decode.cancelled_for is not None
    again.tokens(9, finish=FinishReason.LENGTH)
    (await plane.wait_for(Leg.DECODE, nth=1)).tokens(4, finish=FinishReason.LENGTH)
    assert await reading == [4]
    assert bench.booked() == 0


async def test_required_sends_nothing_when_no_decode_worker_shares_the_domain() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="b", enforcement=Enforcement.REQUIRED), card(2, Role.DECODE, zone="a")
    )
    with pytest.raises(NoEligibleWorker) as refused:
        await read_all(bench)
    assert refused.value.domain == "zone"
    assert plane.opened == []
    assert bench.booked() == 0


async def test_draining_refuses_new_requests_and_waits_for_running_ones() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(card(1))
    reading = asyncio.create_task(read_all(bench))
    stream = await plane.wait_for(Leg.AGGREGATED)
    draining = asyncio.create_task(bench.service.drain(30.0))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        bench.service.generate(generate_request(request_id="r2"))
    stream.tokens(1, finish=FinishReason.STOP)
    assert await reading == [1]
    assert await draining == 0


async def test_decode_is_picked_again_after_prefill_where_the_load_is_lower_now() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED),
        card(2, Role.DECODE, zone="a"),
        card(3, Role.DECODE, zone="a"),
    )
    reading = asyncio.create_task(read_all(bench, max_tokens=1))
    prefill = await plane.wait_for(Leg.PREFILL)
    first = bench.service.decisions(generate_request().request_id)
    assert first is not None
    booked = first[0][1].decode.rank
    other = asyncio.create_task(read_all(bench, max_tokens=1, request_id="other", pinned=booked.worker_id))
    await plane.wait_for(Leg.PREFILL, nth=1)
    prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
    decode = await plane.wait_for(Leg.DECODE)
    assert decode.address != address_of(booked.worker_id), (
        "the other request's blocks are on the first pick now"
    )
    decode.tokens(1, finish=FinishReason.LENGTH)
    assert await reading == [1]
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
    assert bench.booked() == 0


async def test_decode_stays_where_it_was_booked_when_nothing_changed() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED),
        *(card(number, Role.DECODE, zone="a") for number in range(2, 6)),
    )
    for number in range(8):
        reading = asyncio.create_task(read_all(bench, max_tokens=1, request_id=f"r{number}"))
        prefill = await plane.wait_for(Leg.PREFILL, nth=number)
        prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
        decode = await plane.wait_for(Leg.DECODE, nth=number)
        kept = bench.service.decisions(RequestId(f"r{number}"))
        assert kept is not None
        assert len(kept) == 1, "one decision: decode was not moved"
        decode.tokens(1, finish=FinishReason.LENGTH)
        await reading


async def test_a_decode_worker_that_leaves_during_prefill_is_replaced_and_booked() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED),
        card(2, Role.DECODE, zone="a"),
        card(3, Role.DECODE, zone="a"),
    )
    reading = asyncio.create_task(read_all(bench, max_tokens=1))
    prefill = await plane.wait_for(Leg.PREFILL)
    kept = bench.service.decisions(generate_request().request_id)
    assert kept is not None
    left = kept[0][1].decode.rank.worker_id
    bench.discovery.drop(left)
    prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
    decode = await plane.wait_for(Leg.DECODE)
    assert decode.address == address_of(5 - left)
    assert bench.booked() == 3, "its blocks are booked at the other worker"
    decode.tokens(1, finish=FinishReason.LENGTH)
    assert await reading == [1]
    assert bench.booked() == 0


async def test_explaining_changes_nothing_and_tells_the_next_decision() -> None:
    plane = ScriptedPlane(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    for mode in RouterMode:
        bench = Bench(plane, KvRouterConfig(router_mode=mode, router_temperature=0.7))
        await bench.start(*(card(number) for number in range(1, 6)))
        for number in range(6):
            request = generate_request(request_id=f"{mode}-{number}")
            told = [bench.service.explain(request).decode.rank for _ in range(3)]
            async with bench.service.generate(request) as generation:
                await anext(generation)
            placement = generation.placement
            assert placement is not None
            assert told == [placement.decision.decode.rank] * 3


async def test_an_admitted_request_is_decoded_however_busy_the_fleet_became() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane, KvRouterConfig(active_decode_blocks_threshold=0.5))
    decode = card(2, Role.DECODE, zone="a")
    await bench.start(card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED), decode)
    reading = asyncio.create_task(read_all(bench, max_tokens=1))
    prefill = await plane.wait_for(Leg.PREFILL)
    bench.load(LoadReport(decode.ranks()[0], active_blocks=1000, total_blocks=1024))
    prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
    (await plane.wait_for(Leg.DECODE)).tokens(1, finish=FinishReason.LENGTH)
    assert await reading == [1]


async def test_a_prefilled_request_whose_domain_lost_its_decode_workers_becomes_a_new_pair() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED),
        card(2, Role.DECODE, zone="a"),
        card(3, Role.PREFILL, zone="b", enforcement=Enforcement.REQUIRED),
        card(4, Role.DECODE, zone="b"),
    )
    reading = asyncio.create_task(read_all(bench, max_tokens=1))
    first = await plane.wait_for(Leg.PREFILL)
    left, stays = (2, 4) if first.address == address_of(1) else (4, 2)
    bench.discovery.drop(left)
    first.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
    second = await plane.wait_for(Leg.PREFILL, nth=1)
    assert first.cancelled_for is not None, "its KV would wait for nobody"
    second.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 8}))
    decode = await plane.wait_for(Leg.DECODE)
    assert decode.address == address_of(stays)
    decode.tokens(1, finish=FinishReason.LENGTH)
    assert await reading == [1]
    assert bench.booked() == 0


async def test_workers_that_are_full_make_the_fleet_busy_not_broken() -> None:
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(card(1), card(2))
    plane.full = {address_of(1), address_of(2)}
    with pytest.raises(AllWorkersBusy, match="queue is full"):
        await read_all(bench)


async def test_a_retry_is_counted_when_it_happens_and_not_when_nobody_is_left() -> None:
    plane = ScriptedPlane(ScriptedStream.die)
    bench = Bench(plane)
    await bench.start(card(1), card(2))
    with pytest.raises(NoEligibleWorker):
        await read_all(bench)
    assert bench.telemetry.retries.value("mock", "aggregated") == 1


async def test_a_new_incarnation_that_cannot_be_used_ends_the_old_one_too() -> None:
    bench = Bench(ScriptedPlane())
    await bench.start(card(1))
    bench.discovery.put(structs.replace(card(1, incarnation=2), block_size=BLOCK_SIZE * 2))
    assert len(bench.model.fleet) == 0
    bench.discovery.put(card(1, incarnation=3))
    assert len(bench.model.fleet) == 1


async def test_what_prefill_had_cached_is_told_although_it_arrives_after_the_last_token() -> None:
    """Two workers, two connections: the prefill leg said its last word first, and it may come last."""
    plane = ScriptedPlane()
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="a", bootstrap=True, enforcement=Enforcement.REQUIRED),
        card(2, Role.DECODE, zone="a"),
    )
    async with bench.service.generate(generate_request(max_tokens=2)) as generation:
        reading = asyncio.create_task(anext(generation))
        prefill, decode = await plane.wait_for(Leg.PREFILL), await plane.wait_for(Leg.DECODE)
        decode.tokens(1)
        assert (await reading).token_ids == (1,)
        last = asyncio.create_task(anext(generation))
        decode.tokens(2, finish=FinishReason.LENGTH)
        await asyncio.sleep(0)
        prefill.tokens(1, finish=FinishReason.LENGTH, cached=48)
        assert (await last).token_ids == (2,)
        assert generation.usage.cached_tokens == 48
        assert prefill.cancelled_for is None
    assert bench.booked() == 0


async def test_an_answer_does_not_wait_for_ever_for_a_prefill_leg_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrouter.service.dispatch.PREFILL_LAST_WORD_S", 0.01)
    plane = ScriptedPlane(
        lambda stream: (
            stream.tokens(1, finish=FinishReason.STOP) if stream.request.leg is Leg.DECODE else None
        )
    )
    bench = Bench(plane)
    await bench.start(
        card(1, Role.PREFILL, zone="a", bootstrap=True, enforcement=Enforcement.REQUIRED),
        card(2, Role.DECODE, zone="a"),
    )
    assert await read_all(bench) == [1]
    assert (await plane.wait_for(Leg.PREFILL)).cancelled_for is not None
    assert bench.booked() == 0
