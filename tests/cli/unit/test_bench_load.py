"""How ``kvrouter bench`` sends a round: in order, some at a time, and with the errors of each request."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrouter.cli.bench.load import Arm, ArmRound, run_round
from kvrouter.cli.bench.workload import TURNS, Prompts, WorkloadSize, turns_in_order
from kvrouter.cli.timed_stream import Clock
from kvrouter.engines.openai.server import EngineServer
from tests.testing.timed_engine import (
    MODEL,
    PREFILL_S,
    QUEUE_S,
    TOKENS_PER_WORD,
    WAY_S,
    Fault,
    TimedEngine,
    timed_engine,
)


@asynccontextmanager
async def server_of(engine: TimedEngine) -> AsyncIterator[EngineServer]:
    async with timed_engine(engine):
        server = EngineServer(engine.url)
        await server.open()
        try:
            yield server
        finally:
            await server.close()


async def sent(engine: TimedEngine, *, conversations: int = 3, concurrency: int = 1) -> ArmRound:
    """A round of short prompts to one engine."""
    async with server_of(engine) as server:
        return await round_of(engine.clock, (server,), conversations, concurrency)


async def round_of(
    clock: Clock, servers: tuple[EngineServer, ...], conversations: int, concurrency: int
) -> ArmRound:
    size = WorkloadSize(conversations, 120)
    ended: list[int] = []
    found = await run_round(
        Arm("x", "", servers, {"model": MODEL, "max_tokens": 2, "user": "u"}, "--peer"),
        turns_in_order(size, 1),
        Prompts(1.0, size, 1, (1,)),
        clock,
        concurrency=concurrency,
        on_request=lambda n_ended, _failures: ended.append(n_ended),
    )
    assert ended == list(range(1, size.requests + 1))
    return found


async def test_each_answer_has_its_time_and_its_counts() -> None:
    engine = TimedEngine()
    found = await sent(engine)
    assert {round(answer.first_s - answer.sent_s, 6) for answer in found.answers} == {
        WAY_S + QUEUE_S + PREFILL_S
    }
    assert {answer.output_tokens for answer in found.answers} == {2}
    assert {answer.cached_tokens for answer in found.answers} == {None}
    words = [len(call["prompt"].split()) for call in engine.calls]
    assert [answer.prompt_tokens for answer in found.answers] == [TOKENS_PER_WORD * n for n in words]
    assert {(call["user"], call["ignore_eos"], call["stream"]) for call in engine.calls} == {
        ("u", True, True)
    }
    assert not found.failures


async def test_a_turn_waits_for_the_answer_of_the_one_before() -> None:
    engine = TimedEngine()
    found = await sent(engine, conversations=1, concurrency=4)
    assert engine.most_at_once == 1
    assert len(found.answers) == TURNS


async def test_as_many_run_at_once_as_may() -> None:
    engine = TimedEngine()
    await sent(engine, conversations=6, concurrency=3)
    assert engine.most_at_once == 3


async def test_servers_take_requests_in_turn() -> None:
    first, second = TimedEngine(), TimedEngine()

    def clock() -> float:
        return first.clock() + second.clock()

    async with server_of(first) as one, server_of(second) as other:
        await round_of(clock, (one, other), 4, 1)
    assert len(first.calls) == len(second.calls) == 8


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.REFUSED, "no such parameter"),
        (Fault.IN_STREAM, "out of memory"),
        (Fault.NO_USAGE, "does not count them"),
        (Fault.BROKEN_OFF, "ended without a finish reason"),
    ],
)
async def test_failures_are_kept_with_the_url_and_the_round_goes_on(fault: Fault, message: str) -> None:
    engine = TimedEngine(fault=fault)
    found = await sent(engine, conversations=1)
    assert not found.answers
    assert len(found.failures) == TURNS
    assert all(message in failure and engine.url in failure for failure in found.failures)
