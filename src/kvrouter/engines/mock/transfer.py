"""KV handoffs between processes of mock engines: one connection for each pull, from the sink to the source.

The connection is the pull: it opens for an accepted decode leg with KV in another process, and when it is
lost, both sides end the handoff as if the other's engine had died. No bytes of KV cross it, only the few
messages of :mod:`kvrouter.engines.mock_engine.remote`: the sink's process simulates the transfer.

The receiver of a last message closes the connection; its sender waits for that, for ``linger_s`` at most.
Each side sends a keep-alive every ``keep_alive_s``, and is lost after ``silence_max_s`` without a frame.

A frame is its length (4 bytes, big-endian) and that many bytes. The first frame of the side that connects is
the hello: a fixed beginning, the version and the shared token, in plain bytes, so that a stranger is refused
before its frame is parsed. Every other frame is a message or a keep-alive, in msgpack.
"""

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum, StrEnum, auto
from ssl import SSLContext
from time import monotonic
from typing import cast

import msgspec

from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.core.json import unpacked
from kvrouter.core.requests import KvLoss
from kvrouter.engines.mock_engine.fabric import Fabric
from kvrouter.engines.mock_engine.handoff import RemoteSink
from kvrouter.engines.mock_engine.remote import (
    REASON_CHARS_MAX,
    Done,
    Failed,
    GiveUp,
    Join,
    Peer,
    PullId,
    Ready,
    RemoteOutput,
    SinkMessage,
    SourceMessage,
    ToSource,
    Want,
)

HELLO = b"kvrouter mock kv "
VERSION = b"3"
HELLO_BYTES_MAX = 1_024
FRAME_BYTES_MAX = 16_384
LENGTH_BYTES = 4


class PeerRefusal(StrEnum):
    """Why this process closed a connection."""

    STRANGER = "stranger"
    """Its first frame is no hello of kvrouter's, or none came in time."""
    VERSION = "version"
    TOKEN = "token"  # noqa: S105 - the name of a reason
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    OUT_OF_ORDER = "out_of_order"
    SILENT = "silent"
    SLOW = "slow"
    """It does not read the frames that it is sent."""
    FULL = "full"


