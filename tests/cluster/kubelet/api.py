"""The API server as a kubelet uses it, in plain JSON."""

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import httpx

from tests.cluster.control_plane import ControlPlane

CALL_S = 10.0
WATCH_S = 300
STRATEGIC = "application/strategic-merge-patch+json"

Object = dict[str, Any]


class Api:
    """Calls with the administrator's rights. Each raises httpx.HTTPError when it was not done."""

    def __init__(self, plane: ControlPlane) -> None:
        users = plane.admin.parent
        trust = ssl.create_default_context(cadata=plane.authority.certificate_pem.decode())
        trust.load_cert_chain(users / "admin.crt", users / "admin.key")
        self._client = httpx.AsyncClient(base_url=plane.url, verify=trust, timeout=CALL_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def read(self, path: str, **query: str) -> Object:
        """Return what is there."""
        return _told(await self._client.get(path, params=query))

    async def create(self, path: str, body: Mapping[str, Any]) -> Object:
        """Create an object, or ask a question that is one."""
        return _told(await self._client.post(path, json=body))

    async def patch(self, path: str, body: Mapping[str, Any]) -> Object:
        """Change an object by a strategic merge patch."""
        headers = {"Content-Type": STRATEGIC}
        return _told(await self._client.patch(path, json=body, headers=headers))

    async def delete_now(self, path: str, uid: str) -> None:
        """Take away an object of this uid without further ado; nothing happens where it is gone."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        answer = await self._client.request("DELETE", path, json=body)
        if answer.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.CONFLICT):
            answer.raise_for_status()

    async def watch(self, path: str, version: str, **query: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield what changes after ``version``, until the server ends it. Errors are the server's events."""
        asked = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_S), **query}
        quiet = httpx.Timeout(CALL_S, read=WATCH_S + CALL_S)
        async with self._client.stream("GET", path, params=asked, timeout=quiet) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                event: Object = json.loads(line)
                yield event["type"], event["object"]


def _told(answer: httpx.Response) -> Object:
    told: Object = answer.raise_for_status().json()
    return told
