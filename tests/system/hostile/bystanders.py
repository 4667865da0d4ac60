"""The other clients: streams that go on, and a health check that asks again and again, during an attack."""

import asyncio
import itertools
from functools import partial
from types import TracebackType
from typing import Self

from tests.testing.processes import Frontend, eventually
from tests.testing.streaming_client import StreamingClient

STREAMS = 12
HUNG_S = 20.0
"""Whoever waits as long as this waits for a process that hangs: a busy machine is quicker."""

ASK_EVERY_S = 0.02


class Bystanders:
    """Twelve streams and a health check, where there is one worker.

    Use as ``async with Bystanders(frontend) as others``.

    When the block ends, every stream must go on and have nothing but the right text so far, and nobody may
    have waited :data:`HUNG_S`. Then its client leaves: the streams outlast any attack, on a slow machine too.
    """

    def __init__(self, frontend: Frontend, *, max_tokens: int = 20_000, n: int = STREAMS) -> None:
        self._frontend = frontend
        self._max_tokens = max_tokens
        self._n = n
        self.longest_health_s = 0.0
        """How long the slowest answer of ``/health`` took, since the block began or :meth:`start_over`."""

        self._since_s = 0.0

    async def __aenter__(self) -> Self:
        await eventually(partial(self._frontend.serves, 1))
        self._clients = [StreamingClient(self._frontend, max_tokens=self._max_tokens) for _ in range(self._n)]
        for client in self._clients:
            await client.until(2)
        self._asking = asyncio.create_task(self._ask())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._asking.cancel()
        [asked] = await asyncio.gather(self._asking, return_exceptions=True)
        if error is None:
            await self.passed()
        for client in self._clients:
            await client.leave()
        if error is None:
            assert isinstance(asked, asyncio.CancelledError), asked
            assert [client.error for client in self._clients if not client.is_right_so_far] == []
            assert self.longest_health_s < HUNG_S
            assert self.longest_gap_s < HUNG_S

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two pieces of one stream, since the block began or :meth:`start_over`."""
        gaps = [0.0]
        for client in self._clients:
            pairs = itertools.pairwise(client.piece_times_s)
            gaps += [after - before for before, after in pairs if after >= self._since_s]
        return max(gaps)

    def start_over(self) -> None:
        """Measure the longest waits from now on."""
        self._since_s = asyncio.get_running_loop().time()
        self.longest_health_s = 0.0

    async def passed(self) -> None:
        """Return once every stream has had two more pieces, and so has felt what went before."""
        for client in self._clients:
            await client.until(client.pieces + 2)

    @property
    def all_go_on(self) -> bool:
        """Whether no stream has ended yet: what was measured so far, all of them have lived through."""
        return not any(client.has_ended for client in self._clients)

    async def _ask(self) -> None:
        clock_s = asyncio.get_running_loop().time
        while True:
            began_s = clock_s()
            reply = await self._frontend.http.get("/health", timeout=HUNG_S)
            assert reply.status_code == 200, reply.text
            self.longest_health_s = max(self.longest_health_s, clock_s() - began_s)
            await asyncio.sleep(ASK_EVERY_S)
