"""A client of the API server over aiohttp: requests, lists in pages, watches."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.transports.discovery.kubernetes.account import Account, Token
from kvrouter.transports.discovery.kubernetes.objects import ListMetadata, Status, WatchEvent

PAGE_OBJECTS = 200
ANSWER_MAX_BYTES = 64 * 1024 * 1024
"""A page of the largest cards, with room."""

LINE_MAX_BYTES = 2 * 1024 * 1024
"""More than etcd keeps under one key."""

ASKED_AT_ONCE = 32
"""How many questions of this process may be open, watches apart."""

KEPT_OPEN_S = 75.0
"""For how long a connection waits for the next question. The API server closes one after 90 s; a worker
renews its lease more often than this, so that no renewal costs both of them a handshake.
"""

WATCH_S = 300
"""For how long a watch is asked for; then another goes on where it ended."""

_T = TypeVar("_T")


class ApiError(Exception):
    """The API server did not do what it was asked, and wants to be left alone for ``wait_s``."""

    def __init__(self, status: Status, *, wait_s: float = 0.0) -> None:
        super().__init__(f"the API server says {status.code} {status.reason}: {status.message}")
        self.code = status.code
        self.wait_s = wait_s


STORE_ERRORS = (ApiError, ProtocolError, aiohttp.ClientError, TimeoutError, OSError)
"""What asking the API server raises when it does not do what was asked."""


def why(error: Exception) -> str:
    """What ``error``, one of :data:`STORE_ERRORS`, says."""
    if isinstance(error, TimeoutError):
        return "the API server did not answer in time"
    return str(error) or type(error).__name__


class Page(msgspec.Struct, frozen=True):
    """A page of a list."""

    metadata: ListMetadata
    items: list[msgspec.Raw]


class ApiServer:
    """Every method raises one of :data:`STORE_ERRORS`; paths are those of Kubernetes.

    ``answer_s`` is how long the API server may take for an answer.
    """

    def __init__(self, account: Account, *, answer_s: float) -> None:
        self._answer_s = answer_s
        self._token = Token(account)
        self._account = account
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close every connection; idempotent."""
        if self._session is not None:
            await self._session.close()

    async def everything(self, path: str, *, selector: str) -> tuple[list[msgspec.Raw], str]:
        """Return every object that the labels select, and the version as of which they are all."""
        found: list[msgspec.Raw] = []
        more: dict[str, str] = {}
        while True:
            asked = {"labelSelector": selector, "limit": str(PAGE_OBJECTS), **more}
            page = decoded(await self.ask("GET", path, params=asked), Page)
            found += page.items
            if not page.metadata.more:
                return found, page.metadata.resource_version
            more = {"continue": page.metadata.more}

    @asynccontextmanager
    async def watch(
        self, path: str, version: str, *, selector: str
    ) -> AsyncIterator[AsyncIterator[list[WatchEvent]]]:
        """Hear what happens after ``version``, as it comes; open when this is entered, it ends some time."""
        asked = {
            "labelSelector": selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._answer_s)
        async with asyncio.timeout(self._answer_s):
            response = await self._opened().get(
                f"{self._account.url}{path}", params=asked, headers=self._headers(), timeout=timeout
            )
        try:
            async with asyncio.timeout(self._answer_s):
                await self._check(response)
            yield _events(response)
        finally:
            _hang_up(response)

    async def ask(
        self, method: str, path: str, *, params: dict[str, str] | None = None, body: bytes | None = None
    ) -> bytes:
        """Ask; return the whole answer."""
        async with self._asking, asyncio.timeout(self._answer_s):
            headers = self._headers()
            if body is not None:
                headers["Content-Type"] = "application/json"
            async with self._opened().request(
                method, f"{self._account.url}{path}", params=params, data=body, headers=headers
            ) as response:
                await self._check(response)
                return await _read(response)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.ok:
            return
        if response.status == 401:
            self._token.refused()
        text = await _read(response)
        try:
            said = msgspec.json.decode(text, type=Status)
        except msgspec.MsgspecError:
            said = Status(message=text[:200].decode(errors="replace"))
        asked_wait = response.headers.get("Retry-After", "")
        wait_s = float(asked_wait) if asked_wait.isascii() and asked_wait.isdecimal() else 0.0
        raise ApiError(Status(response.status, said.reason, said.message), wait_s=wait_s)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                ssl=self._account.trust(), limit=0, keepalive_timeout=KEPT_OPEN_S
            )
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token.read()}", "Accept": "application/json"}


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """End a connection now: a polite end of TLS waits for the peer, and outlives the session's own close."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for piece in response.content.iter_any():
        text += piece
        if len(text) > ANSWER_MAX_BYTES:
            raise ProtocolError(f"the API server's answer has more than {ANSWER_MAX_BYTES} bytes")
    return bytes(text)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[list[WatchEvent]]:
    """The lines of a watch, all that came together at once. Raises ApiError for one that reports an error."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LINE_MAX_BYTES:
            raise ProtocolError(f"a line of a watch has more than {LINE_MAX_BYTES} bytes")
        events = [decoded(line, WatchEvent) for line in lines if line]
        for event in events:
            if event.type == "ERROR":
                raise ApiError(decoded(bytes(event.object), Status))
        if events:
            yield events


def decoded(text: bytes, kind: type[_T]) -> _T:
    """Return ``text`` as a value of this kind. Raises ProtocolError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the API server's answer: {error}") from error
