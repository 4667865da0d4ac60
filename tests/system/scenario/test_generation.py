"""One request's life against scripted workers: handoffs, losses, resumes, and that nothing is left behind."""

import asyncio

import pytest
from msgspec import structs

from kvrouter.core.errors import (
    AllWorkersBusy,
    DeadlineExceeded,
    KvrouterError,
    NoEligibleWorker,
    ProtocolError,
    ShuttingDown,
    WorkerFailed,
)
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg, Sampling
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.requests.port import WorkerFull
from tests.testing.router_harness import (
    BLOCK_SIZE,
    RouterHarness,
    card,
    generate_request,
    read_all,
    router_harness,
)
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport, address_of
from tests.testing.waits import until


async def test_an_aggregated_request_is_booked_streamed_and_freed() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1))
    async with harness.service.requests.generate(generate_request()) as generation:
        reading = asyncio.create_task(anext(generation))
        stream = await plane.wait_for(Leg.AGGREGATED)
        assert harness.booked() == 40 + 3, "40 tokens to prefill, 3 blocks with the tail"
        stream.tokens(1, 2, cached=32)
        assert (await reading).token_ids == (1, 2)
        assert harness.booked() == 40 + 3, "the client's bytes are written first"
        await until(lambda: harness.booked() == 3)  # the first token moves load from prefill to decode
        stream.tokens(*range(3, 20))
        await anext(generation)
        assert harness.booked() == 4, "a block of output that became full counts"
        stream.tokens(20, finish=FinishReason.STOP)
        assert (await anext(generation)).finish is FinishReason.STOP
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
    assert harness.booked() == 0
    assert generation.usage.completion_tokens == 20
    assert generation.usage.cached_tokens == 32
    assert stream.cancelled_for is None


@pytest.mark.parametrize("is_lost", [False, True], ids=["left", "lost"])
async def test_first_tokens_are_counted_though_the_answer_ends_at_once(is_lost: bool) -> None:
    plane = ScriptedTransport(lambda stream: stream.tokens(1))
    harness = await router_harness(plane, card(1))
    async with harness.service.requests.generate(generate_request()) as generation:
        await anext(generation)
        if is_lost:
            (await plane.wait_for(Leg.AGGREGATED)).die()
            with pytest.raises(KvrouterError):
                await anext(generation)
    kept = harness.service.decisions.get(generation.request.request_id)
    assert kept is not None
    assert kept[0].seen.ttft_s is not None
    assert harness.telemetry.worker_prompt_tokens.value("mock", "1") == 40
    assert harness.booked() == 0


async def test_a_worker_that_leaves_before_its_leg_was_sent_keeps_no_series() -> None:
    plane = ScriptedTransport()
    plane.unreachable.add(address_of(1))
    plane.accepts.clear()
    harness = await router_harness(plane, card(1))
    reading = asyncio.create_task(read_all(harness))
    await until(lambda: plane.asked == [address_of(1)])
    assert b"kvrouter_worker_requests_total{" in harness.telemetry.render()
    assert harness.service.decisions.get(generate_request().request_id) is not None
    harness.discovery.drop(1)
    plane.accepts.set()
    with pytest.raises(NoEligibleWorker):
        await reading
    assert b"kvrouter_worker_requests_total{" not in harness.telemetry.render()


async def test_completion_tokens_reported_only_as_a_count_are_counted() -> None:
    last = EngineChunk(raw=b"data: [DONE]", finish=FinishReason.LENGTH, completion_tokens=9)
    plane = ScriptedTransport(lambda stream: stream.feed(EngineChunk(raw=b"data: {}"), last))
    harness = await router_harness(plane, card(1))
    async with harness.service.requests.generate(generate_request()) as generation:
        while (await anext(generation)).finish is None:
            assert generation.usage.completion_tokens == 0
    assert generation.usage.completion_tokens == 9
    assert harness.telemetry.completion_tokens.value("mock") == 9


