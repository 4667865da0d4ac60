"""A prefill worker fetches what its decode worker has of a conversation, and computes it where that fails."""

import asyncio
from array import array
from collections.abc import Callable

import pytest
from msgspec import structs

from kvrouter.core.requests import EngineChunk, FinishReason, GenerateRequest, KvLoss, Leg
from kvrouter.kernel.placement import kv_pull
from kvrouter.router import request_run
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.constants import SetConstants
from tests.testing.mock_fleet import fleet_file, prompt, running_mock_fleet
from tests.testing.router_harness import (
    BLOCK_SIZE,
    RouterHarness,
    decode_card,
    generate_request,
    prefill_card,
    router_harness,
)
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport, address_of, silent

TOKENS = 3_000
HELD_BLOCKS = 180
"""Of the prompt's 187 blocks, so many are at the decode worker."""

PULLED_TOKENS = HELD_BLOCKS * BLOCK_SIZE
KEPT = {"kept": 3}
PREFILL, DECODE = address_of(1), address_of(2)

PAIR = """
version: 1
models: [{{name: mock, block_size: 16, context_length: 4096}}]
workers:
  - name: p
    role: prefill
    engine: {{handoff: synchronous, kv_bytes_per_token: 100, bidirectional_kv: {0}}}
  - name: d
    role: decode
    engine: {{handoff: synchronous, kv_bytes_per_token: 100, bidirectional_kv: {0}}}
speedup: 1000
"""
"""A transfer takes no time."""

Script = Callable[[ScriptedStream], None]


def prefilled(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))


def kept(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params=KEPT))


def not_fetched(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(finish=FinishReason.ERROR, error="no way", kv_lost=KvLoss.BROKEN))


def scripted(keeps: Script = kept, fetches: Script = prefilled) -> ScriptedTransport:
    """A decode worker that ``keeps`` KV and a prefill worker that ``fetches`` it; answers are 5 and 6."""

    def script(stream: ScriptedStream) -> None:
        if stream.request.leg is not Leg.PREFILL:
            stream.tokens(5, 6, finish=FinishReason.STOP)
        elif stream.address == DECODE:
            keeps(stream)
        elif stream.request.kv_transfer_params:
            fetches(stream)
        else:
            prefilled(stream)

    return ScriptedTransport(script)


async def conversation(
    plane: ScriptedTransport,
    *,
    bidirectional: bool = True,
    held_blocks: int = HELD_BLOCKS,
    config: KvRouterConfig | None = None,
) -> RouterHarness:
    """A pair after a turn with the first blocks of the prompt, which the decode worker still has: it
    publishes no events, so that this is predicted, and those of the prefill worker name no block.
    """
    prefill = structs.replace(prefill_card(1), bidirectional_kv=bidirectional)
    decode = structs.replace(decode_card(2), bidirectional_kv=True, publishes_kv_events=False)
    harness = await router_harness(plane, prefill, decode, config=config)
    if held_blocks:
        # a request to a worker of its client's choice says nothing of how fast workers are
        first = generate_request(tokens=held_blocks * BLOCK_SIZE, request_id="r0", pinned=2)
        assert await answer(harness, first) == [5, 6]
        plane.opened.clear()
    return harness


async def answer(harness: RouterHarness, request: GenerateRequest | None = None) -> list[int]:
    asked = request or generate_request(tokens=TOKENS)
    async with harness.service.requests.generate(asked) as generation:
        return [token async for chunk in generation for token in chunk.token_ids]


def pulled(harness: RouterHarness, outcome: str) -> float:
    return harness.telemetry.kv_pulled_tokens.value("mock", outcome)


async def test_prefill_fetches_what_its_decode_worker_has() -> None:
    plane = scripted()
    harness = await conversation(plane)
    assert await answer(harness) == [5, 6]
    assert plane.legs() == [(Leg.PREFILL, DECODE), (Leg.PREFILL, PREFILL), (Leg.DECODE, DECODE)]
    keeping, prefill, decode = (stream.request for stream in plane.opened)
    assert (len(keeping.token_ids), keeping.sampling.max_tokens, keeping.call) == (PULLED_TOKENS, 1, None)
    assert keeping.token_ids == prefill.token_ids[:PULLED_TOKENS]
    assert keeping.kv_transfer_params is None
    assert (len(prefill.token_ids), prefill.kv_transfer_params) == (TOKENS, KEPT)
    assert decode.kv_transfer_params == {"block": 7}
    assert pulled(harness, "pulled") == PULLED_TOKENS
    assert [stream.cancelled_for for stream in plane.opened[:1]] == [None], "its KV was fetched"
    assert harness.booked() == 0


