"""A client leaves, at each stage of its request: both legs are cancelled, and nothing is left over."""

import asyncio

import pytest

from kvrouter.core.errors import ShuttingDown
from kvrouter.core.requests import GenerateRequest, Leg
from kvrouter.core.workers import Role
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.mock_fleet import (
    LONG_TOKENS,
    MOCK,
    ChunkCondition,
    MockFleetHarness,
    Pause,
    accepted,
    ended,
    prompt,
    running_mock_fleet,
    streaming,
    uniform_fleet,
    zoned_fleet,
)
from tests.testing.waits import until

SLOW_LINK_S = 1_000.0
"""Simulated: no KV arrives while a test of a waiting decode leg runs."""


async def leave_when(harness: MockFleetHarness, when: ChunkCondition, request: GenerateRequest) -> None:
    """Let the client leave at that moment, as a front door does: its task is cancelled in mid-read."""
    pause = harness.plane.hook = Pause(when)
    reading = asyncio.create_task(harness.read(request))
    await pause.reached.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])
@pytest.mark.parametrize(
    ("when", "stage"),
    [
        (accepted(Leg.PREFILL), "prefill"),
        (ended(Leg.PREFILL), "prefill"),
        (accepted(Leg.DECODE), "prefill"),
        (streaming(Leg.DECODE), "prefill"),
        (streaming(Leg.DECODE, tokens=600), "decode"),
        (ended(Leg.DECODE), "decode"),
    ],
    ids=["prefill-sent", "prefill-done", "decode-sent", "first-token", "streaming", "last-chunk"],
)
async def test_a_client_leaving_a_pair_cancels_its_legs(
    handoff: str, when: ChunkCondition, stage: str
) -> None:
    async with running_mock_fleet(zoned_fleet(handoff=handoff)) as harness:
        await leave_when(harness, when, harness.request(max_tokens=LONG_TOKENS))
        await harness.until_quiet()
        assert harness.telemetry.cancellations.value(MOCK, stage) == 1
        legs = {stream.request.leg: stream for stream in harness.plane.opened}
        if Leg.DECODE in legs:
            assert legs[Leg.DECODE].cancelled_for is not None
        if stage == "prefill":
            assert legs[Leg.PREFILL].cancelled_for is not None
        harness.plane.hook = None
        tokens, _ = await harness.read(harness.request(max_tokens=LONG_TOKENS))
        assert len(tokens) == LONG_TOKENS, "the fleet serves on"


@pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])
async def test_a_client_leaving_during_a_kv_transfer_leaves_nothing(handoff: str) -> None:
    async with running_mock_fleet(zoned_fleet(handoff=handoff, latency_s=SLOW_LINK_S)) as harness:
        reading = asyncio.create_task(harness.read(harness.request()))
        await until(lambda: any(what.transfers for what in harness.fleet.cluster.carried().values()))
        assert not harness.fleet.cluster.idle, "the prefill worker's KV waits for the transfer"
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await harness.until_quiet()
        assert all(what.arrived_bytes == 0 for what in harness.fleet.cluster.carried().values())
        assert harness.telemetry.handoffs.value("a", "a") + harness.telemetry.handoffs.value("b", "b") == 0


@pytest.mark.parametrize(
    "when", [accepted(Leg.AGGREGATED), streaming(Leg.AGGREGATED)], ids=["sent", "streaming"]
)
async def test_a_client_leaving_one_worker_leaves_nothing_running(when: ChunkCondition) -> None:
    async with running_mock_fleet(uniform_fleet()) as harness:
        await leave_when(harness, when, harness.request(max_tokens=LONG_TOKENS))
        await harness.until_quiet()


async def test_clients_leaving_together_do_not_disturb_the_others() -> None:
    async with running_mock_fleet(zoned_fleet()) as harness:
        alone, _ = await harness.read(harness.request(prompt(first=5), max_tokens=LONG_TOKENS))
        leaving = [
            asyncio.create_task(harness.read(harness.request(prompt(first=n), max_tokens=LONG_TOKENS)))
            for n in range(8)
        ]
        staying = [
            asyncio.create_task(harness.read(harness.request(prompt(first=5), max_tokens=LONG_TOKENS)))
            for _ in range(4)
        ]
        await until(lambda: len(harness.legs(Leg.DECODE)) == 13)
        for task in leaving:
            task.cancel()
        left = await asyncio.gather(*leaving, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in left)
        assert [tokens for tokens, _ in await asyncio.gather(*staying)] == [alone] * 4


async def test_a_client_leaving_its_domain_wait_sends_nothing() -> None:
    async with running_mock_fleet(
        zoned_fleet(decode=1), KvRouterConfig(router_domain_wait_s=30.0)
    ) as harness:
        for worker_id in harness.workers(Role.DECODE):
            await harness.fleet.kill(worker_id)
        reading = asyncio.create_task(harness.read(harness.request()))
        await until(lambda: len(harness.model.placer.waiting) == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: len(harness.model.placer.waiting) == 0)
        assert harness.telemetry.cancellations.value(MOCK, "queued") == 1
        assert harness.plane.opened == []


async def test_a_router_shutting_down_cuts_requests_over_its_limit() -> None:
    async with running_mock_fleet(zoned_fleet()) as harness:
        pause = harness.plane.hook = Pause(streaming(Leg.DECODE))
        reading = asyncio.create_task(harness.read(harness.request(max_tokens=LONG_TOKENS)))
        await pause.reached.wait()
        assert await harness.service.requests.drain(0.0) == 1
        pause.go.set()
        with pytest.raises(ShuttingDown, match="before the answer was complete"):
            await reading
        await harness.until_quiet()
        with pytest.raises(ShuttingDown):
            harness.service.requests.generate(harness.request())


@pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])
async def test_a_request_id_is_reusable_after_its_client_left(handoff: str) -> None:
    """Nothing reads a leg that was cancelled; the plane must not keep it in mind for that."""
    async with running_mock_fleet(zoned_fleet(handoff=handoff, prefill=1, decode=1)) as harness:
        request = harness.request(max_tokens=LONG_TOKENS, prefill_worker_id=1)
        for when in (accepted(Leg.PREFILL), accepted(Leg.DECODE), streaming(Leg.DECODE)):
            await leave_when(harness, when, request)
        harness.plane.hook = None
        tokens, _ = await harness.read(request)
        assert len(tokens) == LONG_TOKENS
