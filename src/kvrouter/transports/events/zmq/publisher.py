"""The worker's end over ZeroMQ: a socket that publishes, and one that answers recovery."""

import asyncio
from threading import Thread

import zmq

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.events import KvBatch
from kvrouter.core.hosts import advertised_host, bracketed
from kvrouter.core.workers import EventSource, EventTransport, LoadReport
from kvrouter.transports.events.encoding import BATCH_MAX_BYTES, encode_load, encode_parts
from kvrouter.transports.events.loads import Drops, LatestLoads
from kvrouter.transports.events.port import DropSink, MalformedSink
from kvrouter.transports.events.recovery import QUESTION_MAX_BYTES, RecoveryAnswers
from kvrouter.transports.events.zmq.sockets import (
    BATCH,
    LOAD,
    TOPIC_BYTES,
    ReadScheduler,
    SocketReader,
    TokenKeys,
    new_socket,
    worker_topic,
)
from kvrouter.transports.zmq_contexts import TERM_LIMIT_S, end_context

ANSWER_FRAME_MAX_BYTES = 1024 * 1024
"""The largest piece of an answer."""


class ZmqEventPublisher:
    """Publishes for every worker of one process, and answers their recovery. Create it on the event loop.

    It listens at once, on free ports where ``port`` and ``recovery_port`` are 0. Publishing never waits:
    messages to a slow router are dropped once 4,096 wait, and its feeds notice the gap. With ``token`` only
    routers that have it connect, encrypted; without one any peer may subscribe and ask. ``on_dropped`` is
    called for batches that no router could have received. Raises ConfigError when it cannot listen.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        on_malformed: MalformedSink,
        on_dropped: DropSink = lambda _n_batches, _why: None,
        recovery_port: int = 0,
        advertise_host: str | None = None,
        token: str | None = None,
    ) -> None:
        at = advertised_host(host, advertise_host)
        self._drops = Drops(on_dropped)
        self._on_malformed = on_malformed
        self._recovery_answers = RecoveryAnswers()
        self.serve_recovery = self._recovery_answers.serve
        self._loads = LatestLoads(self._send_load)
        self.publish_load = self._loads.publish
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._out = new_socket(self._context, zmq.PUB, message_max_bytes=QUESTION_MAX_BYTES)
        self._answers = new_socket(self._context, zmq.ROUTER, message_max_bytes=QUESTION_MAX_BYTES)
        try:
            keys = None if token is None else TokenKeys(token)
            self._source = EventSource(
                EventTransport.ZMQ,
                events=_listen(self._out, host, port, at, keys),
                recovery=_listen(self._answers, host, recovery_port, at, keys),
            )
        except ConfigError:
            self._answers.close()
            self._end()
            raise
        self._questions = SocketReader(self._answers, self._asked, ReadScheduler())

    @property
    def source(self) -> EventSource:
        """Return the endpoints that routers connect to."""
        return self._source

    def publish(self, batch: KvBatch) -> None:
        """Send a batch, in parts when it exceeds the largest message that routers read."""
        topic = worker_topic(batch.rank.worker_id) + BATCH
        max_bytes = BATCH_MAX_BYTES - TOPIC_BYTES
        for frame, _ in encode_parts(batch, max_bytes=max_bytes):
            if len(frame) > max_bytes:
                self._drops.add(1, f"an event of {len(frame)} bytes is too large for routers to read")
            elif not self._send(topic + frame):
                self._drops.add(1, "ZeroMQ did not take it")

    async def close(self) -> None:
        """Stop publishing and answering; the ports are free again."""
        self._loads.close()
        self._drops.close()
        self._questions.close()
        await asyncio.to_thread(self._end().join, TERM_LIMIT_S)

    def _end(self) -> Thread:
        self._out.close()
        return end_context(self._context)

    def _send_load(self, report: LoadReport) -> None:
        self._send(worker_topic(report.rank.worker_id) + LOAD + encode_load(report))

    def _send(self, message: bytes) -> bool:
        try:
            self._out.send(message, zmq.NOBLOCK)
        except zmq.ZMQError:  # no room, or closed
            return False
        return True

    def _asked(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            self._on_malformed(f"question: {len(frames)} frames instead of 3")
            return
        router, number, question = frames
        now_s = asyncio.get_running_loop().time()
        try:
            answer = self._recovery_answers.answer(
                question, frame_max_bytes=ANSWER_FRAME_MAX_BYTES, now_s=now_s
            )
        except ProtocolError as error:
            self._on_malformed(error.message)
            return
        try:
            self._answers.send_multipart([router, number, answer], zmq.NOBLOCK)
        except zmq.Again:
            return  # the router does not read; its own timeout ends the question
        finally:
            self._questions.schedule()


def _listen(
    socket: "zmq.Socket[bytes]", host: str, port: int, advertise_host: str, keys: TokenKeys | None
) -> str:
    """Listen at ``host``; return the endpoint at ``advertise_host`` to connect to."""
    if keys is not None:
        keys.serve(socket)
    socket.ipv6 = ":" in host
    try:
        socket.bind(f"tcp://{bracketed(host)}:{port or '*'}")
    except zmq.ZMQError as error:
        why = OSError(error.errno, error.strerror)
        raise ConfigError(f"cannot listen on {host}:{port}: {why}", param="port") from why
    bound = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    return f"tcp://{bracketed(advertise_host)}:{bound.rpartition(':')[2]}"
