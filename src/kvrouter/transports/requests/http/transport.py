"""The router's end of requests over HTTP."""

import asyncio
import io
import itertools
import secrets
import socket
import ssl as tls
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple
from weakref import finalize

import aiohttp

from kvrouter.core.clock import AwakeClock
from kvrouter.core.errors import InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.http_client import HttpClient, connection_failure
from kvrouter.core.requests import EngineRequest, Leg
from kvrouter.transports.background import spawn, tick
from kvrouter.transports.requests.encoding import (
    REQUEST_MAX_BYTES,
    ErrorMessage,
    decode_refusal,
    encode_request,
    error_of,
)
from kvrouter.transports.requests.http.frames import (
    LEG_HEADER,
    MSGPACK,
    REASON_MAX_BYTES,
    REFUSAL_MAX_BYTES,
    ROUTER_HEADER,
    HttpFrameReader,
)
from kvrouter.transports.requests.leg_stream import LegStream, UnacceptedLegs
from kvrouter.transports.requests.port import (
    AliveSink,
    LivenessListeners,
    ReaderTooSlow,
    StreamBroken,
    WorkerUnreachable,
)
from kvrouter.transports.requests.session import ROUTER_LIMITS, RouterLimits

STREAM_TOKENS_MAX = 1024
"""Unread tokens of one leg above which its connection is not read."""

LEGS_MAX = 20_000
"""Legs of one transport that run at once, each on its own connection; a further one waits."""

CONTROL_CONNECTIONS_MAX = 256
RECEIVE_BUFFER_BYTES = 16 * 1024
LARGE_BODY_BYTES = 1 << 20
"""A longer body is written in pieces, so that other legs' answers are read meanwhile."""


class _HttpLeg:
    """One open leg: its HTTP request and response, and the stream that it fills."""

    def __init__(
        self, transport: "HttpRequestTransport", number: int, address: str, request: EngineRequest
    ) -> None:
        self.number = number
        self.address = address
        self.stream = LegStream(address, request, on_read=self._on_read, on_cancel=self._on_cancel)
        self._transport = transport
        self.is_prefill = request.leg is Leg.PREFILL
        self._room = asyncio.Event()
        self._waits_since_s: float | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, url: str, body: bytes) -> None:
        """Start to send the request and to read the response."""
        self._task = spawn(self._run(url, body), name="requests: send a leg and read its answer")

    def check(self, now_s: float, dead_after_s: float, slow_stream_limit_s: float) -> None:
        """Fail the leg if its worker is silent or its stream unread for too long."""
        if self._waits_since_s is not None and now_s - self._waits_since_s > dead_after_s:
            self.stream.withdraw(StreamBroken(f"{self.address} was not heard for {dead_after_s} s"))
        elif self.stream.unread_for_s(now_s) > slow_stream_limit_s:
            self.stream.withdraw(ReaderTooSlow(f"its reader took nothing for {slow_stream_limit_s:g} s"))

    def close(self) -> list[asyncio.Task[None]]:
        """Close the connection, unless the response was read to its end: then it is reused.

        Return the task to await, if there is one.
        """
        if self._response is not None:
            self._response.close()
        if self._task is None:
            return []
        self._task.cancel()
        return [self._task]

    async def _run(self, url: str, body: bytes) -> None:
        frames = HttpFrameReader()
        try:
            response = self._response = await self._transport.send_leg(url, self.number, body)
            del body  # the answer may be long
            self.stream.accept()
            while not self.stream.is_over:
                self._take(frames, await self._received(response))
                while self.stream.waiting_tokens >= STREAM_TOKENS_MAX and not self.stream.is_over:
                    self._room.clear()
                    await self._room.wait()
            if not self._transport.is_cancelling(self):
                async with asyncio.timeout(self._transport.limits.heartbeat_s):
                    await response.content.readany()
        except KvrouterError as error:
            if self.stream.is_accepted:
                self.stream.break_off(f"{self.address}: {error.message}")
            else:
                self.stream.fail(error)
        except (aiohttp.ClientError, OSError) as error:
            self.stream.break_off(f"{self.address}: {connection_failure(error)}")
        finally:
            self.stream.break_off(f"{self.address}: the leg ended")
            if not self._transport.is_cancelling(self):
                if self._response is not None:
                    self._response.close()
                self._transport.forget(self)

    async def _received(self, response: aiohttp.ClientResponse) -> bytes:
        self._waits_since_s = self._transport.clock.now_s
        try:
            return await response.content.readany()
        finally:
            self._waits_since_s = None

    def _take(self, frames: HttpFrameReader, received: bytes) -> None:
        if not received:
            self.stream.break_off(f"{self.address} ended its answer before the last chunk")
        for item in frames.feed(received):
            if isinstance(item, ErrorMessage):
                self.stream.fail(error_of(item))
            else:
                self.stream.push(item)

    def _on_read(self, _read_tokens: int) -> None:
        self._room.set()

    def _on_cancel(self, reason: str) -> None:
        self._room.set()
        if self._response is None:
            self.close()  # without its connection the worker cancels the leg
            self._transport.forget(self)
        elif self.is_prefill or self._task is None or not self._task.done():
            self._transport.cancel(self, reason)


