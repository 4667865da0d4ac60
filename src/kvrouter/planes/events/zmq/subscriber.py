"""The router's end: one socket that hears every followed worker, and one for questions to each process."""

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count

import zmq

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.core.workers import EventLane, WorkerCard
from kvrouter.planes.events.port import BatchSink, LoadSink, MalformedSink
from kvrouter.planes.events.recovery import ANSWER_TIMEOUT_S, recover_range, recover_snapshot
from kvrouter.planes.events.wire import BATCH_MAX_BYTES, decode_batch, decode_load
from kvrouter.planes.events.zmq.sockets import (
    BATCH,
    LOAD,
    TOPIC_BYTES,
    Inlet,
    TokenKeys,
    new_socket,
    worker_topic,
)

ANSWER_MAX_BYTES = 2 * 1024 * 1024
"""The largest frame of an answer that is read."""

NUMBER_BYTES = 8

SOCKETS_MAX = 16_384
"""How many worker processes one router can ask, with a few to spare; libzmq's own limit is 1,023."""


class _Questions:
    """The questions to one worker process: each has a number, and its answer carries that number back."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_malformed: MalformedSink) -> None:
        self.followers = 0
        self._socket = socket
        self._on_malformed = on_malformed
        self._numbers = count()
        self._open: dict[bytes, asyncio.Future[bytes | None]] = {}
        self._inlet = Inlet(socket, self._answered)

    async def ask(self, question: bytes) -> bytes | None:
        """Return the answer; None when it is certain that none will come."""
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "big")
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._socket.send_multipart([number, question], zmq.NOBLOCK)
            self._inlet.look()
            answer: bytes | None = await future
            return answer
        except zmq.ZMQError:  # no room for more questions to a process that does not answer, or closed
            return None
        finally:
            del self._open[number]

    def close(self) -> None:
        """Ask nothing any more; open questions have no answer."""
        self._inlet.close()
        for future in self._open.values():
            if not future.done():
                future.set_result(None)

    def _answered(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self._on_malformed(f"answer: {len(frames)} frames instead of 2")
            return
        future = self._open.get(frames[0])
        if future is not None and not future.done():  # else it was given up
            future.set_result(frames[1])


class ZmqEventSubscriber:
    """Hears the workers that it follows, and asks them. Make it on the event loop.

    ``token`` must be that of the workers. A connection that breaks is made again by itself; what was missed
    meanwhile shows as a gap at the latest with a worker's next heartbeat.
    """

    def __init__(
        self,
        *,
        on_malformed: MalformedSink,
        token: str | None = None,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        batch_max_bytes: int = BATCH_MAX_BYTES,
        sockets_max: int = SOCKETS_MAX,
    ) -> None:
        self._on_malformed = on_malformed
        self._answer_timeout_s = answer_timeout_s
        self._keys = None if token is None else TokenKeys(token)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, sockets_max)
        self._in = self._new_socket(zmq.SUB, batch_max_bytes)
        self._inlet = Inlet(self._in, self._arrived)
        self._sinks: dict[object, tuple[BatchSink, LoadSink]] = {}
        self._connected: Counter[str] = Counter()
        self._topics: Counter[bytes] = Counter()
        self._questions: dict[str, _Questions] = {}
        self._asked_at: dict[WorkerId, str] = {}

    def subscribe(self, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        """Begin to deliver; return the function that ends it."""
        key = object()
        self._sinks[key] = (on_batch, on_load)

        def end() -> None:
            self._sinks.pop(key, None)

        return end

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Connect to the worker; return the function that ends it.

        Raises ConfigError when its card does not say where to.
        """
        source, worker_id = card.event_source, card.worker_id
        if source.lane is not EventLane.ZMQ or not source.events or not source.recovery:
            raise ConfigError(
                f"event_source: worker {worker_id} names no endpoints to connect to", param="event_source"
            )
        self._connect(source.events)
        topic = worker_topic(worker_id)
        try:
            self._begin_questions(source.recovery)
        except ConfigError:
            self._disconnect(source.events)
            raise
        self._topics[topic] += 1
        if self._topics[topic] == 1:
            self._in.subscribe(topic)
        self._asked_at[worker_id] = source.recovery
        self._inlet.look()
        is_over = False

        def end() -> None:
            nonlocal is_over
            if is_over or self._in.closed:
                return
            is_over = True
            self._unfollow(card)

        return end

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last``; None when it is gone, or its worker does not answer."""
        questions = self._questions_to(rank)
        if questions is None:
            return None
        return await recover_range(questions.ask, rank, first, last, timeout_s=self._answer_timeout_s)

    async def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        """The rank's whole state, or None when its worker does not answer."""
        questions = self._questions_to(rank)
        if questions is None:
            return None
        return await recover_snapshot(questions.ask, rank, timeout_s=self._answer_timeout_s)

    async def close(self) -> None:
        """Hear and ask nothing any more."""
        self._inlet.close()
        for questions in self._questions.values():
            questions.close()
        self._questions.clear()
        self._sinks.clear()
        self._context.destroy(linger=0)

    def _new_socket(self, kind: int, message_max_bytes: int) -> "zmq.Socket[bytes]":
        socket = new_socket(self._context, kind, message_max_bytes=message_max_bytes)
        socket.ipv6 = True
        if self._keys is not None:
            self._keys.join(socket)
        return socket

    def _connect(self, endpoint: str) -> None:
        if not self._connected[endpoint]:
            _connect(self._in, endpoint)
        self._connected[endpoint] += 1

    def _disconnect(self, endpoint: str) -> None:
        self._connected[endpoint] -= 1
        if not self._connected[endpoint]:
            del self._connected[endpoint]
            self._in.disconnect(endpoint)
            self._inlet.look()

    def _begin_questions(self, endpoint: str) -> None:
        questions = self._questions.get(endpoint)
        if questions is None:
            try:
                socket = self._new_socket(zmq.DEALER, ANSWER_MAX_BYTES)
            except zmq.ZMQError as error:  # no more sockets, or no more open files
                raise ConfigError(
                    f"event_source: {endpoint} cannot be asked: {error}", param="event_source"
                ) from error
            try:
                _connect(socket, endpoint)
            except ConfigError:
                socket.close(linger=0)
                raise
            questions = self._questions[endpoint] = _Questions(socket, self._on_malformed)
        questions.followers += 1

    def _unfollow(self, card: WorkerCard) -> None:
        source, topic = card.event_source, worker_topic(card.worker_id)
        self._topics[topic] -= 1
        if not self._topics[topic]:
            del self._topics[topic]
            self._in.unsubscribe(topic)
        self._disconnect(source.events)
        questions = self._questions[source.recovery]
        questions.followers -= 1
        if not questions.followers:
            del self._questions[source.recovery]
            questions.close()
        if not self._topics[topic] and self._asked_at.get(card.worker_id) == source.recovery:
            del self._asked_at[card.worker_id]

    def _questions_to(self, rank: WorkerRank) -> _Questions | None:
        endpoint = self._asked_at.get(rank.worker_id)
        return None if endpoint is None else self._questions.get(endpoint)

    def _arrived(self, frames: list[bytes]) -> None:
        message = frames[0]
        kind, body = message[TOPIC_BYTES - 1 : TOPIC_BYTES], memoryview(message)[TOPIC_BYTES:]
        try:
            if kind == BATCH:
                batch = decode_batch(body)
                for on_batch, _ in tuple(self._sinks.values()):
                    on_batch(batch)
            elif kind == LOAD:
                report = decode_load(body)
                for _, on_load in tuple(self._sinks.values()):
                    on_load(report)
            else:
                raise ProtocolError(f"topic: unknown kind {kind!r}", param="topic")
        except ProtocolError as error:
            self._on_malformed(error.message)


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"event_source: {endpoint!r}: {error}", param="event_source") from None
