"""The engine door: a listening socket through which a custom engine reports its cached blocks to its worker.

The client is ``native/c`` (``kvrouter.h``). Its reports go to the worker's
:class:`~kvrouter.worker.kv_publisher.KvPublisher`, so the engine does not depend on the event transport.

A frame begins with its length in 4 bytes, big-endian. The first frame is the bare token; every other one is
an array whose first element is the kind.
"""

import asyncio
import hmac
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.events import HASH_BYTES, HashColumn, Medium, Removed, Stored
from kvrouter.core.hosts import bracketed
from kvrouter.core.ids import DpRank, EngineHash
from kvrouter.core.json import unpacked
from kvrouter.telemetry import Event, log_event
from kvrouter.telemetry.logs import LogThrottle
from kvrouter.worker.kv_publisher import FIRST_RANK, KvPublisher

_UNIX, _TCP = "unix:", "tcp://"
_PORTS = 65536


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The address to listen at: a socket file, or a host and a port; port 0 picks a free one."""

    path: str | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "ListenAddress":
        """Parse an address. Raises ConfigError."""
        if text.startswith(_UNIX):
            path = text.removeprefix(_UNIX)
            if path.startswith("/"):
                return cls(path=path)
        elif text.startswith(_TCP):
            host, _, port = text.removeprefix(_TCP).rpartition(":")
            if host and port.isdecimal() and int(port) < _PORTS:
                return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))
        raise ConfigError(f"address: {text!r} is neither unix:/path nor tcp://host:port", param="address")

    def __str__(self) -> str:
        if self.path is not None:
            return f"{_UNIX}{self.path}"
        return f"{_TCP}{bracketed(self.host)}:{self.port}"

    @property
    def is_private(self) -> bool:
        """Whether only processes of this host can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def listen(self) -> socket.socket:
        """Return a bound socket; its file is this user's, and replaces a stale one. Raises ConfigError."""
        try:
            if self.path is None:
                family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
                return socket.create_server((self.host, self.port), family=family)
            return self._listen_at(self.path)
        except OSError as error:
            raise ConfigError(
                f"address: cannot listen at {self}: {error.strerror or error}", param="address"
            ) from error

    def bound_to(self, sock: socket.socket) -> "ListenAddress":
        """The address with the port that the socket got."""
        return self if self.path is not None else ListenAddress(host=self.host, port=sock.getsockname()[1])

    def forget(self) -> None:
        """Remove the socket file."""
        if self.path is not None:
            with suppress(FileNotFoundError):
                Path(self.path).unlink()

    def _listen_at(self, path: str) -> socket.socket:
        self._remove_leftover(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            sock.bind(path)
        except OSError:
            sock.close()
            raise
        finally:
            os.umask(before)
        return sock

    def _remove_leftover(self, path: str) -> None:
        if not Path(path).is_socket():
            return
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()
                return
        raise ConfigError(f"address: somebody listens at {self} already", param="address")


VERSION = 1

LENGTH_BYTES = 4

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Hash = Annotated[int, msgspec.Meta(ge=0)]


class EngineHello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The engine's hello: the protocol version, and the engine's block size in tokens."""

    version: _Count
    block_size: _Count


class Replace(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Claim a rank for this connection: its blocks are cleared, and only this connection reports it."""

    dp_rank: _Count


class StoredFrame(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Consecutive blocks were stored."""

    dp_rank: _Count
    medium: Medium
    parent: _Hash | None
    engine_hashes: HashColumn
    block_hashes: HashColumn

    def event(self) -> Stored:
        """Return the event. Raises ValueError for malformed columns."""
        parent = None if self.parent is None else EngineHash(self.parent)
        return Stored(parent, self.engine_hashes, self.block_hashes, self.medium)


class RemovedFrame(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Blocks were removed from a medium."""

    dp_rank: _Count
    medium: Medium
    engine_hashes: HashColumn

    def event(self) -> Removed:
        """Return the event. Raises ValueError for a malformed column."""
        if len(self.engine_hashes) % HASH_BYTES:
            raise ValueError(f"engine_hashes: {len(self.engine_hashes)} bytes are no column of hashes")
        return Removed(self.engine_hashes, self.medium)


class LoadFrame(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A rank's load."""

    dp_rank: _Count
    active_blocks: _Count
    total_blocks: _Count
    active_prefill_tokens: _Count
    running_requests: _Count
    waiting_requests: _Count


class Sync(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Requests a :class:`Synced` once all earlier frames are processed."""

    goal: _Hash


EngineFrame = EngineHello | Replace | StoredFrame | RemovedFrame | LoadFrame | Sync


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The connection is accepted."""

    version: int


class EngineRefused(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The connection is refused, and closed after this frame."""

    reason: str


class Synced(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """All frames before the :class:`Sync` of this goal are processed."""

    goal: int


def decode_frame(payload: bytes) -> EngineFrame:
    """Return a frame of an engine; raise ProtocolError."""
    return unpacked(_decoder, payload, "frame", times=FRAME_TIMES)


def encode_reply(reply: Welcome | EngineRefused | Synced) -> bytes:
    """Return ``reply``, encoded with its length."""
    payload = _encoder.encode(reply)
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[EngineFrame] = msgspec.msgpack.Decoder(EngineFrame)


FRAME_BYTES_MAX = 1024 * 1024
FRAME_TIMES = 2
"""A frame may hold one value per byte: twice the usual limit."""

TOKEN_BYTES_MAX = 1024
CONNECTIONS_MAX = 64

GREETING_S = 5.0
"""A connection without a valid token after this time is closed."""

SILENCE_S = 10.0
"""A connection without a frame for this long is closed; engines send one every second."""

_NUMBER = re.compile(r"\d+")

_log = logging.getLogger(__name__)


class _ConnectionEnded(Exception):
    """The connection has ended; the reason is logged, and sent to the engine when ``is_sent``."""

    def __init__(self, reason: str, *, is_sent: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_sent = is_sent


class _EngineConnection:
    """One engine's connection, and the ranks that it reports."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.ranks: set[DpRank] = set()
        self.is_accepted = False
        self.ended: _ConnectionEnded | None = None

    async def frame(self, *, bytes_max: int, limit_s: float) -> bytes:
        """Return the next frame. Raises _ConnectionEnded when it is too long, too late, or never comes."""
        try:
            async with asyncio.timeout(limit_s):
                n_bytes = int.from_bytes(await self.reader.readexactly(LENGTH_BYTES), "big")
                if n_bytes > bytes_max:
                    raise _ConnectionEnded(f"a frame of {n_bytes} bytes is longer than {bytes_max}")
                return await self.reader.readexactly(n_bytes)
        except TimeoutError:
            raise _ConnectionEnded(f"it said nothing for {limit_s:g} s") from None
        except (asyncio.IncompleteReadError, OSError):
            raise _ConnectionEnded("its connection ended", is_sent=False) from None

    async def reply(self, reply: Welcome | Synced, *, limit_s: float) -> None:
        """Send a reply. Raises _ConnectionEnded when the engine does not accept it."""
        try:
            async with asyncio.timeout(limit_s):
                self.writer.write(encode_reply(reply))
                await self.writer.drain()
        except TimeoutError:
            raise _ConnectionEnded(f"it took no answer for {limit_s:g} s", is_sent=False) from None
        except OSError:
            raise _ConnectionEnded("its connection ended", is_sent=False) from None

    def close(self, ended: _ConnectionEnded) -> None:
        """Close the connection, and send the reason where that is possible. Only the first reason counts."""
        if self.ended is not None:
            return
        self.ended = ended
        if ended.is_sent and not self.writer.is_closing():
            self.writer.write(encode_reply(EngineRefused(ended.reason)))
        self.writer.close()


class EngineDoor:
    """Listens for engines of other processes; ``start``, ``stop``. Use it from the publisher's event loop.

    ``address`` is ``unix:/path`` (only this user may connect) or ``tcp://host:port`` (port 0: any free one);
    a host beyond loopback needs a ``token``, which an engine must send before any other frame is read.
    ``block_size`` is the worker's, in tokens; ``dp_ranks`` are the worker's ranks.

    A rank is reported by one connection, the newest that claims it. When that ends, its ranks are cleared at
    once: a dead engine holds no blocks, and a live one reports everything again.
    """

    def __init__(
        self,
        publisher: KvPublisher,
        *,
        address: str,
        block_size: int,
        token: str = "",
        dp_ranks: Sequence[DpRank] = (FIRST_RANK,),
        greeting_s: float = GREETING_S,
        silence_s: float = SILENCE_S,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._publisher = publisher
        self._listen_address = ListenAddress.parse(address)
        if not token and not self._listen_address.is_private:
            raise ConfigError(
                f"token: must be set for {address}, which others than this host can reach", param="token"
            )
        self._token = token.encode()
        if len(self._token) > TOKEN_BYTES_MAX:
            raise ConfigError(f"token: is longer than {TOKEN_BYTES_MAX} bytes", param="token")
        self._block_size = block_size
        self._dp_ranks = frozenset(dp_ranks)
        self._greeting_s = greeting_s
        self._silence_s = silence_s
        self._frame_bytes_max = frame_bytes_max
        self._connections_max = connections_max
        self._server: asyncio.Server | None = None
        self._connections: dict[_EngineConnection, asyncio.Task[None]] = {}
        self._owners: dict[DpRank, _EngineConnection] = {}
        self._log_throttle = LogThrottle()

    @property
    def address(self) -> str:
        """The address where engines connect; after :meth:`start` with the actual port."""
        return str(self._listen_address)

    @property
    def dp_ranks(self) -> frozenset[DpRank]:
        """The ranks that a connection reports now."""
        return frozenset(self._owners)

    async def start(self) -> None:
        """Start to listen. Raises ConfigError when the address is not available."""
        sock = self._listen_address.listen()
        self._listen_address = self._listen_address.bound_to(sock)
        start = asyncio.start_server if self._listen_address.path is None else asyncio.start_unix_server
        self._server = await start(self._on_connection, sock=sock)

    async def stop(self) -> None:
        """Close the listener and all connections; their ranks are cleared. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        tasks = tuple(self._connections.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None
        self._listen_address.forget()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine = _EngineConnection(reader, writer)
        if len(self._connections) >= self._connections_max:
            engine.close(_ConnectionEnded(f"{self._connections_max} connections are open already"))
            self._log_end(engine)
            return
        task = asyncio.get_running_loop().create_task(self._serve(engine))
        self._connections[engine] = task
        task.add_done_callback(self._report)

    async def _serve(self, engine: _EngineConnection) -> None:
        ended = _ConnectionEnded("the worker's door is closed")
        try:
            await self._handshake(engine)
            while engine.ended is None:
                await self._take(engine)
        except _ConnectionEnded as why:
            ended = why
        except ProtocolError as error:
            ended = _ConnectionEnded(error.message)
        finally:
            del self._connections[engine]
            self._release(engine)
            engine.close(ended)
            self._log_end(engine)

    async def _handshake(self, engine: _EngineConnection) -> None:
        shown = await engine.frame(bytes_max=TOKEN_BYTES_MAX, limit_s=self._greeting_s)
        if not hmac.compare_digest(shown, self._token):
            raise _ConnectionEnded("its token is not the worker's")
        hello = decode_frame(
            await engine.frame(bytes_max=self._frame_bytes_max, limit_s=self._greeting_s),
        )
        if not isinstance(hello, EngineHello):
            raise _ConnectionEnded("it does not begin with a hello")
        if hello.version != VERSION:
            raise _ConnectionEnded(f"it speaks version {hello.version}, the worker {VERSION}")
        if hello.block_size != self._block_size:
            raise _ConnectionEnded(
                f"its block_size is {hello.block_size} tokens, the worker's {self._block_size}"
            )
        await engine.reply(Welcome(VERSION), limit_s=self._greeting_s)
        engine.is_accepted = True
        log_event(_log, Event.ENGINE_JOINED, worker=str(self._publisher.worker_id))

    async def _take(self, engine: _EngineConnection) -> None:
        frame = decode_frame(
            await engine.frame(bytes_max=self._frame_bytes_max, limit_s=self._silence_s),
        )
        if isinstance(frame, Sync):
            self._publisher.flush()
            await engine.reply(Synced(frame.goal), limit_s=self._silence_s)
        elif isinstance(frame, EngineHello):
            raise _ConnectionEnded("it says hello twice")
        else:
            self._apply(engine, frame)

    def _apply(self, engine: _EngineConnection, frame: EngineFrame) -> None:
        match frame:
            case Replace():
                self._claim(engine, DpRank(frame.dp_rank))
            case StoredFrame() | RemovedFrame():
                dp_rank = self._owned(engine, frame.dp_rank)
                try:
                    event = frame.event()
                except ValueError as error:
                    raise _ConnectionEnded(str(error)) from None
                self._publisher.publish(dp_rank, (event,))
            case LoadFrame():
                self._publisher.publish_load(
                    dp_rank=self._owned(engine, frame.dp_rank),
                    active_blocks=frame.active_blocks,
                    total_blocks=frame.total_blocks,
                    active_prefill_tokens=frame.active_prefill_tokens,
                    running_requests=frame.running_requests,
                    waiting_requests=frame.waiting_requests,
                )

    def _claim(self, engine: _EngineConnection, dp_rank: DpRank) -> None:
        if dp_rank not in self._dp_ranks:
            raise _ConnectionEnded(f"the worker has no dp_rank {dp_rank}")
        owner = self._owners.get(dp_rank)
        if owner is not None and owner is not engine:
            self._release(owner)
            owner.close(_ConnectionEnded(f"a newer connection tells of dp_rank {dp_rank}"))
        self._owners[dp_rank] = engine
        engine.ranks.add(dp_rank)
        self._publisher.publish_cleared(dp_rank=dp_rank)

    def _owned(self, engine: _EngineConnection, dp_rank: int) -> DpRank:
        if dp_rank not in engine.ranks:
            raise _ConnectionEnded(f"it tells of dp_rank {dp_rank}, which it did not claim")
        return DpRank(dp_rank)

    def _release(self, engine: _EngineConnection) -> None:
        for dp_rank in engine.ranks:
            del self._owners[dp_rank]
            self._publisher.publish_cleared(dp_rank=dp_rank)
            self._publisher.drop_load(dp_rank=dp_rank)
        engine.ranks.clear()

    def _log_end(self, engine: _EngineConnection) -> None:
        """Log the end. A refused engine reconnects for ever, so equal reasons are throttled."""
        reason = "" if engine.ended is None else engine.ended.reason
        if not engine.is_accepted and not self._log_throttle.allows(_NUMBER.sub("", reason)):
            return
        event = Event.ENGINE_LEFT if engine.is_accepted else Event.ENGINE_REFUSED
        log_event(_log, event, worker=str(self._publisher.worker_id), reason=reason)

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log_event(_log, Event.INTERNAL_ERROR, worker=str(self._publisher.worker_id), exc_info=error)
