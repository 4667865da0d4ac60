"""Pages without a token: models, health, readiness, metrics."""

import asyncio
import hashlib
import math
import time
from array import array
from itertools import starmap

from kvrouter.api.fleet_schema import ExpectedState
from kvrouter.api.health_schema import (
    Health,
    ModelCard,
    ModelList,
    ModelPermission,
    Ready,
    ServerLoad,
    Version,
)
from kvrouter.api.paths import ACCEPTING, METRICS, MODELS, READY
from kvrouter.core.errors import ModelNotReady, NoEligibleWorker, RoutingRefused, ShuttingDown
from kvrouter.core.ids import RequestId
from kvrouter.frontend.errors import NotReady
from kvrouter.frontend.fleet_state import ExpectedEngines, no_expected_engines, read_expected
from kvrouter.frontend.page_route import GET, POST, Page, PageRequest, PublicRoute, Route, json_page
from kvrouter.frontend.prepare import NamedModel, RequestPreparer
from kvrouter.kernel.routing.interface import RouteRequest
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.router_service import RouterService
from kvrouter.settings.setting import installed_version
from kvrouter.telemetry import MetricsFormat, Telemetry

_PROBE = RequestId("ready")


def why_not_ready(model: ModelRouter) -> str | None:
    """Return why no worker or pair of ``model`` can take a request of one token; None when one can.

    Busy workers count as ready: they will be free again.
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
"""The seconds for which ``/accepting`` waits for a first worker and tokenizer after the start."""


METRICS_TIME_SHARE = 0.1
"""The largest share of the event loop's time for ``/metrics``, however often it is scraped."""


class MetricsRenderer:
    """Renders ``/metrics`` once for all concurrent scrapes of a format (single-flight), in steps and
    rate-limited.

    A page is never older than the request that it answers. The next rendering starts once the last one's
    time on the loop is at most :data:`METRICS_TIME_SHARE` of the elapsed time.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._next: dict[MetricsFormat, asyncio.Task[bytes]] = {}
        self._render_lock = asyncio.Lock()
        self._not_before_s = -math.inf

    async def render(self, metrics_format: MetricsFormat) -> bytes:
        """Return a page whose rendering starts after this call."""
        coming = self._next.get(metrics_format)
        if coming is None:
            coming = self._next[metrics_format] = asyncio.create_task(self._render(metrics_format))
        return await asyncio.shield(coming)

    async def _render(self, metrics_format: MetricsFormat) -> bytes:
        async with self._render_lock:
            await asyncio.sleep(self._not_before_s - time.monotonic())
            del self._next[metrics_format]  # later scrapes get the next page
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
    """The pages that need no admin token."""

    def __init__(
        self,
        service: RouterService,
        preparer: RequestPreparer,
        telemetry: Telemetry,
        expected: ExpectedEngines = no_expected_engines,
        *,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._service = service
        self._preparer = preparer
        self._metrics = MetricsRenderer(telemetry)
        self._expected = expected
        self._created_s = int(time.time())
        self._settled_at = time.monotonic() + settle_s

    def routes(self) -> list[Route]:
        """Return the routes of these pages."""
        accepts = "Whether a load balancer should send requests here"
        ping = "The same, without a body, as SageMaker asks it"
        version = "The version of the engines, where all have one"
        return [
            PublicRoute(MODELS, self.models, "The models that are served", answer=ModelList),
            PublicRoute(f"{MODELS}/{{model:path}}", self.model, "One of them", answer=ModelCard),
            PublicRoute("/health", self.health, "Whether the process answers", answer=Health),
            PublicRoute(READY, self.ready, "Whether a plain request could be placed now", answer=Ready),
            PublicRoute(ACCEPTING, self.accepting, accepts, answer=Ready),
            PublicRoute("/ping", self.ping, ping, methods=(*GET, *POST)),
            PublicRoute("/load", self.load, "How many requests run", answer=ServerLoad),
            PublicRoute("/version", self.version, version, answer=Version),
            Route(METRICS, self.metrics, "Metrics, for Prometheus"),
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
        """``GET /health``: always 200, so that a liveness probe restarts only a process that hangs."""
        status = "ok" if self._service.why_too_few is None else "starting"
        if self._service.requests.is_draining:
            status = "draining"
        return json_page(Health(status, self._service.requests.running))

    async def ready(self, _: PageRequest) -> Page:
        """``GET /ready``: 200 when a plain request to some model could be placed now, busy workers included;
        also lists the engines that have no worker or a wrong URL.
        """
        self._refuse_draining()
        self._refuse_too_few()
        problems = [engine for engine in read_expected(self._service, self._expected) if engine.has_problem]
        awaited = [str(engine) for engine in problems if engine.state != ExpectedState.JOINED]
        reasons = self._why_not_ready()
        if reasons is None:
            return json_page(Ready("ready", awaited or (), problems or ()))
        raise NotReady(
            "; ".join((*reasons, *awaited)) or "no model has both workers and a tokenizer here", problems
        )

    async def accepting(self, _: PageRequest) -> Page:
        """``GET /accepting``: 200 while the router takes requests, even if none can be placed.

        It is 503 for a started router that is still learning the fleet, that waits for its first workers, or
        that has not reached discovery and knows no model: load balancers then prefer other routers. A router
        that reached discovery and found no workers accepts, since other routers would find none either.
        """
        self._refuse_draining()
        self._refuse_too_few()
        lost = self._service.store_lost
        if lost is not None and not self._preparer.models():
            raise NotReady(f"this router could not learn yet which workers are there: {lost}")
        if time.monotonic() < self._settled_at:
            if self._why_not_ready() is not None:
                raise NotReady("this router has just started, and is learning which workers are there")
            # A worker was ready once: if it leaves now, the router is no longer learning.
            self._settled_at = -math.inf
        return json_page(Ready("accepting"))

    async def ping(self, request: PageRequest) -> Page:
        """``GET`` and ``POST /ping``, SageMaker's probe: as ``/accepting``, without a body."""
        await self.accepting(request)
        return Page()

    async def load(self, _: PageRequest) -> Page:
        """``GET /load``: the number of running requests, in vLLM's form."""
        return json_page(ServerLoad(self._service.requests.running))

    async def version(self, _: PageRequest) -> Page:
        """``GET /version``: the engines' version if all have the same, else this router's."""
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
        """Return the reason of each model that is not ready; None when some model is ready."""
        reasons: list[str] = []
        for name in self._preparer.models():
            why = why_not_ready(self._service.model(name))
            if why is None:
                return None
            reasons.append(f"{name}: {why}")
        return reasons

    async def metrics(self, request: PageRequest) -> Page:
        """``GET /metrics``, in OpenMetrics if the client accepts that, else in Prometheus' text format."""
        metrics_format = MetricsFormat.accepted_by(request.header("accept"))
        page = await self._metrics.render(metrics_format)
        kind = metrics_format.value.encode()
        return Page(page, headers=((b"content-type", kind), (b"vary", b"accept")))

    def _model_card(self, name: str, named: NamedModel) -> ModelCard:
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
