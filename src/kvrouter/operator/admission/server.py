"""The HTTPS server of admission webhooks; every replica of the operator runs one."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec
from aiohttp import web
from pydantic import JsonValue

from kvrouter.core.errors import ConfigError, ProtocolError
from kvrouter.core.json import Unreadable, parsed
from kvrouter.operator.admission.certificates import ServingCertificate
from kvrouter.operator.admission.review import (
    Review,
    answer,
    bind_answer,
    is_judged,
    judged,
    read_binding,
    read_review,
)
from kvrouter.operator.admission.validate import Verdict
from kvrouter.operator.api.deployment import DEFAULT_CLASS, class_of
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.instrumentation import OperatorInstrumentation
from kvrouter.operator.labels.binding import BindingTarget
from kvrouter.operator.plan.defaults import PlanDefaults

BODY_BYTES_MAX = 8 * 2**20
"""Two objects of an API server's maximum size, and their envelope."""
REVIEW_TIMES = 2
"""A review holds two objects, each of which may hold as much as other JSON."""
REVIEWS_MAX = 32
"""How many reviews are answered at a time; a further one is answered 503."""
BINDING_BYTES_MAX = 512 * 2**10
"""More than the annotations of a Binding may have."""
BINDINGS_MAX = 128
"""How many Bindings are answered at a time: they cost little, and a scheduler binds many pods at a time."""
ANSWER_S = 8.0
"""The API server's ten seconds, with a reserve: the dry run has what reading the question
and the cluster leaves of it.
"""
INFO_TIMEOUT_S = 5.0
BODY_S = 5.0
LABELS_S = 1.0
"""Well within the 2 s that the API server waits before it binds a pod without the webhook."""
REREAD_S = 10.0

ReadClusterInfo = Callable[[], Awaitable[ClusterInfo]]
"""Reads the cluster. May raise OSError or TimeoutError: the cluster then counts as unread."""

Labels = Callable[[BindingTarget], Awaitable[Mapping[str, str] | None]]
"""Returns the labels that a pod gets at its binding: empty for other pods, None if unknown."""

