"""Measuring a live engine: stamps, lengths and metrics as they are, and every failure by its URL."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrouter.cli.calibrate import engine_measurement
from kvrouter.cli.calibrate.engine_measurement import Measurement, MeasurementFailed, measure_engine
from kvrouter.engines.openai.server import EngineServer
from kvrouter.sim.calibrate.engine_load import EngineLoad, engine_load
from tests.testing.constants import SetConstants
from tests.testing.timed_engine import (
    MODEL,
    PREFILL_S,
    QUEUE_S,
    TOKEN_S,
    TOKENS_PER_WORD,
    WAY_S,
    Fault,
    TimedEngine,
    timed_engine,
)

LOAD = engine_load(12, context_tokens=1_024)
N_ALONE = len(LOAD.fitted[0].requests)


@asynccontextmanager
async def server_of(engine: TimedEngine) -> AsyncIterator[EngineServer]:
    async with timed_engine(engine):
        server = EngineServer(engine.url, api_key="secret")
        await server.open()
        try:
            yield server
        finally:
            await server.close()


async def measured(
    engine: TimedEngine, *, load: EngineLoad = LOAD, limit_s: float = 60.0, ended: list[int] | None = None
) -> Measurement:
    async with server_of(engine) as server:
        return await measure_engine(
            server,
            MODEL,
            load,
            limit_s=limit_s,
            on_request=([] if ended is None else ended).append,
            clock=engine.clock,
        )


async def test_stamps_are_those_of_the_first_and_the_last_token() -> None:
    found = await measured(TimedEngine())
    assert len(found.requests) == LOAD.n_requests
    for request in found.requests[:N_ALONE]:
        assert request.first_s - request.sent_s == pytest.approx(WAY_S + QUEUE_S + PREFILL_S)
        assert request.last_s - request.first_s == pytest.approx(TOKEN_S * (request.answer_tokens - 1))
    sent = [request.sent_s for request in found.requests]
    assert sent == sorted(sent)


async def test_prompts_have_the_lengths_of_the_load_and_are_never_repeated() -> None:
    engine = TimedEngine()
    ended: list[int] = []
    found = await measured(engine, ended=ended)
    assert ended == list(range(1, LOAD.n_requests + 1))
    asked = [request for phase in LOAD.fitted[:1] for request in phase.requests]
    for request, wanted in zip(found.requests, asked, strict=False):
        assert request.prompt_tokens == pytest.approx(wanted.prompt_tokens, abs=TOKENS_PER_WORD)
        assert request.answer_tokens == wanted.answer_tokens
    totals = [sum(each.prompt_tokens for each in phase.requests) for phase in LOAD.phases]
    assert sum(request.prompt_tokens for request in found.requests) == pytest.approx(sum(totals), rel=0.05)
    prompts = [call["prompt"] for call in engine.calls]
    assert len({prompt[:60] for prompt in prompts}) == len(prompts) == LOAD.n_requests + len(LOAD.warm_up)
    assert engine.most_at_once == max(phase.concurrency for phase in LOAD.phases)
    for call in engine.calls:
        assert (call["model"], call["stream"], call["ignore_eos"]) == (MODEL, True, True)
        assert call["stream_options"] == {"include_usage": True}


async def test_metrics_give_queue_and_prefill_times_of_requests_run_alone() -> None:
    found = await measured(TimedEngine())
    alone, others = found.requests[:N_ALONE], found.requests[N_ALONE:]
    assert [request.queue_s for request in alone] == pytest.approx([QUEUE_S] * N_ALONE)
    assert [request.prefill_s for request in alone] == pytest.approx([PREFILL_S] * N_ALONE)
    assert all(request.queue_s is None and request.prefill_s is None for request in others)
    ttft_s = sum(request.first_s - request.sent_s for request in others[-len(LOAD.checked.requests) :])
    share = 1.0 - (QUEUE_S + PREFILL_S) * len(LOAD.checked.requests) / ttft_s
    assert {request.way_share for request in alone} == {None}
    assert others[-1].way_share == pytest.approx(share)
    assert found.times.queue is not None
    assert found.times.queue.count == LOAD.n_requests
    assert found.times.queue.mean_s == pytest.approx(QUEUE_S)
    assert found.times.ttft is None


async def test_measurement_without_metrics_has_client_stamps_alone() -> None:
    found = await measured(TimedEngine(has_metrics=False))
    assert {request.prefill_s for request in found.requests} == {None}
    assert found.times.queue is None
    assert found.round_trip_s == 0.0
    assert found.requests[0].first_s > found.requests[0].sent_s


async def test_a_metrics_page_that_counts_late_is_read_again() -> None:
    found = await measured(TimedEngine(lag=True))
    assert [request.queue_s for request in found.requests[:N_ALONE]] == pytest.approx([QUEUE_S] * N_ALONE)
    assert found.times.queue is not None
    assert found.times.queue.count == LOAD.n_requests


async def test_answers_with_times_give_them_for_concurrent_requests_too() -> None:
    for engine in (TimedEngine(says_times=True), TimedEngine(says_times=True, has_metrics=False)):
        found = await measured(engine)
        assert [request.queue_s for request in found.requests] == pytest.approx([QUEUE_S] * LOAD.n_requests)
        assert [request.prefill_s for request in found.requests] == pytest.approx(
            [PREFILL_S] * LOAD.n_requests
        )


async def test_engine_that_serves_other_requests_is_refused_at_once() -> None:
    engine = TimedEngine(others=1)
    with pytest.raises(MeasurementFailed, match="served 2 requests, of which 1 came from here") as caught:
        await measured(engine)
    assert engine.url in caught.value.message
    assert len(engine.calls) == len(LOAD.warm_up) + 1


async def test_running_requests_of_others_are_refused_before_and_after(
    set_constants: SetConstants,
) -> None:
    set_constants(engine_measurement, SETTLE_PAUSE_S=0.0)
    engine = TimedEngine(others_running=2)
    with pytest.raises(MeasurementFailed, match="has 2 requests that were not sent from here") as caught:
        await measured(engine)
    assert engine.url in caught.value.message
    assert len(engine.calls) == len(LOAD.warm_up)
    later = TimedEngine()

    def begin(n_ended: int) -> None:
        later.others_running = 1

    async with server_of(later) as server:
        with pytest.raises(MeasurementFailed, match="has 1 requests that were not sent from here"):
            await measure_engine(server, MODEL, LOAD, limit_s=60.0, on_request=begin, clock=later.clock)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault.REFUSED, "no such parameter"),
        (Fault.IN_STREAM, "out of memory"),
        (Fault.NO_USAGE, "include_usage is needed"),
        (Fault.BROKEN_OFF, "ended without a finish reason"),
    ],
)
async def test_measurement_failure_names_the_url_and_the_servers_message(fault: Fault, why: str) -> None:
    engine = TimedEngine(fault=fault)
    with pytest.raises(MeasurementFailed, match=why) as caught:
        await measured(engine)
    assert f"{engine.url}/v1/completions: " in caught.value.message


async def test_request_that_does_not_end_in_time_fails_the_measurement() -> None:
    engine = TimedEngine(fault=Fault.SILENT)
    with pytest.raises(MeasurementFailed, match=r"/v1/completions: a request did not end within 0\.01 s"):
        await measured(engine, limit_s=0.01)


async def test_a_failure_among_requests_that_run_together_is_one_error() -> None:
    engine = TimedEngine()
    load = EngineLoad(LOAD.fitted[:1], LOAD.checked)

    def fail(n_ended: int) -> None:
        if n_ended == N_ALONE:
            engine.fault = Fault.REFUSED

    async with server_of(engine) as server:
        with pytest.raises(MeasurementFailed, match="no such parameter"):
            await measure_engine(server, MODEL, load, limit_s=60.0, on_request=fail, clock=engine.clock)


async def test_engine_key_is_sent_with_each_request() -> None:
    engine = TimedEngine()
    await measured(engine)
    assert {headers["authorization"] for headers in engine.headers} == {"Bearer secret"}
