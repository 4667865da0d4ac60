"""One request, two workers: prefill hands its KV to decode, which is picked again when that is better."""

import asyncio
import logging

import pytest

from kvrouter.core.errors import NoEligibleWorker
from kvrouter.core.ids import RequestId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg
from kvrouter.core.workers import LoadReport
from kvrouter.router import request_run
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.constants import SetConstants
from tests.testing.router_harness import (
    RouterHarness,
    decode_card,
    generate_request,
    prefill_card,
    read_all,
    router_harness,
)
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport, address_of
from tests.testing.waits import until


async def test_a_synchronous_handoff_hands_params_over_and_restores_max_tokens() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, prefill_card(1), decode_card(2))
    reading = asyncio.create_task(read_all(harness, max_tokens=2))
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
    assert harness.booked() == 0
    assert harness.telemetry.handoffs.value("a", "a") == 1


async def test_a_bootstrap_handoff_sends_both_legs_at_once_with_one_room() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, prefill_card(1, bootstrap=True, dp_size=4), decode_card(2))
    reading = asyncio.create_task(read_all(harness, max_tokens=1))
    prefill, decode = await plane.wait_for(Leg.PREFILL), await plane.wait_for(Leg.DECODE)
    assert prefill.request.bootstrap == decode.request.bootstrap
    assert prefill.request.bootstrap is not None
    assert prefill.request.bootstrap.room % 4 == prefill.request.dp_rank
    prefill.tokens(9, finish=FinishReason.LENGTH)
    decode.tokens(1, finish=FinishReason.LENGTH)
    assert await reading == [1]
    assert harness.booked() == 0


async def test_cached_tokens_of_prefill_are_kept_while_decode_is_not_sent() -> None:
    decode_connects = asyncio.Event()

    class DecodeConnectsLate(ScriptedTransport):
        async def open(self, address: str, request: EngineRequest) -> ScriptedStream:
            if request.leg is Leg.DECODE:
                await decode_connects.wait()
            return await super().open(address, request)

    plane = DecodeConnectsLate()
    harness = await router_harness(plane, prefill_card(1, bootstrap=True), decode_card(2))
    reading = asyncio.create_task(read_all(harness))
    prefill = await plane.wait_for(Leg.PREFILL)
    prefill.tokens(9, finish=FinishReason.LENGTH, cached=16)
    await until(lambda: harness.telemetry.cached_tokens.value("mock") == 16)
    decode_connects.set()
    (await plane.wait_for(Leg.DECODE)).tokens(1, finish=FinishReason.STOP)
    assert await reading == [1]
    kept = harness.service.decisions.get(generate_request().request_id)
    assert kept is not None
    assert [each.seen.cached_tokens for each in kept] == [16]


@pytest.mark.parametrize("bootstrap", [False, True])
async def test_a_leaving_client_cancels_both_legs(bootstrap: bool) -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, prefill_card(1, bootstrap=bootstrap), decode_card(2))
    async with harness.service.requests.generate(generate_request()) as generation:
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
    assert harness.booked() == 0
    assert harness.telemetry.cancellations.value("mock", "prefill") == 1


async def test_a_client_leaving_while_decode_is_sent_leaves_no_kv_waiting() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, prefill_card(1), decode_card(2))
    async with harness.service.requests.generate(generate_request()) as generation:
        reading = asyncio.create_task(anext(generation))
        prefill = await plane.wait_for(Leg.PREFILL)
        plane.accepts.clear()
        prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
        await until(lambda: plane.asked == [address_of(1), address_of(2)])
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert harness.booked() == 0
    plane.accepts.set()
    decode = await plane.wait_for(Leg.DECODE)
    assert decode.request.kv_transfer_params == {"block": 7}
    await until(lambda: decode.cancelled_for is not None)


async def test_a_handoff_with_empty_transfer_params_is_decoded() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, prefill_card(1), decode_card(2))
    reading = asyncio.create_task(read_all(harness, max_tokens=1))
    prefill = await plane.wait_for(Leg.PREFILL)
    prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={}))
    decode = await plane.wait_for(Leg.DECODE)
    assert decode.request.kv_transfer_params == {}
    decode.tokens(4, finish=FinishReason.LENGTH)
    assert await reading == [4]
    assert harness.booked() == 0


async def test_a_failed_bootstrap_prefill_frees_decode_and_is_retried() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(
        plane,
        prefill_card(1, bootstrap=True),
        prefill_card(3, bootstrap=True),
        decode_card(2),
    )
    reading = asyncio.create_task(read_all(harness, max_tokens=1))
    prefill, decode = await plane.wait_for(Leg.PREFILL), await plane.wait_for(Leg.DECODE)
    prefill.die()
    again = await plane.wait_for(Leg.PREFILL, nth=1)
    assert again.address != prefill.address
    assert decode.cancelled_for is not None
    again.tokens(9, finish=FinishReason.LENGTH)
    (await plane.wait_for(Leg.DECODE, nth=1)).tokens(4, finish=FinishReason.LENGTH)
    assert await reading == [4]
    assert harness.booked() == 0


async def test_required_sends_nothing_when_no_decode_worker_shares_the_domain() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, prefill_card(1, zone="b"), decode_card(2))
    with pytest.raises(NoEligibleWorker) as refused:
        await read_all(harness)
    assert refused.value.domain == "zone"
    assert plane.opened == []
    assert harness.booked() == 0


