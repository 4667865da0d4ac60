"""An HTTP client for an engine's server.

Clients may read the error of a call, so it omits the engine's address; the error of a probe has it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from errno import ECONNREFUSED, ETIMEDOUT
from io import BytesIO
from socket import socket
from typing import Any
from weakref import WeakSet

import aiohttp

from kvrouter.core.engine_answer import Headers, passed_headers
from kvrouter.core.http_client import HttpClient, connection_failure
from kvrouter.engines.attach import Attached, AttachSpec, KeyRefused
from kvrouter.engines.openai.failures import REDIRECTED, REDIRECTS, error_message, read_error, read_failure
from kvrouter.engines.openai.host_watch import HostWatch
from kvrouter.engines.openai.metrics import MetricLines
from kvrouter.transports.requests.port import StreamBroken, WorkerUnreachable

CONNECT_LIMIT_S = 5.0
"""How long the engine's server may take to accept a connection."""

PROBE_LIMIT_S = 10.0
"""How long a small request, such as for the engine's models or metrics, may take."""

HOST_LOST_S = 15.0
"""A host that acknowledges nothing for so long is lost, and so are its connections."""

KEEP_IDLE_S = 3.0
"""How long an idle connection is kept: engines close theirs after five seconds, and a call that is sent just
then has to be sent again."""

END_LIMIT_S = 1.0
"""How long an answer may take to end behind its last event, so that its connection is used again."""

READ_BYTES = 256 * 1024
"""How much of an answer is held here before the engine is made to wait."""

ANSWER_MAX_BYTES = 64 * 1024 * 1024
"""The longest answer to a call that is not streamed."""

PAGE_MAX_BYTES = 4 * 1024 * 1024
"""The longest answer to a small request, such as for the engine's models."""

METRICS_PIECE_BYTES = 64 * 1024
"""So much of a metrics page is looked through before others have a turn: 4 ms at most."""


_made: ContextVar[list[aiohttp.AddrInfoType] | None] = ContextVar("sockets made for a request", default=None)
"""The addresses for which the request of this context made sockets: empty on a kept connection. aiohttp's own
traces would tell it too, for a fifth of what a request costs.
"""


class EngineRefuses(WorkerUnreachable):
    """The engine's server refuses connections: no process listens at its port."""

    code = "engine_refuses"


