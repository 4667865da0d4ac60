"""What a router has with one worker over NATS: its legs, who follows it, and when it was heard."""

import asyncio
from weakref import WeakSet

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, Leg
from kvrouter.planes.requests.followers import Followers
from kvrouter.planes.requests.nats.frames import (
    Accepted,
    Beat,
    Cancel,
    Chunk,
    Credit,
    Lost,
    Pulse,
    Refused,
    Tokens,
    WorkerFrame,
)
from kvrouter.planes.requests.nats.post import Box
from kvrouter.planes.requests.port import ReaderTooSlow, StreamBroken, WorkerUnreachable
from kvrouter.planes.requests.stream import LegStream
from kvrouter.planes.requests.wire import error_of

WINDOW_TOKENS = 2048
"""What a worker may send of one leg before the reader takes any of it."""

OVERRUN_TOKENS_MAX = 65_536
"""How far one chunk may go beyond the window."""

REASON_MAX = 1000
"""Characters of a reason that a worker is told."""

NOBODY_PULSES = 3
"""Pulses in a row that nobody hears, and the worker is lost."""


class NatsLeg:
    """One leg: opening until the worker accepts it, then a stream that is filled frame by frame."""

    def __init__(self, link: "Link", number: int, request: EngineRequest) -> None:
        self.number = number
        self.granted_tokens = WINDOW_TOKENS
        self.received = 0
        self.stream = LegStream(on_read=self._on_read, on_cancel=self._on_cancel)
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = link
        self.is_prefill = request.leg is Leg.PREFILL
        self._read_tokens = 0

    def refuse(self, error: KvrouterError) -> None:
        """The leg was not taken."""
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def take(self, number: int, chunk: EngineChunk | None, token_ids: tuple[int, ...]) -> None:
        """A chunk came, or bare tokens."""
        if not self._is_next(number):
            return
        if chunk is None:
            self.stream.push_tokens(token_ids)
        else:
            self.stream.push(chunk)
        if self.stream.waiting_tokens > WINDOW_TOKENS + OVERRUN_TOKENS_MAX:
            self.give_up(StreamBroken(f"{self._link.address} sent more than it may"))
        elif self.stream.is_over:
            self._link.drop(self)

    def lose(self, number: int, error: KvrouterError) -> None:
        """The worker says that the leg is lost."""
        if self._is_next(number):
            self.stream.fail(error)
            self._link.drop(self)

    def compare(self, sent: int | None) -> None:
        """The worker sent ``sent`` frames so far; None when it runs no such leg."""
        if self.accepted.done() and sent != self.received:
            what = "the end of the answer" if sent is None else f"frames {self.received + 1} to {sent}"
            self.give_up(StreamBroken(f"{self._link.address}: {what} never came"))

    def give_up(self, error: KvrouterError) -> None:
        """End the leg here, and tell the worker."""
        self.refuse(WorkerUnreachable(error.message))
        self.stream.fail(error)
        self.withdraw(error.message)

    def withdraw(self, reason: str) -> None:
        """Tell the worker that the leg is not wanted."""
        self._link.drop(self)
        self._link.box.put(Cancel(self.number, reason[:REASON_MAX]))

    def _is_next(self, number: int) -> bool:
        if self.accepted.done() and number == self.received + 1:
            self.received = number
            return True
        self.give_up(StreamBroken(f"{self._link.address}: frame {self.received + 1} never came"))
        return False

    def _on_read(self, read_tokens: int) -> None:
        self._read_tokens += read_tokens
        if self.granted_tokens - self._read_tokens <= WINDOW_TOKENS // 2 and not self.stream.is_over:
            self.granted_tokens = self._read_tokens + WINDOW_TOKENS
            self._link.box.put(Credit(self.number, self.granted_tokens))

    def _on_cancel(self, reason: str) -> None:
        if self.is_prefill or self.number in self._link.legs:
            self.withdraw(reason)