Tried = Callable[[Review, ClusterInfo, float], Awaitable[Verdict]]
"""Returns the refusals of the objects that an admitted deployment becomes, within so many seconds."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_T = TypeVar("_T")


def probe(why_not: Callable[[], str | None]) -> Handler:
    """Return the handler of a probe: 200 while ``why_not`` returns None, else 503 and the reason."""

    async def answer_probe(_request: web.Request) -> web.Response:
        wrong = why_not()
        return web.Response(text="ok\n") if wrong is None else web.Response(status=503, text=f"{wrong}\n")

    return answer_probe


class AdmissionServer:
    """``POST /validate``, ``POST /bind``, ``GET /healthz`` and ``GET /readyz`` over TLS.

    ``not_ready`` returns why the operator is not ready yet, or None. If the cluster does not answer within
    ``info_timeout_s``, topologies count as unread, and only deployments without one are admitted. Deployments
    are planned with ``defaults``, and an admitted plan is ``tried``. After ``labels_s`` without ``labels`` a
    pod is bound without them: the server never refuses a binding. Everything is allowed while ``is_ours`` is
    false, as the definition is another project's, and for deployments of another class than ``class_name``.
    """

    def __init__(
        self,
        *,
        read_cluster_info: ReadClusterInfo,
        labels: Labels,
        tried: Tried,
        defaults: PlanDefaults,
        certificate: ServingCertificate,
        instrumentation: OperatorInstrumentation,
        not_ready: Callable[[], str | None],
        is_ours: Callable[[], bool] = lambda: True,
        class_name: str = DEFAULT_CLASS,
        info_timeout_s: float = INFO_TIMEOUT_S,
        body_s: float = BODY_S,
        labels_s: float = LABELS_S,
        reread_s: float = REREAD_S,
        body_bytes_max: int = BODY_BYTES_MAX,
        reviews_max: int = REVIEWS_MAX,
        bindings_max: int = BINDINGS_MAX,
    ) -> None:
        self._read_cluster_info, self._labels, self._tried = read_cluster_info, labels, tried
        self._defaults, self._instrumentation = defaults, instrumentation
        self._certificate, self._is_ours, self._class_name = certificate, is_ours, class_name
        self._info_timeout_s, self._body_s, self._reread_s = info_timeout_s, body_s, reread_s
        self._labels_s = labels_s
        self._body_bytes_max = body_bytes_max
        app = web.Application(client_max_size=body_bytes_max)
        app.router.add_post("/validate", self._at_most(reviews_max, self._validate))
        app.router.add_post("/bind", self._at_most(bindings_max, self._bind))
        app.router.add_get("/healthz", probe(lambda: None))
        app.router.add_get("/readyz", probe(not_ready))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=info_timeout_s + body_s)
        self._rereading: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, which is a free one for port 0. Raises OSError when it is taken."""
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
        """Stop listening, after the current requests are answered."""
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
                    self._instrumentation.certificate_changed()
            except ConfigError as error:
                self._instrumentation.certificate_refused(error.message)

    def _at_most(self, questions: int, answer_one: Handler) -> Handler:
        """Limit ``answer_one`` to so many requests at a time: a further one is refused at once."""
        left = asyncio.Semaphore(questions)

        async def answer_or_not(request: web.Request) -> web.StreamResponse:
            if left.locked():
                return self._refused(503, "too many questions at a time")
            async with left:
                return await answer_one(request)

        return answer_or_not

    async def _validate(self, request: web.Request) -> web.Response:
        until_s = asyncio.get_running_loop().time() + ANSWER_S
        review = await self._asked(request, read_review)
        if isinstance(review, web.Response):
            return review
        is_of_class = class_of(review.new) == self._class_name
        verdict = await self._verdict(review, until_s) if self._is_ours() and is_of_class else Verdict()
        self._instrumentation.judged(verdict)
        return _json(answer(review.uid, verdict, review.name))

    async def _verdict(self, review: Review, until_s: float) -> Verdict:
        cluster_info = await self._known()
        verdict = await asyncio.to_thread(judged, review, cluster_info, self._defaults)
        if not verdict.is_allowed or not is_judged(review):
            return verdict
        left_s = max(0.0, until_s - asyncio.get_running_loop().time())
        tried = await self._tried(review, cluster_info, left_s)
        return Verdict(tried.problems, (*verdict.warnings, *tried.warnings))

    async def _bind(self, request: web.Request) -> web.Response:
        if request.content_length is None or request.content_length > BINDING_BYTES_MAX:
            return self._refused(413, f"a Binding of no length, or of more than {BINDING_BYTES_MAX} bytes")
        review = await self._asked(request, read_binding)
        if isinstance(review, web.Response):
            return review
        labels: Mapping[str, str] | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._labels_s):
                labels = await self._labels(review.pod) if self._is_ours() else {}
        self._instrumentation.bound(labels)
        return _json(bind_answer(review, labels or {}))

    async def _asked(self, request: web.Request, read: Callable[[object], _T]) -> _T | web.Response:
        """Return the review in a request, or the response to an invalid request."""
        try:
            async with asyncio.timeout(self._body_s):
                body = await request.read()
            return await asyncio.to_thread(_read, body, read)
        except TimeoutError:
            return self._refused(408, f"no whole body within {self._body_s:g} s")
        except web.HTTPRequestEntityTooLarge:
            return self._refused(413, f"a body of more than {self._body_bytes_max} bytes")
        except Unreadable as error:
            return self._refused(400, f"no JSON that is read: {error}")
        except ProtocolError as error:
            return self._refused(400, error.message)

    async def _known(self) -> ClusterInfo:
        try:
            async with asyncio.timeout(self._info_timeout_s):
                return await self._read_cluster_info()
        except TimeoutError:
            why = f"no answer within {self._info_timeout_s:g} s"
            return ClusterInfo(grove=Grove.UNREAD, unread_because=why)
        except OSError as error:
            return ClusterInfo(grove=Grove.UNREAD, unread_because=str(error))

    def _refused(self, status: int, reason: str) -> web.Response:
        self._instrumentation.not_answered(reason)
        return web.Response(status=status, text=f"{reason}\n")


_any = msgspec.json.Decoder(object)


def _read(body: bytes, read: Callable[[object], _T]) -> _T:
    return read(parsed(_any, body, times=REVIEW_TIMES))


def _json(document: dict[str, JsonValue]) -> web.Response:
    return web.Response(body=json.dumps(document).encode(), content_type="application/json")
