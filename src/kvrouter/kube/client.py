"""A client of the Kubernetes API server: requests, paged lists, watches, and a limit on JSON's depth.

One deeply nested object would fail the decoding of a whole list or watch, and hide all others: parts deeper
than :data:`DEPTH_MAX` are decoded as null.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import NamedTuple, Protocol, TypeVar

import aiohttp
import msgspec
from pydantic import JsonValue

from kvrouter.core.errors import KvrouterError
from kvrouter.core.http_client import DEFAULT_LIMITS, connection_failure
from kvrouter.core.json import Unreadable, parsed
from kvrouter.kube.objects import (
    Key,
    Manifest,
    ResourceKind,
    WatchEvent,
    fields_of,
    key_of,
    metadata_of,
    objects_in,
)

ANSWER_S = 10.0
"""The default time for an answer of the API server."""

PAGE_OBJECTS = 500
ANSWER_MAX_BYTES = 64 * 1024 * 1024
"""The largest page; a larger one is requested again with fewer objects. One object has 2 MiB at most."""

LINE_MAX_BYTES = 2 * 1024 * 1024
"""The longest line of a watch, more than etcd stores under one key."""

ASKED_AT_ONCE = 32
"""Concurrent requests of one client, watches not counted."""

WATCH_S = 300
"""The requested duration of a watch; then another continues where it ended."""

WATCH_QUIET_S = 20.0
"""Silence beyond the requested duration after which a watch's connection counts as lost."""

DEPTH_MAX = 400
"""Deeper parts of an object are decoded as null. Python's decoders fail from a depth of about 1,000 on; the
API server stores objects of 10,000.
"""

JSON = "application/json"
JSON_OF_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
JSON_OF_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

Query = Sequence[tuple[str, str]]
T = TypeVar("T")


class ClusterError(KvrouterError):
    """The API server did not do what was requested."""

    code = "cluster_error"


class ClusterLost(ClusterError):
    """The API server could not be reached, did not answer in time, or sent an undecodable answer."""

    code = "cluster_lost"


class ResponseTooLarge(ClusterLost):
    """The answer has more bytes than are read."""


