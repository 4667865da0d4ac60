"""The HTTP API of a standalone router: routing calls, bookings and prefills."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from kvrouter.api import booking_schema as api
from kvrouter.api.cordon_schema import Name
from kvrouter.core.errors import InvalidRequest, KvrouterError, ShuttingDown
from kvrouter.core.ids import ModelName, RequestId, Slot, new_request_id
from kvrouter.core.requests import NO_TRACE, Bootstrap, GenerateRequest, TokenBuffer
from kvrouter.frontend.admin import AdminRoutes
from kvrouter.frontend.decision_state import policy_state
from kvrouter.frontend.engine_tokens import ModelTexts
from kvrouter.frontend.errors import JSON_HEADERS, error_body, error_headers
from kvrouter.frontend.gauges import Gauges
from kvrouter.frontend.generate import CLIENT_LEFT_STATUS, trace_of
from kvrouter.frontend.http import Disconnected, Request, Responder
from kvrouter.frontend.http_app import HttpApp
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.frontend.openai.body import (
    CacheSalt,
    GenerateBody,
    PositiveInt,
    ScannedBody,
    decode_body,
    read_messages,
    read_token_ids,
)
from kvrouter.frontend.openai.parse import (
    READER,
    Call,
    ChatCall,
    CompletionCall,
    NvextReader,
    call_of,
    one_prompt,
)
from kvrouter.frontend.page_route import DELETE, POST, Page, PageRequest, Route, json_page
from kvrouter.frontend.pins import check_pins
from kvrouter.frontend.prepare import (
    Bodies,
    CalledModel,
    RequestPreparer,
    answer_tokens,
)
from kvrouter.frontend.public_pages import Pages
from kvrouter.frontend.response_writer import USABLE_REQUEST_ID, cancel_with
from kvrouter.frontend.web_page import WebPage
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.routing.interface import Decision, Pick
from kvrouter.kernel.topology.policy import Fallback, Preferred, Required, TransferConstraint
from kvrouter.router.bookings import Bookings
from kvrouter.router.prefill_dispatch import PrefillDispatch, Prefilled
from kvrouter.router.router_service import RouterService
from kvrouter.settings.tree import FrontendSettings
from kvrouter.telemetry import Telemetry
from kvrouter.text.model import TextModel

if TYPE_CHECKING:
    from kvrouter.frontend.tracing import RequestTracing


def routed(
    request: GenerateRequest,
    fleet: Fleet,
    decision: Decision,
    *,
    bootstrap: Bootstrap | None,
    lease_ttl_s: float | None,
) -> api.Routed:
    """Return the answer of ``/v1/route``; ``lease_ttl_s`` is None when the request was not booked."""
    return api.Routed(
        request_id=request.request_id,
        model=request.model,
        leg=decision.decode.leg,
        **asdict(_picked(decision.decode, fleet)),
        prefill=None if decision.prefill is None else _picked(decision.prefill, fleet),
        bootstrap=_bootstrap(bootstrap),
        constraint=obeyed_constraint(decision.constraint),
        fallback_used=decision.fallback_used,
        isl_tokens=request.isl_tokens,
        block_size=fleet.block_size,
        booked=lease_ttl_s is not None,
        lease_ttl_s=lease_ttl_s,
    )


def prefilled(request: GenerateRequest, fleet: Fleet, result: Prefilled) -> api.Prefilled:
    """Return the answer of ``/v1/prefill``."""
    return api.Prefilled(
        request_id=request.request_id,
        model=request.model,
        **asdict(_picked(result.placement.prefill_pick, fleet)),
        cached_tokens=result.cached_tokens,
        kv_transfer_params=result.kv_transfer_params,
        bootstrap=_bootstrap(result.bootstrap),
        constraint=obeyed_constraint(result.placement.decision.constraint),
        isl_tokens=request.isl_tokens,
        block_size=fleet.block_size,
    )


def _bootstrap(bootstrap: Bootstrap | None) -> api.Bootstrap | None:
    """Return a bootstrap address as the API has it."""
    return None if bootstrap is None else api.Bootstrap(bootstrap.host, bootstrap.port, bootstrap.room)


def obeyed_constraint(constraint: TransferConstraint | None) -> api.ObeyedConstraint | None:
    """Return the prefill worker's constraint on the decode worker, also as the taints of a request.

    ``routing_constraints`` go into ``nvext`` of the request that picks decode. Under ``fallback`` the caller
    drops them when no worker meets them.
    """
    if constraint is None:
        return None
    policy, taint = policy_state(constraint.policy), constraint.taint
    constraints = api.RoutingConstraints()
    if taint is not None:
        match constraint.policy:
            case Required() | Fallback():
                constraints = api.RoutingConstraints(required_taints=[taint])
            case Preferred(weight=weight):
                constraints = api.RoutingConstraints(preferred_taints={taint: weight})
    return api.ObeyedConstraint(
        enforcement=policy.enforcement,
        domain=policy.domain,
        weight=policy.weight,
        value=constraint.value,
        taint=taint,
        routing_constraints=constraints,
    )


def _picked(pick: Pick, fleet: Fleet) -> api.PickedWorker:
    card = fleet.card_at(Slot(pick.slot))
    current = card if card is not None and card.worker_id == pick.rank.worker_id else None
    return api.PickedWorker(
        worker_id=pick.rank.worker_id,
        dp_rank=pick.rank.dp_rank,
        address=None if current is None else current.address,
        domains={} if current is None else current.runtime_config.topology_domains,
        overlap_blocks=pick.overlap_blocks,
        cost=pick.cost,
    )


class RouteBody(GenerateBody, frozen=True, kw_only=True):
    """``POST /v1/route`` and ``/v1/prefill``: the body of a chat or completion, or ``token_ids``, and a
    request id. Other fields are ignored, as at the frontend.
    """

    max_completion_tokens: PositiveInt | None = None
    request_id: str | None = None
    lora_name: Name | None = None
    cache_namespace: CacheSalt | None = None


_ROUTE = msgspec.json.Decoder(RouteBody)
_OUTPUT = msgspec.json.Decoder(api.OutputBody)


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """A parsed routing call. ``parsed`` has its prompt."""

    parsed: ChatCall | CompletionCall
    request_id: str | None
    lora_name: str | None
    cache_namespace: str | None


def parse_route(scanned: ScannedBody, nvext: NvextReader = READER) -> RoutedCall:
    """Return the routing call in a body; raise :class:`InvalidRequest` naming the field."""
    body = decode_body(_ROUTE, scanned)
    prompt_fields = [name for name in ("token_ids", "prompt", "messages") if name in scanned.fields]
    if len(prompt_fields) != 1:
        detail = (
            f"give one of them, not {' and '.join(prompt_fields)}"
            if prompt_fields
            else "or prompt, or messages, must be given"
        )
        raise InvalidRequest(f"token_ids: {detail}", param="token_ids")
    if body.request_id is not None and USABLE_REQUEST_ID.fullmatch(body.request_id) is None:
        raise InvalidRequest(
            "request_id: must be 1 to 128 of the characters A-Z a-z 0-9 . _ : @ / -", param="request_id"
        )
    if body.request_id is not None and not has_own_path(body.request_id):
        raise InvalidRequest(
            "request_id: its path would be another one's: a part between slashes is empty, . or .., or the "
            "last one is free",
            param="request_id",
        )
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    call = call_of(body, nvext, max_tokens=body.max_completion_tokens or body.max_tokens, field=field)
    if call.nvext.token_data is not None:
        raise InvalidRequest("nvext.token_data: give token_ids instead", param="nvext.token_data")
    if call.nvext.is_query:
        raise InvalidRequest("nvext.annotations: ask with ?book=false instead", param="nvext.annotations")
    cache_namespace = body.cache_namespace or call.cache_namespace
    if call.cache_namespace is not None and cache_namespace != call.cache_namespace:
        raise InvalidRequest(
            "cache_namespace: cache_salt says something else, and they are the same", param="cache_namespace"
        )
    parsed: ChatCall | CompletionCall
    if "messages" in prompt_fields:
        parsed = ChatCall(call, read_messages(scanned))
    elif "prompt" in prompt_fields:
        parsed = CompletionCall(call, one_prompt(scanned))
    else:
        token_ids, _ = read_token_ids(scanned.data, scanned.fields["token_ids"][0], at="token_ids")
        parsed = CompletionCall(call, token_ids)
    return RoutedCall(parsed, body.request_id, body.lora_name, cache_namespace)


def has_own_path(request_id: str) -> bool:
    """Whether the id's paths below ``/v1/route/`` are unambiguous: clients normalize empty and dot segments
    away, and ``DELETE /v1/route/x/free`` frees ``x``.
    """
    *before, last = request_id.split("/")
    return {"", ".", ".."}.isdisjoint((*before, last)) and not (before and last == "free")


def parse_output(scanned: ScannedBody) -> int:
    """Return the number of new full blocks; raise :class:`InvalidRequest` naming the field."""
    return decode_body(_OUTPUT, scanned).blocks


class TokenRequestParser:
    """Prepares the requests of routing calls. Token ids are used as they are, without a tokenizer."""

    def __init__(self, preparer: RequestPreparer) -> None:
        self._preparer = preparer

    async def prepare(
        self, routed_call: RoutedCall, called: CalledModel, text: TextModel | None, request_id: RequestId
    ) -> GenerateRequest:
        """Return the request of a routing call, tokenized and checked. ``text`` is None for a call with token
        ids, and for a model without a tokenizer here.

        Raises :class:`InvalidRequest` naming the field.
        """
        parsed = routed_call.parsed
        if text is None and isinstance(parsed, CompletionCall) and not isinstance(parsed.prompt, str):
            request = self._of_tokens(parsed.call, parsed.prompt, called, request_id)
        else:
            request = await self._preparer.prepare(parsed, called, text, request_id)
        return replace(request, lora_name=routed_call.lora_name, cache_namespace=routed_call.cache_namespace)

    @staticmethod
    def _of_tokens(
        call: Call, token_ids: TokenBuffer, called: CalledModel, request_id: RequestId
    ) -> GenerateRequest:
        check_pins(call, called.router)
        context_tokens = called.router.fleet.context_length_tokens
        max_tokens = answer_tokens(
            len(token_ids),
            call.max_tokens,
            context_length_tokens=context_tokens or 2**31 - 1,  # without workers: routing refuses
            prompt_field="token_ids",
            max_tokens_field=call.max_tokens_field,
        )
        return GenerateRequest(
            request_id=request_id,
            model=called.name,
            token_ids=token_ids,
            sampling=call.sampling(max_tokens),
            constraints=call.constraints,
            override=call.override,
            pin=call.pin,
            prefill_pin=call.prefill_pin,
            service_level=call.service_level,
            context_tokens=len(token_ids) + (call.max_tokens or 1),
        )


def id_of(routed_call: RoutedCall, header: str | None) -> RequestId:
    """Return the request id: of the body, else of the header if usable, else a new one."""
    if routed_call.request_id is not None:
        return RequestId(routed_call.request_id)
    if header is not None and USABLE_REQUEST_ID.fullmatch(header) and has_own_path(header):
        return RequestId(header)
    return new_request_id()


_YES_NO = {"true": True, "1": True, "false": False, "0": False}


class Calls:
    """Handles ``/v1/route`` and ``/v1/prefill``."""

    def __init__(
        self,
        service: RouterService,
        preparer: RequestPreparer,
        parser: TokenRequestParser,
        bodies: Bodies,
        bookings: Bookings,
        prefills: PrefillDispatch,
        instrumentation: FrontendInstrumentation,
        *,
        lease_ttl_s: float,
        tracing: "RequestTracing | None",
    ) -> None:
        self._tracing = tracing
        self._service = service
        self._preparer = preparer
        self._parser = parser
        self._bodies = bodies
        self._bookings = bookings
        self._prefills = prefills
        self._instrumentation = instrumentation
        self._lease_ttl_s = lease_ttl_s

    async def route(self, request: Request, responder: Responder) -> None:
        """``POST /v1/route``: decide and book; ``?book=false``: only decide."""
        await self._answer(request, responder, self._route)

    async def prefill(self, request: Request, responder: Responder) -> None:
        """``POST /v1/prefill``: pick a prefill worker and send it the prefill leg."""
        await self._answer(request, responder, self._prefill)

    async def _answer(
        self, request: Request, responder: Responder, work: Callable[["_Call"], Awaitable[Struct]]
    ) -> None:
        call = _Call(request, self._tracing)
        status = KvrouterError.status_hint
        failure: KvrouterError | None = None
        cancel_with(responder)
        try:
            if self._service.requests.is_draining:
                raise ShuttingDown("this router is shutting down and takes no new requests")
            body = msgspec.json.encode(await work(call))
            status = 200
            await responder.send(status, JSON_HEADERS, body)
        except KvrouterError as error:
            status, failure = error.status_hint, error
            self._instrumentation.failed(error, model=call.model)
            responder.answer(status, error_headers(error), error_body(error))
        except (asyncio.CancelledError, Disconnected):
            if responder.disconnected is None:
                raise
            status = CLIENT_LEFT_STATUS
        finally:
            self._instrumentation.answered(
                route=request.path,
                model=call.model,
                status=status,
                request_id=call.request_id,
                trace=call.trace,
                duration_s=time.monotonic() - call.began_s,
                code=None if failure is None else failure.code,
                placement=call.placement,
            )
            if call.spans is not None:
                call.spans.end_routed(
                    status=status,
                    model=call.model,
                    request_id=call.request_id,
                    error=failure,
                    decision=call.decision,
                    decided_s=call.decided_s,
                )

    async def _route(self, call: "_Call") -> api.Routed:
        books = _books(call.request.query)
        request = await self._prepared(call)
        model_router = self._service.model(request.model)
        bootstrap: Bootstrap | None = None
        if books:
            placement = await self._bookings.book(model_router, request)
            call.placed(placement)
            decision, bootstrap = placement.decision, placement.bootstrap
            call.decided_s = placement.decision_s
        else:
            began_s = time.monotonic()
            decision = call.decision = model_router.explain(request)
            call.decided_s = time.monotonic() - began_s
        return routed(
            request,
            model_router.fleet,
            decision,
            bootstrap=bootstrap,
            lease_ttl_s=self._lease_ttl_s if books else None,
        )

    async def _prepared(self, call: "_Call") -> GenerateRequest:
        body = await self._bodies.scan(call.request.take_body())
        called = self._preparer.called_model(body)
        call.model = called.name
        text = None if "token_ids" in body.fields else self._preparer.text_of(called, body)
        reader = self._preparer.nvext_reader(call.request.headers)
        routed_call = await self._bodies.parse(body, partial(parse_route, nvext=reader))
        call.request_id = id_of(routed_call, call.request.header("x-request-id"))
        request = await self._parser.prepare(routed_call, called, text, call.request_id)
        call.request.read()
        if call.spans is not None:
            call.spans.prepared()
        return request if call.trace == NO_TRACE else replace(request, trace=call.trace)

    async def _prefill(self, call: "_Call") -> api.Prefilled:
        if call.request.query:
            raise InvalidRequest("query: this route takes none", param="query")
        request = await self._prepared(call)
        model_router = self._service.model(request.model)
        result = await self._prefills.prefill(model_router, request, call.placed)
        return prefilled(request, model_router.fleet, result)


class _Call:
    """The state of one call: ``model`` is set once it is known to be served, ``request_id`` once the body is
    read, ``decision`` and ``decided_s`` after the decision, ``placement`` once that is booked.
    """

    __slots__ = (
        "began_s",
        "decided_s",
        "decision",
        "model",
        "placement",
        "request",
        "request_id",
        "spans",
        "trace",
    )

    def __init__(self, request: Request, tracing: "RequestTracing | None") -> None:
        self.request = request
        self.began_s = time.monotonic()
        sent = trace_of(request.headers)
        self.spans = None if tracing is None else tracing.begin(request, sent)
        self.trace = sent if self.spans is None else self.spans.trace
        self.decision: Decision | None = None
        self.decided_s: float | None = None
        self.placement: Placement | None = None
        self.model: ModelName | None = None
        self.request_id = RequestId("-")

    def placed(self, placement: Placement) -> None:
        """Note where the call goes, or goes next after a failure."""
        self.placement, self.decision = placement, placement.decision


def _books(query: str) -> bool:
    """Whether the call books its route. A misspelt query is refused: it could leave an unwanted booking."""
    books = True
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "book" or value.lower() not in _YES_NO:
            raise InvalidRequest(f"query: only book=true and book=false are known, not {name}", param="query")
        books = _YES_NO[value.lower()]
    return books


class BookingPages:
    """The routes of bookings; a draining router answers them too."""

    def __init__(self, bookings: Bookings, bodies: Bodies, *, lease_ttl_s: float) -> None:
        self._bookings = bookings
        self._bodies = bodies
        self._lease_ttl_s = lease_ttl_s

    def routes(self) -> list[Route]:
        """Return the routes of bookings."""
        booked, answer = "/v1/route/{request_id:path}", api.Booking
        began = "The first token of a booked request is there"
        filled = "So many more blocks of a booked request are full"
        runs, ended = "A booked request still runs", "A booked request has ended"
        output, body = f"{booked}/output_blocks", api.OutputBody
        return [
            Route(f"{booked}/prefill_complete", self.prefill_complete, began, methods=POST, answer=answer),
            Route(output, self.output_blocks, filled, methods=POST, answer=answer, body=body),
            Route(f"{booked}/renew", self.renew, runs, methods=POST, answer=answer),
            Route(f"{booked}/free", self.free, ended, methods=(*POST, *DELETE), answer=answer),
            Route(booked, self.free, ended, methods=DELETE, answer=answer),
        ]

    async def prefill_complete(self, request: PageRequest) -> Page:
        """``POST …/prefill_complete``: the request has its first token."""
        self._bookings.first_token(_id_of(request))
        return self._renewed(request)

    async def output_blocks(self, request: PageRequest) -> Page:
        """``POST …/output_blocks``: the request has this many more full blocks of output."""
        blocks = await self._bodies.read(request.take_body(), parse_output)
        self._bookings.output_blocks(_id_of(request), blocks)
        return self._renewed(request)

    async def renew(self, request: PageRequest) -> Page:
        """``POST …/renew``: the request still runs."""
        self._bookings.renew(_id_of(request))
        return self._renewed(request)

    async def free(self, request: PageRequest) -> Page:
        """``POST`` or ``DELETE …/free``, or ``DELETE`` of the booking: the request has ended."""
        self._bookings.free(_id_of(request))
        return json_page(api.Booking(_id_of(request), booked=False, lease_ttl_s=None))

    def _renewed(self, request: PageRequest) -> Page:
        return json_page(api.Booking(_id_of(request), booked=True, lease_ttl_s=self._lease_ttl_s))


class PrefillPages:
    """The route that ends a prefill that runs or has KV waiting."""

    def __init__(self, prefills: PrefillDispatch) -> None:
        self._prefills = prefills

    def routes(self) -> list[Route]:
        """Return the route of prefills."""
        path, summary = "/v1/prefill/{request_id:path}", "No decode worker will fetch this KV"
        return [Route(path, self.discard, summary, methods=DELETE, answer=api.PrefillEnded)]

    async def discard(self, request: PageRequest) -> Page:
        """``DELETE /v1/prefill/{request_id}``: end the prefill; no decode worker will fetch its KV."""
        self._prefills.discard(_id_of(request))
        return json_page(api.PrefillEnded(_id_of(request)))


def _id_of(request: PageRequest) -> RequestId:
    return RequestId(request.parameters["request_id"])


class RouterApp(HttpApp):
    """The HTTP app of a standalone router: decisions, bookings and, with ``takes_prefills``, prefill legs.

    Gauges are refreshed before each scrape of ``telemetry`` until :meth:`close`.
    """

    def __init__(
        self,
        service: RouterService,
        texts: ModelTexts,
        bookings: Bookings,
        prefills: PrefillDispatch,
        *,
        settings: FrontendSettings,
        telemetry: Telemetry,
        lease_ttl_s: float,
        takes_prefills: bool,
        tracing: "RequestTracing | None" = None,
    ) -> None:
        instrumentation = FrontendInstrumentation(telemetry)
        preparer = RequestPreparer(service, texts, instrumentation, settings)
        bodies = Bodies(service, texts.texts, instrumentation, settings)
        parser = TokenRequestParser(preparer)
        calls = Calls(
            service,
            preparer,
            parser,
            bodies,
            bookings,
            prefills,
            instrumentation,
            lease_ttl_s=lease_ttl_s,
            tracing=tracing,
        )
        by_path = {"/v1/route": calls.route}
        routes = [
            *Pages(service, preparer, telemetry).routes(),
            *AdminRoutes(service, preparer, bodies, instrumentation, settings=settings).routes(),
            *WebPage().routes(),
            *BookingPages(bookings, bodies, lease_ttl_s=lease_ttl_s).routes(),
        ]
        if takes_prefills:
            by_path["/v1/prefill"] = calls.prefill
            routes.extend(PrefillPages(prefills).routes())
        super().__init__(
            by_path,
            routes,
            bodies=bodies,
            settings=settings,
            instrumentation=instrumentation,
            traffic=service.requests.traffic,
        )
        self._telemetry = telemetry
        self._bookings = bookings
        self._prefills = prefills
        self._ends = (
            telemetry.before_scrape(Gauges(telemetry, service).refresh),
            telemetry.before_scrape(self._refresh),
            telemetry.before_scrape(preparer.refresh_gauges),
        )

    def close(self) -> None:
        """Stop refreshing gauges and reading bodies."""
        for end in self._ends:
            end()
        self._bodies.close()
        self._compressed.close()

    def _refresh(self) -> None:
        self._telemetry.bookings.set(len(self._bookings))
        self._telemetry.prefills_active.set(len(self._prefills))