@pytest.mark.parametrize(
    ("bidirectional", "held_blocks"),
    [(False, HELD_BLOCKS), (True, 0), (True, 3)],
    ids=["cannot", "none", "few"],
)
async def test_prefill_computes_what_it_cannot_fetch_sooner(bidirectional: bool, held_blocks: int) -> None:
    plane = scripted()
    harness = await conversation(plane, bidirectional=bidirectional, held_blocks=held_blocks)
    assert await answer(harness) == [5, 6]
    assert plane.legs() == [(Leg.PREFILL, PREFILL), (Leg.DECODE, DECODE)]
    assert plane.opened[0].request.kv_transfer_params is None


async def test_prefill_is_sent_again_without_the_kv_that_it_did_not_get() -> None:
    plane = scripted(fetches=not_fetched)
    harness = await conversation(plane)
    assert await answer(harness) == [5, 6]
    first, second = (stream.request for stream in plane.opened if stream.address == PREFILL)
    assert (first.kv_transfer_params, second.kv_transfer_params) == (KEPT, None)
    assert (first.attempt, second.attempt) == (0, 1)
    assert plane.opened[0].cancelled_for is not None, "what was kept is given back"
    assert pulled(harness, "failed") == PULLED_TOKENS
    assert harness.telemetry.retries.value("mock", "prefill") == 1
    assert harness.telemetry.worker_failures.value("mock", "1", "lost") == 0
    assert harness.booked() == 0


async def test_nothing_is_fetched_if_a_failure_would_end_the_request() -> None:
    plane = scripted(fetches=not_fetched)
    harness = await conversation(plane, config=KvRouterConfig(retries_max=0))
    assert await answer(harness) == [5, 6]
    assert plane.legs() == [(Leg.PREFILL, PREFILL), (Leg.DECODE, DECODE)]


def keeps_nothing(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params={}))


@pytest.mark.parametrize("keeps", [keeps_nothing, not_fetched, ScriptedStream.die, silent])
async def test_prefill_computes_what_its_decode_worker_does_not_keep(
    keeps: Script, set_constants: SetConstants
) -> None:
    set_constants(request_run, KEEP_LIMIT_S=0.01)
    plane = scripted(keeps)
    harness = await conversation(plane)
    assert await answer(harness) == [5, 6]
    assert plane.opened[1].request.kv_transfer_params is None
    assert pulled(harness, "not_kept") == PULLED_TOKENS
    assert harness.telemetry.retries.value("mock", "prefill") == 0
    assert harness.booked() == 0


async def test_a_leaving_client_gives_back_what_was_kept_for_its_prefill() -> None:
    plane = scripted(fetches=silent)
    harness = await conversation(plane)
    async with harness.service.requests.generate(generate_request(tokens=TOKENS)) as generation:
        reading = asyncio.create_task(anext(generation))
        await plane.wait_for(Leg.PREFILL, nth=1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert plane.opened[0].cancelled_for is not None
    assert harness.booked() == 0


async def test_a_conversation_over_a_pair_is_answered_as_by_one_engine(set_constants: SetConstants) -> None:
    """Each turn fetches the answer before it, of which the prefill engine has nothing."""
    set_constants(kv_pull, ASK_S=0.0)
    set_constants(request_run, KEEP_LIMIT_S=60.0)
    config = KvRouterConfig(router_cost="blocks")  # which learns no speed
    answers: list[list[list[int]]] = []
    for is_bidirectional in (False, True):
        turns: list[list[int]] = []
        asked = prompt(tokens=160)
        fleet = fleet_file(PAIR.format(str(is_bidirectional).lower()))
        async with running_mock_fleet(fleet, config) as harness:
            for turn in range(4):
                tokens, _ = await harness.read(harness.request(asked, max_tokens=400))
                turns.append(tokens)
                asked = asked + array("I", tokens) + prompt(tokens=20, first=turn + 1)
                await harness.until_index_is_true()
            fetched = harness.telemetry.kv_pulled_tokens.value("mock", "pulled")
            assert (fetched >= 3 * 384) is is_bidirectional
            assert harness.telemetry.retries.value("mock", "prefill") == 0
        answers.append(turns)
    assert answers[0] == answers[1]
