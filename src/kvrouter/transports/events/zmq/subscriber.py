"""The router's end over ZeroMQ: for each worker process a socket for events and one for recovery.

Each process has its own socket: its messages count only for workers with its endpoint on their card.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count

import zmq

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.ids import WorkerId, WorkerRank
from kvrouter.core.workers import EventTransport, WorkerCard
from kvrouter.transports.events.encoding import BATCH_MAX_BYTES, decode_batch, decode_load
from kvrouter.transports.events.port import ForeignRank, ForeignSink, MalformedSink, foreign
from kvrouter.transports.events.recovery import ANSWER_TIMEOUT_S, Ask, RecoveryQuestions
from kvrouter.transports.events.sinks import EventSinks
from kvrouter.transports.events.zmq.sockets import (
    BATCH,
    LOAD,
    TOPIC_BYTES,
    ReadScheduler,
    SocketReader,
    TokenKeys,
    new_socket,
    topic_of,
    worker_topic,
)
from kvrouter.transports.zmq_contexts import end_context

ANSWER_MAX_BYTES = 2 * 1024 * 1024
"""The largest answer frame that is read."""

NUMBER_BYTES = 8

SOCKETS_MAX = 32_768
"""Two sockets for each worker process, with a few to spare; libzmq's default is 1,023."""


class _Questions:
    """Questions to one worker process: each has a number, which its answer repeats."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", on_malformed: MalformedSink, scheduler: ReadScheduler
    ) -> None:
        self.followers = 0
        self._socket = socket
        self._on_malformed = on_malformed
        self._numbers = count()
        self._open: dict[bytes, asyncio.Future[bytes | None]] = {}
        self._reader = SocketReader(socket, self._answered, scheduler)

    async def ask(self, question: bytes) -> bytes | None:
        """Return the answer; None when it is certain that there will be none."""
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "big")
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._socket.send_multipart([number, question], zmq.NOBLOCK)
            self._reader.schedule()
            answer: bytes | None = await future
            return answer
        except zmq.ZMQError:  # the queue to a silent process is full, or the socket is closed
            return None
        finally:
            del self._open[number]

    def close(self) -> None:
        """Close the socket; open questions return None."""
        self._reader.close()
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


class _EventSocket:
    """The event socket to one worker process, with the topics of its followed workers."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", on_message: Callable[[bytes], None], scheduler: ReadScheduler
    ) -> None:
        self.topics: Counter[bytes] = Counter()
        self._socket = socket
        self._reader = SocketReader(socket, lambda frames: on_message(frames[0]), scheduler)

    def follow(self, topic: bytes) -> None:
        """Subscribe to the worker's topic."""
        self.topics[topic] += 1
        if self.topics[topic] == 1:
            self._socket.subscribe(topic)
            self._reader.schedule()

    def unfollow(self, topic: bytes) -> None:
        """Take back one :meth:`follow`."""
        self.topics[topic] -= 1
        if not self.topics[topic]:
            del self.topics[topic]
            self._socket.unsubscribe(topic)
            self._reader.schedule()

    def close(self) -> None:
        """Close the socket."""
        self._reader.close()


