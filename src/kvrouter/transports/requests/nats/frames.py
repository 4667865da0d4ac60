"""Frames of requests over NATS, their subjects, and the chunking of frames into messages.

A message is sealed and numbered (:mod:`kvrouter.transports.message_auth`), and msgpack: who speaks, and a run
of frames. A frame is an array whose first element is its number here.
"""

import asyncio
import itertools
import re
from collections.abc import Callable

import msgspec
from nats.aio.client import Client

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk
from kvrouter.transports.background import go_on
from kvrouter.transports.message_auth import SEAL_BYTES, Seal
from kvrouter.transports.requests.stream import WireError

_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Part(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A piece of a request. The worker may send ``window_tokens`` before it needs a credit."""

    leg: int
    window_tokens: int
    total_bytes: int
    from_byte: int
    body: bytes


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The router wants no more of a leg."""

    leg: int
    reason: str


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """How many tokens the leg may have sent since it began."""

    leg: int
    granted_tokens: int


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The router lives: every leg that it has at this worker, with its credit. The worker answers a beat."""

    granted_tokens: dict[int, int]


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The worker took the leg."""

    leg: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The worker did not take the leg."""

    leg: int
    refusal: WireError


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A chunk that has nothing but tokens. A leg's frames are numbered from 1."""

    leg: int
    number: int
    token_ids: tuple[int, ...]


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Any chunk."""

    leg: int
    number: int
    chunk: EngineChunk


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The leg is lost; its last frame."""

    leg: int
    number: int
    refusal: WireError


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The worker lives: every leg that it runs for this router, with the number of its last frame."""

    sent: dict[int, int]


RouterFrame = Part | Cancel | Credit | Pulse
WorkerFrame = Accepted | Refused | Tokens | Chunk | Lost | Beat


class FromRouter(msgspec.Struct, frozen=True, array_like=True):
    """One message of a router. ``link`` is its name for the worker: the last word of the answers' subject."""

    router: str
    link: int
    frames: list[RouterFrame]


class FromWorker(msgspec.Struct, frozen=True, array_like=True):
    """One message of a worker."""

    worker_id: WorkerId
    incarnation: Epoch
    frames: list[WorkerFrame]


def seal_of(token: str, namespace: str) -> Seal:
    """Return the seal of the plane's messages."""
    return Seal(token, f"requests 1 {namespace}")


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


def encode_frame(frame: RouterFrame | WorkerFrame) -> msgspec.Raw:
    """Return a frame, to be put into a message."""
    return msgspec.Raw(_encoder.encode(frame))


def encode_message(speaker: tuple[str | int, int], frames: list[msgspec.Raw]) -> bytes:
    """Return what ``speaker`` says, (router, link) or (worker id, incarnation), to be sealed."""
    return _encoder.encode((*speaker, frames))


def requests_subject(namespace: str, worker_id: WorkerId, incarnation: Epoch) -> str:
    """Where one incarnation of a worker listens."""
    return f"{_prefix(namespace)}.requests.{worker_id}.{incarnation}"


def answers_subject(namespace: str, router: str, link: int | str) -> str:
    """Where a router listens."""
    return f"{_prefix(namespace)}.answers.{router}.{link}"


def _prefix(namespace: str) -> str:
    return f"kvrouter.{namespace}"


_encoder = msgspec.msgpack.Encoder()
_from_router = msgspec.msgpack.Decoder(FromRouter)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


MESSAGE_MAX_BYTES = 1 << 20
"""The longest message that is sent, where the server would take a longer one."""

ENVELOPE_BYTES = SEAL_BYTES + 256
"""What a message has in addition to its frames: the seal, who speaks, and the frames' own heads."""

Unsent = Callable[[str], None]
"""Hears why a frame could not be sent."""


class Box:
    """What waits to be sent to one subject. ``replies_to`` hears when nobody listens there."""

    def __init__(self, post: "Post", subject: str, replies_to: str, speaker: tuple[str | int, int]) -> None:
        self.subject = subject
        self.replies_to = replies_to
        self.speaker = speaker
        self.frames: list[tuple[msgspec.Raw, Unsent | None]] = []
        self._post = post

    def put(self, frame: RouterFrame | WorkerFrame, on_unsent: Unsent | None = None) -> None:
        """Send ``frame`` soon, after all that was put before. ProtocolError when no message can hold it."""
        raw = encode_frame(frame)
        if len(raw) > self._post.frames_max_bytes:
            raise ProtocolError(
                f"a frame of {len(raw)} bytes is above the {self._post.frames_max_bytes} of a message",
                param="frame",
            )
        self.frames.append((raw, on_unsent))
        self._post.wake(self)


class Post:
    """Publishes what is put into its boxes. What NATS does not take is lost, as on the way.

    Its messages are numbered from 1, whatever box they are from.
    """

    def __init__(self, client: Client, seal: Seal) -> None:
        self._client = client
        self._seal = seal
        self._numbers = itertools.count(1)
        self._full: dict[Box, None] = {}
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def frames_max_bytes(self) -> int:
        """The room for frames in one message."""
        return min(self._client.max_payload, MESSAGE_MAX_BYTES) - ENVELOPE_BYTES

    def wake(self, box: Box) -> None:
        """Something waits in ``box``."""
        self._full[box] = None
        self._more.set()
        if self._task is None:
            self._task = go_on(self._run(), name="requests: send frames")

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
            box = next(iter(self._full))
            del self._full[box]
            frames, box.frames = box.frames, []
            at = 0
            while at < len(frames):
                end, n_bytes = at, 0
                while end < len(frames) and n_bytes + len(frames[end][0]) <= self.frames_max_bytes:
                    n_bytes += len(frames[end][0])
                    end += 1
                end = max(end, at + 1)
                await self._send(box, frames[at:end])
                at = end

    async def _send(self, box: Box, frames: list[tuple[msgspec.Raw, Unsent | None]]) -> None:
        body = encode_message(box.speaker, [raw for raw, _ in frames])
        message = self._seal.seal(box.subject, body, number=next(self._numbers))
        try:
            await self._client.publish(box.subject, message, reply=box.replies_to)
        except Exception as error:  # noqa: BLE001 - one message that the client fails on keeps no other back
            for _, on_unsent in frames:
                if on_unsent is not None:
                    on_unsent(f"NATS: {type(error).__name__}: {error}")
