"""KV handoffs between processes of mock engines: one connection for each pull, from the sink to the source.

The connection is the pull: it opens when a decode leg was accepted whose KV is elsewhere, and when it is
lost, both sides end the handoff as if the other's engine had died. No bytes of KV cross it, only the few
words of :mod:`kvrouter.mock.remote`: the time that the bytes would take is simulated by the sink's process.

Who hears a last word closes; who says one waits for that, for ``linger_s`` at most. Every side gives a sign
of life each ``keep_alive_s``, and one that was silent for ``silence_max_s`` is lost.
"""

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from kvrouter.core.errors import ConfigError
from kvrouter.core.requests import KvLoss
from kvrouter.engines.mock.connection import Connection, TransferCounts, TransferSettings
from kvrouter.engines.mock.frames import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    Alive,
    ConnectionRefused,
    Refusal,
    check_hello,
    decode_sink_word,
    decode_source_word,
    encode_hello,
    encode_word,
)
from kvrouter.mock import (
    Done,
    Fabric,
    Failed,
    GiveUp,
    Join,
    Peer,
    PullId,
    Ready,
    RemoteOutput,
    RemoteSink,
    SinkWord,
    SourceWord,
    ToSource,
    Want,
)
from kvrouter.mock.remote import REASON_CHARS_MAX


class Transfers:
    """The connections of one process. ``at_now`` calls back at once with the simulated second that it is, and
    afterwards tells what followed.
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
        self._open: set[Connection] = set()
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
        """Send each word its way; what is for a connection that is lost has no receiver any more."""
        for output in outputs:
            if not isinstance(output, ToSource):
                incoming = self._incoming.get(output.sink)
                if incoming is not None:
                    incoming.tell(output.word)
            elif isinstance(output.word, Join):
                self._connect(output.pull, output.peer, output.word)
            else:
                outgoing = self._outgoing.get(output.pull)
                if outgoing is not None:
                    outgoing.tell(output.word)

    def opened(self, connection: "Connection") -> bool:
        """Count an open connection; False when there are too many."""
        self._open.add(connection)
        if isinstance(connection, _Incoming):
            self._incoming[connection.sink] = connection
        return len(self._open) <= self.settings.connections_max

    def closed(self, connection: "Connection") -> None:
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
        outgoing.say(encode_word(join))
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


class _Incoming(Connection):
    """A decode leg of another process that comes for KV that is here."""

    def __init__(self, transfers: Transfers) -> None:
        super().__init__(transfers, frame_bytes_max=HELLO_BYTES_MAX)
        self._transfers = transfers
        self.sink = transfers.next_sink()
        self._stage = _Stage.STRANGER
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Someone connected, and has so long to join a handoff."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._settings.hello_timeout_s, self._check_joined)
        super().connection_made(transport)

    def on_frame(self, payload: bytes) -> None:
        """A hello, and from then on the words of the sink."""
        if self._stage is _Stage.STRANGER:
            check_hello(payload, self._settings.token)
            self._frames.bytes_max = FRAME_BYTES_MAX
            self._stage = _Stage.GREETED
            return
        word = decode_sink_word(payload)
        if isinstance(word, Alive):
            return
        self._stage = self._follows(word)
        if isinstance(word, Join):
            self._transfers.counts.incoming += 1
        elif isinstance(word, Done):
            self._transfers.counts.incoming_done += 1
        self._hear(word)
        if self._stage is _Stage.ENDED:
            self.close()

    def tell(self, word: SourceWord) -> None:
        """The source has something to say."""
        if self._stage is _Stage.ENDED:
            return
        self.say(encode_word(word))
        if isinstance(word, Failed):
            self._stage = _Stage.ENDED
            self.wait_for_the_other()
        else:
            self._stage = _Stage.PULLING

    def end(self, loss: KvLoss, why: str) -> None:  # noqa: ARG002 - the source does not ask why a sink is lost
        """The sink is lost, unless it has said its last word."""
        if self._deadline is not None:
            self._deadline.cancel()
        stage, self._stage = self._stage, _Stage.ENDED
        if stage in IN_A_MEETING:
            self._hear(None)

    def _hear(self, word: SinkWord | None) -> None:
        self._transfers.at_now(lambda now: self._transfers.fabric.hear_sink(now, self.sink, word))

    def _follows(self, word: SinkWord) -> _Stage:
        """Return the stage after ``word``; ConnectionRefused when it does not belong here."""
        match self._stage, word:
            case _Stage.GREETED, Join():
                return _Stage.JOINED
            case _Stage.JOINED, Want():
                return _Stage.WANTING
            case _Stage.PULLING, Done():
                return _Stage.ENDED
            case ((_Stage.JOINED | _Stage.WANTING | _Stage.PULLING), GiveUp()):
                return _Stage.ENDED
        raise ConnectionRefused(Refusal.OUT_OF_ORDER, f"{type(word).__name__} does not belong here")

    def _check_joined(self) -> None:
        if self._stage in (_Stage.STRANGER, _Stage.GREETED):
            self._refuse(ConnectionRefused(Refusal.STRANGER, "no handoff was joined in time"))


class _Outgoing(Connection):
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
        """A word of the source."""
        word = decode_source_word(payload)
        if isinstance(word, Alive):
            return
        if isinstance(word, Ready):
            if not self._wanting:
                raise ConnectionRefused(Refusal.OUT_OF_ORDER, "Ready does not belong here")
            self._wanting = False
        else:
            self._ended = True
        self._hear(word)
        if isinstance(word, Failed):
            self.close()

    def tell(self, word: SinkWord | None) -> None:
        """The sink has something to say, or is lost."""
        if word is None:
            self._ended = True
            if self._transport is None and self.connecting is not None:
                self.connecting.cancel()
                self._transfers.closed(self)
            self.cut()
            return
        self._wanting = isinstance(word, Want)
        self.say(encode_word(word))
        if not self._wanting:
            self._ended = True
            self._transfers.counts.outgoing_done += isinstance(word, Done)
            self.wait_for_the_other()

    def end(self, loss: KvLoss, why: str) -> None:
        """The KV is lost, unless the last word was said."""
        self._transfers.closed(self)
        if not self._ended:
            self._ended = True
            self._hear(Failed(loss, f"{self._peer.host}:{self._peer.port}: {why}"[:REASON_CHARS_MAX]))

    def _hear(self, word: SourceWord) -> None:
        self._transfers.at_now(lambda now: self._transfers.fabric.hear_source(now, self.pull, word))
