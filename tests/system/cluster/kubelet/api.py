"""The API server as a kubelet uses it, in plain JSON.

Over aiohttp: of httpx, a call that is cancelled while it greets over TLS leaves its connection open for good,
and pods are closed in the middle of their calls.
"""

import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Self

import aiohttp

from tests.system.cluster.control_plane import ControlPlane

CALL_S = 60.0
WATCH_S = 300
LINE_BYTES = 1024 * 1024
STRATEGIC = "application/strategic-merge-patch+json"
GONE = (404, 409)
"""What is answered about an object that is not there any more, or of which another one is there."""

Object = dict[str, Any]


class ApiError(Exception):
    """The API server did not do it. ``status`` is that of its answer, 0 without one."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


class Api:
    """Calls with the administrator's rights. Each raises ApiError when it was not done."""

    def __init__(self, plane: ControlPlane) -> None:
        users = plane.admin.parent
        trust = ssl.create_default_context(cadata=plane.authority.certificate_pem.decode())
        trust.load_cert_chain(users / "admin.crt", users / "admin.key")
        self._session = aiohttp.ClientSession(
            plane.url,
            connector=aiohttp.TCPConnector(ssl=trust),
            timeout=aiohttp.ClientTimeout(total=CALL_S),
            read_bufsize=LINE_BYTES,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def read(self, path: str, **query: str) -> Object:
        """Return what is there."""
        return await self._asked("GET", path, params=query)

    async def create(self, path: str, body: Mapping[str, Any]) -> Object:
        """Create an object, or ask a question that is one."""
        return await self._asked("POST", path, json=body)

    async def patch(self, path: str, body: Mapping[str, Any]) -> Object:
        """Change an object by a strategic merge patch."""
        return await self._asked("PATCH", path, json=body, headers={"Content-Type": STRATEGIC})

    async def delete_now(self, path: str, uid: str) -> None:
        """Take away an object of this uid without further ado; nothing happens where it is gone."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        try:
            await self._asked("DELETE", path, json=body)
        except ApiError as error:
            if error.status not in GONE:
                raise

    async def watch(self, path: str, version: str, **query: str) -> AsyncGenerator[tuple[str, Object], None]:
        """Yield what changes after ``version``, until the server ends it. Errors are the server's events."""
        asked = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_S), **query}
        quiet = aiohttp.ClientTimeout(total=None, connect=CALL_S, sock_read=WATCH_S + CALL_S)
        try:
            async with self._session.get(path, params=asked, timeout=quiet) as answer:
                if not answer.ok:
                    raise ApiError(answer.status, await answer.text())
                async for line in answer.content:
                    event: Object = json.loads(line)
                    yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, str(error)) from error

    async def _asked(self, method: str, path: str, **more: Any) -> Object:
        try:
            async with self._session.request(method, path, **more) as answer:
                said = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, str(error)) from error
        if not answer.ok:
            raise ApiError(answer.status, said)
        reported: Object = json.loads(said)
        return reported
