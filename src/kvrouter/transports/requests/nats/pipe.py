"""A session's pipe over NATS: its bytes in sealed and numbered messages, their subjects, their sender."""

import asyncio
import itertools
import re

import msgspec
from nats.aio.client import Client

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.transports.background import go_on
from kvrouter.transports.message_auth import SEAL_BYTES, Seal
from kvrouter.transports.requests.messages import FrameKind, frame
from kvrouter.transports.requests.session import Session

VERSION = 2
"""Of the plane over NATS. Ends of different versions use different subjects and keys: to each other, nobody
listens there."""

SIGNS = frozenset({frame(FrameKind.PING), frame(FrameKind.PONG)})
"""Mere signs of life, which are not counted: one that nobody heard is no loss."""

MESSAGE_MAX_BYTES = 1 << 20
"""The longest message that is sent, where the server would take a longer one."""

ENVELOPE_BYTES = SEAL_BYTES + 256
"""What a message has in addition to the session's bytes: the seal, and who speaks."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


class FromRouter(msgspec.Struct, frozen=True, array_like=True):
    """One message of a router. ``link`` names its session: the last word of the answers' subject."""

    router: str
    link: int
    n_before: int
    is_sign: bool
    data: bytes


class FromWorker(msgspec.Struct, frozen=True, array_like=True):
    """One message of a worker, to one session of a router."""

    worker_id: WorkerId
    incarnation: Epoch
    n_before: int
    is_sign: bool
    data: bytes


def seal_of(token: str, namespace: str) -> Seal:
    """Return the seal of the plane's messages."""
    return Seal(token, f"requests {VERSION} {namespace}")


def from_router(seal: Seal, subject: str, message: bytes) -> tuple[int, FromRouter]:
    """Return a message's number and what a router says; raise ProtocolError. A stranger's is not parsed."""
    number, body = seal.numbered(subject, message)
    try:
        said = _from_router.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"message: {error}", param="message") from error
    if not _NAME.fullmatch(said.router):
        raise ProtocolError(f"{said.router!r} is no router", param="router")
    return number, said


def from_worker(seal: Seal, subject: str, message: bytes) -> tuple[int, FromWorker]:
    """Return a message's number and what a worker says; raise ProtocolError. A stranger's is not parsed."""
    number, body = seal.numbered(subject, message)
    try:
        return number, _from_worker.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"message: {error}", param="message") from error


def requests_subject(namespace: str, worker_id: WorkerId, incarnation: Epoch) -> str:
    """Where one incarnation of a worker listens."""
    return f"kvrouter.{namespace}.requests.{VERSION}.{worker_id}.{incarnation}"


def answers_subject(namespace: str, router: str, link: int | str) -> str:
    """Where a router listens."""
    return f"kvrouter.{namespace}.answers.{router}.{link}"


_encoder = msgspec.msgpack.Encoder()
_from_router = msgspec.msgpack.Decoder(FromRouter)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


class NatsPipe:
    """What carries one session: numbered messages to one subject, and those that come back.

    NATS delivers at most once. Every message says how many were sent before it, so that one that was lost is
    noticed with the next, a sign of life at the latest; it ends the session. ``replies_to`` hears when nobody
    listens at ``subject``. The ``session`` is set by who makes the pipe, and is given :meth:`wake`.
    """

    session: Session

    def __init__(self, post: "Post", subject: str, replies_to: str, speaker: tuple[str | int, int]) -> None:
        self.subject = subject
        self.replies_to = replies_to
        self._post = post
        self._speaker = speaker
        self._n_sent = 0
        self._n_received = 0

    def wake(self) -> None:
        """The session has something to send."""
        self._post.wake(self)

    def receive(self, said: FromRouter | FromWorker) -> None:
        """Give the session what the other end says; end it where a message is missing."""
        if said.n_before != self._n_received:
            self.session.close("a message was lost on the way")
            return
        self._n_received += not said.is_sign
        self.session.receive(said.data)

    def message(self, data: bytes, *, is_sign: bool) -> bytes:
        """Return the next message, to be sealed."""
        body = _encoder.encode((*self._speaker, self._n_sent, is_sign, data))
        self._n_sent += not is_sign
        return body


class Post:
    """Publishes what the sessions of its pipes have to say, in messages that NATS takes.

    Its messages are numbered from 1, whatever pipe they are from.
    """

    def __init__(self, client: Client, seal: Seal) -> None:
        self._client = client
        self._seal = seal
        self._numbers = itertools.count(1)
        self._full: dict[NatsPipe, None] = {}
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self, pipe: NatsPipe) -> None:
        """Something waits in ``pipe``."""
        self._full[pipe] = None
        self._more.set()
        if self._task is None:
            self._task = go_on(self._run(), name="requests: send messages")

    async def close(self) -> None:
        """Send what waits, and no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._send_all()

    async def _run(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self._send_all()

    async def _send_all(self) -> None:
        while self._full:
            pipe = next(iter(self._full))
            del self._full[pipe]
            data = pipe.session.take_output()
            piece_bytes = min(self._client.max_payload, MESSAGE_MAX_BYTES) - ENVELOPE_BYTES
            for at in range(0, len(data), piece_bytes):
                await self._send(pipe, data[at : at + piece_bytes], is_sign=data in SIGNS)

    async def _send(self, pipe: NatsPipe, data: bytes, *, is_sign: bool) -> None:
        body = pipe.message(data, is_sign=is_sign)
        message = self._seal.seal(pipe.subject, body, number=next(self._numbers))
        try:
            await self._client.publish(pipe.subject, message, reply=pipe.replies_to)
        except Exception as error:  # noqa: BLE001 - one message that the client fails on keeps no other back
            if not is_sign:
                pipe.session.lose(f"NATS: {type(error).__name__}: {error}")
