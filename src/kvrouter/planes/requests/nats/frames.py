"""What routers and workers say to each other over NATS, and on which subjects.

A message is sealed and numbered (:mod:`kvrouter.planes.seal`), and msgpack: who speaks, and a run of frames.
A frame is an array whose first element is its number here.
"""

import re

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk
from kvrouter.planes.requests.wire import Refusal
from kvrouter.planes.seal import Seal

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
    refusal: Refusal


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
    refusal: Refusal


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
