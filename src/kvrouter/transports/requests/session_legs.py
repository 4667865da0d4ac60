"""The legs of one session at its worker: each in a task, whose answer waits for the router's credit."""

import asyncio
from collections.abc import Callable

from kvrouter.core.requests import EngineChunk, EngineRequest
from kvrouter.transports.background import go_on
from kvrouter.transports.requests.legs import CONNECTION_CLOSED, LegName, LegServer
from kvrouter.transports.requests.session import LEFT
from kvrouter.transports.requests.stream import credit_of
from kvrouter.transports.requests.worker_session import Answer, WorkerSession


class SessionAnswer(Answer):
    """What one leg answers, as its worker writes it."""

    __slots__ = ("_is_accepted", "_more", "task")

    def __init__(self, session: WorkerSession, stream_id: int, credit_tokens: int) -> None:
        super().__init__(session, stream_id, credit_tokens)
        self.task: asyncio.Task[None] | None = None
        self._is_accepted = False
        self._more: asyncio.Future[None] | None = None

    def go_on(self) -> None:
        """There is credit, or room to write."""
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def accept(self) -> None:
        """Say so."""
        self._is_accepted = True
        self._session.accept(self.stream_id)

    async def send(self, chunk: EngineChunk) -> None:
        """Send, in parts where there is credit for a part only."""
        self.bring(await self._fitting(chunk))

    async def send_last(self, chunk: EngineChunk, over: Callable[[], None]) -> None:
        """Send, in parts where there is credit for a part only; the leg is over with the last one."""
        last = await self._fitting(chunk)
        over()
        self.bring(last)

    async def end(self, error: Exception) -> None:
        """Refuse, or say that the leg is lost."""
        self._session.fail(self.stream_id, error, is_accepted=self._is_accepted)

    async def _fitting(self, chunk: EngineChunk) -> EngineChunk:
        """Send what ``chunk`` has above the credit as credit comes; return the rest once it may go."""
        while True:
            await self._wait_for_room(credit_of(chunk))
            rest = self.rest_of(chunk)
            if rest is None:
                return chunk
            chunk = rest

    async def _wait_for_room(self, n_tokens: int) -> None:
        while not self.has_room(n_tokens):
            self._more = asyncio.get_running_loop().create_future()
            try:
                await self._more
            finally:
                self._more = None


class SessionLegs:
    """Runs the legs that one router asks one worker for. ``router`` is a name that no other session has."""

    def __init__(self, place: LegServer, router: str, session: WorkerSession) -> None:
        self._place = place
        self._router = router
        self._session = session
        self._answers: dict[int, SessionAnswer] = {}

    def begin(self, stream_id: int, credit_tokens: int, request: EngineRequest) -> Answer:
        """Serve a leg in a task of its own."""
        answer = self._answers[stream_id] = SessionAnswer(self._session, stream_id, credit_tokens)
        serving = self._place.run(LegName(self._router, stream_id), request, answer)
        answer.task = go_on(serving, name="requests: serve a leg")
        answer.task.add_done_callback(lambda _task: self._forget(stream_id))
        return answer

    def cancel(self, stream_id: int, reason: str) -> None:
        """The router wants no more of a leg, or will not decode what it prefilled."""
        self._place.cancel(LegName(self._router, stream_id), reason)
        answer = self._answers.get(stream_id)
        if answer is not None and answer.task is not None:
            answer.task.cancel()  # also where the place has not seen the leg yet

    def ended(self, reason: str) -> None:
        """Nobody reads what the legs bring: they are cancelled."""
        self._place.drop_router(self._router, CONNECTION_CLOSED if reason == LEFT else reason)
        for answer in self._answers.values():
            if answer.task is not None:
                answer.task.cancel()

    def _forget(self, stream_id: int) -> None:
        del self._answers[stream_id]
        self._session.forget(stream_id)
