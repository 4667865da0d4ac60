"""How long a request waits, and for what: queues, domains, deadlines and silence."""

import asyncio
import time

import pytest
from msgspec import structs

from kvrouter.core.errors import (
    AllWorkersBusy,
    DeadlineExceeded,
    InternalError,
    Reason,
    RoutingRefused,
    SloUnreachable,
)
from kvrouter.core.requests import CallRoute, ClientCall, EngineChunk, FinishReason, GenerateRequest, Leg
from kvrouter.core.workers import LoadReport
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.router_harness import (
    BLOCK_SIZE,
    RouterHarness,
    card,
    decode_card,
    generate_request,
    prefill_card,
    read_all,
    router_harness,
)
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport
from tests.testing.virtual_time import in_virtual_time
from tests.testing.waits import until

RANK = card(1).ranks()[0]
BUSY, QUIET = (LoadReport(RANK, active_blocks=active, total_blocks=1024) for active in (900, 1))
QUEUE = KvRouterConfig(active_decode_blocks_threshold=0.5, admission_queue_max=1, admission_wait_s=30.0)
PREFILL = prefill_card(1)
DECODE, ELSEWHERE, THERE = decode_card(2), decode_card(2, zone="b"), decode_card(3)


@in_virtual_time
async def test_a_request_waits_for_a_decode_worker_to_join_its_domain() -> None:
    plane = ScriptedTransport(
        lambda stream: stream.feed(
            EngineChunk(token_ids=(1,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 7})
        )
    )
    harness = await router_harness(
        plane, PREFILL, ELSEWHERE, config=KvRouterConfig(router_domain_wait_s=30.0)
    )
    reading = asyncio.create_task(read_all(harness, max_tokens=1))
    await harness.until_parked()
    harness.discovery.put(THERE)
    assert await reading == [1]
    assert harness.telemetry.domain_waits.value("joined") == 1
    assert harness.telemetry.queue_wait.count("mock") == 0, "that is no time in the queue"


@in_virtual_time
async def test_admission_parks_busy_requests_until_load_falls() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), config=QUEUE)
    harness.load(BUSY)
    parked = asyncio.create_task(read_all(harness))
    await harness.until_parked()
    with pytest.raises(AllWorkersBusy):
        await read_all(harness, request_id="r2")
    assert harness.telemetry.queue_refusals.value("mock", "full") == 1
    assert harness.telemetry.queue_refusals.value("mock", "timeout") == 0
    harness.load(QUIET)
    (await plane.wait_for(Leg.AGGREGATED)).tokens(1, finish=FinishReason.STOP)
    assert await parked == [1]


@in_virtual_time
async def test_a_late_first_token_fails_the_request_without_a_retry() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), card(2), config=KvRouterConfig(ttft_timeout_s=0.05))
    with pytest.raises(DeadlineExceeded, match=r"no first token within 0\.05 s"):
        await read_all(harness)
    assert len(plane.opened) == 1
    assert plane.opened[0].cancelled_for is not None
    assert harness.booked() == 0


@in_virtual_time
async def test_a_stalled_stream_resumes_on_another_worker() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), card(2), config=KvRouterConfig(stall_timeout_s=0.05))
    reading = asyncio.create_task(read_all(harness, max_tokens=2))
    first = await plane.wait_for(Leg.AGGREGATED)
    first.tokens(1)
    second = await plane.wait_for(Leg.AGGREGATED, nth=1)
    assert first.cancelled_for is not None
    second.tokens(2, finish=FinishReason.LENGTH)
    assert await reading == [1, 2]


@in_virtual_time
async def test_a_request_over_its_total_time_limit_fails() -> None:
    plane = ScriptedTransport(lambda stream: stream.tokens(1))
    harness = await router_harness(plane, card(1), card(2), config=KvRouterConfig(request_timeout_s=0.05))
    with pytest.raises(DeadlineExceeded):
        await read_all(harness)
    assert harness.booked() == 0


@in_virtual_time
async def test_every_leg_carries_the_remaining_request_time() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), card(2), config=KvRouterConfig(request_timeout_s=500.0))
    reading = asyncio.create_task(read_all(harness, max_tokens=2))
    first = await plane.wait_for(Leg.AGGREGATED)
    first.tokens(1)
    opened_s = time.monotonic()
    await asyncio.sleep(0.02)
    first.die()
    died_s = time.monotonic()
    second = await plane.wait_for(Leg.AGGREGATED, nth=1)
    second.tokens(2, finish=FinishReason.LENGTH)
    assert await reading == [1, 2]
    before_s, after_s = (stream.request.time_left_s for stream in (first, second))
    assert before_s is not None
    assert after_s is not None
    assert 0.0 < after_s < before_s - (died_s - opened_s) + 1e-6 < 500.0


