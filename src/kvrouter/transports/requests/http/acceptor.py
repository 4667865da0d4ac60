"""The worker's end of requests over HTTP."""

import asyncio
import hmac
import socket
import ssl as tls
from collections.abc import Callable

from aiohttp import ClientError, web

from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import ConfigError, InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.hosts import advertised_host, bracketed
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk
from kvrouter.transports.background import spawn, tick
from kvrouter.transports.listener import NO_DESCRIPTOR, TcpServer
from kvrouter.transports.requests.encoding import (
    REQUEST_MAX_BYTES,
    decode_request,
    encode_refusal,
    refusal_of,
)
from kvrouter.transports.requests.http.connections import (
    HttpConnections,
    last_answer,
    service_unavailable,
)
from kvrouter.transports.requests.http.frames import (
    ALIVE,
    FRAMES,
    LEG_HEADER,
    MSGPACK,
    REASON_MAX_BYTES,
    ROUTER_HEADER,
    chunk_frame,
    failure_frame,
)
from kvrouter.transports.requests.legs import LegName, LegServer, RouterGone
from kvrouter.transports.requests.port import RequestServer, WorkerFull, WorkerUnreachable
from kvrouter.transports.requests.worker_session import WORKER_LIMITS, WorkerLimits

BODIES_MAX_BYTES = 512 * 1024 * 1024
"""Bytes of requests being read, over all connections; a further request is refused as WorkerFull."""

BODY_WITHIN_S = 30.0
"""How long the body of a request may take to arrive."""

CUT_OFF_S = 0.05
"""How long closing the listener waits for idle connections."""

GOODBYE_S = 1.0
"""How long closing the listener waits for routers to read the end of their answers."""

SEND_BUFFER_BYTES = 16 * 1024
"""Bytes buffered for one reader, in the kernel and in the process: few, so that back-pressure is quick."""


