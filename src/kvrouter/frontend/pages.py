"""Pages: models, health, readiness, metrics."""

import asyncio
import hashlib
import math
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import starmap

from kvrouter.api.pages import Health, ModelCard, ModelList, ModelPermission, Ready, ServerLoad, Version
from kvrouter.core.errors import ModelNotReady, NoEligibleWorker, RoutingRefused, ShuttingDown
from kvrouter.core.ids import RequestId
from kvrouter.frontend.errors import NotReady
from kvrouter.frontend.prepare import Named, RequestPreparer
from kvrouter.frontend.routes import Page, PageRequest, PublicRoute, Route, json_page
from kvrouter.kernel.routing.request import RouteRequest
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.router_service import RouterService
from kvrouter.settings.setting import installed_version
from kvrouter.telemetry import MetricsFormat, Telemetry

_PROBE = RequestId("ready")

Awaited = Callable[[], Sequence[str]]
"""Lists which engines are to come and have not come yet: a line for each, with why."""


def nobody_awaited() -> Sequence[str]:
    """Workers are found by discovery: none is known beforehand."""
    return ()


def why_not_ready(model: ModelRouter) -> str | None:
    """Why no worker, or no pair, of ``model`` may take a request of one token; None when one may.

    Workers that are busy make nobody unready: the fleet is whole, and they will be free again.
    """
    prompt = model.hash_prompt(array("I", (0,)))
    probe = RouteRequest(_PROBE, isl_tokens=prompt.isl_tokens, total_blocks=prompt.total_blocks)
    try:
        model.decide(probe, prompt)
    except NoEligibleWorker as refused:
        return refused.message
    except RoutingRefused:
        return None
    return None


OWNER = "kvrouter"

SETTLE_S = 10.0
"""How long an HTTP app may wait for a first worker or a tokenizer before it takes requests without."""


METRICS_TIME_SHARE = 0.1
"""How much of the event loop's time goes into ``/metrics`` at most, however often it is asked for."""