class RequestRefused(ClusterError):
    """The API server answered with an error: HTTP's ``status``, its ``reason`` (one word, such as
    ``Conflict``) and ``detail`` (a sentence). The next request should wait ``wait_s``.
    """

    code = "cluster_refused"

    def __init__(
        self, message: str, *, status: int, reason: str = "", detail: str = "", wait_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.detail = detail or message
        self.wait_s = wait_s

    @property
    def is_passing(self) -> bool:
        """Whether the same write may succeed a moment later without any change."""
        return self.status in _PASSING

    @property
    def is_lasting(self) -> bool:
        """Whether the same write fails until somebody changes it, or a policy. A server error (500) lasts
        where a field has a wrong form.
        """
        return not self.is_passing and (self.status < 500 or _NO_FORM.match(self.detail) is not None)


UNAUTHORIZED = 401
FORBIDDEN = 403
NOT_FOUND = 404
CONFLICT = 409
GONE = 410
_PASSING = frozenset({CONFLICT, 429, 503, 504})
_NO_FORM = re.compile(r"failed to (create typed patch|convert new) object")
"""The beginning of the API server's message for an unknown field or a wrong value, sent as a server error."""


WARNINGS_MAX = 20
WARNING_CHARS_MAX = 1024
"""Limits of the warnings of one answer: webhooks and policies write them."""

_WARNING = re.compile(r'299 \S{1,64} "((?:[^"\\]|\\.)*)"')
_collected: ContextVar[list[str] | None] = ContextVar("collected_warnings", default=None)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Yield a list that collects the API server's warnings in the answers to this task's requests."""
    found: list[str] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def warnings_in(headers: Iterable[str]) -> list[str]:
    """Return the texts of an API server's ``Warning`` headers, each once, within the limits."""
    found: dict[str, None] = {}
    for header in headers:
        for quoted in _WARNING.findall(header):
            text = re.sub(r"\\(.)", r"\1", quoted)[:WARNING_CHARS_MAX]
            found["".join(letter if letter.isprintable() else " " for letter in text)] = None
    return [*found][:WARNINGS_MAX]


class ApiRequest(NamedTuple):
    """A request to an API server, with a JSON body if any."""

    method: str
    path: str
    query: Query
    headers: Mapping[str, str]
    body: bytes | None
    limits: aiohttp.ClientTimeout


class Connection(Protocol):
    """Sends authenticated requests to one API server."""

    async def send(self, request: ApiRequest) -> aiohttp.ClientResponse:
        """Send a request; return its response with the body unread.

        Raises ClusterLost, OSError or aiohttp.ClientError.
        """

    def refused(self) -> None:
        """Renew the credentials: the API server rejected them (401)."""

    async def close(self) -> None:
        """Close every connection; idempotent."""


class ClusterUser(Protocol):
    """A user of an API server, and the Kubernetes namespace to use."""

    @property
    def namespace(self) -> str:
        """The Kubernetes namespace of the objects."""

    def connection(self) -> Connection:
        """Return a connection as this user; it opens with the first request."""


class ObjectList(NamedTuple):
    """The objects of a list, and the version from which to watch."""

    objects: list[Manifest]
    version: str


class _ListMetadata(
    msgspec.Struct, frozen=True, rename={"resource_version": "resourceVersion", "more": "continue"}
):
    resource_version: str = ""
    more: str = ""


class _Page(msgspec.Struct, frozen=True):
    metadata: _ListMetadata = _ListMetadata()
    items: list[msgspec.Raw] | None = None


class Status(msgspec.Struct, frozen=True):
    """The API server's description of an error."""

    code: int = 0
    reason: str = ""
    message: str = ""


class KubeClient:
    """Sends requests to one API server. Every method raises ClusterLost or RequestRefused when it fails.

    ``answer_s`` is how long the API server may take for an answer. ``manager`` is the field manager of
    writes. ``on_warning`` is called with the request and a warning of the API server.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        answer_s: float = ANSWER_S,
        manager: str = "kvrouter",
        on_warning: Callable[[str, str], None] | None = None,
    ) -> None:
        self._connection = connection
        self._on_warning = on_warning
        self._answer_s = answer_s
        self._managed = (("fieldManager", manager),)
        self._forced = (*self._managed, ("force", "true"))
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._connection.close()

    # Bytes

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: bytes | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        """Send a request; return the body of the answer."""
        async with self._asking:
            try:
                async with asyncio.timeout(self._answer_s):
                    response = await self._send(
                        method, path, query=query, body=body, content_type=content_type, accept=accept
                    )
                    async with response:
                        return await _read(response)
            except (aiohttp.ClientError, OSError) as error:
                raise _lost(f"{method} {path}", error) from error

    async def everything(
        self, path: str, *, labels: str = "", accept: str = JSON
    ) -> tuple[list[msgspec.Raw], str]:
        """Return every object under ``path`` that matches the selector ``labels``, page by page; and the
        resourceVersion of the list.
        """
        found: list[msgspec.Raw] = []
        rest, n_objects = "", PAGE_OBJECTS
        while True:
            query = [("limit", str(n_objects)), ("labelSelector", labels), ("continue", rest)]
            try:
                page = await _page(await self.ask("GET", path, query=query, accept=accept))
            except ResponseTooLarge:
                if n_objects == 1:
                    raise
                n_objects = max(1, n_objects // 4)
                continue
            found += page.items or ()
            rest = page.metadata.more
            if not rest:
                return found, page.metadata.resource_version

    @asynccontextmanager
    async def watch(
        self, path: str, version: str, *, labels: str = "", accept: str = JSON, for_s: int = WATCH_S
    ) -> AsyncIterator[AsyncIterator[list[WatchEvent]]]:
        """Watch changes after ``version``, for about ``for_s`` seconds. The API server has accepted the watch
        when the context is entered.

        RequestRefused with 410 means that the server no longer has that version.
        """
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("timeoutSeconds", str(for_s)),
            ("labelSelector", labels),
        ]
        quiet = aiohttp.ClientTimeout(sock_connect=self._answer_s, sock_read=for_s + WATCH_QUIET_S)
        try:
            async with asyncio.timeout(self._answer_s):
                response = await self._send("GET", path, query=query, accept=accept, limits=quiet)
        except OSError as error:
            raise _lost(f"watch of {path}", error) from error
        try:
            yield _events(response, path)
        finally:
            _hang_up(response)

    # Objects

    async def read(self, kind: ResourceKind, key: Key) -> Manifest | None:
        """Return one object; None when it does not exist."""
        return await self._found(kind.path(*key))

    async def served(self, group_version: str) -> frozenset[str]:
        """Return the plurals that are served in a group's version; an empty set where it is not served."""
        answer = await self._found(f"/apis/{group_version}") or {}
        return frozenset(str(entry.get("name")) for entry in objects_in(answer.get("resources")))

    async def version(self) -> tuple[int, int]:
        """Return the version of Kubernetes: (1, 36); (0, 0) for an unreadable one."""
        answer = await self._call("GET", "/version")
        major, minor = (re.match(r"\d{1,4}", str(answer.get(part))) for part in ("major", "minor"))
        return (int(major[0]) if major else 0, int(minor[0]) if minor else 0)

    async def find(self, kind: ResourceKind, *, namespace: str = "", labels: str = "") -> ObjectList:
        """Return all objects that match the selector ``labels``."""
        accept = JSON_OF_METADATA_LIST if kind.is_metadata_enough else JSON
        items, version = await self.everything(kind.path(namespace), labels=labels, accept=accept)
        named: Manifest = {"apiVersion": kind.api_version, "kind": kind.name}
        return ObjectList([{**manifest_of(kind, item), **named} for item in items], version)

    async def claim(self, kind: ResourceKind, manifest: Manifest, *, manager: str) -> Manifest:
        """Become a co-owner of the fields of ``manifest``, as the field manager ``manager``.

        RequestRefused with 409 when another manager owns one of them with another value, or the object is at
        another ``resourceVersion``.
        """
        query = (("fieldManager", manager),)
        return await self._call(
            "PATCH", kind.path(*key_of(manifest)), query=query, body=manifest, content_type=APPLY
        )

    async def apply(self, kind: ResourceKind, manifest: Manifest, *, subresource: str = "") -> Manifest:
        """Set the fields of ``manifest`` by server-side apply, regardless of their owners."""
        path = kind.path(*key_of(manifest), subresource)
        return await self._call("PATCH", path, query=self._forced, body=manifest, content_type=APPLY)

    async def dry_run(self, kind: ResourceKind, manifest: Manifest) -> None:
        """Check by a dry run whether the API server and its webhooks accept this apply; nothing is stored."""
        path = kind.path(*key_of(manifest))
        await self._call(
            "PATCH", path, query=(*self._forced, ("dryRun", "All")), body=manifest, content_type=APPLY
        )

    async def merge(self, kind: ResourceKind, key: Key, patch: Manifest) -> Manifest:
        """Change one object by a JSON merge patch."""
        return await self._call("PATCH", kind.path(*key), query=self._managed, body=patch, content_type=MERGE)

    async def create(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        """Create an object; RequestRefused with 409 when it exists."""
        path = kind.path(key_of(manifest).namespace)
        return await self._call("POST", path, query=self._managed, body=manifest)

    async def replace(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        """Replace an object; RequestRefused with 409 when it is at another ``resourceVersion``."""
        return await self._call("PUT", kind.path(*key_of(manifest)), query=self._managed, body=manifest)

    async def delete(self, kind: ResourceKind, key: Key, *, uid: str) -> None:
        """Delete the object with this uid, and then the objects that it owns; done when it does not exist."""
        options: Manifest = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._call("DELETE", kind.path(*key), body=options)
        except RequestRefused as refused:
            if refused.status not in (NOT_FOUND, CONFLICT):
                raise

    async def _found(self, path: str) -> Manifest | None:
        """Return the JSON object at ``path``; None when it does not exist."""
        try:
            return await self._call("GET", path)
        except RequestRefused as refused:
            if refused.status == NOT_FOUND:
                return None
            raise

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: Manifest | None = None,
        content_type: str = JSON,
    ) -> Manifest:
        text = None if body is None else json.dumps(body).encode()
        answer = await self.ask(method, path, query=query, body=text, content_type=content_type)
        return fields_of(_manifest(answer))

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Query,
        accept: str,
        content_type: str = JSON,
        body: bytes | None = None,
        limits: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            asked = [(key, value) for key, value in query if value]
            request = ApiRequest(method, path, asked, headers, body, limits or DEFAULT_LIMITS)
            response = await self._connection.send(request)
            self._collect_warnings(f"{method} {path}", response)
            if response.status >= 400:
                if response.status == UNAUTHORIZED:
                    self._connection.refused()
                async with response:
                    raise _refusal(response, f"{method} {path}", await _read(response))
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(f"{method} {path}", error) from error
        return response

    def _collect_warnings(self, what: str, response: aiohttp.ClientResponse) -> None:
        found, collected = warnings_in(response.headers.getall("Warning", ())), _collected.get()
        if collected is not None:
            collected += found
        if self._on_warning is not None:
            for text in found:
                self._on_warning(what, text)


def manifest_of(kind: ResourceKind, text: msgspec.Raw) -> Manifest:
    """Return an object without the fields that no decision uses, such as the owners of its fields, because
    thousands are kept. Raises ClusterLost for anything but an object.
    """
    manifest = _manifest(bytes(text))
    if not isinstance(manifest, dict):
        raise ClusterLost(f"{kind.plural}: something else than an object")
    metadata_of(manifest).pop("managedFields", None)
    if not kind.kept:
        return manifest
    reduced: Manifest = {
        part: manifest[part] for part in ("apiVersion", "kind", "metadata") if part in manifest
    }
    for path in kind.kept:
        part, _, name = path.partition(".")
        fields, kept = manifest.get(part), reduced.get(part)
        if isinstance(fields, dict) and name in fields:
            reduced[part] = {**fields_of(kept), name: fields[name]}
    return reduced


ENVELOPE_DEPTH = 2
"""The depth of an object in a list; in a line of a watch it is 1."""


def decoded(text: bytes, kind: type[T]) -> T:
    """Return ``text`` decoded as ``kind``. Raises ClusterLost."""
    decoder = msgspec.json.Decoder(kind)
    with suppress(Unreadable):
        return parsed(decoder, text)
    cut = cut_at_depth(text, depth_max=DEPTH_MAX + ENVELOPE_DEPTH)
    try:
        return parsed(decoder, cut)
    except Unreadable as error:
        raise ClusterLost(f"the API server's answer: {error}") from error


_pages = msgspec.json.Decoder(_Page)
_statuses = msgspec.json.Decoder(Status)
_manifests: "msgspec.json.Decoder[JsonValue]" = msgspec.json.Decoder()


async def _page(text: bytes) -> _Page:
    """Decode a page. One with a deep object is decoded in a thread: that takes a second for 20 MB."""
    try:
        return parsed(_pages, text)
    except Unreadable:
        return await asyncio.to_thread(decoded, text, _Page)


def _manifest(text: bytes) -> JsonValue:
    try:
        # The depth limit of decoders differs between versions of Python: results must not.
        return parsed(_manifests, cut_at_depth(text) if _may_be_too_deep(text) else text)
    except Unreadable as error:
        raise ClusterLost(f"the API server's answer: {error}") from error


def _may_be_too_deep(text: bytes) -> bool:
    return text.count(b"{") + text.count(b"[") > DEPTH_MAX


_NESTING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{]|[\]}]', re.DOTALL)
_OPENS, _CLOSES = b"[{", b"]}"


