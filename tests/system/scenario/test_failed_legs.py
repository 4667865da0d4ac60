"""Calls that engines fail before the first token: whether the call or an engine is set aside for it."""

import asyncio
import time

import pytest

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason, KvLoss, Leg
from kvrouter.core.workers import WorkerCard
from kvrouter.kernel.fleet.circuit import CircuitState
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.requests.port import EngineFailed, EngineFailedLater, StreamBroken, WorkerUnreachable
from tests.testing.router_harness import (
    RouterHarness,
    card,
    decode_card,
    prefill_card,
    read_all,
    router_harness,
)
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport, address_of
from tests.testing.waits import until

LONG = KvRouterConfig(router_cost="blocks", circuit_open_s=1000.0, circuit_open_max_s=1000.0)
BRIEF = KvRouterConfig(router_cost="blocks", circuit_open_s=0.5, circuit_open_max_s=1000.0)

FAILURES: list[EngineChunk | KvrouterError] = [
    EngineFailed("the engine answered 500: Internal server error"),
    EngineFailedLater("the engine failed: Internal server error"),
    StreamBroken("the engine took the call: it closed the connection before it answered"),
    EngineChunk(finish=FinishReason.ERROR, error="the worker failed: KeyError: 'x'"),
]
each_failure = pytest.mark.parametrize("failure", FAILURES, ids=["500", "event", "closed", "mistake"])


class Engines:
    """Engines that answer; those at ``bad`` fail every last leg, and all fail calls that are ``poison``."""

    def __init__(self, failure: EngineChunk | KvrouterError, *bad: int) -> None:
        self.failure = failure
        self.bad = set(map(address_of, bad))
        self.held: list[ScriptedStream] = []
        self.holds = False
        """Whether answers wait until :meth:`let_go`."""

    def __call__(self, stream: ScriptedStream) -> None:
        if stream.request.leg is Leg.PREFILL:
            stream.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
        elif stream.address in self.bad or stream.request.request_id.startswith("poison"):
            stream.feed(self.failure)
        elif self.holds:
            self.held.append(stream)
        else:
            stream.tokens(1, finish=FinishReason.STOP)

    def let_go(self) -> None:
        for stream in self.held:
            stream.tokens(1, finish=FinishReason.STOP)
        self.held.clear()


async def send(harness: RouterHarness, times: int = 1) -> None:
    for number in range(times):
        assert await read_all(harness, request_id=f"plain-{number}") == [1]


async def poison(harness: RouterHarness, times: int = 1, *, pinned: int | None = None) -> None:
    for number in range(times):
        with pytest.raises(KvrouterError):
            await read_all(harness, request_id=f"poison-{number}", pinned=pinned)


def sent_to(plane: ScriptedTransport, worker: int) -> int:
    return sum(each.address == address_of(worker) for each in plane.opened)


def circuits_open(harness: RouterHarness, *workers: int) -> set[int]:
    states = {worker: harness.circuit_state(WorkerId(worker)) for worker in workers}
    return {worker for worker, state in states.items() if state is not CircuitState.CLOSED}


AGGREGATED = [card(1), card(2), card(3)]
PAIRS = [prefill_card(1), decode_card(2), decode_card(3), decode_card(4)]


@each_failure
@pytest.mark.parametrize("cards", [AGGREGATED, AGGREGATED[:2], PAIRS], ids=["three", "two", "pairs"])
async def test_a_call_that_every_engine_fails_opens_no_circuit(
    failure: EngineChunk | KvrouterError, cards: list[WorkerCard]
) -> None:
    plane = ScriptedTransport(Engines(failure))
    harness = await router_harness(plane, *cards, config=LONG)
    await poison(harness, 12)
    assert circuits_open(harness, 1, 2, 3, 4) == set()
    asked = {each.address for each in plane.opened if each.request.request_id == "poison-0"}
    assert len(asked) == len(cards)
    await send(harness, 6)
    assert harness.booked() == 0


@each_failure
async def test_an_engines_circuit_opens_after_failing_three_calls_others_answer(
    failure: EngineChunk | KvrouterError,
) -> None:
    plane = ScriptedTransport(Engines(failure, 1))
    harness = await router_harness(plane, card(1), card(2), config=LONG)
    await send(harness, 40)
    assert circuits_open(harness, 1, 2) == {1}
    assert sent_to(plane, 1) == 3


async def test_a_decode_engines_circuit_opens_for_calls_others_answer() -> None:
    harness = await router_harness(ScriptedTransport(Engines(FAILURES[2], 2)), *PAIRS, config=LONG)
    await send(harness, 40)
    assert circuits_open(harness, 1, 2, 3, 4) == {2}


async def test_circuits_of_two_engines_open_for_calls_a_third_answers() -> None:
    harness = await router_harness(ScriptedTransport(Engines(FAILURES[0], 1, 2)), *AGGREGATED, config=LONG)
    await send(harness, 60)
    assert circuits_open(harness, 1, 2, 3) == {1, 2}


