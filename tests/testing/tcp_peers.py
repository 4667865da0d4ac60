"""Hand-made ends of the tcp request plane: they say what a test tells them, right or wrong."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineRequest
from kvrouter.transports.requests.encoding import encode_request
from kvrouter.transports.requests.frames import (
    TO_ROUTER,
    TO_WORKER,
    FrameKind,
    FrameReader,
    Open,
    frame,
)
from kvrouter.transports.requests.handshake import (
    GREETING_BYTES,
    HELLO_BYTES,
    Secret,
    greeting,
    hello,
    read_greeting,
    read_hello,
)
from kvrouter.transports.requests.tcp.pipe import new_nonce
from tests.testing.asyncio_servers import port_of, stop_listening
from tests.testing.request_transports import TOKEN
from tests.testing.scripted_worker import IN_TIME_S

Frame = tuple[int, bytes]


def encode_open(stream_id: int, credit_tokens: int, request: EngineRequest) -> bytes:
    """The body of an OPEN frame."""
    return encode_request(Open(stream_id, credit_tokens, request))


class Peer:
    """One end of a connection: sends bytes, receives frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._frames: list[Frame] = []
        self._cut = FrameReader({**TO_ROUTER, **TO_WORKER, FrameKind.WELCOME: 32})

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def send_frame(self, kind: FrameKind, body: bytes = b"") -> None:
        self.send(frame(kind, body))

    async def frame(self) -> Frame | None:
        """The next frame that is no heartbeat, None at the end of the connection."""
        async with asyncio.timeout(IN_TIME_S):
            while not self._frames:
                try:
                    data = await self.reader.read(65536)
                except ConnectionError:
                    return None
                if not data:
                    return None
                self._frames += [
                    (kind, body)
                    for kind, body in self._cut.feed(data)
                    if kind not in {FrameKind.PING, FrameKind.PONG}
                ]
        return self._frames.pop(0)

    async def next(self, kind: FrameKind) -> bytes:
        """The body of the next frame, which is of this kind."""
        got = await self.frame()
        assert got is not None
        assert FrameKind(got[0]) is kind, got
        return got[1]

    async def goodbye(self) -> str:
        """Why the other end hangs up; it does."""
        while (got := await self.frame()) is not None:
            if got[0] == FrameKind.GOODBYE:
                assert await self.frame() is None
                return got[1].decode()
        raise AssertionError("hung up without a reason")

    async def close(self) -> None:
        self.writer.transport.abort()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


class RawRouter(Peer):
    """Connects to a listener as a router would."""

    @classmethod
    async def connect(cls, port: int) -> Self:
        """Connect and say nothing."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    @classmethod
    async def welcomed(cls, port: int, worker_id: int = 1, *, token: str | None = TOKEN) -> Self:
        """Connect, say hello and be welcomed."""
        peer = await cls.connect(port)
        await peer.say_hello(worker_id, token=token)
        await peer.next(FrameKind.WELCOME)
        return peer

    async def say_hello(self, worker_id: int = 1, incarnation: int = 1, *, token: str | None = TOKEN) -> None:
        nonce = read_greeting(await self.reader.readexactly(GREETING_BYTES))
        assert nonce is not None
        self.send(hello(Secret(token), nonce, new_nonce(), worker_id, incarnation))


class RawWorkers:
    """A listener that a test answers for: ``accepted`` brings each connection."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[Peer] = asyncio.Queue()
        self._peers: list[Peer] = []
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        await stop_listening(self._listener)
        for peer in self._peers:
            await peer.close()

    def address_of(self, worker_id: int = 1) -> str:
        assert self._listener is not None
        return f"tcp://127.0.0.1:{port_of(self._listener)}/{WorkerId(worker_id)}/{Epoch(1)}"

    async def next(self) -> Peer:
        async with asyncio.timeout(IN_TIME_S):
            return await self.accepted.get()

    async def welcome_next(self, *, token: str | None = TOKEN) -> Peer:
        """Greet, read the hello and welcome the next router."""
        peer = await self.next()
        nonce = new_nonce()
        peer.send(greeting(nonce))
        said = read_hello(await peer.reader.readexactly(HELLO_BYTES))
        assert said is not None
        proof = Secret(token).worker_proof(nonce, said.nonce, said.worker_id, said.incarnation)
        peer.send_frame(FrameKind.WELCOME, proof)
        return peer

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self._peers.append(peer)
        self.accepted.put_nowait(peer)


class LoopErrors:
    """What reached the loop's exception handler: nothing a peer sends may."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def watch(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.seen.append(context))
        return lambda: loop.set_exception_handler(None)
