"""A decode worker that does not get its KV keeps its good name, and the request is prefilled again."""

import asyncio
import logging

import pytest
from msgspec import structs

from kvrouter.core.constraints import Pin, RoutingConstraints
from kvrouter.core.errors import Reason, WorkerFailed
from kvrouter.core.ids import Taint, WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason, KvLoss, Leg, Sampling
from kvrouter.core.workers import Enforcement, Role, WorkerCard
from kvrouter.kernel.fleet.circuit import CircuitState
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.engine_requests import client_call, engine_request
from tests.testing.probed_engine import probed_engine
from tests.testing.router_harness import RouterHarness, card, generate_request, read_all, router_harness
from tests.testing.scripted_engine import EMPTY_CHAT, ScriptedAnswer, scripted_engine
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport, address_of
from tests.testing.waits import until

HANDOFFS = pytest.mark.parametrize("bootstrap", [False, True], ids=["synchronous", "bootstrap"])
DECODE = card(2, Role.DECODE, zone="a")


def prefill(worker_id: int, *, zone: str = "a", bootstrap: bool = False) -> WorkerCard:
    return card(worker_id, Role.PREFILL, zone=zone, bootstrap=bootstrap, enforcement=Enforcement.REQUIRED)


def kv_lost(stream: ScriptedStream, loss: KvLoss = KvLoss.UNREACHABLE) -> None:
    stream.feed(EngineChunk(finish=FinishReason.ERROR, error=f"{stream.address}: no way", kv_lost=loss))


def prefilled(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))


def losing(times: int) -> ScriptedTransport:
    """Prefill legs end well, and so many decode legs do not get their KV; then answers are 5 and 6."""
    seen: dict[int, set[Leg]] = {}

    def script(stream: ScriptedStream) -> None:
        request = stream.request
        if request.leg is Leg.PREFILL:
            prefilled(stream)
        elif request.leg is Leg.AGGREGATED or request.attempt >= times:
            stream.tokens(5, 6, finish=FinishReason.STOP)
        legs = seen.setdefault(request.attempt, set())
        legs.add(request.leg)
        if request.attempt < times and legs == {Leg.PREFILL, Leg.DECODE}:  # in whatever order they came
            kv_lost(next(each for each in reversed(plane.opened) if each.request.leg is Leg.DECODE))

    plane = ScriptedTransport(script)
    return plane