class ZmqEventSubscriber(EventSinks):
    """Subscribes to followed workers, and asks them. Create it on the event loop.

    ``token`` must be that of the workers. ZeroMQ reconnects by itself; missed events leave a gap, which shows
    at the latest with a worker's next heartbeat.
    """

    def __init__(
        self,
        *,
        on_malformed: MalformedSink,
        on_foreign: ForeignSink,
        token: str | None = None,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        sockets_max: int = SOCKETS_MAX,
    ) -> None:
        super().__init__()
        self._on_malformed = on_malformed
        self._on_foreign = on_foreign
        questions = RecoveryQuestions(self._ask_of, timeout_s=answer_timeout_s)
        self.recover_range, self.recover_snapshot = questions.recover_range, questions.recover_snapshot
        self._keys = None if token is None else TokenKeys(token)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, sockets_max)
        self._scheduler = ReadScheduler()
        self._event_sockets: dict[str, _EventSocket] = {}
        self._is_closed = False
        self._questions: dict[str, _Questions] = {}
        self._recovery_endpoints: dict[WorkerId, str] = {}

    def follow(self, card: WorkerCard) -> Callable[[], None]:
        """Connect to the worker; return the function that ends it.

        Raises ConfigError when its card has no endpoints.
        """
        source, worker_id = card.event_source, card.worker_id
        if source.transport is not EventTransport.ZMQ or not source.events or not source.recovery:
            raise ConfigError(
                f"event_source: worker {worker_id} names no endpoints to connect to", param="event_source"
            )
        self._subscribe_events(source.events, worker_topic(worker_id))
        try:
            self._begin_questions(source.recovery)
        except ConfigError:
            self._unsubscribe_events(source.events, worker_topic(worker_id))
            raise
        self._recovery_endpoints[worker_id] = source.recovery
        is_over = False

        def end() -> None:
            nonlocal is_over
            if is_over or self._is_closed:
                return
            is_over = True
            self._unfollow(card)

        return end

    async def close(self) -> None:
        """Close all sockets."""
        self._is_closed = True
        for event_socket in self._event_sockets.values():
            event_socket.close()
        self._event_sockets.clear()
        for questions in self._questions.values():
            questions.close()
        self._questions.clear()
        self._sinks.clear()
        end_context(self._context)

    def _new_socket(self, kind: int, message_max_bytes: int) -> "zmq.Socket[bytes]":
        socket = new_socket(self._context, kind, message_max_bytes=message_max_bytes)
        socket.ipv6 = True
        if self._keys is not None:
            self._keys.join(socket)
        return socket

    def _connected(self, kind: int, endpoint: str, message_max_bytes: int) -> "zmq.Socket[bytes]":
        """Return a socket connected to the worker process; raise ConfigError."""
        try:
            socket = self._new_socket(kind, message_max_bytes)
        except zmq.ZMQError as error:  # no more sockets, or no more open files
            raise ConfigError(
                f"event_source: {endpoint} cannot be connected to: {error}", param="event_source"
            ) from error
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"event_source: {endpoint!r}: {error}", param="event_source") from None
        return socket

    def _subscribe_events(self, endpoint: str, topic: bytes) -> None:
        event_socket = self._event_sockets.get(endpoint)
        if event_socket is None:
            socket = self._connected(zmq.SUB, endpoint, BATCH_MAX_BYTES)
            event_socket = self._event_sockets[endpoint] = _EventSocket(
                socket, self._arrived, self._scheduler
            )
        event_socket.follow(topic)

    def _unsubscribe_events(self, endpoint: str, topic: bytes) -> None:
        event_socket = self._event_sockets[endpoint]
        event_socket.unfollow(topic)
        if not event_socket.topics:
            del self._event_sockets[endpoint]
            event_socket.close()

    def _begin_questions(self, endpoint: str) -> None:
        questions = self._questions.get(endpoint)
        if questions is None:
            socket = self._connected(zmq.DEALER, endpoint, ANSWER_MAX_BYTES)
            questions = self._questions[endpoint] = _Questions(socket, self._on_malformed, self._scheduler)
        questions.followers += 1

    def _unfollow(self, card: WorkerCard) -> None:
        source, topic = card.event_source, worker_topic(card.worker_id)
        self._unsubscribe_events(source.events, topic)
        questions = self._questions[source.recovery]
        questions.followers -= 1
        if not questions.followers:
            del self._questions[source.recovery]
            questions.close()
        is_followed = any(topic in event_socket.topics for event_socket in self._event_sockets.values())
        if not is_followed and self._recovery_endpoints.get(card.worker_id) == source.recovery:
            del self._recovery_endpoints[card.worker_id]

    def _ask_of(self, rank: WorkerRank) -> Ask | None:
        questions = self._questions.get(self._recovery_endpoints.get(rank.worker_id, ""))
        return None if questions is None else questions.ask

    def _arrived(self, message: bytes) -> None:
        worker_id, kind = topic_of(message)
        body = memoryview(message)[TOPIC_BYTES:]
        try:
            if kind == BATCH:
                batch = decode_batch(body)
                _check_speaker(batch.rank, worker_id)
                self._deliver(batch)
            elif kind == LOAD:
                report = decode_load(body)
                _check_speaker(report.rank, worker_id)
                self._deliver_load(report)
            else:
                raise ProtocolError(f"topic: unknown kind {kind!r}", param="topic")
        except ForeignRank as error:
            self._on_foreign(error)
        except ProtocolError as error:
            self._on_malformed(error.message)


def _check_speaker(rank: WorkerRank, worker_id: int) -> None:
    """Raise ForeignRank where the topic is another worker's than the rank's."""
    if rank.worker_id != worker_id:
        raise foreign(rank, f"worker {worker_id}")
