"""A fleet under load is scaled from six workers to two and back: each answer is what it would have been."""

import asyncio
from array import array
from collections.abc import Callable
from itertools import count

from kvrouter.app.mock_fleet import MockFleet
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.records.port import CardSink, GoneSink, StoreSink
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


class UnreadDiscovery(MemoryDiscovery):
    """Watchers read what changed when the test says so."""

    propagation_s = ENDS_WITHIN_S

    def __init__(self) -> None:
        super().__init__()
        self.unread: list[Callable[[], None]] | None = None

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        def on_change(card: WorkerCard) -> None:
            self._later(lambda: on_card(card))

        return await super().watch(on_change, lambda *gone: self._later(lambda: on_gone(*gone)), on_store)

    def read(self) -> None:
        unread, self.unread = self.unread, None
        for change in unread or ():
            change()

    def _later(self, change: Callable[[], None]) -> None:
        if self.unread is None:
            change()
        else:
            self.unread.append(change)


async def test_requests_to_workers_whose_drain_is_over_before_it_is_read_cost_no_retry() -> None:
    fleet = MockFleet(uniform_fleet(replicas=6))
    fleet.discovery = discovery = UnreadDiscovery()
    async with fleet:
        harness = MockFleetHarness(fleet, KvRouterConfig(retries_max=0))
        await harness.service.start()
        discovery.unread = []
        leaving = [asyncio.create_task(fleet.workers[worker_id].drain(ENDS_WITHIN_S)) for worker_id in SCALED]
        await until(lambda: len(discovery.unread or ()) == 2 * len(SCALED))
        for first in range(CALLERS):
            said = prompt(first=first)
            tokens, _ = await harness.read(harness.request(said))
            assert tokens == expected_tokens(said, 8)
        assert not any(each.done() for each in leaving)
        assert harness.telemetry.retries.value(MOCK, "aggregated") > 0, "no request met a worker that leaves"
        discovery.read()
        assert len(harness.model.fleet) == 2
        for each in leaving:
            each.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await harness.until_quiet()
        harness.service.stop()
