"""A prefill worker fetches what its decode worker has of a conversation, and computes it where that fails."""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from kvrouter.core.errors import DeadlineExceeded
from kvrouter.core.events import KvBatch, Stored
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.requests import (
    CallRoute,
    ClientCall,
    EngineChunk,
    FinishReason,
    GenerateRequest,
    KvLoss,
    Leg,
)
from kvrouter.core.workers import LoadReport
from kvrouter.kernel.placement import kv_pull
from kvrouter.kernel.placement.attempt_request import hash_prompt
from kvrouter.router import request_run
from kvrouter.router.instrumentation import add_decision
from kvrouter.router.prompt_shapes import ANSWERS_MIN
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Fields
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
from tests.testing.virtual_time import in_virtual_time
from tests.testing.waits import until

TOKENS = 3_000
HELD_BLOCKS = 180
"""Of the prompt's 187 blocks, so many are at the decode worker."""

PULLED_TOKENS = HELD_BLOCKS * BLOCK_SIZE
KEPT = {"kept": 3}
PREFILL, DECODE = address_of(1), address_of(2)
DECODE_RANK = WorkerRank(WorkerId(2), DpRank(0))

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

BLIND = "chat developer+user"
"""A shape of calls from which engines make other prompts than the router."""

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
    publishes: bool = True,
    waiting: int = 0,
    config: KvRouterConfig | None = None,
) -> RouterHarness:
    """A pair after a turn with the first blocks of the prompt, which the decode worker still has, by its
    events or by the router's prediction; ``waiting`` requests wait at its engine.
    """
    prefill = structs.replace(prefill_card(1), bidirectional_kv=bidirectional)
    decode = structs.replace(decode_card(2), bidirectional_kv=True, publishes_kv_events=publishes)
    harness = await router_harness(plane, prefill, decode, config=config)
    if not publishes:
        # a request to a worker of its client's choice says nothing of how fast workers are
        first = generate_request(tokens=held_blocks * BLOCK_SIZE, request_id="r0", pinned=2)
        assert await answer(harness, first) == [5, 6]
        plane.opened.clear()
    elif held_blocks:
        slot = harness.model.fleet.slot_of(DECODE_RANK)
        assert slot is not None
        await until(lambda: harness.model.cache.is_sure_of(slot))
        prompt = hash_prompt(
            generate_request(tokens=held_blocks * BLOCK_SIZE).token_ids, block_size=BLOCK_SIZE
        )
        stored = Stored(None, prompt.sequence_hashes, prompt.block_hashes)
        harness.events.batch(KvBatch(DECODE_RANK, Epoch(1), EventId(0), (stored,)))
        await until(lambda: held(harness, prompt) == held_blocks)
    harness.load(LoadReport(DECODE_RANK, active_blocks=0, total_blocks=1024, waiting_requests=waiting))
    return harness


def held(harness: RouterHarness, prompt: Prompt) -> int:
    """The prompt's blocks that the decode worker has, as the router knows."""
    overlap = harness.model.cache.overlap(prompt, harness.model.fleet.n_slots, now_s=0.0)
    return 0 if overlap is None else int(overlap.max())


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
    "pair",
    [{"bidirectional": False}, {"held_blocks": 0}, {"held_blocks": 3}, {"publishes": False}, {"waiting": 1}],
    ids=["cannot", "none", "few", "predicted", "waits"],
)
async def test_prefill_computes_what_it_cannot_fetch_sooner(pair: dict[str, Any]) -> None:
    plane = scripted()
    await nothing_is_fetched(plane, await conversation(plane, **pair))


async def nothing_is_fetched(
    plane: ScriptedTransport, harness: RouterHarness, request: GenerateRequest | None = None
) -> None:
    assert await answer(harness, request) == [5, 6]
    assert plane.legs() == [(Leg.PREFILL, PREFILL), (Leg.DECODE, DECODE)]
    assert plane.opened[0].request.kv_transfer_params is None


def call(*, resumable: bool) -> ClientCall:
    return ClientCall(CallRoute.CHAT, b"{}", stream=True, resumable=resumable)


