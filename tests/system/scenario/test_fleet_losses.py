"""Workers of a mock fleet die in the middle of requests: answers stay what they would have been."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from kvrouter.core.errors import KvrouterError, NoEligibleWorker, WorkerFailed
from kvrouter.core.requests import Leg, Sampling
from kvrouter.core.workers import Role
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.mock_fleet import (
    BLOCK,
    LONG_TOKENS,
    MOCK,
    ChunkCondition,
    MockFleetHarness,
    SeenChunk,
    accepted,
    ended,
    on_first,
    prompt,
    running_mock_fleet,
    streaming,
    uniform_fleet,
    zoned_fleet,
)

HANDOFFS = pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])
SLOW_LINK_S = 1_000.0
"""Simulated, a second of the clock: KV is still on its way when the prefill leg's answer is read."""


async def undisturbed(fleet: FleetFile, *, max_tokens: int = LONG_TOKENS) -> list[int]:
    """What the fleet answers when nobody dies."""
    async with running_mock_fleet(fleet) as harness:
        tokens, _ = await harness.read(harness.request(max_tokens=max_tokens))
    return tokens


async def answer_despite(harness: MockFleetHarness, when: ChunkCondition, legs: Sequence[Leg]) -> list[int]:
    """Answer a request while the worker dies that is seen ``when``; check what must hold of any answer."""
    harness.plane.hook = on_first(when, harness.kill())
    tokens, generation = await harness.read(harness.request(max_tokens=LONG_TOKENS))
    assert generation.usage.completion_tokens == len(tokens) == LONG_TOKENS
    assert generation.usage.prompt_tokens == 100
    assert generation.attempts == 2
    telemetry = harness.telemetry
    assert telemetry.completion_tokens.value(MOCK) == LONG_TOKENS
    assert telemetry.prompt_tokens.value(MOCK) == 100
    assert telemetry.requests_active.value(MOCK) == 0
    assert telemetry.ttft.count(MOCK) == 1
    assert Counter(stream.request.leg for stream in harness.plane.opened) == Counter(legs)
    assert harness.crossed() == 0
    return tokens


@HANDOFFS
async def test_a_prefill_worker_dying_before_its_answer_is_replaced(handoff: str) -> None:
    fleet = zoned_fleet(handoff=handoff, prefill=2)
    legs = [Leg.PREFILL, Leg.DECODE, Leg.PREFILL, Leg.DECODE]
    if handoff == "synchronous":
        legs = [Leg.PREFILL, Leg.PREFILL, Leg.DECODE]
    async with running_mock_fleet(fleet) as harness:
        tokens = await answer_despite(harness, accepted(Leg.PREFILL), legs)
        assert harness.telemetry.retries.value(MOCK, "prefill") == 1
    assert tokens == await undisturbed(fleet)


@pytest.mark.parametrize(
    ("handoff", "when"),
    [
        ("bootstrap", ended(Leg.PREFILL)),
        ("synchronous", ended(Leg.PREFILL)),
        ("synchronous", accepted(Leg.DECODE)),
    ],
    ids=["bootstrap", "synchronous-before-decode", "synchronous-after-decode"],
)
async def test_a_prefill_worker_dying_during_its_transfer_is_replaced(
    handoff: str, when: ChunkCondition
) -> None:
    """The decode worker is the one that tells of it: its zone, which has no other, must not lose it."""
    fleet = zoned_fleet(handoff=handoff, prefill=2, decode=1, latency_s=SLOW_LINK_S)
    async with running_mock_fleet(fleet) as harness:
        for worker_id in harness.workers(Role.DECODE, "b"):
            await harness.fleet.kill(worker_id)

        async def kill_sender(_: SeenChunk) -> None:
            await harness.fleet.kill(harness.legs(Leg.PREFILL)[0])

        harness.plane.hook = on_first(when, kill_sender)
        tokens, generation = await harness.read(harness.request(max_tokens=24))
        assert generation.attempts == 2
        assert len(set(harness.legs(Leg.PREFILL))) == 2
        assert len(harness.legs(Leg.DECODE)) == 2
        assert len(set(harness.legs(Leg.DECODE))) == 1
        assert harness.telemetry.retries.value(MOCK, "prefill") == 1
    assert tokens == await undisturbed(fleet, max_tokens=24)