def cut_at_depth(text: bytes, *, depth_max: int = DEPTH_MAX) -> bytes:
    """Return JSON text in which every part deeper than ``depth_max`` is null."""
    pieces: list[bytes] = []
    depth = kept_to = cut_from = 0
    for token in _NESTING.finditer(text):
        at = token.start()
        if text[at] in _OPENS:
            depth += 1
            if depth == depth_max + 1:
                cut_from = at
        elif text[at] in _CLOSES:
            if depth == depth_max + 1:
                pieces += (text[kept_to:cut_from], b"null")
                kept_to = token.end()
            depth -= 1
    return b"".join((*pieces, text[kept_to:]))


async def _read(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for piece in response.content.iter_any():
        text += piece
        if len(text) > ANSWER_MAX_BYTES:
            raise ResponseTooLarge(f"the API server's answer has more than {ANSWER_MAX_BYTES} bytes")
    return bytes(text)


async def _events(response: aiohttp.ClientResponse, path: str) -> AsyncIterator[list[WatchEvent]]:
    """Yield the events of a watch, in the lists in which they arrive. Raises RequestRefused for an error."""
    rest = b""
    try:
        async for piece in response.content.iter_any():
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LINE_MAX_BYTES:
                raise ClusterLost(f"a line of the watch of {path} has more than {LINE_MAX_BYTES} bytes")
            events = [decoded(line, WatchEvent) for line in lines if line]
            for event in events:
                if event.type == "ERROR":
                    status = decoded(bytes(event.object), Status)
                    raise RequestRefused(status.message, status=status.code or 500, reason=status.reason)
            if events:
                yield events
    except (aiohttp.ClientError, OSError) as error:
        raise _lost(f"watch of {path}", error) from error


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """Abort a connection: a graceful end of TLS waits for the peer, and outlives the session's close."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


def _lost(what: str, error: Exception) -> ClusterLost:
    return ClusterLost(f"{what}: the API server: {connection_failure(error)}")


def _refusal(response: aiohttp.ClientResponse, what: str, body: bytes) -> RequestRefused:
    try:
        status = parsed(_statuses, body)
    except Unreadable:
        status = Status()
    message = status.message or body[:200].decode(errors="replace")
    asked_wait = response.headers.get("Retry-After", "")
    wait_s = float(asked_wait) if asked_wait.isascii() and asked_wait.isdecimal() else 0.0
    return RequestRefused(
        f"{what}: {message}", status=response.status, reason=status.reason, detail=message, wait_s=wait_s
    )