class ConnectionRefused(KvrouterError):
    """The other side sent an invalid frame."""

    code = "mock_transfer_refused"

    def __init__(self, refusal: PeerRefusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


class Alive(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A sign of life."""


_encoder = msgspec.msgpack.Encoder()
_sink_decoder: msgspec.msgpack.Decoder[SinkMessage | Alive] = msgspec.msgpack.Decoder(
    Join | Want | Done | GiveUp | Alive
)
_source_decoder: msgspec.msgpack.Decoder[SourceMessage | Alive] = msgspec.msgpack.Decoder(
    Ready | Failed | Alive
)


def encode_hello(token: str) -> bytes:
    """Return the frame that a connection begins with."""
    return _frame(HELLO + VERSION + b" " + token.encode())


def check_hello(payload: bytes, token: str) -> None:
    """Raise ConnectionRefused unless ``payload`` is a hello of this version with this token."""
    if not payload.startswith(HELLO):
        raise ConnectionRefused(PeerRefusal.STRANGER, "the first frame is no hello")
    version, _, given = payload[len(HELLO) :].partition(b" ")
    if version != VERSION:
        raise ConnectionRefused(PeerRefusal.VERSION, f"this process speaks version {VERSION.decode()}")
    if not hmac.compare_digest(given, token.encode()):
        raise ConnectionRefused(PeerRefusal.TOKEN, "the token is not ours")


def encode_message(message: SinkMessage | SourceMessage | Alive) -> bytes:
    """Return the frame of one message."""
    return _frame(_encoder.encode(message))


def decode_sink_message(payload: bytes) -> SinkMessage | Alive:
    """Return a sink's message. Raises ConnectionRefused for an invalid one."""
    return unpacked(_sink_decoder, payload, "not a word of a sink", error=_malformed)


def decode_source_message(payload: bytes) -> SourceMessage | Alive:
    """Return a source's message. Raises ConnectionRefused for an invalid one."""
    return unpacked(_source_decoder, payload, "not a word of a source", error=_malformed)


def _malformed(message: str, *, param: str | None) -> ConnectionRefused:
    del param
    return ConnectionRefused(PeerRefusal.MALFORMED, message)


class PeerFrameReader:
    """Bytes in, whole frames out. It holds one unfinished frame of ``bytes_max`` bytes at most."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that are whole now. ConnectionRefused at one that is longer than allowed."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            n_bytes = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if n_bytes > self.bytes_max:
                raise ConnectionRefused(
                    PeerRefusal.TOO_LARGE, f"a frame of {n_bytes} bytes; {self.bytes_max} are allowed"
                )
            end = LENGTH_BYTES + n_bytes
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield payload


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


UNSENT_BYTES_MAX = 65_536
TOKEN_BYTES_MAX = HELLO_BYTES_MAX - len(HELLO) - 16


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How processes reach each other's KV. All processes of a fleet have the same ``token``.

    The listening side uses ``server_ssl``, the connecting one ``client_ssl``; both or neither in a fleet.
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
    refused: Counter[PeerRefusal] = msgspec.field(default_factory=Counter)


class PeerConnection(asyncio.Protocol):
    """One end of the way between two processes."""

    def __init__(self, transfers: "Transfers", *, frame_bytes_max: int) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transfers = transfers
        self._settings = transfers.settings
        self._frames = PeerFrameReader(frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsent: list[bytes] = []
        self._received_at_s = 0.0
        self._deaf = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open: send the frames that waited for it."""
        stream = cast("asyncio.Transport", transport)  # uvloop's transports are of no class of asyncio's
        self._transport = stream
        self._received_at_s = monotonic()
        stream.writelines(self._unsent)
        self._unsent.clear()
        if not self._transfers.opened(self):
            self._refuse(ConnectionRefused(PeerRefusal.FULL, "this process has too many connections"))
        elif not self._deaf:
            self._after(self._settings.keep_alive_s, self._beat)

    def data_received(self, data: bytes) -> None:
        """Some bytes came: a part of a frame, or several frames."""
        if self._deaf:
            return
        self._received_at_s = monotonic()
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
        self._transfers.closed(self)
        self.gone.set_result(None)
        self.end(KvLoss.BROKEN, "the connection was lost" + (f": {exc}" if exc else ""))

    def on_frame(self, payload: bytes) -> None:
        """The other side sent a whole frame. ConnectionRefused when it cannot be gone on with."""
        raise NotImplementedError

    def end(self, loss: KvLoss, why: str) -> None:
        """Close the connection; end the handoff unless its last message was sent. Idempotent."""
        raise NotImplementedError

    def say(self, frame: bytes) -> None:
        """Send a frame, once the connection is open."""
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
        """Close after all frames are sent."""
        self._deaf = True
        if self._transport is not None:
            self._transport.close()
            self._after(self._settings.linger_s, self._transport.abort)

    def wait_for_the_other(self) -> None:
        """The last message was sent: the other side closes."""
        self._deaf = True
        if self._transport is not None:
            self._after(self._settings.linger_s, self._transport.abort)

    def _refuse(self, refused: ConnectionRefused) -> None:
        self._transfers.counts.refused[refused.refusal] += 1
        loss = KvLoss.TIMEOUT if refused.refusal is PeerRefusal.SILENT else KvLoss.BROKEN
        self.say(encode_message(Failed(loss, refused.message[:REASON_CHARS_MAX])))
        self.close()
        self.end(loss, refused.message)

    def _beat(self) -> None:
        transport = self._transport
        if transport is None:
            return
        if monotonic() - self._received_at_s > self._settings.silence_max_s:
            self._refuse(ConnectionRefused(PeerRefusal.SILENT, "nothing was heard for too long"))
        elif transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._refuse(ConnectionRefused(PeerRefusal.SLOW, "what was sent is not read"))
        else:
            transport.write(encode_message(Alive()))
            self._after(self._settings.keep_alive_s, self._beat)

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, act)


class Transfers:
    """The connections of one process. ``at_now`` calls back at once with the simulated second that it is, and
    afterwards reports what followed.
    """

    def __init__(
        self, settings: TransferSettings, fabric: Fabric, at_now: Callable[[Callable[[float], None]], None]
    ) -> None:
        self.settings = settings
        self.counts = TransferCounts()
        self.fabric = fabric
        self.at_now = at_now
        self._server: asyncio.Server | None = None
        self._incoming: dict[RemoteSink, _Incoming] = {}
        self._outgoing: dict[PullId, _Outgoing] = {}
        self._open: set[PeerConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._sinks = 0

    async def listen(self, host: str, port: int) -> int:
        """Take pulls at ``host``; return the port. ConfigError when that is not possible."""
        loop, server_ssl = asyncio.get_running_loop(), self.settings.server_ssl
        try:
            self._server = await loop.create_server(
                lambda: _Incoming(self),
                host,
                port,
                ssl=server_ssl,
                ssl_handshake_timeout=None if server_ssl is None else self.settings.hello_timeout_s,
                backlog=1_024,
            )
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error}", param="port") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Cut every connection and listen no more; the other ends take this process for lost."""
        if self._server is not None:
            self._server.close()
        for task in self._connecting:
            task.cancel()
        for connection in self._open:
            connection.cut()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for outgoing in tuple(self._outgoing.values()):
            outgoing.end(KvLoss.BROKEN, "this process ends its connections")
        await asyncio.gather(*(connection.gone for connection in tuple(self._open)))
        if self._server is not None:
            await self._server.wait_closed()

    def tell(self, outputs: list[RemoteOutput]) -> None:
        """Send each message on its connection; messages for a lost connection are dropped."""
        for output in outputs:
            if not isinstance(output, ToSource):
                incoming = self._incoming.get(output.sink)
                if incoming is not None:
                    incoming.tell(output.message)
            elif isinstance(output.message, Join):
                self._connect(output.pull, output.peer, output.message)
            else:
                outgoing = self._outgoing.get(output.pull)
                if outgoing is not None:
                    outgoing.tell(output.message)

    def opened(self, connection: "PeerConnection") -> bool:
        """Count an open connection; False when there are too many."""
        self._open.add(connection)
        if isinstance(connection, _Incoming):
            self._incoming[connection.sink] = connection
        return len(self._open) <= self.settings.connections_max

    def closed(self, connection: "PeerConnection") -> None:
        """The connection is gone."""
        self._open.discard(connection)
        if isinstance(connection, _Incoming):
            self._incoming.pop(connection.sink, None)
        elif isinstance(connection, _Outgoing):
            self._outgoing.pop(connection.pull, None)

    def next_sink(self) -> RemoteSink:
        """Return a number for a remote sink."""
        self._sinks += 1
        return RemoteSink(self._sinks)

    def _connect(self, pull: PullId, peer: Peer, join: Join) -> None:
        self.counts.outgoing += 1
        outgoing = self._outgoing[pull] = _Outgoing(self, pull, peer)
        outgoing.say(encode_hello(self.settings.token))
        outgoing.say(encode_message(join))
        task = asyncio.get_running_loop().create_task(self._open_connection(outgoing, peer))
        outgoing.connecting = task
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _open_connection(self, outgoing: "_Outgoing", peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                await loop.create_connection(
                    lambda: outgoing, peer.host, peer.port, ssl=self.settings.client_ssl
                )
        except (OSError, ValueError) as error:  # a host may be one that no resolver takes
            loss = KvLoss.TIMEOUT if isinstance(error, TimeoutError) else KvLoss.UNREACHABLE
            outgoing.end(loss, f"{peer.host}:{peer.port} cannot be reached: {error!r}")


class _Stage(Enum):
    """How far the sink of an incoming connection is."""

    STRANGER = auto()
    GREETED = auto()
    JOINED = auto()
    WANTING = auto()
    PULLING = auto()
    ENDED = auto()


IN_A_MEETING = (_Stage.JOINED, _Stage.WANTING, _Stage.PULLING)


class _Incoming(PeerConnection):
    """A decode leg of another process that comes for KV that is here."""

    def __init__(self, transfers: Transfers) -> None:
        super().__init__(transfers, frame_bytes_max=HELLO_BYTES_MAX)
        self._transfers = transfers
        self.sink = transfers.next_sink()
        self._stage = _Stage.STRANGER
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer connected, and must join a handoff within the hello timeout."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._settings.hello_timeout_s, self._check_joined)
        super().connection_made(transport)

    def on_frame(self, payload: bytes) -> None:
        """Take the hello, and then the messages of the sink."""
        if self._stage is _Stage.STRANGER:
            check_hello(payload, self._settings.token)
            self._frames.bytes_max = FRAME_BYTES_MAX
            self._stage = _Stage.GREETED
            return
        message = decode_sink_message(payload)
        if isinstance(message, Alive):
            return
        self._stage = self._follows(message)
        if isinstance(message, Join):
            self._transfers.counts.incoming += 1
        elif isinstance(message, Done):
            self._transfers.counts.incoming_done += 1
        self._receive(message)
        if self._stage is _Stage.ENDED:
            self.close()

    def tell(self, message: SourceMessage) -> None:
        """Send a message of the source."""
        if self._stage is _Stage.ENDED:
            return
        self.say(encode_message(message))
        if isinstance(message, Failed):
            self._stage = _Stage.ENDED
            self.wait_for_the_other()
        else:
            self._stage = _Stage.PULLING

    def end(self, loss: KvLoss, why: str) -> None:  # noqa: ARG002 - the source does not ask why a sink is lost
        """The sink is lost, unless it has sent its last message."""
        if self._deadline is not None:
            self._deadline.cancel()
        stage, self._stage = self._stage, _Stage.ENDED
        if stage in IN_A_MEETING:
            self._receive(None)

    def _receive(self, message: SinkMessage | None) -> None:
        self._transfers.at_now(lambda now: self._transfers.fabric.receive_from_sink(now, self.sink, message))

    def _follows(self, message: SinkMessage) -> _Stage:
        """Return the stage after ``message``; ConnectionRefused when it does not belong here."""
        match self._stage, message:
            case _Stage.GREETED, Join():
                return _Stage.JOINED
            case _Stage.JOINED, Want():
                return _Stage.WANTING
            case _Stage.PULLING, Done():
                return _Stage.ENDED
            case ((_Stage.JOINED | _Stage.WANTING | _Stage.PULLING), GiveUp()):
                return _Stage.ENDED
        raise ConnectionRefused(PeerRefusal.OUT_OF_ORDER, f"{type(message).__name__} does not belong here")

    def _check_joined(self) -> None:
        if self._stage in (_Stage.STRANGER, _Stage.GREETED):
            self._refuse(ConnectionRefused(PeerRefusal.STRANGER, "no handoff was joined in time"))


class _Outgoing(PeerConnection):
    """A decode leg of this process that comes for KV at another."""

    def __init__(self, transfers: Transfers, pull: PullId, peer: Peer) -> None:
        super().__init__(transfers, frame_bytes_max=FRAME_BYTES_MAX)
        self._transfers = transfers
        self.pull = pull
        self.connecting: asyncio.Task[None] | None = None
        self._peer = peer
        self._wanting = False
        self._ended = False

    def on_frame(self, payload: bytes) -> None:
        """Take a message of the source."""
        message = decode_source_message(payload)
        if isinstance(message, Alive):
            return
        if isinstance(message, Ready):
            if not self._wanting:
                raise ConnectionRefused(PeerRefusal.OUT_OF_ORDER, "Ready does not belong here")
            self._wanting = False
        else:
            self._ended = True
        self._receive(message)
        if isinstance(message, Failed):
            self.close()

    def tell(self, message: SinkMessage | None) -> None:
        """Send a message of the sink; None: it is lost."""
        if message is None:
            self._ended = True
            if self._transport is None and self.connecting is not None:
                self.connecting.cancel()
                self._transfers.closed(self)
            self.cut()
            return
        self._wanting = isinstance(message, Want)
        self.say(encode_message(message))
        if not self._wanting:
            self._ended = True
            self._transfers.counts.outgoing_done += isinstance(message, Done)
            self.wait_for_the_other()

    def end(self, loss: KvLoss, why: str) -> None:
        """The KV is lost, unless the last message was sent."""
        self._transfers.closed(self)
        if not self._ended:
            self._ended = True
            self._receive(Failed(loss, f"{self._peer.host}:{self._peer.port}: {why}"[:REASON_CHARS_MAX]))

    def _receive(self, message: SourceMessage) -> None:
        self._transfers.at_now(
            lambda now: self._transfers.fabric.receive_from_source(now, self.pull, message)
        )