@HANDOFFS
async def test_a_decode_worker_dying_before_the_first_token_is_replaced(handoff: str) -> None:
    fleet = zoned_fleet(handoff=handoff)
    legs = [Leg.PREFILL, Leg.DECODE] * 2
    if handoff == "bootstrap":
        legs.remove(Leg.PREFILL)  # decode is sent first, and dies before the first prefill leg is
    async with running_mock_fleet(fleet) as harness:
        tokens = await answer_despite(harness, accepted(Leg.DECODE), legs)
        assert len(set(harness.legs(Leg.DECODE))) == 2
        assert harness.telemetry.retries.value(MOCK, "decode") == 1
        assert harness.telemetry.resumes.value(MOCK) == 0
    assert tokens == await undisturbed(fleet)


async def test_a_decode_worker_dying_during_prefill_is_replaced() -> None:
    """Nothing was sent to it: no try is spent, the new worker is booked, and KV still keeps to its zone."""
    async with running_mock_fleet(zoned_fleet(handoff="synchronous")) as harness:

        async def kill_picked(seen: SeenChunk) -> None:
            assert generation.placement is not None
            await harness.fleet.kill(generation.placement.decision.decode.rank.worker_id)

        booked: list[int] = []

        async def note_booked(seen: SeenChunk) -> None:
            booked.append(harness.booked())

        kill, note = on_first(accepted(Leg.PREFILL), kill_picked), on_first(accepted(Leg.DECODE), note_booked)

        async def hook(seen: SeenChunk) -> None:
            await kill(seen)
            await note(seen)

        harness.plane.hook = hook
        async with harness.service.requests.generate(harness.request()) as generation:
            tokens = [token async for chunk in generation for token in chunk.token_ids]
        assert generation.attempts == 1
        assert len(harness.legs(Leg.DECODE)) == 1
        assert booked == [-(-100 // BLOCK)], "the prompt's blocks, at the worker that has the request now"
        assert harness.crossed() == 0
    assert tokens == await undisturbed(zoned_fleet(handoff="synchronous"), max_tokens=8)


@HANDOFFS
async def test_a_decode_worker_dying_in_mid_answer_costs_no_token(handoff: str) -> None:
    fleet = zoned_fleet(handoff=handoff)
    async with running_mock_fleet(fleet) as harness:
        legs = [Leg.PREFILL, Leg.DECODE] * 2
        tokens = await answer_despite(harness, streaming(Leg.DECODE), legs)
        first, second = (stream for stream in harness.plane.opened if stream.request.leg is Leg.DECODE)
        resumed = second.request.resumed_tokens
        assert 0 < resumed < LONG_TOKENS
        assert list(second.request.token_ids) == [*first.request.token_ids, *tokens[:resumed]]
        assert second.request.sampling.max_tokens == LONG_TOKENS - resumed
        assert harness.telemetry.resumes.value(MOCK) == 1
        assert harness.telemetry.retries.value(MOCK, "decode") == 0
    assert tokens == await undisturbed(fleet)


@HANDOFFS
async def test_a_prefill_worker_dying_in_mid_answer_changes_nothing(handoff: str) -> None:
    fleet = zoned_fleet(handoff=handoff)
    async with running_mock_fleet(fleet) as harness:

        async def kill_sender(_: SeenChunk) -> None:
            await harness.fleet.kill(harness.legs(Leg.PREFILL)[0])

        harness.plane.hook = on_first(streaming(Leg.DECODE), kill_sender)
        tokens, generation = await harness.read(harness.request(max_tokens=LONG_TOKENS))
        assert generation.attempts == 1
    assert tokens == await undisturbed(fleet)


async def test_an_aggregated_answer_survives_two_worker_deaths_not_three() -> None:
    fleet = uniform_fleet(replicas=4)
    expected = await undisturbed(fleet, max_tokens=4 * LONG_TOKENS)

    async def answer(deaths: int, got: list[int]) -> None:
        async with running_mock_fleet(fleet) as harness:
            left = [deaths]

            async def hook(seen: SeenChunk) -> None:
                if left[0] and streaming(Leg.AGGREGATED)(seen):
                    left[0] -= 1
                    await harness.fleet.kill(seen.worker_id)

            harness.plane.hook = hook
            async with harness.service.requests.generate(
                harness.request(max_tokens=4 * LONG_TOKENS)
            ) as generation:
                async for chunk in generation:
                    got.extend(chunk.token_ids)
            assert generation.resumes == deaths
            assert harness.telemetry.completion_tokens.value(MOCK) == 4 * LONG_TOKENS

    got: list[int] = []
    await answer(2, got)
    assert got == expected
    got.clear()
    with pytest.raises(WorkerFailed, match="try 3 of 3"):
        await answer(3, got)
    assert 0 < len(got) < len(expected)
    assert got == expected[: len(got)], "what the client has is right as far as it goes"


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=LONG_TOKENS, temperature=0.7, seed=3),
        Sampling(max_tokens=LONG_TOKENS, temperature=0.0, frequency_penalty=0.5),
    ],
    ids=["seeded", "penalised"],
)
async def test_an_answer_that_cannot_be_resumed_ends_with_one_error(sampling: Sampling) -> None:
    async with running_mock_fleet(zoned_fleet()) as harness:
        harness.plane.hook = on_first(streaming(Leg.DECODE), harness.kill())
        async with harness.service.requests.generate(harness.request(sampling=sampling)) as generation:
            errors: list[KvrouterError] = []
            for _ in range(10):
                try:
                    async for _chunk in generation:
                        pass
                except KvrouterError as error:
                    errors.append(error)
        assert [type(error) for error in errors] == [WorkerFailed]
        assert len(harness.legs(Leg.DECODE)) == 1


