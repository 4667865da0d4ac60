"""An engine's KV events on real sockets, in vLLM's framing: a publisher, and a ring that replays."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import msgspec
import zmq
import zmq.asyncio

from kvrouter.engines.kv_events.listener import EventsAt
from kvrouter.transports.zmq_contexts import TERM_LIMIT_S, end_context

REPLAY_END = (-1).to_bytes(8, "big", signed=True)
TOPIC = "kv-events"


def vllm_batch(*events: dict[str, object], published_s: float = 1.0, dp_rank: int = 0) -> bytes:
    """A batch as vLLM packs it."""
    return msgspec.msgpack.encode([published_s, list(events), dp_rank])


def stored_event(
    name: int, *, parent: int | None = None, token: int = 7, block_size: int = 32
) -> dict[str, object]:
    """One block stored, all of one token."""
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": parent,
        "token_ids": [token] * block_size,
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
    }


class Publisher:
    """One start of an engine. Batches count from 0; the last ``ring_batches_max`` of them are replayed.

    The publishing socket tells who subscribed, so that a test can wait for it.
    """

    def __init__(
        self, *, ring_batches_max: int = 1_000_000, replays: bool = True, with_topic: bool = True
    ) -> None:
        self.payloads: list[bytes] = []
        self.questions: list[int] = []
        self.ring_batches_max = ring_batches_max
        self.replay_silent = False
        self.broken_replays: set[int] = set()
        """Batches whose replay no one can read."""
        self.subscribed = asyncio.Event()
        self._with_topic = with_topic
        self._context = zmq.asyncio.Context()
        self._live: zmq.asyncio.Socket = self._context.socket(zmq.XPUB)
        self._ring: zmq.asyncio.Socket | None = self._context.socket(zmq.ROUTER) if replays else None
        self._tasks: list[asyncio.Task[None]] = []
        self.at = EventsAt("")

    def start(self, at: EventsAt | None = None) -> None:
        """Bind, to where another start was or to free ports."""
        events = _bind(self._live, None if at is None else at.events)
        replay = None
        self._tasks.append(asyncio.create_task(self._hear()))
        if self._ring is not None:
            replay = _bind(self._ring, None if at is None else at.replay)
            self._tasks.append(asyncio.create_task(self._replay(self._ring)))
        self.at = EventsAt(events, replay, TOPIC)

    def stop(self) -> None:
        """Be gone at once. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        for socket in (self._live, self._ring):
            if socket is not None:
                socket.close(linger=0)
        end_context(self._context).join(TERM_LIMIT_S)

    async def publish(self, payload: bytes, *, lost: bool = False) -> None:
        """Publish the next batch; a lost one is in the ring alone."""
        self.payloads.append(payload)
        if not lost:
            await self.send(len(self.payloads) - 1)

    async def send(self, seq: int) -> None:
        """Send a batch again, or late, to whoever is subscribed."""
        await self.send_frames((TOPIC.encode(), seq.to_bytes(8, "big"), self.payloads[seq]))

    async def send_frames(self, frames: Iterable[bytes]) -> None:
        """Send any frames."""
        await self._live.send_multipart(list(frames))

    async def _hear(self) -> None:
        while True:
            said = await self._live.recv()
            if said[:1] == b"\x01":
                self.subscribed.set()

    async def _replay(self, ring: zmq.asyncio.Socket) -> None:
        while True:
            client, _, start = await ring.recv_multipart()
            first = int.from_bytes(start, "big")
            self.questions.append(first)
            if self.replay_silent:
                continue
            for seq in range(max(first, len(self.payloads) - self.ring_batches_max), len(self.payloads)):
                await ring.send_multipart([client, *self._replayed(seq)])
            end = (b"", b"", REPLAY_END, b"") if self._with_topic else (b"", REPLAY_END, b"")
            await ring.send_multipart([client, *end])

    def _replayed(self, seq: int) -> Sequence[bytes]:
        number = b"?" if seq in self.broken_replays else seq.to_bytes(8, "big")
        if self._with_topic:
            return b"", TOPIC.encode(), number, self.payloads[seq]
        return b"", number, self.payloads[seq]


def _bind(socket: zmq.asyncio.Socket, endpoint: str | None) -> str:
    if endpoint is not None:
        socket.bind(endpoint)
        return endpoint
    return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


@asynccontextmanager
async def publisher(
    *, ring_batches_max: int = 1_000_000, replays: bool = True, with_topic: bool = True
) -> AsyncIterator[Publisher]:
    """A publisher that listens."""
    found = Publisher(ring_batches_max=ring_batches_max, replays=replays, with_topic=with_topic)
    found.start()
    try:
        yield found
    finally:
        found.stop()