async def test_decode_moves_to_a_less_loaded_worker_after_prefill(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvrouter.router")
    plane = ScriptedTransport()
    harness = await router_harness(plane, prefill_card(1), decode_card(2), decode_card(3))
    reading = asyncio.create_task(read_all(harness, max_tokens=1))
    prefill = await plane.wait_for(Leg.PREFILL)
    first = harness.service.decisions.get(generate_request().request_id)
    assert first is not None
    booked = first[0][1].decode.rank
    other = asyncio.create_task(read_all(harness, max_tokens=1, request_id="other", pinned=booked.worker_id))
    await plane.wait_for(Leg.PREFILL, nth=1)
    prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
    decode = await plane.wait_for(Leg.DECODE)
    assert decode.address != address_of(booked.worker_id), (
        "the other request's blocks are on the first pick now"
    )
    decode.tokens(1, finish=FinishReason.LENGTH)
    assert await reading == [1]
    logged = [getattr(record, "kvrouter_fields", {}) for record in caplog.records]
    decisions = [fields for fields in logged if "decision_us" in fields]
    assert [each["request_id"] for each in decisions] == ["r1", "other", "r1"]
    assert [each["again"] for each in decisions] == [False, False, True]
    assert address_of(int(decisions[-1]["decode_worker"].partition("/")[0])) == decode.address
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
    assert harness.booked() == 0


async def test_decode_keeps_its_booked_worker_if_nothing_changed() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, prefill_card(1), *(decode_card(number) for number in range(2, 6)))
    for number in range(8):
        reading = asyncio.create_task(read_all(harness, max_tokens=1, request_id=f"r{number}"))
        prefill = await plane.wait_for(Leg.PREFILL, nth=number)
        prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
        decode = await plane.wait_for(Leg.DECODE, nth=number)
        kept = harness.service.decisions.get(RequestId(f"r{number}"))
        assert kept is not None
        assert len(kept) == 1, "one decision: decode was not moved"
        decode.tokens(1, finish=FinishReason.LENGTH)
        await reading


async def test_a_decode_worker_that_leaves_during_prefill_is_replaced_and_booked() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, prefill_card(1), decode_card(2), decode_card(3))
    reading = asyncio.create_task(read_all(harness, max_tokens=1))
    prefill = await plane.wait_for(Leg.PREFILL)
    kept = harness.service.decisions.get(generate_request().request_id)
    assert kept is not None
    left = kept[0][1].decode.rank.worker_id
    harness.discovery.drop(left)
    prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
    decode = await plane.wait_for(Leg.DECODE)
    assert decode.address == address_of(5 - left)
    assert harness.booked() == 3, "its blocks are booked at the other worker"
    decode.tokens(1, finish=FinishReason.LENGTH)
    assert await reading == [1]
    assert harness.booked() == 0


async def test_an_admitted_request_is_decoded_on_a_fleet_that_became_busy() -> None:
    plane = ScriptedTransport()
    harness = RouterHarness(plane, KvRouterConfig(active_decode_blocks_threshold=0.5))
    decode = decode_card(2)
    await harness.start(prefill_card(1), decode)
    reading = asyncio.create_task(read_all(harness, max_tokens=1))
    prefill = await plane.wait_for(Leg.PREFILL)
    harness.load(LoadReport(decode.ranks()[0], active_blocks=1000, total_blocks=1024))
    prefill.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
    (await plane.wait_for(Leg.DECODE)).tokens(1, finish=FinishReason.LENGTH)
    assert await reading == [1]


async def test_a_prefilled_request_without_decode_workers_becomes_a_new_pair() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(
        plane,
        prefill_card(1),
        decode_card(2),
        prefill_card(3, zone="b"),
        decode_card(4, zone="b"),
    )
    reading = asyncio.create_task(read_all(harness, max_tokens=1))
    first = await plane.wait_for(Leg.PREFILL)
    left, stays = (2, 4) if first.address == address_of(1) else (4, 2)
    harness.discovery.drop(left)
    first.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
    second = await plane.wait_for(Leg.PREFILL, nth=1)
    assert first.cancelled_for is not None, "its KV would wait for nobody"
    second.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 8}))
    decode = await plane.wait_for(Leg.DECODE)
    assert decode.address == address_of(stays)
    decode.tokens(1, finish=FinishReason.LENGTH)
    assert await reading == [1]
    assert harness.booked() == 0


async def test_prefill_cached_tokens_arriving_last_are_still_reported() -> None:
    """Two workers, two connections: the prefill leg said its last word first, and it may come last."""
    plane = ScriptedTransport()
    harness = await router_harness(plane, prefill_card(1, bootstrap=True), decode_card(2))
    async with harness.service.requests.generate(generate_request(max_tokens=2)) as generation:
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
    assert harness.booked() == 0


async def test_an_answer_does_not_wait_forever_for_a_silent_prefill_leg(
    set_constants: SetConstants,
) -> None:
    set_constants(request_run, PREFILL_END_WAIT_S=0.01)
    plane = ScriptedTransport(
        lambda stream: (
            stream.tokens(1, finish=FinishReason.STOP) if stream.request.leg is Leg.DECODE else None
        )
    )
    harness = await router_harness(plane, prefill_card(1, bootstrap=True), decode_card(2))
    assert await read_all(harness) == [1]
    assert (await plane.wait_for(Leg.PREFILL)).cancelled_for is not None
    assert harness.booked() == 0
