"""The HTTPS door to which the API server sends its questions. Every replica of the operator opens one."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from aiohttp import web
from pydantic import JsonValue

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.operator.admission.review import answer, judged, read_review
from kvrouter.operator.admission.shown import ShownCertificate
from kvrouter.operator.admission.validate import Verdict
from kvrouter.operator.facts import ClusterFacts, Grove

BODY_BYTES_MAX = 8 * 2**20
"""Two objects of the most that an API server takes, and what is around them."""
REVIEWS_MAX = 32
"""Questions that are answered at a time; one more is answered 503."""
FACTS_S = 5.0
BODY_S = 5.0
REREAD_S = 10.0

Facts = Callable[[], Awaitable[ClusterFacts]]
"""Reads the cluster. May raise OSError or TimeoutError: then it is judged as one that could not be read."""


class Listener(Protocol):
    """Who is told what happens at the door."""

    def judged(self, verdict: Verdict) -> None:
        """A question was answered with this verdict."""

    def not_answered(self, reason: str) -> None:
        """A question was no question, or came when the door was full."""

    def certificate_changed(self) -> None:
        """Another certificate is shown from now on."""

    def certificate_refused(self, reason: str) -> None:
        """The files changed, and cannot be shown: what was shown is shown still."""


class AdmissionDoor:
    """``POST /validate``, ``GET /healthz`` and ``GET /readyz`` over TLS.

    ``not_ready`` returns why the operator is not ready yet, or None. The cluster has ``facts_s`` to answer;
    then topologies count as unread, and only what needs none is admitted.
    """

    def __init__(
        self,
        *,
        facts: Facts,
        certificate: ShownCertificate,
        listener: Listener,
        not_ready: Callable[[], str | None],
        facts_s: float = FACTS_S,
        body_s: float = BODY_S,
        reread_s: float = REREAD_S,
        body_bytes_max: int = BODY_BYTES_MAX,
        reviews_max: int = REVIEWS_MAX,
    ) -> None:
        self._facts, self._listener, self._not_ready = facts, listener, not_ready
        self._certificate = certificate
        self._facts_s, self._body_s, self._reread_s = facts_s, body_s, reread_s
        self._body_bytes_max, self._reviews_left = body_bytes_max, reviews_max
        app = web.Application(client_max_size=body_bytes_max)
        app.router.add_post("/validate", self._validate)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=facts_s + body_s)
        self._rereading: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Open the door; return its port, which is a free one for port 0. Raises OSError when it is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=self._certificate.context)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._rereading = asyncio.create_task(self._reread())
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the door; questions that are being answered are answered."""
        if self._rereading is not None:
            self._rereading.cancel()
            with suppress(asyncio.CancelledError):
                await self._rereading
        await self._runner.cleanup()

    async def _reread(self) -> None:
        while True:
            await asyncio.sleep(self._reread_s)
            try:
                if self._certificate.reread():
                    self._listener.certificate_changed()
            except ConfigError as error:
                self._listener.certificate_refused(error.message)

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        reason = self._not_ready()
        return web.Response(text="ok\n") if reason is None else web.Response(status=503, text=f"{reason}\n")

    async def _validate(self, request: web.Request) -> web.Response:
        if self._reviews_left <= 0:
            return self._refused(503, "too many questions at a time")
        self._reviews_left -= 1
        try:
            return await self._answered(request)
        finally:
            self._reviews_left += 1

    async def _answered(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(self._body_s):
                body = await request.read()
            review = read_review(json.loads(body))
        except TimeoutError:
            return self._refused(408, f"no whole body within {self._body_s:g} s")
        except web.HTTPRequestEntityTooLarge:
            return self._refused(413, f"a body of more than {self._body_bytes_max} bytes")
        except (ValueError, RecursionError) as error:
            return self._refused(400, f"no JSON: {error}")
        except ProtocolError as error:
            return self._refused(400, error.message)
        verdict = judged(review, await self._known())
        self._listener.judged(verdict)
        return _json(answer(review.uid, verdict))

    async def _known(self) -> ClusterFacts:
        try:
            async with asyncio.timeout(self._facts_s):
                return await self._facts()
        except TimeoutError:
            return ClusterFacts(grove=Grove.UNREAD, unread_because=f"no answer within {self._facts_s:g} s")
        except OSError as error:
            return ClusterFacts(grove=Grove.UNREAD, unread_because=str(error))

    def _refused(self, status: int, reason: str) -> web.Response:
        self._listener.not_answered(reason)
        return web.Response(status=status, text=f"{reason}\n")


def _json(document: dict[str, JsonValue]) -> web.Response:
    return web.Response(body=json.dumps(document).encode(), content_type="application/json")