@in_virtual_time
async def test_queued_requests_keep_their_place_and_are_served_in_order() -> None:
    plane = ScriptedTransport(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    harness = await router_harness(plane, card(1), config=QUEUE.model_copy(update={"admission_queue_max": 3}))
    harness.load(BUSY)
    parked = [asyncio.create_task(read_all(harness, request_id=f"r{number}")) for number in range(3)]
    await until(lambda: len(harness.model.placer.waiting) == 3)
    for _ in range(5):  # a change that helps nobody costs nobody its place
        harness.load(BUSY)
        with pytest.raises(AllWorkersBusy):
            await read_all(harness, request_id="late")
    assert len(harness.model.placer.waiting) == 3
    harness.load(QUIET)
    assert await asyncio.gather(*parked) == [[1]] * 3
    assert [stream.request.request_id for stream in plane.opened] == ["r0", "r1", "r2"]
    assert len(harness.model.placer.waiting) == 0


@in_virtual_time
async def test_waiting_for_a_domain_takes_no_place_in_the_admission_queue() -> None:
    config = QUEUE.model_copy(update={"router_domain_wait_s": 30.0})
    harness = await router_harness(ScriptedTransport(), PREFILL, ELSEWHERE, config=config)
    waits = [asyncio.create_task(read_all(harness, request_id=f"r{number}")) for number in range(3)]
    await until(lambda: len(harness.model.placer.waiting) == 3)
    assert len(harness.model.placer.waiting.admission) == 0
    for each in waits:
        each.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    assert len(harness.model.placer.waiting) == 0


@in_virtual_time
async def test_a_stream_may_resume_after_the_first_token_limit() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), card(2), config=KvRouterConfig(ttft_timeout_s=1.0))
    reading = asyncio.create_task(read_all(harness, max_tokens=2))
    first = await plane.wait_for(Leg.AGGREGATED)
    first.tokens(1)
    await asyncio.sleep(1.1)  # the limit of the first token passes; the client has had it
    first.die()
    (await plane.wait_for(Leg.AGGREGATED, nth=1)).tokens(2, finish=FinishReason.LENGTH)
    assert await reading == [1, 2]


@pytest.mark.parametrize(
    ("limit", "error"), [({"request_timeout_s": 0.05}, AllWorkersBusy), ({"slo_ttft_ms": 50}, SloUnreachable)]
)
@in_virtual_time
async def test_queue_wait_ends_at_the_deadline_or_the_ttft_objective(
    limit: dict[str, float], error: type[RoutingRefused]
) -> None:
    config = QUEUE.model_copy(update={"admission_wait_s": 600.0, **limit})
    harness = await router_harness(ScriptedTransport(), card(1), config=config)
    harness.load(BUSY)
    with pytest.raises(error, match="worker that may take this request is busy") as caught:
        await asyncio.wait_for(read_all(harness), 30)
    assert (caught.value.refusals, caught.value.retry_after_s) == ({Reason.BUSY: 1}, 1)
    assert harness.telemetry.queue_refusals.value("mock", "timeout") == 1
    assert harness.telemetry.slo_refusals.value("mock", "other") == (error is SloUnreachable)
    assert len(harness.model.placer.waiting) == 0


@in_virtual_time
async def test_a_model_may_come_back_with_another_block_size() -> None:
    harness = RouterHarness(ScriptedTransport(lambda stream: stream.tokens(1, finish=FinishReason.STOP)))
    await harness.start(card(1))
    harness.discovery.drop(1)
    harness.discovery.put(structs.replace(card(2), block_size=2 * BLOCK_SIZE))
    assert harness.model.fleet.block_size == 2 * BLOCK_SIZE
    assert await read_all(harness) == [1]


@in_virtual_time
async def test_an_internal_error_in_a_prefill_leg_fails_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def script(stream: ScriptedStream) -> None:
        if stream.request.leg is Leg.PREFILL:
            stream.feed(ZeroDivisionError("a mistake"))

    plane = ScriptedTransport(script)
    harness = await router_harness(plane, prefill_card(1, bootstrap=True), DECODE)
    with pytest.raises(InternalError):
        await asyncio.wait_for(read_all(harness), 30)
    assert harness.booked() == 0
    assert "internal_error" in caplog.text


@in_virtual_time
async def test_no_active_blocks_are_known_without_block_tracking() -> None:
    harness = await router_harness(
        ScriptedTransport(), card(1), config=KvRouterConfig(track_active_blocks=False)
    )
    request = generate_request()
    assert harness.model.view(harness.model.hash_prompt(request.token_ids)).not_active is None


