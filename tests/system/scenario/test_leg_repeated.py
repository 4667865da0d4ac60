"""A worker that says that a leg reached it twice did nothing wrong: the next attempt may go there."""

import pytest

from kvrouter.core.errors import WorkerFailed
from kvrouter.core.requests import EngineRequest, FinishReason
from kvrouter.transports.requests.port import LegRepeated
from tests.testing.router_harness import RouterHarness, card, read_all
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport


class Repeating(ScriptedTransport):
    """Finds that the first legs of each request arrived before."""

    def __init__(self, n_repeated: int) -> None:
        super().__init__(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
        self.n_repeated = n_repeated
        self.arrived: list[tuple[str, int]] = []

    async def open(self, address: str, request: EngineRequest) -> ScriptedStream:
        self.arrived.append((request.intake, request.attempt))
        if request.attempt < self.n_repeated:
            error = LegRepeated(f"{request.engine_key}: ran here before")
            return ScriptedStream.refused(request, address, error)
        return await super().open(address, request)


async def test_a_repeated_leg_is_retried_on_the_only_worker() -> None:
    plane = Repeating(1)
    harness = RouterHarness(plane)
    await harness.start(card(1))
    assert await read_all(harness) == [1]
    ((first, zero), (second, one)) = plane.arrived
    assert (first, zero, one) == (second, 0, 1)
    assert harness.booked() == 0


async def test_a_request_whose_legs_all_repeat_fails_after_its_tries() -> None:
    plane = Repeating(100)
    harness = RouterHarness(plane)
    await harness.start(card(1))
    with pytest.raises(WorkerFailed, match="ran here before"):
        await read_all(harness)
    assert len(plane.arrived) == 3
    assert harness.booked() == 0