@pytest.mark.parametrize(("more_tokens", "prediction"), [(0, "too_few"), (1, "other_prompt")])
async def test_predictions_are_judged_by_the_engines_prompt_length(more_tokens: int, prediction: str) -> None:
    prompt_tokens = len(generate_request().token_ids) + more_tokens
    reported = EngineChunk((1,), FinishReason.STOP, cached_tokens=32, prompt_tokens=prompt_tokens)
    harness = await router_harness(ScriptedTransport(lambda stream: stream.feed(reported)), card(1))
    await read_all(harness)
    assert harness.telemetry.index_predictions.value("mock", "1", "0", prediction) == 1


async def test_a_worker_dying_before_the_first_token_is_replaced() -> None:
    plane = ScriptedTransport()
    harness = RouterHarness(plane)
    await harness.start(card(1), card(2), card(3))
    reading = asyncio.create_task(read_all(harness, sampling=Sampling(max_tokens=4, seed=1)))
    first = await plane.wait_for(Leg.AGGREGATED)
    first.die()
    second = await plane.wait_for(Leg.AGGREGATED, nth=1)
    assert second.address != first.address
    assert second.request.attempt == 1
    second.tokens(5, 6, finish=FinishReason.STOP)
    assert await reading == [5, 6]
    assert harness.booked() == 0
    assert harness.telemetry.retries.value("mock", "aggregated") == 1


async def test_requests_succeed_despite_an_unreachable_worker() -> None:
    plane = ScriptedTransport(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    harness = await router_harness(plane, card(1), card(2))
    plane.unreachable = {address_of(1)}
    for number in range(4):
        assert await read_all(harness, request_id=f"r{number}") == [1]
    assert {address for _, address in plane.legs()} == {address_of(2)}


async def test_a_stream_resumes_on_another_worker_without_losing_tokens() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), card(2))
    reading = asyncio.create_task(read_all(harness, max_tokens=6))
    first = await plane.wait_for(Leg.AGGREGATED)
    first.tokens(1, 2, 3, cached=16)
    first.die()
    second = await plane.wait_for(Leg.AGGREGATED, nth=1)
    assert list(second.request.token_ids[-3:]) == [1, 2, 3]
    assert second.request.resumed_tokens == 3
    assert second.request.sampling.max_tokens == 3
    second.tokens(4, 5, 6, finish=FinishReason.LENGTH, cached=40)
    assert await reading == [1, 2, 3, 4, 5, 6]
    assert harness.booked() == 0
    assert harness.telemetry.resumes.value("mock") == 1
    assert harness.telemetry.completion_tokens.value("mock") == 6


async def test_a_non_resumable_stream_ends_with_one_error() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), card(2))
    sampling = Sampling(max_tokens=6, temperature=0.5, seed=3)
    async with harness.service.requests.generate(generate_request(sampling=sampling)) as generation:
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
    assert harness.booked() == 0


async def test_a_request_is_tried_on_at_most_three_workers() -> None:
    plane = ScriptedTransport(ScriptedStream.die)
    harness = RouterHarness(plane)
    await harness.start(*(card(number) for number in range(1, 7)))
    with pytest.raises(WorkerFailed, match="try 3 of 3"):
        await read_all(harness)
    assert len({address for _, address in plane.legs()}) == 3
    assert harness.booked() == 0


async def test_a_refusal_after_a_failure_counts_the_failed_worker() -> None:
    plane = ScriptedTransport(ScriptedStream.die)
    harness = await router_harness(plane, card(1))
    with pytest.raises(NoEligibleWorker, match=r"worker 1 failed .* died\); after that") as refused:
        await read_all(harness)
    assert {str(reason): n for reason, n in refused.value.refusals.items()} == {"excluded": 1}
    assert harness.booked() == 0


async def test_draining_refuses_new_requests_and_waits_for_running_ones() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1))
    reading = asyncio.create_task(read_all(harness))
    stream = await plane.wait_for(Leg.AGGREGATED)
    draining = asyncio.create_task(harness.service.requests.drain(30.0))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        harness.service.requests.generate(generate_request(request_id="r2"))
    stream.tokens(1, finish=FinishReason.STOP)
    assert await reading == [1]
    assert await draining == 0


