"""Hears one rank's batches over ZeroMQ, each once and in order, with what was missed asked for again."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio

from kvrouter.core.errors import ProtocolError
from kvrouter.engines.customs.frames import (
    Published,
    ReplayEnd,
    read_published,
    read_replayed,
    replay_question,
)

QUEUE_BATCHES_MAX = 100_000
"""How many batches wait here while a replay comes; what is lost beyond is asked for again."""

REPLAY_LIMIT_S = 5.0
"""How long the next message of a replay may take."""

LINGER_MS = 0


@dataclass(frozen=True, slots=True)
class EventsAt:
    """Where one rank publishes its KV events; ``replay`` None: what was missed cannot be asked for."""

    events: str
    replay: str | None = None
    topic: str = ""


class EngineListener:
    """Follows one publisher until :meth:`run` is cancelled.

    ``on_batch`` hears the payload of every batch, in order. ``on_missed`` hears how many batches are gone for
    good: before the first one that was heard, or in the middle. ``on_refused`` hears what could not be read.
    A publisher that counts from 0 again is a new start: the one who runs this hears of that elsewhere.
    """

    def __init__(
        self,
        at: EventsAt,
        *,
        on_batch: Callable[[bytes], None],
        on_missed: Callable[[int], None],
        on_refused: Callable[[ProtocolError], None],
        replay_limit_s: float = REPLAY_LIMIT_S,
    ) -> None:
        self._at = at
        self._on_batch = on_batch
        self._on_missed = on_missed
        self._on_refused = on_refused
        self._replay_limit_s = replay_limit_s
        self._next_seq = 0

    @property
    def next_seq(self) -> int:
        """The number of the batch that is heard next."""
        return self._next_seq

    async def run(self) -> None:
        """Listen from the first batch on, for as long as the caller wants."""
        context = zmq.asyncio.Context()
        try:
            live = context.socket(zmq.SUB)
            live.setsockopt(zmq.LINGER, LINGER_MS)
            live.setsockopt(zmq.RCVHWM, QUEUE_BATCHES_MAX)
            live.connect(self._at.events)
            live.subscribe(self._at.topic.encode())
            await self._replay(context, None)
            while True:
                frames = await live.recv_multipart()
                try:
                    published = read_published(frames)
                except ProtocolError as error:
                    self._on_refused(error)
                    continue
                if published.seq > self._next_seq:
                    await self._replay(context, published.seq)
                self._take(published)
        finally:
            context.destroy(linger=LINGER_MS)

    async def _replay(self, context: zmq.asyncio.Context, until_seq: int | None) -> None:
        """Take what the publisher still has from the next batch on, up to ``until_seq`` or its last one."""
        if self._at.replay is None:
            return
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.connect(self._at.replay)
            await socket.send_multipart(replay_question(self._next_seq))
            while until_seq is None or self._next_seq < until_seq:
                async with asyncio.timeout(self._replay_limit_s):
                    frames = await socket.recv_multipart()
                said = read_replayed(frames)
                if isinstance(said, ReplayEnd):
                    return
                self._take(said)
        except TimeoutError:
            self._on_refused(
                ProtocolError(
                    f"{self._at.replay}: no answer to a replay in {self._replay_limit_s} s", param="replay"
                )
            )
        except ProtocolError as error:
            self._on_refused(error)
        finally:
            socket.close()

    def _take(self, published: Published) -> None:
        """Pass a batch on, unless it was heard before."""
        if published.seq < self._next_seq:
            return
        if published.seq > self._next_seq:
            self._on_missed(published.seq - self._next_seq)
        self._next_seq = published.seq + 1
        self._on_batch(published.payload)
