"""A fleet under load is scaled from six workers to two and back: each answer is what it would have been."""

import asyncio
from array import array
from itertools import count

from kvrouter.core.ids import WorkerId
from tests.testing.mock_fleet import MOCK, MockFleetHarness, prompt, running_mock_fleet, uniform_fleet
from tests.testing.streaming_client import expected_tokens
from tests.testing.waits import until

CALLERS = 24
TURNS = 3
ANSWER_TOKENS = 400
SCALED = tuple(WorkerId(number) for number in (3, 4, 5, 6))
ENDS_WITHIN_S = 60.0
"""Only a test that fails waits as long as this."""


class Conversations:
    """Callers that send all of their turns before again with each turn, until they are told to end."""

    def __init__(self, harness: MockFleetHarness) -> None:
        self.right = self.wrong = 0
        self._harness = harness
        self._numbers = count()
        self._ends = False
        self._callers = [asyncio.create_task(self._go_on()) for _ in range(CALLERS)]

    async def answers(self, more: int) -> None:
        """Return once so many answers more than now were right."""
        wanted = self.right + more
        await until(lambda: self.right >= wanted)

    async def end(self) -> None:
        self._ends = True
        await asyncio.gather(*self._callers)

    async def _go_on(self) -> None:
        while not self._ends:
            said = prompt(tokens=200, first=next(self._numbers))
            for _ in range(TURNS):
                tokens, _ = await self._harness.read(self._harness.request(said, max_tokens=ANSWER_TOKENS))
                is_right = tokens == expected_tokens(said, ANSWER_TOKENS)
                self.right += is_right
                self.wrong += not is_right
                said = said + array("I", tokens) + prompt(tokens=30, first=next(self._numbers))


async def scale_down(harness: MockFleetHarness, limit_s: float) -> list[bool]:
    """Let four workers that have legs leave, as at SIGTERM; return of each whether all of its legs ended.
    No leg is begun there meanwhile.
    """
    leaving = [harness.fleet.workers[worker_id] for worker_id in SCALED]
    await until(lambda: all(worker.running_legs for worker in leaving))
    opened = len(harness.plane.opened)
    ended = await asyncio.gather(*(worker.drain(limit_s) for worker in leaving))
    assert not set(SCALED) & {leg.worker_id for leg in harness.plane.opened[opened:] if leg.is_accepted}
    return ended


def legs_moved(harness: MockFleetHarness) -> float:
    """Return how many legs went on elsewhere, before or after their first token."""
    telemetry = harness.telemetry
    return telemetry.resumes.value(MOCK) + telemetry.retries.value(MOCK, "aggregated")


async def test_six_workers_scaled_to_two_and_back_under_load_lose_no_token() -> None:
    async with running_mock_fleet(uniform_fleet(replicas=6, speedup=10.0)) as harness:
        load = Conversations(harness)
        try:
            for limit_s, ends in ((ENDS_WITHIN_S, True), (0.0, False)):
                resumed, moved = harness.telemetry.resumes.value(MOCK), legs_moved(harness)
                assert await scale_down(harness, limit_s) == [ends] * len(SCALED)
                assert len(harness.model.fleet) == 2
                await load.answers(CALLERS)
                if ends:
                    assert harness.telemetry.resumes.value(MOCK) == resumed, "a leg that had the time to end"
                else:
                    assert legs_moved(harness) > moved, "no leg that was cut went on elsewhere"
                for worker_id in SCALED:
                    await harness.revive(harness.fleet.workers[worker_id])
                assert len(harness.model.fleet) == 6
        finally:
            await load.end()
        assert load.wrong == 0