async def test_explain_changes_nothing_and_predicts_the_next_decision() -> None:
    plane = ScriptedTransport(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    harness = RouterHarness(plane, KvRouterConfig())
    await harness.start(*(card(number) for number in range(1, 6)))
    for number in range(6):
        request = generate_request(request_id=f"r{number}")
        reported = [harness.model.explain(request).decode.rank for _ in range(3)]
        async with harness.service.requests.generate(request) as generation:
            await anext(generation)
        placement = generation.placement
        assert placement is not None
        assert reported == [placement.decision.decode.rank] * 3


async def test_full_workers_are_reported_as_busy() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), card(2))
    plane.full = {address_of(1), address_of(2)}
    with pytest.raises(AllWorkersBusy, match="queue is full"):
        await read_all(harness)


@pytest.mark.parametrize(
    "error", [ShuttingDown("it drains"), ProtocolError("no such call"), DeadlineExceeded("late")]
)
async def test_any_error_before_acceptance_is_retried_and_later_raised(error: KvrouterError) -> None:
    class OneRefuses(ScriptedTransport):
        refusing: str | None = None

        async def open(self, address: str, request: EngineRequest) -> ScriptedStream:
            if self.refusing in (None, address):
                self.refusing = address
                return ScriptedStream.refused(request, address, error)
            return await super().open(address, request)

    plane = OneRefuses(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    harness = await router_harness(plane, card(1), card(2))
    assert await read_all(harness) == [1]
    assert harness.telemetry.retries.value("mock", "aggregated") == 1
    assert harness.booked() == 0
    late = await router_harness(ScriptedTransport(lambda stream: stream.feed(error)), card(1), card(2))
    with pytest.raises(type(error)):
        await read_all(late)
    assert late.booked() == 0


async def test_a_request_that_three_draining_workers_refuse_is_answered() -> None:
    class Draining(ScriptedTransport):
        async def open(self, address: str, request: EngineRequest) -> ScriptedStream:
            if len(self.opened) < 3:
                stream = ScriptedStream.refused(request, address, ShuttingDown("it drains"))
                self.opened.append(stream)
                return stream
            return await super().open(address, request)

    plane = Draining(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    harness = await router_harness(plane, card(1), card(2), card(3), card(4))
    assert await read_all(harness) == [1]
    assert len({stream.address for stream in plane.opened}) == 4
    assert harness.telemetry.retries.value("mock", "aggregated") == 3
    assert harness.booked() == 0


async def test_a_worker_full_after_accepting_is_reported_as_busy() -> None:
    plane = ScriptedTransport(lambda stream: stream.feed(WorkerFull("its queue is full")))
    harness = await router_harness(plane, card(1), card(2))
    with pytest.raises(AllWorkersBusy, match="queue is full"):
        await read_all(harness)


async def test_a_leg_accepted_after_a_drain_cut_is_cancelled() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1))
    plane.accepts.clear()
    reading = asyncio.create_task(read_all(harness))
    await until(lambda: harness.booked() > 0)
    assert await harness.service.requests.drain(0.0) == 1
    plane.accepts.set()
    with pytest.raises(ShuttingDown):
        await reading
    assert (await plane.wait_for(Leg.AGGREGATED)).cancelled_for == "shutting_down"


async def test_only_retries_that_are_sent_are_counted() -> None:
    plane = ScriptedTransport(ScriptedStream.die)
    harness = await router_harness(plane, card(1), card(2))
    with pytest.raises(NoEligibleWorker):
        await read_all(harness)
    assert harness.telemetry.retries.value("mock", "aggregated") == 1


async def test_an_unusable_new_incarnation_removes_the_old_one() -> None:
    harness = RouterHarness(ScriptedTransport())
    await harness.start(card(1), card(2))
    harness.discovery.put(structs.replace(card(1, incarnation=2), block_size=BLOCK_SIZE * 2))
    assert len(harness.model.fleet) == 1
    harness.discovery.put(card(1, incarnation=3))
    assert len(harness.model.fleet) == 2
