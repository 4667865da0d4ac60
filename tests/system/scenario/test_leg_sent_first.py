"""A leg that need not wait for a connection is sent before its placement is booked and counted."""

import time
from functools import reduce

import pytest

from kvrouter.core.errors import KvrouterError
from kvrouter.core.requests import EngineRequest, FinishReason
from kvrouter.transports.requests.port import WorkerFull
from tests.testing.router_harness import RouterHarness, card, generate_request, read_all, router_harness
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport


class ConnectedTransport(ScriptedTransport):
    """Workers with open connections; ``seen`` is what was booked when each leg was sent."""

    harness: RouterHarness
    error: KvrouterError | None = None
    now_s = 0.0
    """A clock that each leg that is sent moves."""

    def __init__(self) -> None:
        super().__init__(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
        self.seen: list[int] = []

    def open_now(self, address: str, request: EngineRequest) -> ScriptedStream:
        self.seen.append(self.harness.booked())
        self.now_s += 100.0
        if self.error is not None:
            raise self.error
        stream = ScriptedStream(request, address)
        self.opened.append(stream)
        if self.script is not None:
            self.script(stream)
        return stream


async def connected() -> tuple[ConnectedTransport, RouterHarness]:
    plane = ConnectedTransport()
    plane.harness = await router_harness(plane, card(1), card(2))
    return plane, plane.harness


async def test_a_leg_is_sent_once_and_before_its_placement_is_booked() -> None:
    plane, harness = await connected()
    async with harness.service.requests.generate(generate_request()) as generation:
        await generation.begin()
        assert plane.seen == [0]
        assert harness.booked() == 40 + 3
        assert (await anext(generation)).token_ids == (1,)
    assert plane.asked == [], "it is not sent again"
    assert harness.booked() == 0


async def test_sending_a_leg_is_no_part_of_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, harness = await connected()

    def books(*_: object, **__: object) -> None:
        plane.now_s += 2.0

    monkeypatch.setattr(harness.model.placer.cache, "decided", books)
    monkeypatch.setattr(time, "perf_counter", lambda: plane.now_s)
    assert await read_all(harness) == [1]
    assert plane.now_s == 102.0
    assert harness.telemetry.decision_duration.total("kv") == 2.0


async def test_a_leg_that_a_worker_cannot_take_at_once_is_sent_as_others_are() -> None:
    plane, harness = await connected()
    plane.error = WorkerFull("many streams are open")
    assert await read_all(harness) == [1]
    assert len(plane.seen) == 1
    assert len(plane.asked) == 1
    assert harness.telemetry.retries.value("mock", "aggregated") == 0, "no worker is blamed"


async def test_another_attempt_resumes_where_the_first_one_was_lost() -> None:
    plane, harness = await connected()
    plane.script = lambda stream: stream.tokens(*[7] * (1 + len(plane.opened)))
    async with harness.service.requests.generate(generate_request()) as generation:
        assert (await anext(generation)).token_ids == (7, 7)
        plane.script = lambda stream: stream.tokens(8, finish=FinishReason.STOP)
        plane.opened[0].die()
        assert (await anext(generation)).token_ids == (8,)
    assert plane.opened[1].request.resumed_tokens == 2
    assert harness.booked() == 0


async def test_an_attempt_after_a_loss_without_tokens_is_sent_first_too() -> None:
    plane, harness = await connected()
    plane.script = lambda stream: stream.die()
    async with harness.service.requests.generate(generate_request()) as generation:
        await generation.begin()
        plane.script = lambda stream: stream.tokens(1, finish=FinishReason.STOP)
        assert (await anext(generation)).token_ids == (1,)
    assert plane.seen == [0, 0]
    assert plane.asked == []
    assert harness.booked() == 0


@pytest.mark.parametrize("step", ["placer._book_decode", "placer.learned.placed", "_record"])
async def test_a_leg_whose_booking_fails_is_cancelled_and_leaves_no_load(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    plane, harness = await connected()
    plane.script = None

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("the ledger is broken")

    *owners, name = step.split(".")
    owner = reduce(getattr, owners, harness.model)
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(RuntimeError, match="broken"):
        await read_all(harness)
    assert plane.opened[0].cancelled_for is not None
    assert harness.booked() == 0
