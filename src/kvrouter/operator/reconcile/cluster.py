"""A Kubernetes client in plain JSON, over the official client's connections."""

import json
import re
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, cast

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import ConfigException
from pydantic import JsonValue

from kvrouter.core.errors import KvrouterError
from kvrouter.operator.plan.manifest import mapping
from kvrouter.operator.reconcile.kinds import Key, Manifest, ResourceKind, key_of, metadata_of, version_of

MANAGER = "kvrouter-operator"
"""The field manager of everything that the operator writes."""
CALL_S = 10.0
"""How long one call may take."""
PAGE_OBJECTS = 500
ANSWER_QUIET_S = 20.0
"""How much longer than asked for a watch may be silent before its connection counts as lost."""
NESTED_MAX = 12_000
"""The API server takes objects whose parts are up to 10,000 inside each other."""
FRAMES_A_LEVEL = 3
"""Python's own decoder needs two frames for each part inside another."""

JSON = "application/json"
JSON_OF_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
JSON_OF_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

Query = Sequence[tuple[str, str]]


class ClusterError(KvrouterError):
    """The API server did not do what it was asked."""

    code = "cluster_error"


class ClusterLost(ClusterError):
    """It could not be asked, or did not answer in time."""

    code = "cluster_lost"


class RequestRefused(ClusterError):
    """It answered with an error: ``status`` is HTTP's, ``reason`` its own word, such as ``Conflict``, and
    ``said`` its own sentence.
    """

    code = "cluster_refused"

    def __init__(self, message: str, *, status: int, reason: str = "", said: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.said = said or message

    @property
    def is_passing(self) -> bool:
        """Whether the same write may be taken a moment later, though nobody changes anything."""
        return self.status in _PASSING


FORBIDDEN = 403
NOT_FOUND = 404
CONFLICT = 409
GONE = 410
_PASSING = frozenset({CONFLICT, 429, 503, 504})


class ObjectList(NamedTuple):
    """The objects of a list, and the version from which a watch goes on."""

    objects: list[Manifest]
    version: str


class WatchChange(StrEnum):
    """What a watch reports about an object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


class Cluster:
    """Calls to the API server. Every one raises ClusterLost or Refused when it was not done."""

    def __init__(self, api: ApiClient, *, call_s: float = CALL_S) -> None:
        self._api = api
        self._call_s = call_s

    async def read(self, kind: ResourceKind, key: Key) -> Manifest | None:
        """Return one object; None when it is not there."""
        try:
            return await self._call("GET", kind.path(*key))
        except RequestRefused as refused:
            if refused.status == NOT_FOUND:
                return None
            raise

    async def served(self, group_version: str) -> frozenset[str]:
        """Return the plurals that are served in a group's version; none where it is not served at all."""
        try:
            answer = await self._call("GET", f"/apis/{group_version}")
        except RequestRefused as refused:
            if refused.status == NOT_FOUND:
                return frozenset()
            raise
        found = answer.get("resources")
        entries = found if isinstance(found, list) else []
        return frozenset(str(entry.get("name")) for entry in entries if isinstance(entry, dict))

    async def version(self) -> tuple[int, int]:
        """Return the version of Kubernetes: (1, 36); zeros for what cannot be read as one."""
        answer = await self._call("GET", "/version")
        major, minor = (re.match(r"\d{1,4}", str(answer.get(part))) for part in ("major", "minor"))
        return (int(major[0]) if major else 0, int(minor[0]) if minor else 0)

    async def find(self, kind: ResourceKind, *, namespace: str = "", labels: str = "") -> ObjectList:
        """Return all objects that ``labels``, a selector, picks; page by page."""
        objects: list[Manifest] = []
        rest = ""
        while True:
            query = [("limit", str(PAGE_OBJECTS)), ("labelSelector", labels), ("continue", rest)]
            accept = JSON_OF_METADATA_LIST if kind.is_metadata_enough else JSON
            page = await self._call("GET", kind.path(namespace), query=query, accept=accept)
            items = page.get("items")
            objects += [
                _reduced(kind, {**item, "apiVersion": kind.api_version, "kind": kind.name})
                for item in (items if isinstance(items, list) else [])
                if isinstance(item, dict)
            ]
            metadata = page.get("metadata")
            rest = str(metadata.get("continue") or "") if isinstance(metadata, dict) else ""
            if not rest:
                return ObjectList(objects, version_of(page))

    async def watch(
        self,
        kind: ResourceKind,
        version: str,
        *,
        namespace: str = "",
        labels: str = "",
        for_s: int,
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[tuple[WatchChange, Manifest], None]:
        """Yield what changes after ``version``, for about ``for_s`` seconds.

        ``opened`` is called once the server has taken the watch: it may be silent for long. Raises Refused
        with 410 when the server no longer knows that version.
        """
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("timeoutSeconds", str(for_s)),
            ("labelSelector", labels),
        ]
        quiet = aiohttp.ClientTimeout(sock_connect=self._call_s, sock_read=for_s + ANSWER_QUIET_S)
        accept = JSON_OF_METADATA if kind.is_metadata_enough else JSON
        response = await self._send("GET", kind.path(namespace), query=query, limits=quiet, accept=accept)
        opened()
        try:
            async for line in response.content:
                yield _change(kind, _loaded(line))
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise ClusterLost(f"watch of {kind.plural}: {_text_of(error)}") from error
        finally:
            _hang_up(response)

    async def claim(self, kind: ResourceKind, manifest: Manifest, *, manager: str) -> Manifest:
        """Be one more of those who hold the fields of ``manifest``, as the field manager ``manager``.

        Refused with 409 where another holds one of them with another value, or the object is not of the
        ``resourceVersion`` that is named.
        """
        query = (("fieldManager", manager),)
        return await self._call(
            "PATCH", kind.path(*key_of(manifest)), query=query, body=manifest, content_type=APPLY
        )

    async def apply(self, kind: ResourceKind, manifest: Manifest, *, subresource: str = "") -> Manifest:
        """Make the fields of ``manifest`` so, by server-side apply, regardless of who wrote them before."""
        path = kind.path(*key_of(manifest), subresource)
        return await self._call("PATCH", path, query=_FORCED, body=manifest, content_type=APPLY)

    async def dry_run(self, kind: ResourceKind, manifest: Manifest) -> None:
        """Ask whether the API server, and all that it asks, would take this apply; nothing is stored."""
        path = kind.path(*key_of(manifest))
        await self._call(
            "PATCH", path, query=(*_FORCED, ("dryRun", "All")), body=manifest, content_type=APPLY
        )

    async def merge(self, kind: ResourceKind, key: Key, patch: Manifest) -> Manifest:
        """Change one object by a JSON merge patch."""
        return await self._call("PATCH", kind.path(*key), query=_MANAGED, body=patch, content_type=MERGE)

    async def create(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        """Create an object; Refused with 409 when it is there."""
        path = kind.path(key_of(manifest).namespace)
        return await self._call("POST", path, query=_MANAGED, body=manifest)

    async def replace(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        """Replace an object; Refused with 409 when it is not of the ``resourceVersion`` that is named."""
        return await self._call("PUT", kind.path(*key_of(manifest)), query=_MANAGED, body=manifest)

    async def delete(self, kind: ResourceKind, key: Key, *, uid: str) -> None:
        """Delete the object of this uid, and what it owns after it; done when it is not there."""
        options: Manifest = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._call("DELETE", kind.path(*key), body=options)
        except RequestRefused as refused:
            if refused.status not in (NOT_FOUND, CONFLICT):
                raise

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: Manifest | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> Manifest:
        limits = aiohttp.ClientTimeout(total=self._call_s)
        response = await self._send(
            method, path, query=query, body=body, content_type=content_type, accept=accept, limits=limits
        )
        try:
            answer = _loaded(await response.read())
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise ClusterLost(f"{method} {path}: {_text_of(error)}") from error
        finally:
            response.release()
        return answer if isinstance(answer, dict) else {}

    async def _send(
        self,
        method: str,
        path: str,
        *,
        limits: aiohttp.ClientTimeout,
        query: Query = (),
        body: Manifest | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> aiohttp.ClientResponse:
        given = [(key, value) for key, value in query if value]
        try:
            method, url, headers, content, _ = await self._api.param_serialize(
                method,
                path,
                query_params=given,
                header_params={"Accept": accept, "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            answered = await self._api.call_api(
                method, url, header_params=headers, body=content, _request_timeout=limits
            )
            response = cast(aiohttp.ClientResponse, answered.response)
            if response.status >= 400:
                raise _refusal(response.status, f"{method} {path}", await response.read())
        except (aiohttp.ClientError, ConfigException, OSError) as error:  # also what the token's file raises
            raise ClusterLost(f"{method} {path}: {_text_of(error)}") from error
        return response


_MANAGED = (("fieldManager", MANAGER),)
_FORCED = (*_MANAGED, ("force", "true"))


def _hang_up(response: aiohttp.ClientResponse) -> None:
    """End a connection now: a polite end of TLS waits for the peer, and outlives the client's own close."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


class _DeepDecoder(json.JSONDecoder):
    """The decoder in Python: in C, Python 3.12 fails from a depth of about 1,500, whatever the limit."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # stubs lack it


def _loaded(text: bytes) -> JsonValue:
    """JSON of any depth that an API server stores: one such object must not hide all others of its kind."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(NESTED_MAX)
    try:
        found: JsonValue = json.loads(text)
    except RecursionError:
        sys.setrecursionlimit(FRAMES_A_LEVEL * NESTED_MAX)
        found = _DeepDecoder().decode(text.decode())
    finally:
        sys.setrecursionlimit(limit)
    return found


def _change(kind: ResourceKind, line: JsonValue) -> tuple[WatchChange, Manifest]:
    """Return one line of a watch; raises Refused for an error in it, and ValueError for what is none."""
    event = line if isinstance(line, dict) else {}
    thing = event.get("object")
    if not isinstance(thing, dict):
        raise ValueError("a line of a watch without an object")
    if event.get("type") == "ERROR":
        code = thing.get("code")
        raise RequestRefused(
            str(thing.get("message")),
            status=code if isinstance(code, int) else 500,
            reason=str(thing.get("reason") or ""),
        )
    return WatchChange(str(event.get("type"))), _reduced(kind, thing)


def _reduced(kind: ResourceKind, manifest: Manifest) -> Manifest:
    """Without what nothing is decided by, such as the record of who wrote which field: thousands are kept."""
    metadata_of(manifest).pop("managedFields", None)
    if not kind.kept:
        return manifest
    reduced: Manifest = {
        part: manifest[part] for part in ("apiVersion", "kind", "metadata") if part in manifest
    }
    for path in kind.kept:
        part, _, name = path.partition(".")
        fields = manifest.get(part)
        if isinstance(fields, dict) and name in fields:
            reduced[part] = {**mapping(reduced.get(part)), name: fields[name]}
    return reduced


def _text_of(error: Exception) -> str:
    """Errors of a connection often say nothing."""
    return str(error) or type(error).__name__


def _refusal(status: int, what: str, body: bytes) -> RequestRefused:
    try:
        parsed: JsonValue = json.loads(body)
    except ValueError:
        parsed = None
    fields = parsed if isinstance(parsed, dict) else {}
    message = str(fields.get("message") or body[:200].decode(errors="replace"))
    reason = str(fields.get("reason") or "")
    return RequestRefused(f"{what}: {message}", status=status, reason=reason, said=message)
