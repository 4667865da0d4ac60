"""Prefill legs that engines refuse or fail: who answers the request, and whose fault it is."""

import pytest
from msgspec import structs

from kvrouter.core.constraints import Pin
from kvrouter.core.errors import InvalidRequest, KvrouterError, NoEligibleWorker
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.kernel.fleet.circuit import CircuitState
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.requests.port import EngineFailed, EngineFailedLater
from tests.testing.router_harness import (
    RouterHarness,
    decode_card,
    generate_request,
    prefill_card,
    read_all,
    router_harness,
)
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport, address_of

LONG = KvRouterConfig(router_cost="blocks", circuit_open_s=1000.0, circuit_open_max_s=1000.0)
FAILED = EngineFailed("the engine answered 500: Internal server error")
FAILED_LATER = EngineFailedLater("the engine failed: Internal server error")
REFUSED = InvalidRequest("1 validation error for list[FunctionDefinition]", param="tools")


class Engines:
    """Engines that answer; those at ``bad`` fail prefill legs of requests whose id begins with ``poison``."""

    def __init__(self, *bad: int, error: KvrouterError) -> None:
        self.bad = set(map(address_of, bad))
        self.error = error
        self.decode_error: KvrouterError | None = None

    def __call__(self, stream: ScriptedStream) -> None:
        leg, is_poison = stream.request.leg, stream.request.request_id.startswith("poison")
        if leg is Leg.PREFILL:
            if is_poison and stream.address in self.bad:
                stream.feed(self.error)
            else:
                stream.feed(EngineChunk(finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
        elif is_poison and self.decode_error is not None:
            stream.feed(self.decode_error)
        else:
            stream.tokens(1, finish=FinishReason.STOP)


async def send(harness: RouterHarness, kind: str, times: int = 1) -> None:
    for number in range(times):
        assert await read_all(harness, request_id=f"{kind}-{number}") == [1]


def legs_of(plane: ScriptedTransport, request_id: str) -> list[Leg]:
    return [each.request.leg for each in plane.opened if each.request.request_id == request_id]


def open_circuits(harness: RouterHarness, *workers: int) -> set[int]:
    states = {worker: harness.circuit_state(WorkerId(worker)) for worker in workers}
    return {worker for worker, state in states.items() if state is not CircuitState.CLOSED}


@pytest.mark.parametrize("error", [FAILED, FAILED_LATER], ids=["at once", "later"])
async def test_a_request_failing_every_prefill_is_answered_aggregated(
    error: KvrouterError,
) -> None:
    plane = ScriptedTransport(Engines(1, 2, error=error))
    harness = await router_harness(plane, *map(prefill_card, (1, 2)), *map(decode_card, (3, 4)), config=LONG)
    await send(harness, "poison", 12)
    for number in range(12):
        assert legs_of(plane, f"poison-{number}") == [Leg.PREFILL, Leg.PREFILL, Leg.AGGREGATED]
    assert open_circuits(harness, 1, 2, 3, 4) == set()
    await send(harness, "plain", 4)
    for number in range(4):
        assert legs_of(plane, f"plain-{number}") == [Leg.PREFILL, Leg.DECODE], "others are not hurt"
    assert harness.booked() == 0


async def test_a_refused_prefill_leg_is_answered_aggregated_at_once() -> None:
    plane = ScriptedTransport(Engines(1, 2, error=REFUSED))
    harness = await router_harness(plane, *map(prefill_card, (1, 2)), decode_card(3), config=LONG)
    await send(harness, "poison", 6)
    assert legs_of(plane, "poison-0") == [Leg.PREFILL, Leg.AGGREGATED]
    assert open_circuits(harness, 1, 2, 3) == set()
    assert harness.booked() == 0


async def test_an_aggregated_refusal_after_prefill_is_the_answer() -> None:
    engines = Engines(1, error=REFUSED)
    engines.decode_error = InvalidRequest("tools: odd", param="tools")
    harness = await router_harness(ScriptedTransport(engines), prefill_card(1), decode_card(2), config=LONG)
    with pytest.raises(InvalidRequest, match="odd"):
        await send(harness, "poison")
    assert harness.booked() == 0


async def test_a_prefill_refusal_is_the_answer_if_no_worker_serves_alone() -> None:
    only_decodes = structs.replace(decode_card(2), decode_only=True)
    plane = ScriptedTransport(Engines(1, error=REFUSED))
    harness = await router_harness(plane, prefill_card(1), only_decodes, config=LONG)
    with pytest.raises(InvalidRequest, match="FunctionDefinition"):
        await send(harness, "poison")
    assert harness.booked() == 0


async def test_a_bootstrap_prefill_refusal_is_the_answer_without_blame() -> None:
    class Pairs(Engines):
        def __call__(self, stream: ScriptedStream) -> None:
            if stream.request.leg is Leg.PREFILL:
                super().__call__(stream)  # decode waits for KV that never comes

    plane = ScriptedTransport(Pairs(1, error=REFUSED))
    harness = await router_harness(plane, prefill_card(1, bootstrap=True), decode_card(2), config=LONG)
    for number in range(6):
        with pytest.raises(InvalidRequest, match="FunctionDefinition"):
            await read_all(harness, request_id=f"poison-{number}")
    assert sorted(legs_of(plane, "poison-0")) == [Leg.DECODE, Leg.PREFILL]
    assert open_circuits(harness, 1, 2) == set()
    assert harness.booked() == 0


async def test_a_prefill_workers_circuit_opens_for_requests_another_prefills() -> None:
    plane = ScriptedTransport(Engines(1, error=FAILED))
    harness = await router_harness(plane, *map(prefill_card, (1, 2)), decode_card(3), config=LONG)
    await send(harness, "poison", 40)
    assert open_circuits(harness, 1, 2, 3) == {1}
    assert {Leg.AGGREGATED} & set().union(*(legs_of(plane, f"poison-{n}") for n in range(40))) == set()


async def test_a_lone_prefill_worker_answering_others_keeps_a_closed_circuit() -> None:
    plane = ScriptedTransport(Engines(1, error=FAILED))
    harness = await router_harness(plane, prefill_card(1), decode_card(2), config=LONG)
    await send(harness, "plain")
    await send(harness, "poison", 12)
    assert legs_of(plane, "poison-11") == [Leg.PREFILL, Leg.AGGREGATED]
    assert open_circuits(harness, 1, 2) == set()


async def test_a_lone_prefill_worker_that_only_fails_opens_its_circuit() -> None:
    plane = ScriptedTransport(Engines(1, error=FAILED))
    harness = await router_harness(plane, prefill_card(1), decode_card(2), config=LONG)
    await send(harness, "poison", 4)
    assert open_circuits(harness, 1, 2) == {1}
    assert legs_of(plane, "poison-3") == [Leg.AGGREGATED]


async def test_a_failed_pinned_prefill_worker_is_not_replaced() -> None:
    plane = ScriptedTransport(Engines(1, 2, error=FAILED))
    harness = await router_harness(plane, *map(prefill_card, (1, 2)), decode_card(3), config=LONG)
    pinned = structs.replace(generate_request(request_id="poison-0"), prefill_pin=Pin(WorkerId(1)))
    async with harness.service.requests.generate(pinned) as generation:
        with pytest.raises(NoEligibleWorker, match="Internal server error"):
            await anext(generation)
    assert legs_of(plane, "poison-0") == [Leg.PREFILL]