@pytest.mark.parametrize("when", [accepted(Leg.DECODE), streaming(Leg.DECODE)], ids=["early", "late"])
async def test_losing_all_decode_workers_gives_no_eligible_worker(when: ChunkCondition) -> None:
    async with running_mock_fleet(zoned_fleet()) as harness:

        async def kill_decode(_: SeenChunk) -> None:
            for worker_id in harness.workers(Role.DECODE):
                await harness.fleet.kill(worker_id)

        harness.plane.hook = on_first(when, kill_decode)
        with pytest.raises(NoEligibleWorker, match="decode"):
            await harness.read(harness.request(max_tokens=LONG_TOKENS))


async def test_a_lost_worker_fails_the_request_without_retries() -> None:
    async with running_mock_fleet(zoned_fleet(), KvRouterConfig(retries_max=0)) as harness:
        harness.plane.hook = on_first(accepted(Leg.DECODE), harness.kill("a power cut"))
        with pytest.raises(WorkerFailed, match="a power cut"):
            await harness.read(harness.request())


async def test_forty_answers_survive_the_death_of_half_the_workers() -> None:
    """Half of the workers die while forty answers are under way: each one is what it would have been."""
    fleet = zoned_fleet(prefill=2, decode=3)
    prompts = [prompt(tokens=60 + 7 * n, first=n) for n in range(40)]
    async with running_mock_fleet(fleet) as harness:
        expected = [(await harness.read(harness.request(each, max_tokens=700)))[0] for each in prompts]
    async with running_mock_fleet(fleet, KvRouterConfig(retries_max=10)) as harness:
        victims = [
            harness.workers(Role.PREFILL, "a")[0],
            *harness.workers(Role.DECODE, "a")[:2],
            *harness.workers(Role.DECODE, "b")[:1],
        ]
        n_seen = 0

        async def hook(_: SeenChunk) -> None:
            nonlocal n_seen
            n_seen += 1
            if n_seen % 30 == 0 and victims:
                await harness.fleet.kill(victims.pop(0))

        harness.plane.hook = hook
        answers = await asyncio.gather(
            *(harness.read(harness.request(each, max_tokens=700)) for each in prompts)
        )
        assert not victims
        assert [tokens for tokens, _ in answers] == expected
        assert harness.crossed() == 0
        assert harness.telemetry.completion_tokens.value(MOCK) == 40 * 700
        await harness.until_index_is_true()
