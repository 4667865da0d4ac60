"""Admin routes: busy thresholds, explanations, kept decisions, the fleet, cordons. None shows a prompt."""

import hmac
from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET

from kvrouter.api import fleet_schema
from kvrouter.api.cordon_schema import CordonBody, CordonChange, CordonList
from kvrouter.api.decision_schema import Decisions, Explanation, LastDecisions
from kvrouter.api.fleet_schema import Refusals, RefusedAnswers, RefusedRanks
from kvrouter.api.health_schema import BusyBody, ThresholdList, Thresholds
from kvrouter.api.paths import CORDONS, DECISIONS, EXPLAIN, FLEET, FLOWS
from kvrouter.core.errors import InvalidRequest, RoutingRefused, Unauthorized
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import CallRoute, GenerateRequest
from kvrouter.frontend.cordon_routes import CordonRoutes
from kvrouter.frontend.decision_state import attempts_of, decided, latest_of, refused
from kvrouter.frontend.errors import UnknownDecision
from kvrouter.frontend.fleet_state import (
    ExpectedEngines,
    fleet_state,
    flows_state,
    no_expected_engines,
)
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.frontend.openai.body import ScannedBody, decode_body
from kvrouter.frontend.openai.parse import NvextReader, parse_either
from kvrouter.frontend.openai.passthrough import parse_passthrough
from kvrouter.frontend.page_route import (
    DELETE,
    POST,
    AdminRoute,
    Endpoint,
    Page,
    PageRequest,
    Route,
    json_page,
)
from kvrouter.frontend.prepare import Bodies, CalledModel, RequestPreparer
from kvrouter.frontend.request_stats import RequestStatistics
from kvrouter.frontend.response_writer import RequestIds
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.router_service import RouterService
from kvrouter.settings.tree import AdminAccess, FrontendSettings

DECISIONS_LISTED = 50
"""The default of ``limit`` of ``GET /v1/decisions``, in requests."""

DECISIONS_LISTED_MAX = 200
"""The largest ``limit`` of ``GET /v1/decisions``."""


_BUSY = msgspec.json.Decoder(BusyBody)


def _busy(scanned: ScannedBody) -> BusyBody:
    return decode_body(_BUSY, scanned)