@in_virtual_time
async def test_a_deadline_while_prefill_is_sent_ends_the_request() -> None:
    plane = ScriptedTransport()
    plane.accepts = asyncio.Event()
    harness = await router_harness(plane, PREFILL, DECODE, config=KvRouterConfig(ttft_timeout_s=0.05))
    async with harness.service.requests.generate(generate_request()) as generation:
        reading = asyncio.create_task(anext(generation))
        await until(lambda: generation.error is not None)
        plane.accepts.set()
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(reading, 30)
    (prefill,) = plane.opened
    assert prefill.cancelled_for is not None
    assert harness.booked() == 0


@in_virtual_time
async def test_kv_lost_by_a_dead_prefill_worker_is_prefilled_by_another() -> None:
    """Decode is the first to know that the prefill worker died: its zone, which has no other, keeps it."""
    plane = ScriptedTransport()
    harness = await router_harness(plane, PREFILL, prefill_card(3), DECODE)
    reading = asyncio.create_task(read_all(harness, max_tokens=2))
    prefill = await plane.wait_for(Leg.PREFILL)
    prefill.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
    decode = await plane.wait_for(Leg.DECODE)
    decode.feed(EngineChunk(finish=FinishReason.ERROR, error="KV transfer failed"))
    asyncio.get_running_loop().call_later(0.02, plane.followers[prefill.address], False)
    again = await plane.wait_for(Leg.PREFILL, nth=1)
    assert again.address != prefill.address
    again.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 8}))
    (await plane.wait_for(Leg.DECODE, nth=1)).tokens(4, 5, finish=FinishReason.LENGTH)
    assert await reading == [4, 5]
    assert harness.booked() == 0


def asked_at_once() -> GenerateRequest:
    """A request whose engine answers it at once, when all of the answer is there."""
    return structs.replace(
        generate_request(), call=ClientCall(route=CallRoute.CHAT, body=b"{}", stream=False, resumable=True)
    )


@in_virtual_time
async def test_a_whole_answer_may_exceed_the_first_token_limit() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), config=KvRouterConfig(ttft_timeout_s=0.05))
    async with harness.service.requests.generate(asked_at_once()) as generation:
        reading = asyncio.create_task(anext(generation))
        stream = await plane.wait_for(Leg.AGGREGATED)
        await asyncio.sleep(0.1)  # the deadline passes, and nothing is to happen
        stream.feed(EngineChunk(raw=b"{}", finish=FinishReason.STOP))
        assert (await reading).raw == b"{}"


@in_virtual_time
async def test_a_hanging_whole_answer_ends_at_the_request_deadline() -> None:
    plane = ScriptedTransport()
    config = KvRouterConfig(ttft_timeout_s=0.05, request_timeout_s=1.0, circuit_failures=1)
    harness = await router_harness(plane, card(1), config=config)
    async with harness.service.requests.generate(asked_at_once()) as generation:
        with pytest.raises(DeadlineExceeded, match=r"took longer than 1 s"):
            await anext(generation)
    assert plane.opened[0].cancelled_for is not None
    assert harness.booked() == 0
    assert harness.telemetry.circuits_opened.value("mock", "1", "silent") == 1


@in_virtual_time
async def test_a_whole_answers_prefill_leg_has_the_first_token_limit() -> None:
    plane = ScriptedTransport()
    config = KvRouterConfig(ttft_timeout_s=1.0, circuit_failures=1)
    harness = await router_harness(plane, PREFILL, DECODE, config=config)
    async with harness.service.requests.generate(asked_at_once()) as generation:
        with pytest.raises(DeadlineExceeded, match=r"no prefill within 1 s"):
            await anext(generation)
    assert [leg for leg, _ in plane.legs()] == [Leg.PREFILL]
    assert plane.opened[0].cancelled_for is not None
    assert harness.booked() == 0
    assert harness.telemetry.circuits_opened.value("mock", "1", "silent") == 1


@in_virtual_time
async def test_a_prefilled_whole_answer_may_exceed_the_first_token_limit() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, PREFILL, DECODE, config=KvRouterConfig(ttft_timeout_s=1.0))
    async with harness.service.requests.generate(asked_at_once()) as generation:
        reading = asyncio.create_task(anext(generation))
        (await plane.wait_for(Leg.PREFILL)).feed(
            EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 7})
        )
        stream = await plane.wait_for(Leg.DECODE)
        await asyncio.sleep(1.1)  # the deadline passes, and nothing is to happen
        stream.feed(EngineChunk(raw=b"{}", finish=FinishReason.STOP))
        assert (await reading).raw == b"{}"