@pytest.mark.parametrize(
    "guess",
    [
        {"call": call(resumable=False)},
        {"has_media": True},
        {"text_ids": array("I", range(100, 100 + TOKENS)), "isl_tokens_estimate": TOKENS},
        {"shape": BLIND},
        {"call": call(resumable=True), "shape": BLIND},
    ],
    ids=["not plain", "media", "text", "blind", "plain, blind"],
)
async def test_nothing_is_fetched_for_tokens_that_may_be_others_than_the_engines(
    guess: dict[str, Any],
) -> None:
    """The call of a chat is tokenized by its engine: KV of other tokens would give a wrong answer."""
    plane = scripted()
    harness = await conversation(plane)
    shapes = harness.model.engine_reports.shapes
    for second in range(2 * ANSWERS_MIN):
        shapes.note(
            BLIND,
            predicted_tokens=0,
            cached_tokens=160,
            isl_tokens=200,
            prompt_tokens=200,
            now_s=float(second),
        )
    assert shapes.is_blind(BLIND)
    await nothing_is_fetched(plane, harness, structs.replace(generate_request(tokens=TOKENS), **guess))


async def test_a_plain_call_of_a_known_shape_is_fetched_for() -> None:
    plane = scripted()
    harness = await conversation(plane)
    request = structs.replace(generate_request(tokens=TOKENS), call=call(resumable=True), shape="chat user")
    assert await answer(harness, request) == [5, 6]
    keeping, prefill, _ = (stream.request for stream in plane.opened)
    assert (keeping.call, prefill.call is None, prefill.kv_transfer_params) == (None, False, KEPT)


async def test_a_booked_decision_of_another_program_fetches_nothing() -> None:
    harness = await conversation(scripted())
    request = generate_request(tokens=TOKENS)
    placement = await harness.model.place(request, request.token_ids, attempt=0, excluded=frozenset())
    assert placement.prefill_pick.pulled_blocks == 0


async def test_no_speed_is_learned_from_a_prefill_that_fetches() -> None:
    harness = await conversation(scripted())
    placements = []
    for may_pull_kv in (False, True):
        asked = generate_request(tokens=TOKENS, request_id=f"r{may_pull_kv}")
        placements.append(
            await harness.model.place(
                asked, asked.token_ids, attempt=0, excluded=frozenset(), may_pull_kv=may_pull_kv
            )
        )
    assert [each.prefill_pick.pulled_blocks for each in placements] == [0, HELD_BLOCKS]
    assert [each.expected is None for each in placements] == [False, True]


def found(cached_tokens: int) -> Script:
    """A prefill engine that says how many tokens it had, or got."""

    def script(stream: ScriptedStream) -> None:
        params = {"block": 7}
        stream.feed(
            EngineChunk(
                token_ids=(9,),
                finish=FinishReason.LENGTH,
                kv_transfer_params=params,
                cached_tokens=cached_tokens,
            )
        )

    return script


@pytest.mark.parametrize(
    ("cached_tokens", "outcome", "pulled_blocks"),
    [(PULLED_TOKENS, "pulled", HELD_BLOCKS), (0, "failed", 0)],
)
async def test_a_fetch_counts_where_the_engine_got_its_tokens(
    cached_tokens: int,
    outcome: str,
    pulled_blocks: int,
) -> None:
    """An engine that computed instead says so by its cached tokens: the index was right."""
    plane = scripted(fetches=found(cached_tokens))
    harness = await conversation(plane)
    async with harness.service.requests.generate(generate_request(tokens=TOKENS)) as generation:
        assert [token async for chunk in generation for token in chunk.token_ids] == [5, 6]
        assert generation.placement is not None
        fields: Fields = {}
        add_decision(fields, generation.placement)
        assert fields["pulled_blocks"] == pulled_blocks
    assert {each: pulled(harness, each) for each in ("pulled", "failed")} == {
        "pulled": 0.0,
        "failed": 0.0,
        outcome: PULLED_TOKENS,
    }
    assert (plane.opened[0].cancelled_for is None) is (outcome == "pulled")
    slot = harness.model.fleet.slot_of(WorkerRank(WorkerId(1), DpRank(0)))
    assert slot is not None
    counts = harness.model.engine_reports.reading(slot).answers
    assert counts is None or counts.n_wrong == 0, "the index is not doubted"
    assert harness.booked() == 0


@in_virtual_time
async def test_no_prefill_is_sent_for_a_request_whose_time_is_up(set_constants: SetConstants) -> None:
    set_constants(request_run, KEEP_LIMIT_S=60.0)
    plane = scripted(silent)
    harness = await conversation(plane, config=KvRouterConfig(request_timeout_s=0.05))
    with pytest.raises(DeadlineExceeded):
        await answer(harness)
    assert [address for _, address in plane.legs()] == [DECODE]
    assert plane.opened[0].cancelled_for is not None
    assert harness.booked() == 0


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
    await nothing_is_fetched(plane, harness)


def keeps_nothing(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params={}))


@pytest.mark.parametrize("keeps", [keeps_nothing, not_fetched, ScriptedStream.die, silent])
@in_virtual_time
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