class PageFailed(WorkerUnreachable):
    """The engine answers, but not with this page: ``status`` is its answer, None if the page did not come in
    time, or was too long.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class CallLost(StreamBroken):
    """A kept connection ended as a call went out on it that must not be sent twice."""


class EngineServer:
    """One engine's HTTP server at ``url``, with or without the ``api_key`` that it asks for."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        connect_limit_s: float = CONNECT_LIMIT_S,
        look_limit_s: float = PROBE_LIMIT_S,
        host_lost_s: float = HOST_LOST_S,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._connect_limit_s = connect_limit_s
        self._look_limit_s = look_limit_s
        self._host = HostWatch(host_lost_s)
        self._session: HttpClient | None = None
        self._fresh: HttpClient | None = None
        """A session with a new connection for each request; None until it is needed."""
        self._answers: WeakSet[aiohttp.ClientResponse] = WeakSet()
        self.has_long_metrics = False
        """Whether the metrics page was over a limit when it was read last."""

    async def open(self) -> None:
        """Create the session; no request is sent yet."""
        self._session = self._new_client(keepalive_timeout=KEEP_IDLE_S)

    def _new_client(self, **connections: Any) -> HttpClient:
        return HttpClient(
            headers=self._headers,
            connector=aiohttp.TCPConnector(
                limit=0, ttl_dns_cache=30, socket_factory=self._new_socket, **connections
            ),
            limits=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_limit_s),
            read_bufsize=READ_BYTES,
        )

    def _new_socket(self, address: aiohttp.AddrInfoType) -> socket:
        made = _made.get()
        if made is not None:
            made.append(address)
        return self._host.new_socket(address)

    async def close(self) -> None:
        """Close every connection; open answers break. Idempotent."""
        self._host.close()
        for answer in tuple(self._answers):
            answer.close()  # a session alone leaves the readers waiting
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._fresh is not None:
            await self._fresh.close()
            self._fresh = None

    async def look(self, path: str, *, on_new_connection: bool = False) -> bytes | None:
        """Ask a small question; None when the engine does not know the path.

        Raises WorkerUnreachable when it does not answer, EngineRefuses when it refuses the connection,
        PageFailed when it answers with an error, or too late, KeyRefused for one about its key.
        """
        return await self._looked(path, _page, on_new_connection=on_new_connection)

    async def metrics(
        self, names: Iterable[str], path: str = "/metrics", *, on_new_connection: bool = False
    ) -> bytes | None:
        """Return the lines of the engine's metrics page that begin with ``names``, up to the limit of the
        page; None without a page. Raises as :meth:`look` does.
        """

        async def lines_of(answer: aiohttp.ClientResponse) -> bytes:
            lines = MetricLines(names)
            async for piece in answer.content.iter_chunked(METRICS_PIECE_BYTES):
                lines.push(piece)
                if lines.is_full:
                    break
                await asyncio.sleep(0)
            self.has_long_metrics = lines.is_full
            return lines.page()

        return await self._looked(path, lines_of, on_new_connection=on_new_connection)

    async def _looked(
        self,
        path: str,
        read: Callable[[aiohttp.ClientResponse], Awaitable[bytes]],
        *,
        on_new_connection: bool,
    ) -> bytes | None:
        limit = aiohttp.ClientTimeout(total=self._look_limit_s, sock_connect=self._connect_limit_s)
        try:
            ask = self._request_on_new_connection if on_new_connection else self._request
            async with await ask("GET", path, limits=limit) as answer:
                if answer.status in (404, 405):
                    return None
                if answer.status == 200:
                    return await read(answer)
                message = error_message(await read_error(answer))[0]
                if answer.status in REDIRECTS:
                    message = REDIRECTED
                if answer.status in (401, 403):
                    raise KeyRefused(f"{self.url}{path} answered {answer.status}: {message}")
                raise PageFailed(f"{self.url}{path} answered {answer.status}: {message}", answer.status)
        except StreamBroken as error:
            raise PageFailed(f"{self.url}{path}: {error.message}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            is_late = isinstance(error, TimeoutError) and not isinstance(
                error, aiohttp.ConnectionTimeoutError
            )
            is_refused = isinstance(error, OSError) and error.errno == ECONNREFUSED
            failed = PageFailed if is_late else EngineRefuses if is_refused else WorkerUnreachable
            raise failed(f"{self.url}{path}: {connection_failure(error)}") from error

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None, *, once: bool = False
    ) -> aiohttp.ClientResponse:
        """Send a call; return its answer, with the body still unread, once the engine accepted it. With
        ``once`` it is never sent twice.

        Raises WorkerUnreachable if the engine cannot be reached, StreamBroken if it takes the call and ends
        the connection, and the error of :func:`read_failure` for any other answer than 200.
        """
        try:
            all_headers = {"content-type": "application/json", **(headers or {})}
            answer = await self._request("POST", path, once=once, data=body, headers=all_headers)
            self._answers.add(answer)
            if answer.status == 200:
                return answer
            async with answer:
                raise await read_failure(answer)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise WorkerUnreachable(f"the engine is not reached: {connection_failure(error)}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StreamBroken(f"the engine took the call: {connection_failure(error)}") from error

    async def ask(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        answer_headers: "AnswerHeaders | None" = None,
        *,
        once: bool = False,
    ) -> bytes:
        """Send a call; return its whole answer, and put into ``answer_headers`` which headers it has. Raises
        as :meth:`post` does, StreamBroken once it was accepted.
        """
        answer = await self.post(path, body, headers, once=once)
        if answer_headers is not None:
            answer_headers.take(answer)
        try:
            async with answer:
                return await _read_whole(answer, ANSWER_MAX_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StreamBroken(f"the engine's answer broke off: {connection_failure(error)}") from error

    async def _request(
        self, method: str, path: str, *, once: bool = False, **options: Any
    ) -> aiohttp.ClientResponse:
        """Send a request; return the head of its answer.

        A kept connection may end just as a request goes out on it: engines close theirs after five idle
        seconds. A request lost in this way, without the head of an answer, is sent once more on a fresh
        connection. The engine may have begun on it: that costs it work and has no other effect, since the end
        of a connection makes it abort the request. But a call may be sent only ``once`` that fetches KV:
        blocks that were fetched may have another prompt's KV by then. Where the engine's host is lost there
        is no engine to send it to.
        """
        if self._session is None:
            raise WorkerUnreachable("the engine was left alone: nothing is sent to it any more")
        made: list[aiohttp.AddrInfoType] = []
        _made.set(made)
        try:
            return await self._session.request(method, f"{self.url}{path}", **options)
        except aiohttp.ClientConnectorError:  # no connection was to be had
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError) as error:
            is_host_lost = isinstance(error, OSError) and error.errno == ETIMEDOUT
            if made or is_host_lost or self._session is None:
                raise
            if once:
                raise CallLost("the engine ended the connection as the call was sent") from None
        return await self._request_on_new_connection(method, path, **options)

    async def _request_on_new_connection(
        self, method: str, path: str, **options: Any
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            raise WorkerUnreachable("the engine was left alone: nothing is sent to it any more")
        self._fresh = self._fresh or self._new_client(force_close=True)
        return await self._fresh.request(method, f"{self.url}{path}", **options)


JSON_TYPE = b"application/json"
EVENTS_TYPE = b"text/event-stream; charset=utf-8"


class AnswerHeaders:
    """The headers of an answer that its client gets. ``usual`` is the content type that it has anyway."""

    def __init__(self, usual: bytes) -> None:
        self._usual = (b"content-type", usual)
        self.passed: Headers = ()

    def take(self, answer: aiohttp.ClientResponse) -> None:
        """Keep those of ``answer``."""
        headers = passed_headers(tuple(answer.raw_headers))
        self.passed = tuple(header for header in headers if header != self._usual)


async def _page(answer: aiohttp.ClientResponse) -> bytes:
    return await _read_whole(answer, PAGE_MAX_BYTES)


async def _read_whole(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read a body up to ``bytes_max``. Raises StreamBroken for a longer one."""
    with BytesIO() as body:  # an error's traceback would hold a list of pieces for long
        async for piece in answer.content.iter_any():
            if body.tell() + len(piece) > bytes_max:
                raise StreamBroken(f"the answer is over the {bytes_max} bytes allowed")
            body.write(piece)
        return body.getvalue()


async def attach_server(
    spec: AttachSpec, attach: Callable[[EngineServer, AttachSpec], Awaitable[Attached]]
) -> Attached:
    """Open the engine's server, and return what ``attach`` makes of it; its errors close the server again."""
    server = EngineServer(spec.url, api_key=spec.api_key)
    await server.open()
    try:
        return await attach(server, spec)
    except BaseException:
        await server.close()
        raise