class _Answer:
    """The HTTP response of one leg: a refusal or a stream of frames."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._sent_s = 0.0
        self._is_over = False
        self.response: web.StreamResponse | None = None

    async def accept(self) -> None:
        """Answer 200."""
        transport = self._request.transport
        if transport is None:
            raise RouterGone
        transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        response = self.response = web.StreamResponse(headers={"content-type": FRAMES})
        response.enable_chunked_encoding()
        self._sent_s = self._loop.time()
        try:
            await response.prepare(self._request)
            await self._request.writer.drain()
        except ConnectionError as error:
            raise RouterGone from error

    def take(self, _chunk: EngineChunk) -> bool:
        """Return False: a write is always awaited."""
        return False

    async def send(self, chunk: EngineChunk) -> None:
        """Send a chunk; return once there is room for another."""
        response = self._response()
        self._sent_s = self._loop.time()
        try:
            await response.write(chunk_frame(chunk))
            await self._request.writer.drain()
        except ConnectionError as error:
            raise RouterGone from error

    async def send_last(self, chunk: EngineChunk, over: Callable[[], None]) -> None:
        """Send the last chunk and end the response."""
        response = self._response()
        self._is_over = True
        over()
        try:
            await response.write_eof(chunk_frame(chunk))
        except ConnectionError as error:
            raise RouterGone from error

    async def end(self, error: Exception) -> None:
        """Send a refusal, or end the stream with an error frame."""
        refusal = refusal_of(error)
        if self.response is None:
            status = error.status_hint if isinstance(error, KvrouterError) else 502
            self.response = web.Response(status=status, body=encode_refusal(refusal), content_type=MSGPACK)
            return
        self._is_over = True
        try:
            await self.response.write_eof(failure_frame(refusal))
        except ConnectionError:
            return

    def _response(self) -> web.StreamResponse:
        if self.response is None:
            raise RouterGone
        return self.response

    async def beat(self, silent_for_s: float) -> None:
        """Send a heartbeat when nothing was sent for ``silent_for_s`` and no bytes wait to be read."""
        transport = self._request.transport
        response = self.response
        now_s = self._loop.time()
        if response is None or not response.prepared or self._is_over or transport is None:
            return
        if now_s - self._sent_s < silent_for_s or transport.get_write_buffer_size():
            return
        self._sent_s = now_s
        try:
            await response.write(ALIVE)
        except ConnectionError:
            return


class _Refused(Exception):
    """A request that gets an error response with ``status``."""

    def __init__(self, status: int, error: KvrouterError) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error


class HttpRequestAcceptor:
    """An HTTP listener that serves any number of workers of this process.

    ``advertise_host`` is the host that routers connect to, by default ``host``. Port 0 takes a free port.
    ``on_refused`` is called with the reason for each refused request or connection. The limits per router
    in ``limits`` do not apply: each leg has its own connection.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None,
        ssl: tls.SSLContext | None = None,
        advertise_host: str | None = None,
        limits: WorkerLimits = WORKER_LIMITS,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._host = host
        self._port = port
        self._credentials = f"Bearer {token or ''}".strip().encode()
        self._ssl = ssl
        self._advertise_host = advertised_host(host, advertise_host)
        self._limits = limits
        self._on_refused = on_refused
        self._leg_servers: dict[str, LegServer] = {}
        self._answers: set[_Answer] = set()
        self._reading_bytes = 0
        self._clock = AwakeClock(limits.heartbeat_s / 2)
        self._connections = HttpConnections(
            self._handle, limits=limits, on_dropped=on_refused, clock=self._clock
        )
        self._server = TcpServer(
            self._connections,
            answer=lambda: service_unavailable(
                MSGPACK, encode_refusal(refusal_of(WorkerFull(NO_DESCRIPTOR)))
            ),
            on_refused=on_refused,
            ssl=ssl,
            limits=limits,
        )
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address cannot be had."""
        try:
            self._port = await self._server.start(self._host, self._port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}", param="port") from error
        self._beating = spawn(self._beat(), name="requests: look after routers")

    async def close(self) -> None:
        """Stop listening; every worker leaves, and every connection is closed."""
        leg_servers = tuple(self._leg_servers.values())
        for leg_server in leg_servers:
            leg_server.leave("the listener was closed")
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        self._connections.stop_accepting()
        self._server.close()
        await self._server.wait_closed()
        await asyncio.gather(*(leg_server.wait_idle(GOODBYE_S) for leg_server in leg_servers))
        await self._connections.shutdown(CUT_OFF_S)

    def address_of(self, worker_id: WorkerId, incarnation: Epoch) -> str:
        """Return the address for the card of a worker served here. The listener must have started."""
        scheme = "http" if self._ssl is None else "https"
        return f"{scheme}://{bracketed(self._advertise_host)}:{self._port}/{worker_id}/{incarnation}"

    def serve(self, address: str, server: RequestServer) -> LegServer:
        """Serve ``server`` at an address from :meth:`address_of`; raise ConfigError if it is in use."""
        path = "/" + "/".join(address.split("/")[3:])
        if path in self._leg_servers:
            raise ConfigError(f"{address} is served already", param="address")

        def forget(_why: str) -> None:
            self._leg_servers.pop(path, None)

        leg_server = self._leg_servers[path] = LegServer(address, server, self._clock, forget)
        return leg_server

    async def _beat(self) -> None:
        """Send heartbeats, and find dead routers and unauthenticated connections."""
        while True:
            await tick(self._clock)
            for answer in tuple(self._answers):
                await answer.beat(self._limits.heartbeat_s)
            for leg_server in tuple(self._leg_servers.values()):
                leg_server.cancel_silent(self._limits.dead_after_s)
            self._connections.close_unauthenticated()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and request.path == "/health":
            return last_answer(web.Response(status=204))
        try:
            return await self._answer_to(request)
        except _Refused as refused:
            # The connection ends with the response: later requests on it are never read.
            self._on_refused(f"{request.remote}: {refused.error.message}")
            body = encode_refusal(refusal_of(refused.error))
            return last_answer(web.Response(status=refused.status, body=body, content_type=MSGPACK))

    async def _answer_to(self, request: web.BaseRequest) -> web.StreamResponse:
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._credentials):
            raise _Refused(401, WorkerUnreachable("the worker's token is another one"))
        if not self._connections.open.admit(request.protocol):
            raise _Refused(503, WorkerFull("as many connections are open as may be"))
        root, *rest = request.path.removeprefix("/").split("/")
        router = request.headers.get(ROUTER_HEADER, "")
        if (request.method, root, len(rest)) == ("GET", "health", 2):
            return self._health("/" + "/".join(rest), router)
        if root != "v1" or rest[:1] != ["legs"] or not router:
            raise _Refused(404, ProtocolError(f"{request.path}: no such path", param="path"))
        leg_server = self._leg_servers.get("/" + "/".join(rest[1:3]))
        if leg_server is None:
            raise _Refused(404, WorkerUnreachable(f"nobody serves {request.path} here"))
        number = rest[3] if len(rest) > 3 else request.headers.get(LEG_HEADER, "")
        if not number.isdecimal():
            raise _Refused(400, ProtocolError(f"{number!r} is no leg", param="leg"))
        name = LegName(router, int(number))
        if (request.method, len(rest)) == ("DELETE", 4):
            return await self._cancel(leg_server, name, request)
        if (request.method, len(rest)) == ("POST", 3):
            return await self._leg(leg_server, name, request)
        raise _Refused(405, ProtocolError(f"{request.method}: not here", param="method"))

    def _health(self, path: str, router: str) -> web.Response:
        leg_server = self._leg_servers.get(path)
        if leg_server is None:
            return web.Response(status=404)
        leg_server.mark_alive(router)
        return web.Response(status=204)

    async def _cancel(self, leg_server: LegServer, name: LegName, request: web.BaseRequest) -> web.Response:
        body = await self._body(request, REASON_MAX_BYTES, "reason")
        leg_server.cancel(name, body.decode("utf-8", "replace"))
        return web.Response(status=204)

    async def _leg(
        self, leg_server: LegServer, name: LegName, request: web.BaseRequest
    ) -> web.StreamResponse:
        try:
            decoded = decode_request(await self._body(request, REQUEST_MAX_BYTES, "token_ids"))
        except ProtocolError as error:
            raise _Refused(400, error) from error
        answer = _Answer(request)
        self._answers.add(answer)
        try:
            await leg_server.run(name, decoded, answer)
        finally:
            self._answers.discard(answer)
        return answer.response or web.Response(status=502)

    async def _body(self, request: web.BaseRequest, max_bytes: int, param: str) -> bytes:
        """Check the size, then read the body, in bounded time and memory."""
        n_bytes = request.content_length
        if n_bytes is None:
            raise _Refused(411, ProtocolError("no content-length", param="content-length"))
        if n_bytes > max_bytes:
            raise _Refused(
                413, InvalidRequest(f"{param}: {n_bytes} bytes are above {max_bytes}", param=param)
            )
        if self._reading_bytes + n_bytes > BODIES_MAX_BYTES:
            raise _Refused(503, WorkerFull(f"{BODIES_MAX_BYTES} bytes of requests are being read"))
        self._reading_bytes += n_bytes
        try:
            async with asyncio.timeout(BODY_WITHIN_S):
                return await request.content.readexactly(n_bytes)
        except TimeoutError:
            late = WorkerUnreachable(f"the request did not arrive in {BODY_WITHIN_S} s")
            raise _Refused(408, late) from None
        except (asyncio.IncompleteReadError, ClientError) as error:
            raise _Refused(400, ProtocolError("the request was cut off", param=param)) from error
        finally:
            self._reading_bytes -= n_bytes
