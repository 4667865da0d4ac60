"""Scripted workers that fail again and again: who is passed over, for how long, and who is not."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from msgspec import structs

from kvrouter.api.fleet_schema import BrokenPair
from kvrouter.core.constraints import Pin
from kvrouter.core.errors import DeadlineExceeded, InvalidRequest, KvrouterError, ShuttingDown
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, KvLoss, Leg
from kvrouter.core.workers import Role
from kvrouter.frontend.fleet_state import fleet_state
from kvrouter.frontend.gauges import Gauges
from kvrouter.kernel.fleet.circuit import CircuitState
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.requests.port import LegRepeated, StreamBroken, WorkerFull
from tests.testing.log_events import event_of, events_of
from tests.testing.router_harness import (
    RouterHarness,
    card,
    decode_card,
    generate_request,
    prefill_card,
    read_all,
    router_harness,
)
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport, address_of
from tests.testing.virtual_time import in_virtual_time
from tests.testing.waits import until

ONE = WorkerId(1)
BLOCKS = "blocks"
BRIEF = KvRouterConfig(router_cost=BLOCKS, circuit_open_s=0.05, circuit_open_max_s=0.2)
LONG = KvRouterConfig(router_cost=BLOCKS, circuit_open_s=1000.0, circuit_open_max_s=1000.0)
"""By blocks idle workers are drawn; by time one that happened to answer sooner may get all of so few."""


class Script:
    """Workers answer with one token; those of ``bad`` do what ``does`` says."""

    def __init__(self, *bad: int, does: Callable[[ScriptedStream], None] = ScriptedStream.die) -> None:
        self.bad = set(map(address_of, bad))
        self.does = does

    def __call__(self, stream: ScriptedStream) -> None:
        if stream.address in self.bad:
            self.does(stream)
        elif stream.request.leg is Leg.PREFILL:
            stream.feed(
                EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 7})
            )
        else:
            stream.tokens(1, finish=FinishReason.STOP)


async def send(harness: RouterHarness, times: int = 1, *, pinned: int | None = None) -> list[list[int]]:
    return [await read_all(harness, request_id=f"r{number}", pinned=pinned) for number in range(times)]


def state(harness: RouterHarness, worker_id: int = 1) -> CircuitState:
    return harness.circuit_state(WorkerId(worker_id))


def sent_to(plane: ScriptedTransport, worker_id: int) -> int:
    return sum(stream.address == address_of(worker_id) for stream in plane.opened)


async def fail(harness: RouterHarness, times: int, *, worker: int = 1) -> None:
    """Send requests that are pinned to the worker, and fail there."""
    for number in range(times):
        with pytest.raises(KvrouterError):
            await read_all(harness, request_id=f"failing-{number}", pinned=worker)


async def until_half_open(harness: RouterHarness, worker_id: int = 1) -> None:
    await until(lambda: state(harness, worker_id) is CircuitState.HALF_OPEN)


@in_virtual_time
async def test_three_failures_in_a_row_open_a_workers_circuit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plane = ScriptedTransport(Script(1))
    harness = await router_harness(plane, card(1), card(2), config=LONG)
    with caplog.at_level(logging.INFO, "kvrouter.router"):
        await fail(harness, 3)
    assert state(harness) is CircuitState.OPEN
    before = sent_to(plane, 1)
    assert await send(harness, 20) == 20 * [[1]]
    assert sent_to(plane, 1) == before
    assert harness.telemetry.circuits_opened.value("mock", "1", "lost") == 1
    (line,) = (each for each in caplog.records if event_of(each) == "circuit_opened")
    fields = getattr(line, "kvrouter_fields", {})
    assert (fields["worker"], fields["reason"]) == ("1", "lost")
    assert 750 <= fields["duration_s"] <= 1000
    harness.discovery.drop(1)
    assert harness.telemetry.circuits_opened.value("mock", "1", "lost") == 0, (
        "it left the page with its worker"
    )


@in_virtual_time
async def test_an_unreachable_workers_circuit_opens() -> None:
    plane = ScriptedTransport(Script())
    plane.unreachable = {address_of(1)}
    harness = await router_harness(plane, card(1), card(2), config=LONG)
    await fail(harness, 3)
    assert state(harness) is CircuitState.OPEN


@in_virtual_time
async def test_a_half_open_circuit_gets_one_request_and_closes_on_success() -> None:
    script = Script(1)
    plane = ScriptedTransport(script)
    harness = await router_harness(plane, card(1), card(2), config=BRIEF)
    await fail(harness, 3)
    await until_half_open(harness)
    script.does = lambda _stream: None  # it accepts the next one, and takes its time
    before = sent_to(plane, 1)
    tasks = [asyncio.create_task(read_all(harness, request_id=f"p{number}")) for number in range(12)]
    await until(lambda: sum(task.done() for task in tasks) == 11)
    assert sent_to(plane, 1) == before + 1
    trying = [stream for stream in plane.opened if stream.address == address_of(1)][-1]
    trying.tokens(1, finish=FinishReason.STOP)
    assert await asyncio.gather(*tasks) == 12 * [[1]]
    assert state(harness) is CircuitState.CLOSED
    script.bad.clear()
    await send(harness, 12)
    assert sent_to(plane, 1) > before + 1


@in_virtual_time
async def test_a_half_open_circuit_retries_after_a_cancelled_request() -> None:
    script = Script(1)
    plane = ScriptedTransport(script)
    harness = await router_harness(plane, card(1), card(2), config=BRIEF)
    await fail(harness, 3)
    await until_half_open(harness)
    script.does = lambda _stream: None
    reading = asyncio.create_task(read_all(harness, pinned=1))
    before = sent_to(plane, 1)
    await until(lambda: sent_to(plane, 1) > before)
    assert harness.model.fleet.columns.circuit_open.any(), "nobody else is let in meanwhile"
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert state(harness) is CircuitState.HALF_OPEN
    assert not harness.model.fleet.columns.circuit_open.any()


@in_virtual_time
async def test_the_only_worker_is_tried_despite_its_open_circuit() -> None:
    script = Script(1)
    plane = ScriptedTransport(script)
    harness = await router_harness(plane, card(1), config=LONG)
    await fail(harness, 3)
    assert state(harness) is CircuitState.OPEN
    script.bad.clear()
    decision = harness.model.explain(generate_request())
    assert decision.last_resort
    assert await send(harness) == [[1]]
    assert state(harness) is CircuitState.CLOSED, "it is well"


@in_virtual_time
async def test_an_open_circuit_worker_is_tried_when_the_other_is_full() -> None:
    plane = ScriptedTransport(Script(1))
    harness = await router_harness(plane, card(1), card(2), config=LONG)
    await fail(harness, 3)
    before = sent_to(plane, 1)
    plane.full = {address_of(2)}
    with pytest.raises(KvrouterError):
        await send(harness)  # the full worker is excluded for this request, so the other one is asked
    assert sent_to(plane, 1) == before + 1


@pytest.mark.parametrize(
    "step",
    [
        WorkerFull("its queue is full"),
        InvalidRequest("prompt: too long"),
        ShuttingDown("worker 1 is draining"),
        LegRepeated("it runs already"),
    ],
    ids=lambda step: type(step).__name__,
)
@in_virtual_time
async def test_errors_that_are_not_the_workers_open_no_circuit(step: Exception) -> None:
    class Refusing(ScriptedTransport):
        async def open(self, address: str, request: EngineRequest) -> ScriptedStream:
            return ScriptedStream.refused(request, address, step)

    harness = await router_harness(Refusing(), card(1), config=LONG)
    await fail(harness, 10)
    assert state(harness) is CircuitState.CLOSED
    assert harness.model.fleet.columns.circuit_open.sum() == 0


@in_virtual_time
async def test_leaving_clients_open_no_circuit() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), config=LONG)
    for number in range(10):
        async with harness.service.requests.generate(generate_request(request_id=f"r{number}")) as generation:
            reading = asyncio.create_task(anext(generation))
            await plane.wait_for(Leg.AGGREGATED, nth=number)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    assert state(harness) is CircuitState.CLOSED


@in_virtual_time
async def test_a_hanging_engines_circuit_opens_after_missed_deadlines() -> None:
    config = KvRouterConfig(ttft_timeout_s=1.0, circuit_open_s=1000.0, circuit_open_max_s=1000.0)
    plane = ScriptedTransport(Script(1, does=lambda _stream: None))
    harness = await router_harness(plane, card(1), card(2), config=config)
    failed = await asyncio.gather(
        *(read_all(harness, request_id=f"r{number}") for number in range(12)), return_exceptions=True
    )
    assert any(isinstance(each, DeadlineExceeded) for each in failed)
    before = sent_to(plane, 1)
    assert before >= 3
    assert state(harness) is CircuitState.OPEN
    assert harness.telemetry.circuits_opened.value("mock", "1", "silent") == 1
    assert await send(harness, 10) == 10 * [[1]]
    assert sent_to(plane, 1) == before


@in_virtual_time
async def test_a_worker_slow_for_some_requests_opens_no_circuit() -> None:
    config = KvRouterConfig(ttft_timeout_s=3.0, circuit_failures=2)
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), config=config)
    slow = [asyncio.create_task(read_all(harness, request_id=f"slow-{number}")) for number in range(6)]
    await plane.wait_for(Leg.AGGREGATED, nth=5)
    quick = asyncio.create_task(read_all(harness, request_id="quick"))
    (await plane.wait_for(Leg.AGGREGATED, nth=6)).tokens(1, finish=FinishReason.STOP)
    assert await quick == [1]
    failed = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(each, DeadlineExceeded) for each in failed)
    assert state(harness) is CircuitState.CLOSED


@in_virtual_time
async def test_legs_breaking_together_count_as_one_failure() -> None:
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), card(2), config=LONG)
    tasks = [asyncio.create_task(read_all(harness, request_id=f"r{number}")) for number in range(10)]
    await plane.wait_for(Leg.AGGREGATED, nth=9)
    dying = [stream for stream in plane.opened if stream.address == address_of(1)]
    assert len(dying) > 3
    for stream in dying:
        stream.die()
    await until(lambda: len(plane.opened) == 10 + len(dying))
    for stream in plane.opened:
        stream.tokens(1, finish=FinishReason.STOP)
    assert await asyncio.gather(*tasks) == 10 * [[1]]
    assert state(harness) is CircuitState.CLOSED


@in_virtual_time
async def test_a_worker_already_known_dead_opens_no_circuit() -> None:
    config = KvRouterConfig(circuit_failures=1, circuit_open_s=1000.0, circuit_open_max_s=1000.0)
    plane = ScriptedTransport()
    harness = await router_harness(plane, card(1), card(2), config=config)
    reading = asyncio.create_task(read_all(harness))
    first = await plane.wait_for(Leg.AGGREGATED)
    plane.followers[first.address](False)
    first.die()
    (await plane.wait_for(Leg.AGGREGATED, nth=1)).tokens(1, finish=FinishReason.STOP)
    assert await reading == [1]
    assert state(harness, 1) is state(harness, 2) is CircuitState.CLOSED


@in_virtual_time
async def test_a_new_incarnation_has_a_closed_circuit() -> None:
    plane = ScriptedTransport(Script(1))
    harness = await router_harness(plane, card(1), card(2), config=LONG)
    await fail(harness, 3)
    harness.discovery.put(card(1, incarnation=2))
    assert state(harness) is CircuitState.CLOSED
    assert not harness.model.fleet.columns.circuit_open.any()
    harness.discovery.drop(1, incarnation=2)
    assert state(harness) is CircuitState.CLOSED


@in_virtual_time
async def test_fleet_and_metrics_show_circuits_and_broken_pairs() -> None:
    plane = ScriptedTransport(Link())
    cards = (prefill_card(1), prefill_card(2), decode_card(3), decode_card(4))
    harness = await router_harness(plane, *cards, config=LONG)
    await send(harness, 20)
    plane.unreachable = {address_of(4)}
    await fail(harness, 3, worker=4)
    page = fleet_state(harness.service)
    circuits = {each.worker_id: each.circuit for each in page.workers}
    assert circuits == {1: "closed", 2: "closed", 3: "closed", 4: "open"}
    (model,) = page.models
    assert model.parted_pairs == [BrokenPair(prefill_worker_id=1, decode_worker_id=3, circuit="open")]
    Gauges(harness.telemetry, harness.service).refresh()
    states = [harness.telemetry.worker_circuit.value("4", each) for each in ("closed", "open", "half_open")]
    assert states == [0, 1, 0]
    assert harness.telemetry.pairs_parted.value("mock") == 1


@in_virtual_time
async def test_circuits_can_be_switched_off() -> None:
    plane = ScriptedTransport(Script(1))
    harness = await router_harness(plane, card(1), card(2), config=KvRouterConfig(circuit_failures=0))
    await fail(harness, 20)
    assert state(harness) is CircuitState.CLOSED


def lost_kv(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(finish=FinishReason.ERROR, error="no way", kv_lost=KvLoss.UNREACHABLE))


class Link(Script):
    """KV of the first worker never reaches the third one; of the others it always does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = True

    def __call__(self, stream: ScriptedStream) -> None:
        sender = stream.request.prefill_worker_id
        is_pair = (sender, stream.address) == (ONE, address_of(3))
        if self.is_cut and is_pair and stream.request.leg is Leg.DECODE:
            lost_kv(stream)
        else:
            super().__call__(stream)


