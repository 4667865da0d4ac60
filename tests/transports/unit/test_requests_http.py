"""The http request plane beyond the contract: strangers, limits, TLS, and what its connections do."""

import asyncio
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trustme

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests import encoding
from kvrouter.transports.requests.encoding import REQUEST_MAX_BYTES
from kvrouter.transports.requests.http import HttpRequestAcceptor, HttpRequestTransport
from kvrouter.transports.requests.http import transport as http_plane
from kvrouter.transports.requests.http.frames import ALIVE, FRAMES, chunk_frame
from kvrouter.transports.requests.port import StreamBroken, WorkerUnreachable
from kvrouter.transports.requests.session import RouterLimits
from kvrouter.transports.requests.worker_session import WorkerLimits
from tests.testing.asyncio_servers import port_of, serving_streams
from tests.testing.constants import SetConstants
from tests.testing.scripted_worker import IN_TIME_S, ScriptedWorker, accepted, leg, read_all
from tests.testing.tcp_proxy import TcpProxy
from tests.testing.waits import until

TOKEN = "t0p"
LAST = EngineChunk(token_ids=(4, 5), finish=FinishReason.STOP)


class Ends:
    """A worker behind a listener, and a plane."""

    def __init__(
        self, acceptor: HttpRequestAcceptor, transport: HttpRequestTransport, refused: list[str]
    ) -> None:
        self.acceptor = acceptor
        self.transport = transport
        self.refused = refused
        self.worker = ScriptedWorker()
        self.address = acceptor.address_of(WorkerId(1), Epoch(1))
        self.place = acceptor.serve(self.address, self.worker)
        self.port = int(self.address.split(":")[2].split("/")[0])


@asynccontextmanager
async def both_ends(
    *,
    router_token: str = TOKEN,
    worker_token: str = TOKEN,
    server: ssl.SSLContext | None = None,
    client: ssl.SSLContext | None = None,
    connections_max: int = 100,
    dead_after_s: float = 5.0,
    on_refused: Callable[[str], None] | None = None,
) -> AsyncIterator[Ends]:
    refused: list[str] = []
    acceptor = HttpRequestAcceptor(
        "127.0.0.1",
        0,
        token=worker_token,
        ssl=server,
        advertise_host="localhost",
        limits=WorkerLimits(
            connections_max=connections_max, heartbeat_s=dead_after_s / 3, dead_after_s=dead_after_s
        ),
        on_refused=refused.append,
    )
    await acceptor.start()
    transport = HttpRequestTransport(
        token=router_token,
        ssl=client,
        on_refused=on_refused or (lambda _why: None),
        limits=RouterLimits(dead_after_s=dead_after_s, heartbeat_s=dead_after_s / 3),
    )
    try:
        yield Ends(acceptor, transport, refused)
    finally:
        await transport.close()
        await acceptor.close()