@HANDOFFS
async def test_lost_kv_is_prefilled_again_by_another_worker(
    bootstrap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plane = losing(1)
    harness = RouterHarness(plane)
    await harness.start(prefill(1, bootstrap=bootstrap), prefill(3, bootstrap=bootstrap), DECODE)
    with caplog.at_level(logging.WARNING, "kvrouter.router"):
        assert await read_all(harness) == [5, 6]
    first, second = (address for leg, address in plane.legs() if leg is Leg.PREFILL)
    assert {first, second} == {address_of(1), address_of(3)}
    assert [address for leg, address in plane.legs() if leg is Leg.DECODE] == 2 * [address_of(2)]
    sender = first.removeprefix("scripted://")
    assert harness.telemetry.kv_lost.value("mock", sender, "2", "unreachable") == 1
    assert harness.telemetry.retries.value("mock", "prefill") == 1
    lost, _, sent_again = (getattr(record, "kvrouter_fields", {}) for record in caplog.records)
    assert (lost["prefill_worker"], lost["decode_worker"], lost["reason"]) == (sender, "2", "unreachable")
    assert (sent_again["worker"], sent_again["stage"]) == (sender, "prefill")
    assert harness.booked() == 0


@HANDOFFS
async def test_a_lone_prefill_worker_is_retried_once_then_decode_runs_alone(
    bootstrap: bool,
) -> None:
    plane = losing(2)
    harness = RouterHarness(plane)
    await harness.start(prefill(1, bootstrap=bootstrap), DECODE)
    assert await read_all(harness) == [5, 6]
    legs = [leg for leg, _ in plane.legs()]
    assert sorted(legs[:4]) == [Leg.DECODE, Leg.DECODE, Leg.PREFILL, Leg.PREFILL]
    assert plane.legs()[4:] == [(Leg.AGGREGATED, address_of(2))]
    last = plane.opened[-1].request
    assert (last.kv_transfer_params, last.bootstrap, last.prefill_worker_id) == (None, None, None)
    assert harness.booked() == 0


async def test_the_last_try_needs_no_kv_transfer() -> None:
    plane = losing(9)
    harness = RouterHarness(plane, KvRouterConfig(retries_max=1))
    await harness.start(prefill(1), DECODE)
    assert await read_all(harness) == [5, 6]
    assert [leg for leg, _ in plane.legs()] == [Leg.PREFILL, Leg.DECODE, Leg.AGGREGATED]


async def test_two_prefill_workers_losing_kv_are_asked_once_each() -> None:
    plane = losing(9)
    harness = RouterHarness(plane)
    await harness.start(prefill(1), prefill(3), DECODE)
    assert await read_all(harness) == [5, 6]
    prefills = [address for leg, address in plane.legs() if leg is Leg.PREFILL]
    assert sorted(prefills) == [address_of(1), address_of(3)]
    assert plane.legs()[-1] == (Leg.AGGREGATED, address_of(2))


async def test_a_pinned_prefill_worker_is_asked_until_the_tries_end() -> None:
    plane = losing(9)
    harness = RouterHarness(plane)
    await harness.start(prefill(1), prefill(3), DECODE)
    request = structs.replace(generate_request(), prefill_pin=Pin(WorkerId(1)))
    async with harness.service.requests.generate(request) as generation:
        with pytest.raises(
            WorkerFailed, match=r"worker 1 failed \(worker 2 did not get its KV.*try 3 of 3"
        ) as failed:
            await anext(generation)
    assert address_of(2) not in failed.value.message
    assert plane.legs() == 3 * [(Leg.PREFILL, address_of(1)), (Leg.DECODE, address_of(2))]
    assert harness.booked() == 0


def cut_off(*, alone: bool = True) -> ScriptedTransport:
    """KV arrives nowhere; one worker alone answers 5 and 6, unless it can't work ``alone``."""

    def script(stream: ScriptedStream) -> None:
        if stream.request.leg is Leg.PREFILL:
            prefilled(stream)
        elif stream.request.leg is Leg.DECODE:
            kv_lost(stream)
        elif alone:
            stream.tokens(5, 6, finish=FinishReason.STOP)
        else:
            stream.die()

    return ScriptedTransport(script)


ZONES = tuple(prefill(n, zone=zone) for n, zone in ((1, "a"), (3, "a"), (5, "b"))) + tuple(
    card(n, Role.DECODE, zone=zone) for n, zone in ((2, "a"), (4, "a"), (6, "b"))
)
IN_ZONE_A = RoutingConstraints(frozenset({Taint("dynamo.topology/zone=a")}))


async def ask_in_zone_a(harness: RouterHarness, number: int) -> list[int]:
    request = structs.replace(generate_request(request_id=f"r{number}"), constraints=IN_ZONE_A)
    async with harness.service.requests.generate(request) as generation:
        return [token for chunk in [chunk async for chunk in generation] for token in chunk.token_ids]


@pytest.mark.parametrize("retries_max", [1, 2])
async def test_after_all_pairs_lost_kv_requests_start_aggregated(
    retries_max: int,
) -> None:
    """Four pairs of a zone, each found out once: from then on nobody spends a try on them."""
    plane = cut_off()
    harness = RouterHarness(
        plane, KvRouterConfig(retries_max=retries_max, circuit_open_s=1000.0, circuit_open_max_s=1000.0)
    )
    await harness.start(*ZONES)
    for number in range(12):
        assert await ask_in_zone_a(harness, number) == [5, 6]
    assert len(list(harness.model.fleet.broken_pairs)) == 4
    before = len(plane.legs())
    for number in range(12, 20):
        assert await ask_in_zone_a(harness, number) == [5, 6]
    assert {(leg, address) for leg, address in plane.legs()[before:]} <= {
        (Leg.AGGREGATED, address_of(2)),
        (Leg.AGGREGATED, address_of(4)),
    }
    assert len(plane.legs()) == before + 8
    explained = harness.model.explain(structs.replace(generate_request(), constraints=IN_ZONE_A))
    assert explained.prefill is None
    senders = {row.rank.worker_id: row.refused for row in explained.rows if row.leg is Leg.PREFILL}
    assert senders == {1: Reason.KV_LOST, 3: Reason.KV_LOST, 5: Reason.TAINT_MISSING}
    assert [row.rank for row in explained.rows if row.picked] == [explained.decode.rank]
    assert harness.booked() == 0


async def test_pairs_are_still_tried_if_no_worker_can_serve_alone() -> None:
    plane = cut_off(alone=False)
    harness = RouterHarness(
        plane, KvRouterConfig(circuit_failures=100, circuit_open_s=1000.0, circuit_open_max_s=1000.0)
    )
    await harness.start(prefill(1), DECODE)
    for number in range(4):
        before = len(plane.legs())
        with pytest.raises(WorkerFailed):
            await read_all(harness, request_id=f"r{number}")
        assert plane.legs()[before][0] is Leg.PREFILL


async def test_lost_kv_fails_the_request_without_retries() -> None:
    plane = losing(1)
    harness = RouterHarness(plane, KvRouterConfig(retries_max=0))
    await harness.start(prefill(1), DECODE)
    with pytest.raises(WorkerFailed, match="did not get its KV"):
        await read_all(harness)


async def test_the_next_pair_after_lost_kv_stays_in_its_own_domain() -> None:
    """The other prefill worker is in zone b: so is its decode worker, however free the one in zone a is."""
    plane = losing(1)
    harness = RouterHarness(plane)
    await harness.start(prefill(1), prefill(3, zone="b"), DECODE, card(4, Role.DECODE, zone="b"))
    assert await read_all(harness) == [5, 6]
    partner = {address_of(1): address_of(2), address_of(3): address_of(4)}
    addresses = [address for _, address in plane.legs()]
    assert addresses[1] == partner[addresses[0]]
    assert addresses[3] == partner[addresses[2]]
    assert addresses[0] != addresses[2]


async def test_kv_that_no_decode_worker_may_take_any_more_excludes_nobody() -> None:
    """Another request shows, while KV is computed, that the engines of the only pair refuse each other."""
    prefills: list[ScriptedStream] = []

    def script(stream: ScriptedStream) -> None:
        if stream.request.leg is Leg.PREFILL:
            prefills.append(stream)
        elif stream.request.leg is Leg.DECODE:
            kv_lost(stream, KvLoss.REFUSED)
        else:
            stream.tokens(5, 6, finish=FinishReason.STOP)

    plane = ScriptedTransport(script)
    harness = RouterHarness(plane)
    await harness.start(prefill(1), DECODE)
    requests = [asyncio.create_task(read_all(harness, request_id=each)) for each in "ab"]
    await until(lambda: len(prefills) == 2)
    prefilled(prefills[0])
    await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
    prefilled(prefills[1])
    assert await asyncio.gather(*requests) == [[5, 6], [5, 6]]
    assert [leg for leg, _ in plane.legs()].count(Leg.DECODE) == 1
    assert harness.telemetry.retries.value("mock", "prefill") == 2
    assert harness.booked() == 0


async def test_a_resumed_answer_survives_lost_kv() -> None:
    plane = ScriptedTransport()
    harness = RouterHarness(plane)
    await harness.start(prefill(1), DECODE, card(3, Role.DECODE, zone="a"))
    reading = asyncio.create_task(read_all(harness, sampling=Sampling(max_tokens=6, temperature=0.0)))
    prefilled(await plane.wait_for(Leg.PREFILL))
    first = await plane.wait_for(Leg.DECODE)
    first.tokens(1, 2, 3)
    first.die()
    prefilled(await plane.wait_for(Leg.PREFILL, nth=1))
    second = await plane.wait_for(Leg.DECODE, nth=1)
    kv_lost(second, KvLoss.TIMEOUT)
    last = await plane.wait_for(Leg.AGGREGATED)
    assert last.address == second.address
    assert list(last.request.token_ids[-3:]) == [1, 2, 3]
    last.tokens(4, 5, 6, finish=FinishReason.LENGTH)
    assert await reading == [1, 2, 3, 4, 5, 6]
    assert harness.booked() == 0


async def test_kv_lost_after_the_first_token_excludes_the_decode_worker() -> None:
    plane = ScriptedTransport()
    harness = RouterHarness(plane)
    await harness.start(prefill(1), DECODE, card(3, Role.DECODE, zone="a"))
    reading = asyncio.create_task(read_all(harness, max_tokens=3))
    prefilled(await plane.wait_for(Leg.PREFILL))
    first = await plane.wait_for(Leg.DECODE)
    first.tokens(1)
    kv_lost(first)
    prefilled(await plane.wait_for(Leg.PREFILL, nth=1))
    second = await plane.wait_for(Leg.DECODE, nth=1)
    assert second.address != first.address
    second.tokens(2, 3, finish=FinishReason.LENGTH)
    assert await reading == [1, 2, 3]
    assert harness.telemetry.resumes.value("mock") == 1


async def test_a_failed_bootstrap_pair_is_prefilled_by_another_worker() -> None:
    plane = ScriptedTransport()
    harness = RouterHarness(plane)
    await harness.start(prefill(1, bootstrap=True), prefill(3, bootstrap=True), DECODE)
    reading = asyncio.create_task(read_all(harness, max_tokens=1))
    sender, receiver = await plane.wait_for(Leg.PREFILL), await plane.wait_for(Leg.DECODE)
    sender.die()
    kv_lost(receiver, KvLoss.BROKEN)
    again = await plane.wait_for(Leg.PREFILL, nth=1)
    assert again.address != sender.address
    prefilled(again)
    (await plane.wait_for(Leg.DECODE, nth=1)).tokens(4, finish=FinishReason.LENGTH)
    assert await reading == [4]
    assert harness.booked() == 0


async def test_empty_chat_of_an_engine_blames_the_pair_and_no_decode_worker() -> None:
    """No other engine can go on from a chat with tools: all that the engine's empty answer has must wait."""
    call = client_call({"messages": [], "tools": [], "stream": True}, resumable=False)
    leg = engine_request(kind=Leg.DECODE, call=call, kv_transfer_params={"block": 7})
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(ScriptedAnswer(EMPTY_CHAT))
        lost = [chunk async for chunk in await watched.engine.submit(leg)]

    def script(stream: ScriptedStream) -> None:
        if stream.request.leg is Leg.PREFILL:
            prefilled(stream)
        elif stream.request.kv_transfer_params:
            stream.feed(*lost)
        else:
            stream.feed(EngineChunk(raw=b"ok", finish=FinishReason.STOP))

    harness = await router_harness(ScriptedTransport(script), prefill(1), DECODE)
    for i in range(6):
        request = structs.replace(generate_request(request_id=f"r{i}"), call=call)
        async with harness.service.requests.generate(request) as generation:
            assert [chunk.raw async for chunk in generation] == [b"ok"]
    assert harness.circuit_state(DECODE.worker_id) is CircuitState.CLOSED
    assert [state for _, state in harness.broken_pairs()] == [CircuitState.OPEN]