def pairs(plane: ScriptedTransport) -> list[tuple[int | None, str]]:
    legs = [stream for stream in plane.opened if stream.request.leg is Leg.DECODE]
    return [(stream.request.prefill_worker_id, stream.address) for stream in legs]


@in_virtual_time
async def test_a_pair_that_lost_kv_is_avoided_while_other_pairs_exist(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plane = ScriptedTransport(Link())
    cards = (prefill_card(1), prefill_card(2), decode_card(3), decode_card(4))
    harness = await router_harness(plane, *cards, config=LONG)
    with caplog.at_level(logging.INFO, "kvrouter.router"):
        assert await send(harness, 40) == 40 * [[1]]
    cut = (1, address_of(3))
    assert pairs(plane).count(cut) == 1
    assert {(1, address_of(4)), (2, address_of(3)), (2, address_of(4))} <= set(pairs(plane))
    assert events_of(caplog.records).count("circuit_opened") == 1
    assert harness.telemetry.kv_lost.value("mock", "1", "3", "unreachable") == 1
    assert state(harness, 1) is state(harness, 3) is CircuitState.CLOSED, "both serve others"
    assert [(tuple(pair), each) for pair, each in harness.broken_pairs()] == [((1, 3), CircuitState.OPEN)]
    explained = harness.model.explain(generate_request())
    assert {row.refused for row in explained.rows} <= {None, "kv_lost"}


@in_virtual_time
async def test_a_broken_pair_is_retried_and_cleared_when_its_kv_arrives() -> None:
    link = Link()
    plane = ScriptedTransport(link)
    config = BRIEF
    harness = await router_harness(plane, prefill_card(1), prefill_card(2), decode_card(3), config=config)
    async with asyncio.timeout(60):
        while not harness.model.fleet.broken_pairs:
            await send(harness)
            await asyncio.sleep(0.005)
    link.is_cut = False
    before = pairs(plane).count((1, address_of(3)))
    async with asyncio.timeout(60):
        while pairs(plane).count((1, address_of(3))) == before:
            await send(harness)
            await asyncio.sleep(0.005)
    assert harness.broken_pairs() == []
    assert not harness.model.fleet.broken_pairs


@in_virtual_time
async def test_the_only_broken_pair_is_retried_after_its_delay() -> None:
    """Until then its decode worker serves alone, and no request spends a try on the pair."""
    link = Link()
    plane = ScriptedTransport(link)
    harness = await router_harness(plane, prefill_card(1), decode_card(3), config=BRIEF)
    await send(harness)
    assert harness.model.fleet.broken_pairs
    link.is_cut = False
    async with asyncio.timeout(60):
        while harness.model.fleet.broken_pairs:
            assert await send(harness) == [[1]]
            await asyncio.sleep(0.005)
    assert pairs(plane)[-1] == (1, address_of(3))


@in_virtual_time
async def test_after_lost_kv_an_open_circuit_prefill_worker_is_not_tried() -> None:
    """Rather the same pair once more than another prefill worker that fails every time."""
    link = Link()
    script = Script(2)
    plane = ScriptedTransport(lambda stream: (script if stream.address == address_of(2) else link)(stream))
    harness = await router_harness(plane, prefill_card(1), prefill_card(2), decode_card(3), config=LONG)
    for number in range(3):
        with pytest.raises(KvrouterError):
            await send_prefill_to(harness, 2, number)
    assert state(harness, 2) is CircuitState.OPEN
    before = sent_to(plane, 2)
    assert await send(harness) == [[1]]
    assert sent_to(plane, 2) == before
    assert plane.opened[-1].request.leg is Leg.AGGREGATED, "the last try needs no KV"


async def send_prefill_to(harness: RouterHarness, worker_id: int, number: int) -> None:
    pin = Pin(WorkerId(worker_id))
    request = structs.replace(generate_request(request_id=f"pinned-{number}"), prefill_pin=pin)
    async with harness.service.requests.generate(request) as generation:
        await anext(generation)


@in_virtual_time
async def test_a_broken_pair_is_cleared_by_a_new_decode_incarnation() -> None:
    plane = ScriptedTransport(Link())
    harness = await router_harness(plane, prefill_card(1), decode_card(3), config=LONG)
    await send(harness)
    assert harness.model.fleet.broken_pairs
    harness.discovery.put(card(3, Role.DECODE, zone="a", incarnation=2))
    assert not harness.model.fleet.broken_pairs
    assert harness.broken_pairs() == []


@in_virtual_time
async def test_decode_picked_again_may_keep_its_half_open_worker() -> None:
    """After a synchronous prefill decode is decided afresh: the half-open worker is not in its own way."""
    script = Script(3)
    plane = ScriptedTransport(script)
    harness = await router_harness(plane, prefill_card(1), decode_card(3), decode_card(4), config=BRIEF)
    await fail(harness, 3, worker=3)
    await until_half_open(harness, 3)
    script.bad.clear()
    async with asyncio.timeout(60):
        while state(harness, 3) is not CircuitState.CLOSED:
            await send(harness)
            await asyncio.sleep(0.005)
    assert sent_to(plane, 3) == 4


@in_virtual_time
async def test_an_answer_broken_in_mid_stream_counts_as_a_failure() -> None:
    def breaks_off(stream: ScriptedStream) -> None:
        stream.tokens(1)
        stream.feed(StreamBroken("gone"))

    plane = ScriptedTransport(Script(1, does=breaks_off))
    harness = await router_harness(plane, card(1), card(2), config=LONG)
    async with asyncio.timeout(60):
        while state(harness) is CircuitState.CLOSED:
            await send(harness, 4)
    before = sent_to(plane, 1)
    await send(harness, 4)
    assert sent_to(plane, 1) == before == 3