async def say(port: int, text: str) -> bytes:
    """Send ``text`` and nothing more; return all that comes until the peer closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text.replace("\n", "\r\n").encode())
    try:
        async with asyncio.timeout(IN_TIME_S):
            return await reader.read()
    finally:
        writer.close()


def post(path: str, *, token: str = TOKEN, length: int | None = 10, leg_number: str = "1") -> str:
    size = "" if length is None else f"content-length: {length}\n"
    return (
        f"POST {path} HTTP/1.1\nhost: x\nauthorization: Bearer {token}\n"
        f"x-kvrouter-router: r\nx-kvrouter-leg: {leg_number}\n{size}\n"
    )


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (post("/v1/legs/1/1", token="guess", length=REQUEST_MAX_BYTES), 401),
        (post("/v1/legs/1/1", length=REQUEST_MAX_BYTES + 1), 413),
        (post("/v1/legs/1/1", length=None), 411),
        (post("/v1/legs/1/2"), 404),
        (post("/v1/elsewhere/1/1"), 404),
        (post("/v1/legs/1/1", leg_number="-1"), 400),
        (post("/v1/legs/1/1").replace("POST", "PUT"), 405),
    ],
)
async def test_invalid_request_head_is_refused_before_the_body_is_read(
    request_head: str, status: int
) -> None:
    async with both_ends() as ends:
        answer = await say(ends.port, request_head)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert len(ends.refused) == 1
        assert ends.worker.requests == []


async def test_malformed_body_or_request_line_gets_400_and_others_are_served() -> None:
    async with both_ends() as ends:
        assert b" 400 " in await say(ends.port, post("/v1/legs/1/1", length=4) + "abcd")
        assert b" 400 " in await say(ends.port, "\x00\x01 garbage\n\n")
        stream = await accepted(ends.transport, ends.address, leg())
        await ends.worker.streams[0].put(LAST)
        assert (await read_all(stream))[0] == [4, 5]


async def test_health_needs_a_token_for_a_worker_but_not_for_the_listener() -> None:
    async with both_ends() as ends:
        close = "connection: close\n"
        assert b" 204 " in await say(ends.port, f"GET /health HTTP/1.1\nhost: x\n{close}\n")
        assert b" 401 " in await say(ends.port, f"GET /health/1/1 HTTP/1.1\nhost: x\n{close}\n")
        known = f"authorization: Bearer {TOKEN}\n{close}"
        assert b" 204 " in await say(ends.port, f"GET /health/1/1 HTTP/1.1\nhost: x\n{known}\n")
        assert b" 404 " in await say(ends.port, f"GET /health/1/2 HTTP/1.1\nhost: x\n{known}\n")


async def test_wrong_token_is_refused_and_no_token_is_accepted_if_none_is_set() -> None:
    async with both_ends(router_token="guess") as ends:
        with pytest.raises(WorkerUnreachable, match="token"):
            await accepted(ends.transport, ends.address, leg())
    async with both_ends(router_token="", worker_token="") as ends:
        await accepted(ends.transport, ends.address, leg())


async def test_request_to_an_incarnation_not_served_here_is_refused() -> None:
    async with both_ends() as ends:
        with pytest.raises(WorkerUnreachable, match="nobody serves"):
            await accepted(ends.transport, ends.address.removesuffix("1") + "2", leg())
        with pytest.raises(ConfigError):
            ends.acceptor.serve(ends.address, ScriptedWorker())


async def test_closed_plane_follows_no_worker_and_leaves_no_tasks() -> None:
    async with both_ends() as ends:
        before = asyncio.all_tasks()
        stream = await accepted(ends.transport, ends.address, leg())
        ends.transport.follow(ends.address, lambda _: None)
        await ends.transport.close()
        with pytest.raises(WorkerUnreachable, match="closed"):
            ends.transport.follow(ends.address, lambda _: None)
        named = {task.get_name() for task in asyncio.all_tasks() - before}
        assert not {name for name in named if name.startswith("requests: read an answer")}
        assert not {name for name in named if "health" in name}
        with pytest.raises(StreamBroken):
            await read_all(stream)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1/1/1", "http://127.0.0.1:1", "nonsense"])
async def test_an_address_of_another_plane_is_unreachable(address: str) -> None:
    async with both_ends() as ends:
        with pytest.raises(WorkerUnreachable, match="no address"):
            await accepted(ends.transport, address, leg())
        with pytest.raises(WorkerUnreachable, match="no address"):
            ends.transport.follow(address, lambda _: None)


async def test_following_with_a_wrong_token_or_certificate_is_reported() -> None:
    why: asyncio.Queue[str] = asyncio.Queue()
    async with both_ends(worker_token="other", on_refused=why.put_nowait) as ends, asyncio.timeout(IN_TIME_S):
        ends.transport.follow(ends.address, lambda _: None)
        assert "another token" in await why.get()
    mine, theirs = trustme.CA(), trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.issue_cert("localhost").configure_cert(server)
    client = ssl.create_default_context()
    mine.configure_trust(client)
    async with (
        both_ends(server=server, client=client, on_refused=why.put_nowait) as ends,
        asyncio.timeout(IN_TIME_S),
    ):
        ends.transport.follow(ends.address, lambda _: None)
        assert "certificate" in (await why.get()).lower()


async def test_request_over_the_size_limit_is_an_invalid_request(set_constants: SetConstants) -> None:
    set_constants(http_plane, REQUEST_MAX_BYTES=10)
    async with both_ends() as ends:
        with pytest.raises(InvalidRequest, match="above"):
            await accepted(ends.transport, ends.address, leg())


async def test_a_running_leg_does_not_keep_its_encoded_request() -> None:
    async with both_ends() as ends:
        request = leg()
        request.token_ids.extend(range(1_000_000, 1_200_000))
        tracemalloc.start()
        try:
            stream = await accepted(ends.transport, ends.address, request)
            ends.worker.requests.clear()
            taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, encoding.__file__)])
        finally:
            tracemalloc.stop()
        assert max(trace.size for trace in taken.traces) < 1_000_000, "the worker's array has 800 kB"
        stream.cancel("done")


async def test_a_host_name_that_no_resolver_takes_is_reported_and_never_well() -> None:
    why: asyncio.Queue[str] = asyncio.Queue()
    alive: asyncio.Queue[bool] = asyncio.Queue()
    limits = RouterLimits(open_timeout_s=1e6, heartbeat_s=0.01)
    transport = HttpRequestTransport(token=TOKEN, limits=limits, on_refused=why.put_nowait)
    address = f"http://{'a' * 70}.example:80/1/1"
    stream = await transport.open(address, leg())
    with pytest.raises(WorkerUnreachable, match="URL cannot be read: is the host name in it right"):
        await read_all(stream)
    transport.follow(address, alive.put_nowait)
    async with asyncio.timeout(IN_TIME_S):
        for _ in range(2):  # the poll goes on
            assert await why.get() == f"{address}: its URL cannot be read: is the host name in it right?"
        assert not await alive.get()
    await transport.close()


async def test_a_prompt_of_a_million_tokens_arrives() -> None:
    async with both_ends() as ends:
        long = leg()
        long.token_ids.extend(range(1_000_000))
        await accepted(ends.transport, ends.address, long)
        assert ends.worker.requests == [long]


async def test_excess_connection_and_silent_connection_are_closed() -> None:
    async with both_ends(connections_max=1, dead_after_s=0.2) as ends:
        reader, writer = await asyncio.open_connection("127.0.0.1", ends.port)
        assert await say(ends.port, "") == b""
        async with asyncio.timeout(IN_TIME_S):
            assert await reader.read() == b""
        writer.close()


async def test_old_unauthenticated_connection_is_closed_and_a_younger_one_kept() -> None:
    async with both_ends() as ends:
        old = await asyncio.open_connection("127.0.0.1", ends.port)
        connections, clock = ends.acceptor._connections, ends.acceptor._clock
        await until(lambda: len(connections.connections) == 1)
        clock.now_s += 10.0
        young = await asyncio.open_connection("127.0.0.1", ends.port)
        await until(lambda: len(connections.connections) == 2)
        connections.close_unauthenticated()
        async with asyncio.timeout(IN_TIME_S):
            assert await old[0].read() == b""
        assert not young[0].at_eof()
        assert len(connections.connections) == 1
        assert connections.open.older_than(clock.now_s) == []
        for _, writer in (old, young):
            writer.close()


async def test_consecutive_legs_share_a_connection() -> None:
    async with both_ends() as ends, TcpProxy("127.0.0.1", ends.port) as proxy:
        address = f"http://127.0.0.1:{proxy.port}/1/1"
        ends.transport.follow(address, lambda _is_alive: None)
        for n in range(5):
            stream = await accepted(ends.transport, address, leg(str(n)))
            await ends.worker.streams[-1].put(LAST)
            await read_all(stream)
            assert await ends.place.wait_idle(IN_TIME_S)
        assert (
            proxy.n_accepted <= 3
        )  # one for legs, one for health, and one where a leg's end was not yet read


async def test_a_reset_connection_breaks_its_stream_and_frees_the_worker() -> None:
    async with both_ends() as ends, TcpProxy("127.0.0.1", ends.port) as proxy:
        stream = await accepted(ends.transport, f"http://127.0.0.1:{proxy.port}/1/1", leg())
        reader = asyncio.create_task(read_all(stream))
        proxy.cut()
        with pytest.raises(StreamBroken):
            await reader
        assert await ends.place.wait_idle(IN_TIME_S)
        assert ends.worker.streams[0].reasons == ["the router closed its connection"]


@asynccontextmanager
async def strange_worker(answer: bytes) -> AsyncIterator[str]:
    """A listener that answers every request with ``answer``, and then stays silent."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(answer if b"POST" in head else b"HTTP/1.1 204 No Content\r\n\r\n")
        await asyncio.Event().wait()

    async with serving_streams(on_connection) as server:
        yield f"http://127.0.0.1:{port_of(server)}/1/1"