async def test_a_lone_engine_that_only_fails_opens_its_circuit() -> None:
    harness = await router_harness(ScriptedTransport(Engines(FAILURES[0], 1)), card(1), config=LONG)
    await poison(harness, 3)
    assert circuits_open(harness, 1) == {1}


async def test_a_lone_engine_that_answers_other_calls_keeps_a_closed_circuit() -> None:
    harness = await router_harness(ScriptedTransport(Engines(FAILURES[0])), card(1), config=LONG)
    await send(harness)
    await poison(harness, 12)
    assert circuits_open(harness, 1) == set()


async def test_a_pinned_engine_that_answers_other_calls_keeps_a_closed_circuit() -> None:
    harness = await router_harness(ScriptedTransport(Engines(FAILURES[0])), card(1), card(2), config=LONG)
    await send(harness, 12)
    await poison(harness, 12, pinned=1)
    assert circuits_open(harness, 1, 2) == set()


async def test_circuits_of_unreachable_engines_open_even_if_all_are() -> None:
    """Its connection is refused: it had nothing of the call."""
    refused = WorkerUnreachable("the engine is not reached: nothing listens at its host and port")
    harness = await router_harness(ScriptedTransport(Engines(refused)), card(1), card(2), config=LONG)
    await poison(harness, 3)
    assert circuits_open(harness, 1, 2) == {1, 2}


async def test_failures_count_from_their_own_time_once_another_engine_answers() -> None:
    """Whole answers come late: calls that were sent one after the other are so many failures all the same."""
    engines = Engines(FAILURES[0], 1)
    engines.holds = True
    plane = ScriptedTransport(engines)
    harness = await router_harness(plane, card(1), card(2), config=LONG)
    tasks: list[asyncio.Task[list[int]]] = []
    async with asyncio.timeout(60):
        while sent_to(plane, 1) < 3:
            tasks.append(asyncio.create_task(read_all(harness, request_id=f"plain-{len(tasks)}")))
            await until(lambda: len(engines.held) == len(tasks))
    assert circuits_open(harness, 1, 2) == set()
    engines.let_go()
    await asyncio.gather(*tasks)
    assert circuits_open(harness, 1, 2) == {1}


async def test_a_half_open_circuit_reopens_at_the_first_failure() -> None:
    engines = Engines(FAILURES[0], 1)
    plane = ScriptedTransport(engines)
    harness = await router_harness(plane, card(1), card(2), config=BRIEF)
    await send(harness, 20)
    await until(lambda: harness.circuit_state(WorkerId(1)) is CircuitState.HALF_OPEN)
    harness.model.placer.circuits.refresh(now_s=time.monotonic())
    engines.holds = True
    before = sent_to(plane, 1)
    tasks: list[asyncio.Task[list[int]]] = []
    for number in range(12):
        tasks.append(asyncio.create_task(read_all(harness, request_id=f"plain-{number}")))
        await until(lambda: len(engines.held) == len(tasks))
    assert sent_to(plane, 1) == before + 1, "the next engine has answered nothing yet"
    engines.let_go()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("retries_max", [0, 1, 2])
async def test_a_call_that_kills_engines_reaches_one_engine_per_try(retries_max: int) -> None:
    plane = ScriptedTransport(Engines(FAILURES[2]))
    config = KvRouterConfig(router_cost="blocks", retries_max=retries_max)
    harness = await router_harness(plane, *map(card, range(1, 7)), config=config)
    await poison(harness)
    assert len({each.address for each in plane.opened}) == len(plane.opened) == retries_max + 1


NO_KV = EngineChunk(finish=FinishReason.ERROR, error="the engine answered 500", kv_lost=KvLoss.BROKEN)


class Pairs(Engines):
    """Decode engines fail what they cannot answer as if its KV were lost; the one at ``cut`` gets none."""

    cut = ""

    def __call__(self, stream: ScriptedStream) -> None:
        is_poison = stream.request.request_id.startswith("poison")
        if stream.request.leg is Leg.DECODE and (is_poison or stream.address == self.cut):
            stream.feed(NO_KV)
        else:
            super().__call__(stream)


async def test_a_call_that_every_decode_engine_fails_breaks_no_pair() -> None:
    harness = await router_harness(
        ScriptedTransport(Pairs(FAILURES[0])), prefill_card(5), *PAIRS, config=LONG
    )
    await poison(harness, 12)
    assert harness.broken_pairs() == []
    assert circuits_open(harness, 1, 2, 3, 4, 5) == set()


async def test_a_pair_failing_a_call_that_others_answer_is_broken() -> None:
    engines = Pairs(FAILURES[0])
    engines.cut = address_of(2)
    harness = await router_harness(ScriptedTransport(engines), *PAIRS, config=LONG)
    await send(harness, 20)
    assert {pair.decode for pair, _ in harness.broken_pairs()} == {2}
