"""One end of the way between two processes: frames in order, signs of life, and an end that both notice."""

import asyncio
from collections import Counter
from collections.abc import Callable
from ssl import SSLContext
from time import monotonic
from typing import Protocol, cast

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.requests import KvLoss
from kvrouter.engines.mock.frames import (
    HELLO,
    HELLO_BYTES_MAX,
    Alive,
    ConnectionRefused,
    FrameReader,
    Refusal,
    encode_word,
)
from kvrouter.mock import Failed
from kvrouter.mock.remote import REASON_CHARS_MAX

UNSENT_BYTES_MAX = 65_536
TOKEN_BYTES_MAX = HELLO_BYTES_MAX - len(HELLO) - 16


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How processes reach each other's KV. All processes of a fleet have the same ``token``.

    ``server_ssl`` is for who listens, ``client_ssl`` for who connects; both or neither, over the whole fleet.
    """

    token: str = ""
    connect_timeout_s: float = 10.0
    hello_timeout_s: float = 10.0
    keep_alive_s: float = 5.0
    silence_max_s: float = 20.0
    linger_s: float = 5.0
    connections_max: int = 4_096
    server_ssl: SSLContext | None = None
    client_ssl: SSLContext | None = None

    def __post_init__(self) -> None:
        if len(self.token.encode()) > TOKEN_BYTES_MAX:
            raise ConfigError(f"token: {TOKEN_BYTES_MAX} bytes at most", param="token")
        for name in ("connect_timeout_s", "hello_timeout_s", "keep_alive_s", "linger_s", "connections_max"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be above 0", param=name)
        if not self.silence_max_s > self.keep_alive_s:
            raise ConfigError("silence_max_s: must be above keep_alive_s", param="silence_max_s")


class TransferCounts(msgspec.Struct):
    """Pulls by legs of this process (``outgoing``) and from it (``incoming``), and how they ended."""

    outgoing: int = 0
    outgoing_done: int = 0
    incoming: int = 0
    incoming_done: int = 0
    refused: Counter[Refusal] = msgspec.field(default_factory=Counter)


class Office(Protocol):
    """What the connections of a process have in common."""

    settings: TransferSettings
    counts: TransferCounts

    def opened(self, connection: "Connection") -> bool:
        """Count an open connection; False when there are too many."""

    def closed(self, connection: "Connection") -> None:
        """The connection is gone."""


class Connection(asyncio.Protocol):
    """One end of the way between two processes."""

    def __init__(self, office: Office, *, frame_bytes_max: int) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._office = office
        self._settings = office.settings
        self._frames = FrameReader(frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsent: list[bytes] = []
        self._heard_at_s = 0.0
        self._deaf = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The way is open: what was said before goes out now."""
        stream = cast("asyncio.Transport", transport)  # uvloop's transports are of no class of asyncio's
        self._transport = stream
        self._heard_at_s = monotonic()
        stream.writelines(self._unsent)
        self._unsent.clear()
        if not self._office.opened(self):
            self._refuse(ConnectionRefused(Refusal.FULL, "this process has too many connections"))
        elif not self._deaf:
            self._after(self._settings.keep_alive_s, self._beat)

    def data_received(self, data: bytes) -> None:
        """Some bytes came: a part of a frame, or several frames."""
        if self._deaf:
            return
        self._heard_at_s = monotonic()
        try:
            for payload in self._frames.feed(data):
                self._take(payload)
        except ConnectionRefused as refused:
            self._refuse(refused)

    def _take(self, payload: bytes) -> None:
        if not self._deaf:
            self.on_frame(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        """The way is closed, by whomever."""
        self._deaf = True
        if self._timer is not None:
            self._timer.cancel()
        self._office.closed(self)
        self.gone.set_result(None)
        self.end(KvLoss.BROKEN, "the connection was lost" + (f": {exc}" if exc else ""))

    def on_frame(self, payload: bytes) -> None:
        """The other side sent a whole frame. ConnectionRefused when it cannot be gone on with."""
        raise NotImplementedError

    def end(self, loss: KvLoss, why: str) -> None:
        """The connection serves no more; if its last word was not said yet, the handoff ends. Idempotent."""
        raise NotImplementedError

    def say(self, frame: bytes) -> None:
        """Send a frame, when the connection is there."""
        if self._transport is None:
            self._unsent.append(frame)
        else:
            self._transport.write(frame)

    def cut(self) -> None:
        """Close at once."""
        self._deaf = True
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close when all that was said is sent."""
        self._deaf = True
        if self._transport is not None:
            self._transport.close()
            self._after(self._settings.linger_s, self._transport.abort)

    def wait_for_the_other(self) -> None:
        """A last word was said: the other side closes."""
        self._deaf = True
        if self._transport is not None:
            self._after(self._settings.linger_s, self._transport.abort)

    def _refuse(self, refused: ConnectionRefused) -> None:
        self._office.counts.refused[refused.refusal] += 1
        loss = KvLoss.TIMEOUT if refused.refusal is Refusal.SILENT else KvLoss.BROKEN
        self.say(encode_word(Failed(loss, refused.message[:REASON_CHARS_MAX])))
        self.close()
        self.end(loss, refused.message)

    def _beat(self) -> None:
        transport = self._transport
        if transport is None:
            return
        if monotonic() - self._heard_at_s > self._settings.silence_max_s:
            self._refuse(ConnectionRefused(Refusal.SILENT, "nothing was heard for too long"))
        elif transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._refuse(ConnectionRefused(Refusal.SLOW, "what was sent is not read"))
        else:
            transport.write(encode_word(Alive()))
            self._after(self._settings.keep_alive_s, self._beat)

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, act)