def streaming(*bodies: bytes) -> bytes:
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {FRAMES}\r\ntransfer-encoding: chunked\r\n\r\n"
    return head.encode() + pieces


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"\xff\xff\xff\xff"], "above"),
        ([b"\x00\x00\x00\x01?"], "kind"),
        ([b"\x00\x00\x00\x02c\xc1"], "chunk"),
        ([chunk_frame(EngineChunk(token_ids=(1,))), b""], "before the last chunk"),
        ([ALIVE], "was not heard"),
    ],
)
async def test_worker_that_breaks_the_protocol_breaks_its_stream(frames: list[bytes], why: str) -> None:
    async with strange_worker(streaming(*frames)) as address:
        transport = HttpRequestTransport(
            token=TOKEN, limits=RouterLimits(dead_after_s=0.3, heartbeat_s=0.3 / 3)
        )
        stream = await accepted(transport, address, leg())
        with pytest.raises(StreamBroken, match=why):
            await read_all(stream)
        await transport.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\noops",
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 400 Bad\r\ncontent-type: application/vnd.msgpack\r\ncontent-length: 3\r\n\r\nabc",
        b"HTTP/1.1 400 Bad\r\ncontent-type: application/vnd.msgpack\r\ncontent-length: 999999\r\n\r\n",
        b"no http at all\r\n\r\n",
    ],
)
async def test_invalid_http_answer_is_an_unreachable_worker(answer: bytes) -> None:
    async with strange_worker(answer) as address:
        transport = HttpRequestTransport(token=TOKEN)
        with pytest.raises(WorkerUnreachable):
            await accepted(transport, address, leg())
        await transport.close()