class Link:
    """What the plane has with one worker."""

    def __init__(self, address: str, worker: tuple[WorkerId, Epoch], box: Box, now_s: float) -> None:
        self.address = address
        self.worker = worker
        self.box = box
        self.legs: dict[int, NatsLeg] = {}
        self.prefilled: WeakSet[LegStream] = WeakSet()
        self.followers = Followers()
        self.heard_s = now_s
        self.used_s = now_s
        self.unanswered_pulses = 0

    @property
    def is_used(self) -> bool:
        """Whether anybody wants to know how the worker is."""
        return bool(self.legs or self.prefilled or self.followers)

    def use(self, now_s: float) -> None:
        """Somebody wants to know from now on: silence counts from here."""
        if not self.is_used:
            self.heard_s = now_s
        self.used_s = now_s
        self.unanswered_pulses = 0

    def drop(self, leg: NatsLeg) -> None:
        """A leg has ended; idempotent. While somebody keeps the stream of a prefill leg, the worker hears
        that this router lives, and keeps what it prefilled.
        """
        if self.legs.pop(leg.number, None) is not None and leg.is_prefill:
            self.prefilled.add(leg.stream)

    def hear_nobody(self, *, was_deaf: bool) -> None:
        """Nobody listens at the worker's subject. A worker may be about to connect again, so open legs break
        only when nobody was there for some pulses in a row, and followers hear nothing while the plane itself
        has only just come back: else those routers alone would lose workers that were faster than they.
        """
        why = f"nobody serves {self.address}"
        if not was_deaf:
            self.followers.tell(is_alive=False)
        for leg in tuple(self.legs.values()):
            if not leg.accepted.done():
                leg.refuse(WorkerUnreachable(why))
            elif self.unanswered_pulses >= NOBODY_PULSES:
                leg.give_up(StreamBroken(why))

    def hear(self, frames: list[WorkerFrame], now_s: float) -> None:
        """The worker spoke."""
        self.heard_s = now_s
        self.unanswered_pulses = 0
        self.followers.tell(is_alive=True)
        for frame in frames:
            if isinstance(frame, Beat):
                for leg in tuple(self.legs.values()):
                    leg.compare(frame.sent.get(leg.number))
            elif frame.leg in self.legs:
                self._hear_of(self.legs[frame.leg], frame)

    def _hear_of(self, leg: NatsLeg, frame: Accepted | Refused | Tokens | Chunk | Lost) -> None:
        if isinstance(frame, Tokens):
            leg.take(frame.number, None, frame.token_ids)
        elif isinstance(frame, Chunk):
            leg.take(frame.number, frame.chunk, ())
        elif isinstance(frame, Lost):
            leg.lose(frame.number, error_of(frame.refusal))
        elif isinstance(frame, Refused):
            leg.refuse(error_of(frame.refusal))
        elif not leg.accepted.done():
            leg.accepted.set_result(None)

    def pulse(self) -> None:
        """Ask the worker to speak."""
        self.unanswered_pulses += 1
        self.box.put(Pulse({leg.number: leg.granted_tokens for leg in self.legs.values()}))

    def check(self, now_s: float, deaf_s: float, dead_after_s: float, slow_stream_limit_s: float) -> None:
        """Break legs whose worker is silent or whose reader is slow. Silence while the plane was deaf itself
        says nothing about the worker to those who follow it.
        """
        if now_s - max(self.heard_s, deaf_s) > dead_after_s:
            self.followers.tell(is_alive=False)
        is_silent = now_s - self.heard_s > dead_after_s
        for leg in tuple(self.legs.values()):
            if is_silent:
                leg.give_up(StreamBroken(f"{self.address} was not heard for {dead_after_s} s"))
            elif leg.stream.unread_for_s(now_s) > slow_stream_limit_s:
                leg.give_up(ReaderTooSlow(f"the reader took nothing for {slow_stream_limit_s} s"))
