"""Sends frames: what was said to one peer in one turn of the loop leaves in as few messages as will do."""

import asyncio
import itertools
from collections.abc import Callable

import msgspec
from nats.aio.client import Client

from kvrouter.core.errors import ProtocolError
from kvrouter.planes.background import go_on
from kvrouter.planes.requests.nats.frames import (
    RouterFrame,
    WorkerFrame,
    encode_frame,
    encode_message,
)
from kvrouter.planes.seal import SEAL_BYTES, Seal

MESSAGE_MAX_BYTES = 1 << 20
"""The longest message that is sent, where the server would take a longer one."""

ENVELOPE_BYTES = SEAL_BYTES + 256
"""What a message has beside its frames: the seal, who speaks, and the frames' own heads."""

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