class _Sessions(NamedTuple):
    """The HTTP clients: ``legs``, and ``control`` for health and cancellation, which never waits for legs."""

    legs: HttpClient
    control: HttpClient


class _Watch:
    """Polls the health of one worker while it has followers or legs."""

    def __init__(self, ask: Callable[[], Awaitable[bool]], every_s: float) -> None:
        self.followers = LivenessListeners()
        self.n_users = 0
        self._ask = ask
        self._every_s = every_s
        self.task = spawn(self._run(), name="requests: ask for a worker's health")

    async def _run(self) -> None:
        while True:
            self.followers.notify(is_alive=await self._ask())
            await asyncio.sleep(self._every_s)


class HttpRequestTransport:
    """Opens streams to workers at ``http://host:port/<worker id>/<incarnation>``, ``https`` with ``ssl``.

    The credit and connection limits in ``limits`` do not apply: each leg has its own connection, and
    ``legs_max`` of them run at once. Workers send heartbeats more often than the limits require.
    """

    def __init__(
        self,
        *,
        token: str,
        ssl: tls.SSLContext | None = None,
        limits: RouterLimits = ROUTER_LIMITS,
        legs_max: int = LEGS_MAX,
        on_refused: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self.limits = limits
        self._ssl = ssl
        self._legs_max = legs_max
        self._on_refused = on_refused
        self._headers = {"authorization": f"Bearer {token}".strip(), ROUTER_HEADER: secrets.token_hex(8)}
        self._numbers = itertools.count()
        self._legs: dict[int, _HttpLeg] = {}
        self._cancels: dict[int, asyncio.Task[None]] = {}
        self._watches: dict[str, _Watch] = {}
        self._sessions: _Sessions | None = None
        self.clock = AwakeClock(self.limits.heartbeat_s / 2)
        self._checking: asyncio.Task[None] | None = None
        self._unaccepted = UnacceptedLegs(limits.open_timeout_s)
        self._closed = False

    async def open(self, address: str, request: EngineRequest) -> LegStream:
        """Send ``request`` in a task. Raises WorkerUnreachable for an address of another transport."""
        return self.open_now(address, request)

    def open_now(self, address: str, request: EngineRequest) -> LegStream:
        """Send ``request`` in a task. Raises WorkerUnreachable for an address of another transport."""
        if self._closed:
            raise WorkerUnreachable("the plane was closed")
        body = encode_request(request)
        if len(body) > REQUEST_MAX_BYTES:
            raise InvalidRequest(f"{len(body)} bytes are above {REQUEST_MAX_BYTES}", param="token_ids")
        url = self._url(address, "/v1/legs")
        leg = _HttpLeg(self, next(self._numbers), address, request)
        self._hold(address)
        self._legs[leg.number] = leg
        leg.begin(url, body)
        self._unaccepted.add(leg.stream, time.monotonic())
        return leg.stream

    def follow(self, address: str, on_alive: AliveSink) -> Callable[[], None]:
        """Report the liveness of the worker at ``address``; return the idempotent function that stops it.

        Raises WorkerUnreachable for an unusable address, and after :meth:`close`.
        """
        self._url(address, "/health")
        if self._closed:
            raise WorkerUnreachable("the plane was closed")
        end_following = self._hold(address).followers.add(on_alive)
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                end_following()
                self._release(address)

        return end

    async def close(self) -> None:
        """Close every connection; open streams break."""
        self._closed = True
        tasks = [watch.task for watch in self._watches.values()] + list(self._cancels.values())
        for leg in tuple(self._legs.values()):
            leg.stream.break_off("the plane was closed")
            tasks += leg.close()
        if self._checking is not None:
            tasks.append(self._checking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sessions is not None:
            for session in self._sessions:
                await session.close()

    def is_cancelling(self, leg: _HttpLeg) -> bool:
        """Whether ``leg`` is being cancelled at the worker; its connection stays open until the answer."""
        return leg.number in self._cancels

    def cancel(self, leg: _HttpLeg, reason: str) -> None:
        """Cancel ``leg`` at the worker, then close its connection."""
        if leg.number not in self._cancels and not self._closed:
            self._cancels[leg.number] = spawn(self._cancel(leg, reason), name="requests: cancel a leg")

    def forget(self, leg: _HttpLeg) -> None:
        """Forget a leg that was refused or fully read. While the stream of a prefill leg is referenced, its
        worker is still polled, so that it keeps the prefilled KV.
        """
        if self._legs.pop(leg.number, None) is None:
            return
        if leg.is_prefill and leg.stream.is_accepted:
            finalize(leg.stream, self._release, leg.address).atexit = False
        else:
            self._release(leg.address)

    async def _cancel(self, leg: _HttpLeg, reason: str) -> None:
        url = self._url(leg.address, "/v1/legs") + f"/{leg.number}"
        body = reason.encode()[:REASON_MAX_BYTES]
        try:
            async with asyncio.timeout(self.limits.open_timeout_s):
                async with await self._session().control.request("DELETE", url, data=body):
                    pass
        except (aiohttp.ClientError, OSError):
            return  # closing the connection cancels too, without the reason
        finally:
            del self._cancels[leg.number]
            leg.close()
            self.forget(leg)

    async def send_leg(self, url: str, number: int, body: bytes) -> aiohttp.ClientResponse:
        """Send the request; return the response of a worker that accepted it, else raise its refusal."""
        headers = {LEG_HEADER: str(number), "content-type": MSGPACK}
        data = body if len(body) < LARGE_BODY_BYTES else io.BytesIO(body)
        response = await self._session().legs.request("POST", url, data=data, headers=headers)
        if response.status == 200:
            return response
        async with response:
            n_bytes = response.content_length
            if response.content_type != MSGPACK or n_bytes is None or n_bytes > REFUSAL_MAX_BYTES:
                raise WorkerUnreachable(f"{url} answered {response.status}")
            try:
                refusal = decode_refusal(await response.read())
            except ProtocolError as error:
                raise WorkerUnreachable(f"{url} answered {response.status}: {error.message}") from error
            raise error_of(refusal)

    async def _is_well(self, address: str) -> bool:
        began_s = self.clock.now_s
        while True:
            try:
                url = self._url(address, "/health")
                async with asyncio.timeout(self.limits.dead_after_s):
                    async with await self._session().control.request("GET", url) as response:
                        if response.status == 401:
                            self._on_refused(f"{address}: has another token")
                        return response.status == 204
            except TimeoutError:
                if self.clock.now_s - began_s > self.limits.dead_after_s / 2:
                    return False  # else this event loop was blocked: ask again
            except (aiohttp.ClientSSLError, aiohttp.InvalidURL) as error:
                self._on_refused(f"{address}: {connection_failure(error)}")
                return False
            except (aiohttp.ClientError, OSError, WorkerUnreachable):
                return False

    def _url(self, address: str, root: str) -> str:
        scheme, _, rest = address.partition("://")
        host, _, path = rest.partition("/")
        if scheme not in {"http", "https"} or not host or not path:
            raise WorkerUnreachable(f"{address} is no address of the http plane")
        if self._ssl is not None and scheme != "https":
            raise WorkerUnreachable(f"{address} is not encrypted, and this plane has TLS")
        return f"{scheme}://{host}{root}/{path}"

    def _hold(self, address: str) -> _Watch:
        """Poll ``address`` for one more user."""
        watch = self._watches.get(address)
        if watch is None:
            watch = self._watches[address] = _Watch(partial(self._is_well, address), self.limits.heartbeat_s)
        watch.n_users += 1
        return watch

    def _release(self, address: str) -> None:
        watch = self._watches[address]
        watch.n_users -= 1
        if watch.n_users == 0:
            watch.task.cancel()
            del self._watches[address]

    def _session(self) -> _Sessions:
        if self._closed:
            raise WorkerUnreachable("the plane was closed")
        if self._sessions is None:
            self._sessions = _Sessions(
                self._new_session(self._legs_max), self._new_session(CONTROL_CONNECTIONS_MAX)
            )
            self._checking = spawn(self._check(), name="requests: look after legs")
        return self._sessions

    def _new_session(self, connections_max: int) -> HttpClient:
        connector = aiohttp.TCPConnector(
            limit=connections_max,
            ssl=self._ssl if self._ssl is not None else True,
            socket_factory=_small_socket,
        )
        return HttpClient(
            connector=connector,
            headers=self._headers,
            read_bufsize=RECEIVE_BUFFER_BYTES,
            auto_decompress=False,
        )

    async def _check(self) -> None:
        while True:
            await tick(self.clock)
            for leg in tuple(self._legs.values()):
                leg.check(self.clock.now_s, self.limits.dead_after_s, self.limits.slow_stream_limit_s)


def _small_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket with a small receive buffer, so that unread data stops the sender."""
    family, kind, protocol, _, _ = address
    small = socket.socket(family, kind, protocol)
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    return small
