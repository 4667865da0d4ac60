"""The few questions of the API server that discovery asks, over aiohttp."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import WorkerId
from kvrouter.planes.discovery.kubernetes.account import Account, Token
from kvrouter.planes.discovery.kubernetes.objects import (
    FLEET_LABEL,
    GROUP,
    PLURAL,
    VERSION,
    Event,
    Page,
    Status,
    WorkerObject,
    name_of,
)

PAGE_OBJECTS = 200
ANSWER_MAX_BYTES = 64 * 1024 * 1024
"""A page of the largest cards, with room."""

LINE_MAX_BYTES = 2 * 1024 * 1024
"""More than etcd keeps under one key."""

ASKED_AT_ONCE = 32
"""How many questions of this process may be open, watches apart."""

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


def reason(error: Exception) -> str:
    """What ``error`` says, in a line that a person can act on."""
    if isinstance(error, ApiError) and error.code == 404:
        return f"{error} (is {PLURAL}.{GROUP} installed? kubectl apply --server-side -f deploy/crds)"
    if isinstance(error, ApiError) and error.code == 403:
        return f"{error} (bind a Role for {PLURAL}.{GROUP} to the pod's service account)"
    if isinstance(error, TimeoutError):
        return "the API server did not answer in time"
    return str(error) or type(error).__name__


class WorkersApi:
    """The objects of one fleet. Every method raises one of :data:`STORE_ERRORS`.

    ``answer_s`` is how long the API server may take for an answer.
    """

    def __init__(self, account: Account, *, fleet: str, answer_s: float) -> None:
        self._fleet = fleet
        self._answer_s = answer_s
        self._token = Token(account)
        self._account = account
        self._path = f"{account.url}/apis/{GROUP}/{VERSION}/namespaces/{account.namespace}/{PLURAL}"
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close every connection; idempotent."""
        if self._session is not None:
            await self._session.close()

    async def everything(self) -> tuple[list[WorkerObject], str]:
        """Return every object of the fleet, and the version as of which they are all."""
        found: list[WorkerObject] = []
        more: dict[str, str] = {}
        while True:
            asked = {"labelSelector": self._selector(), "limit": str(PAGE_OBJECTS), **more}
            page = _decoded(await self._ask("GET", self._path, params=asked), Page)
            found += page.items
            if not page.metadata.more:
                return found, page.metadata.resource_version
            more = {"continue": page.metadata.more}

    async def read(self, worker_id: WorkerId) -> WorkerObject | None:
        """Return a worker's object as the store has it; None without one."""
        try:
            return _decoded(await self._ask("GET", self._url(worker_id)), WorkerObject)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def create(self, body: bytes) -> WorkerObject:
        """Write an object where none is: 409 where one is."""
        return _decoded(await self._ask("POST", self._path, body=body), WorkerObject)

    async def replace(self, worker_id: WorkerId, body: bytes) -> WorkerObject:
        """Write over the version that ``body`` names: 409 where another is there, 404 where none is."""
        return _decoded(await self._ask("PUT", self._url(worker_id), body=body), WorkerObject)

    async def delete(self, worker_id: WorkerId, version: str) -> None:
        """Delete a worker's object as of this version: 409 where another is there, 404 where none is."""
        body = msgspec.json.encode({"preconditions": {"resourceVersion": version}})
        await self._ask("DELETE", self._url(worker_id), body=body)

    @asynccontextmanager
    async def watch(self, version: str) -> AsyncIterator[AsyncIterator[list[Event]]]:
        """Hear what happens after ``version``, as it comes; open when this is entered, it ends some time."""
        asked = {
            "labelSelector": self._selector(),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._answer_s)
        async with asyncio.timeout(self._answer_s):
            response = await self._opened().get(
                self._path, params=asked, headers=self._headers(), timeout=timeout
            )
        try:
            async with asyncio.timeout(self._answer_s):
                await self._check(response)
            yield _events(response)
        finally:
            _hang_up(response)

    async def _ask(
        self, method: str, url: str, *, params: dict[str, str] | None = None, body: bytes | None = None
    ) -> bytes:
        async with self._asking, asyncio.timeout(self._answer_s):
            headers = self._headers()
            if body is not None:
                headers["Content-Type"] = "application/json"
            async with self._opened().request(
                method, url, params=params, data=body, headers=headers
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
            connector = aiohttp.TCPConnector(ssl=self._account.trust(), limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token.read()}", "Accept": "application/json"}

    def _selector(self) -> str:
        return f"{FLEET_LABEL}={self._fleet}"

    def _url(self, worker_id: WorkerId) -> str:
        return f"{self._path}/{name_of(self._fleet, worker_id)}"


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


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[list[Event]]:
    """The lines of a watch, all that came together at once. Raises ApiError for one that tells an error."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LINE_MAX_BYTES:
            raise ProtocolError(f"a line of a watch has more than {LINE_MAX_BYTES} bytes")
        events = [_decoded(line, Event) for line in lines if line]
        for event in events:
            if event.type == "ERROR":
                raise ApiError(_decoded(bytes(event.object), Status))
        if events:
            yield events


def _decoded(text: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the API server's answer: {error}") from error
