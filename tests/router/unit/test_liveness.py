"""What a router keeps up for each worker: whom it cannot reach, it says, and sends nothing there."""

import asyncio
from collections.abc import Callable

from kvrouter.core.requests import EngineRequest
from kvrouter.core.workers import WorkerCard
from kvrouter.router.liveness import Liveness
from kvrouter.transports.events.memory import MemoryEventTransport
from kvrouter.transports.requests.port import AliveSink, SentLeg, WorkerUnreachable
from tests.testing.discovery_stores import card


class _Elsewhere:
    """A request plane on which no address is right."""

    def open_now(self, address: str, request: EngineRequest) -> None:
        """The router waits for :meth:`open`."""

    async def open(self, address: str, request: EngineRequest) -> SentLeg:
        raise WorkerUnreachable(address)

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        raise WorkerUnreachable(f"{address} is no address here")

    async def close(self) -> None:
        pass


async def test_a_worker_with_an_unusable_address_is_reported_and_not_alive() -> None:
    reported: list[tuple[WorkerCard, bool]] = []
    liveness = Liveness(
        _Elsewhere(),
        MemoryEventTransport(),
        follows_events=True,
        on_alive=lambda worker, is_alive: reported.append((worker, is_alive)),
        on_lapsed_and_dead=lambda _: None,
    )
    odd = liveness.follow(card())
    assert odd is not None
    assert "is no address here" in odd
    await asyncio.sleep(0)
    assert reported == [(card(), False)]
    liveness.close()