class MetricsRenderer:
    """Renders ``/metrics`` for all who ask for one format at the same time: single-flight, in steps,
    rate-limited.

    A page is never older than the request that it answers. The next one is begun once the last one's time
    on the loop is no more than :data:`METRICS_TIME_SHARE` of what has passed.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._next: dict[MetricsFormat, asyncio.Task[bytes]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._not_before_s = -math.inf

    async def render(self, metrics_format: MetricsFormat) -> bytes:
        """Return a page that is begun from now on."""
        coming = self._next.get(metrics_format)
        if coming is None:
            coming = self._next[metrics_format] = asyncio.create_task(self._render(metrics_format))
        return await asyncio.shield(coming)

    async def _render(self, metrics_format: MetricsFormat) -> bytes:
        async with self._one_at_a_time:
            await asyncio.sleep(self._not_before_s - time.monotonic())
            del self._next[metrics_format]  # who asks from here on gets the page after this one
            parts: list[bytes] = []
            busy_s = 0.0
            began_s = time.monotonic()
            for part in self._telemetry.render_steps(metrics_format):
                parts.append(part)
                ended_s = time.monotonic()
                busy_s += ended_s - began_s
                await asyncio.sleep(0)
                began_s = time.monotonic()
            self._not_before_s = began_s + busy_s / METRICS_TIME_SHARE - busy_s
            return b"".join(parts)


class Pages:
    """The routes that ask no token."""

    def __init__(
        self,
        service: RouterService,
        preparer: RequestPreparer,
        telemetry: Telemetry,
        awaited: Awaited = nobody_awaited,
        *,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._service = service
        self._preparer = preparer
        self._metrics = MetricsRenderer(telemetry)
        self._awaited = awaited
        self._created_s = int(time.time())
        self._settled_at = time.monotonic() + settle_s

    def routes(self) -> list[Route]:
        """The table of these routes."""
        return [
            PublicRoute("/v1/models", self.models),
            PublicRoute("/v1/models/{model:path}", self.model),
            PublicRoute("/health", self.health),
            PublicRoute("/ready", self.ready),
            PublicRoute("/accepting", self.accepting),
            PublicRoute("/ping", self.ping, methods=["GET", "POST"]),
            PublicRoute("/load", self.load),
            PublicRoute("/version", self.version),
            Route("/metrics", self.metrics),
        ]

    async def models(self, _: PageRequest) -> Page:
        """``GET /v1/models``."""
        return json_page(ModelList(data=[*starmap(self._model_card, self._preparer.names().items())]))

    async def model(self, request: PageRequest) -> Page:
        """``GET /v1/models/{model}``."""
        name = request.parameters["model"]
        named = self._preparer.names().get(name)
        if named is None:
            model = self._service.model(self._preparer.named(name).model)
            raise ModelNotReady(
                f"model: {model.fleet.model!r} has no worker, or no tokenizer here", param="model"
            )
        return json_page(self._model_card(name, named))

    async def health(self, _: PageRequest) -> Page:
        """``GET /health``: the process answers, whatever it can do; else the caller would restart it."""
        status = "ok" if self._service.why_too_few is None else "starting"
        if self._service.requests.is_draining:
            status = "draining"
        return json_page(Health(status, self._service.requests.running))

    async def ready(self, _: PageRequest) -> Page:
        """``GET /ready``: 200 when a plain request to some model could be placed now, were nobody busy; with
        the engines that are still awaited.
        """
        self._refuse_draining()
        self._refuse_too_few()
        awaited = list(self._awaited())
        reasons = self._why_not_ready()
        if reasons is None:
            return json_page(Ready("ready", awaited or ()))
        reasons += [f"awaited: {line}" for line in awaited]
        raise NotReady("; ".join(reasons) or "no model has both workers and a tokenizer here")

    async def accepting(self, _: PageRequest) -> Page:
        """``GET /accepting``: 200 while requests are taken, also where the answer is that no worker can be
        found. A router that just started has a moment to learn the fleet, so that nobody is refused for that.
        One that could not ask discovery yet knows nobody, and must take the place of no router that does; nor
        must one that waits for a number of workers at its start. One that asked, and knows that nobody is
        there, knows as much as any other.
        """
        self._refuse_draining()
        self._refuse_too_few()
        lost = self._service.store_lost
        if lost is not None and not self._preparer.models():
            raise NotReady(f"this router could not learn yet which workers are there: {lost}")
        if time.monotonic() < self._settled_at:
            if self._why_not_ready() is not None:
                raise NotReady("this router has just started, and is learning which workers are there")
            # It knew a worker: one that leaves from now on was not unknown to it.
            self._settled_at = -math.inf
        return json_page(Ready("accepting"))

    async def ping(self, request: PageRequest) -> Page:
        """``GET`` and ``POST /ping``, which SageMaker asks: as ``/accepting``, without a body."""
        await self.accepting(request)
        return Page()

    async def load(self, _: PageRequest) -> Page:
        """``GET /load``: how many requests run, as vLLM says it."""
        return json_page(ServerLoad(self._service.requests.running))

    async def version(self, _: PageRequest) -> Page:
        """``GET /version``: the version of the engines where all say the same, else this router's."""
        engines = {card.engine for model in self._service.models() for card in model.fleet}
        version = engines.pop().partition(" ")[2] if len(engines) == 1 else ""
        return json_page(Version(version or installed_version()))

    def _refuse_draining(self) -> None:
        if self._service.requests.is_draining:
            raise ShuttingDown("this router is shutting down and takes no new requests")

    def _refuse_too_few(self) -> None:
        why = self._service.why_too_few
        if why is not None:
            raise NotReady(f"this router waits for its first workers: {why}")

    def _why_not_ready(self) -> list[str] | None:
        """What each model lacks; None when one lacks nothing."""
        reasons: list[str] = []
        for name in self._preparer.models():
            why = why_not_ready(self._service.model(name))
            if why is None:
                return None
            reasons.append(f"{name}: {why}")
        return reasons

    async def metrics(self, request: PageRequest) -> Page:
        """``GET /metrics``, in OpenMetrics for who accepts that, else in Prometheus' text format."""
        metrics_format = MetricsFormat.accepted_by(request.header("accept"))
        page = await self._metrics.render(metrics_format)
        kind = metrics_format.value.encode()
        return Page(page, headers=((b"content-type", kind), (b"vary", b"accept")))

    def _model_card(self, name: str, named: Named) -> ModelCard:
        permission = ModelPermission(
            id=f"modelperm-{hashlib.sha256(name.encode()).hexdigest()[:16]}", created=self._created_s
        )
        return ModelCard(
            id=name,
            created=self._created_s,
            owned_by=OWNER,
            root=name,
            parent=None if named.adapter is None else named.model,
            max_model_len=self._preparer.context_length_tokens(named.model),
            permission=[permission],
        )