class AdminRoutes:
    """The routes that require the admin token, if one is set. ``stats`` are those of the calls that this
    process serves; None where it only decides.
    """

    def __init__(
        self,
        service: RouterService,
        preparer: RequestPreparer,
        bodies: Bodies,
        instrumentation: FrontendInstrumentation,
        *,
        settings: FrontendSettings,
        expected: ExpectedEngines = no_expected_engines,
        stats: RequestStatistics | None = None,
    ) -> None:
        self._service = service
        self._expected = expected
        self._stats = stats
        self._preparer = preparer
        self._bodies = bodies
        self._instrumentation = instrumentation
        token = settings.admin_token
        self._token = None if token is None else token.get_secret_value().encode()
        self._is_closed = settings.admin_routes is AdminAccess.CLOSED
        self._ids = RequestIds()
        self._cordons = CordonRoutes(service.cordons, bodies)

    def routes(self) -> Sequence[Route]:
        """Return the table of these routes, each behind the check of the token."""
        cordons, busy = self._cordons, "When a worker counts as busy"
        explained = "Where a request would go, and why"
        latest = "Where the last requests went, the latest first"
        attempts = "Where one of the last requests went, attempt by attempt"
        fleet = "Every worker, and what the router believes of it"
        flows = "Handoffs and bytes of KV between domains"
        cordoned = "Workers, nodes and zones that get no new requests"
        refused = "How many worker ranks were refused, and why"
        routes = [
            AdminRoute("/busy_threshold", self.thresholds, busy, answer=ThresholdList),
            AdminRoute(
                "/busy_threshold", self.set_thresholds, busy, methods=POST, answer=Thresholds, body=BusyBody
            ),
            AdminRoute(EXPLAIN, self.explain, explained, methods=POST, answer=Explanation),
            AdminRoute(DECISIONS, self.latest_decisions, latest, answer=LastDecisions),
            AdminRoute(f"{DECISIONS}/{{request_id:path}}", self.decisions, attempts, answer=Decisions),
            AdminRoute(FLEET, self.fleet, fleet, answer=fleet_schema.Fleet),
            AdminRoute(CORDONS, cordons.remove, cordoned, methods=DELETE, answer=CordonChange),
            AdminRoute(CORDONS, cordons.show, cordoned, answer=CordonList),
            AdminRoute(CORDONS, cordons.put, cordoned, methods=POST, answer=CordonChange, body=CordonBody),
            AdminRoute(FLOWS, self.flows, flows, answer=fleet_schema.Flows),
            AdminRoute("/v1/refusals", self.refusals, refused, answer=Refusals),
        ]
        for route in routes:
            route.endpoint = self._guarded(route.endpoint)
        return routes

    async def thresholds(self, _: PageRequest) -> Page:
        """``GET /busy_threshold``: all models' thresholds."""
        return json_page(ThresholdList([_thresholds(model) for model in self._service.models()]))

    async def set_thresholds(self, request: PageRequest) -> Page:
        """``POST /busy_threshold``: set the given thresholds of one model."""
        return json_page(self._set_thresholds(await self._bodies.read(request.take_body(), _busy)))

    def _set_thresholds(self, body: BusyBody) -> Thresholds:
        model = self._service.model(ModelName(body.model))
        settings = model.placer.settings
        decode_blocks, prefill_tokens = (
            body.active_decode_blocks_threshold,
            body.active_prefill_tokens_threshold,
        )
        if decode_blocks is UNSET and prefill_tokens is UNSET:
            return _thresholds(model)
        if decode_blocks is UNSET:
            decode_blocks = settings.active_decode_blocks_threshold
        if prefill_tokens is UNSET:
            prefill_tokens = settings.active_prefill_tokens_threshold
        model.placer.set_busy_thresholds(
            decode_blocks=decode_blocks, prefill_tokens=prefill_tokens, now_s=model.clock()
        )
        self._instrumentation.thresholds_set(
            model=body.model, decode_blocks=decode_blocks, prefill_tokens=prefill_tokens
        )
        return _thresholds(model)

    async def explain(self, request: PageRequest) -> Page:
        """``POST /v1/route/explain``: decide as for a real request, without sending or booking it."""
        request_id = self._ids.take(request.header("x-request-id"))
        try:
            body = await self._bodies.scan(request.take_body())
            called = self._preparer.called_model(body)
            reader = self._preparer.nvext_reader(request.headers)
            generate_request = await self._generate_request(body, called, reader, request_id)
        finally:
            self._ids.release(request_id)
        model = called.router
        try:
            explained = decided(
                generate_request,
                model.fleet,
                self._service.model(generate_request.model).explain(generate_request),
            )
        except RoutingRefused as error:
            mode = generate_request.override.router_mode or model.placer.settings.mode
            explained = refused(generate_request, model.fleet, mode, error)
        return json_page(explained)

    async def _generate_request(
        self, body: ScannedBody, called: CalledModel, reader: NvextReader, request_id: RequestId
    ) -> GenerateRequest:
        """Return the request of a call, passed through if the model's engines take calls, else tokenized."""
        if called.router.fleet.takes_calls:
            route = CallRoute.COMPLETION if "prompt" in body.fields else CallRoute.CHAT
            parse_call = partial(parse_passthrough, route, called.name, reader=reader)
            passthrough = await self._bodies.parse(body, parse_call)
            text = self._preparer.passthrough_text(called.name)
            return await self._preparer.prepare_passthrough(passthrough, called, text, request_id)
        text = self._preparer.text_of(called, body)
        parse = partial(parse_either, nvext=reader, model=called.name)
        return await self._preparer.prepare(await self._bodies.parse(body, parse), called, text, request_id)

    async def decisions(self, request: PageRequest) -> Page:
        """``GET /v1/decisions/{request_id}``: the kept decisions of a request, one per attempt."""
        request_id = RequestId(request.parameters["request_id"])
        log = self._service.decisions
        decisions, refusal = log.get(request_id), log.refusals.get(request_id)
        if decisions is None and refusal is None:
            raise UnknownDecision(f"request_id: no decision is kept for {request_id!r}", param="request_id")
        attempts = await attempts_of(decisions or (), refusal)
        return json_page(Decisions(request_id=request_id, attempts=attempts))

    async def latest_decisions(self, request: PageRequest) -> Page:
        """``GET /v1/decisions?limit=N``: the last decision of each of the last N requests, newest first."""
        limit = _limit_of(request.query.get("limit"))
        decisions = self._service.decisions
        latest = map(latest_of, decisions.latest(limit))
        return json_page(LastDecisions(decisions=[*latest], kept=len(decisions)))

    async def fleet(self, _: PageRequest) -> Page:
        """``GET /v1/fleet``: the router's view of every worker and model."""
        state = fleet_state(self._service, self._preparer.tokenizer, self._expected, self._stats)
        return json_page(state)

    async def flows(self, _: PageRequest) -> Page:
        """``GET /v1/flows``: the KV that this router handed over between domains."""
        return json_page(flows_state(self._service))

    async def refusals(self, _: PageRequest) -> Page:
        """``GET /v1/refusals``: refusals since the process began, by reason."""
        counts = self._instrumentation.refusals()
        ranks = [RefusedRanks(reason=reason, role=role, count=n) for reason, role, n in counts.ranks]
        answers = [RefusedAnswers(model=model, code=code, count=n) for model, code, n in counts.answers]
        return json_page(Refusals(worker_ranks=ranks, answers=answers))

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """Return ``endpoint`` behind a check of the admin token, compared in constant time."""
        expected = self._token
        if expected is None:
            return closed if self._is_closed else endpoint

        async def guarded(request: PageRequest) -> Page:
            scheme, _, token = (request.header("authorization") or "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), expected):
                raise Unauthorized("this route needs the admin token: Authorization: Bearer …")
            return await endpoint(request)

        return guarded


async def closed(_: PageRequest) -> Page:
    """Refuse every request: the admin routes are closed because no token is set."""
    raise Unauthorized("the admin routes are closed: no admin token is set (KVROUTER_ADMIN_TOKEN)")


def _limit_of(value: str | None) -> int:
    """Return the number in ``limit``, or the default; raise :class:`InvalidRequest`."""
    if value is None:
        return DECISIONS_LISTED
    if not value.isascii() or not value.isdecimal() or len(value) > 4 or int(value) > DECISIONS_LISTED_MAX:
        must = f"limit: must be a whole number from 0 to {DECISIONS_LISTED_MAX}"
        raise InvalidRequest(must, param="limit")
    return int(value)


def _thresholds(model: ModelRouter) -> Thresholds:
    settings = model.placer.settings
    return Thresholds(
        model.fleet.model, settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold
    )
