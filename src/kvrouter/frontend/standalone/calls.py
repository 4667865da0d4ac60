"""The calls of a standalone router that decide: a caller that leaves meanwhile takes its call back."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import parse_qsl

import msgspec

from kvrouter.core.errors import InvalidRequest, KvrouterError, ShuttingDown
from kvrouter.core.ids import ModelName
from kvrouter.core.requests import Bootstrap, GenerateRequest
from kvrouter.frontend.bodies import Bodies
from kvrouter.frontend.errors import JSON_HEADERS, error_body, error_headers
from kvrouter.frontend.exchange import cancel_with
from kvrouter.frontend.explained import Json
from kvrouter.frontend.generate import CLIENT_LEFT_STATUS
from kvrouter.frontend.http import Disconnected, Request, Responder
from kvrouter.frontend.observed import FrontObserved
from kvrouter.frontend.prepare import Hall
from kvrouter.frontend.standalone.answers import prefilled_json, routed_json
from kvrouter.frontend.standalone.bodies import parse_route
from kvrouter.frontend.standalone.desk import Desk, id_of
from kvrouter.service.bookings import Bookings
from kvrouter.service.prefills import Prefills
from kvrouter.service.router import RouterService

_YES_NO = {"true": True, "1": True, "false": False, "0": False}


class Calls:
    """Handles ``/v1/route`` and ``/v1/prefill``."""

    def __init__(
        self,
        service: RouterService,
        hall: Hall,
        desk: Desk,
        bodies: Bodies,
        bookings: Bookings,
        prefills: Prefills,
        observed: FrontObserved,
        *,
        lease_ttl_s: float,
    ) -> None:
        self._service = service
        self._hall = hall
        self._desk = desk
        self._bodies = bodies
        self._bookings = bookings
        self._prefills = prefills
        self._observed = observed
        self._lease_ttl_s = lease_ttl_s

    async def route(self, request: Request, responder: Responder) -> None:
        """``POST /v1/route``: decide and book; with ``?book=false`` only decide."""
        await self._answer(request, responder, self._route)

    async def prefill(self, request: Request, responder: Responder) -> None:
        """``POST /v1/prefill``: pick a prefill worker and send it the prefill leg."""
        await self._answer(request, responder, self._prefill)

    async def _answer(
        self, request: Request, responder: Responder, work: Callable[["_Call"], Awaitable[Json]]
    ) -> None:
        call = _Call(request)
        status = KvrouterError.status_hint
        cancel_with(responder)
        try:
            if self._service.is_draining:
                raise ShuttingDown("this router is shutting down and takes no new requests")
            body = msgspec.json.encode(await work(call))
            status = 200
            await responder.send(status, JSON_HEADERS, body)
        except KvrouterError as error:
            status = error.status_hint
            self._observed.failed(error, model=call.model)
            responder.answer(status, error_headers(error), error_body(error))
        except (asyncio.CancelledError, Disconnected):
            if responder.disconnected is None:
                raise
            status = CLIENT_LEFT_STATUS
        finally:
            self._observed.answered(route=request.path, model=call.model, status=status)

    async def _route(self, call: "_Call") -> Json:
        books = _books(call.request.query)
        request = await self._prepared(call)
        room = self._service.model(request.model)
        bootstrap: Bootstrap | None = None
        if books:
            placement = await self._bookings.book(room, request)
            decision, bootstrap = placement.decision, placement.bootstrap
        else:
            decision = room.explain(request)
        return routed_json(
            request,
            room.fleet,
            decision,
            bootstrap=bootstrap,
            lease_ttl_s=self._lease_ttl_s if books else None,
        )

    async def _prepared(self, call: "_Call") -> GenerateRequest:
        body = await self._bodies.scan(call.request.take_body())
        called = self._hall.called_model(body)
        call.model = called.name
        text = None if "token_ids" in body.fields else self._hall.text_of(called, body)
        reader = self._hall.nvext_reader(call.request.headers)
        wanted = await self._bodies.parse(body, partial(parse_route, nvext=reader))
        request_id = id_of(wanted, call.request.header("x-request-id"))
        return await self._desk.prepare(wanted, called, text, request_id)

    async def _prefill(self, call: "_Call") -> Json:
        if call.request.query:
            raise InvalidRequest("query: this route takes none", param="query")
        request = await self._prepared(call)
        room = self._service.model(request.model)
        return prefilled_json(request, room.fleet, await self._prefills.prefill(room, request))


class _Call:
    """One call, and the model that it names once that is known to be served."""

    __slots__ = ("model", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.model: ModelName | None = None


def _books(query: str) -> bool:
    """Whether a route is booked. A misspelt wish is refused: it would leave load that nobody knows of."""
    books = True
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "book" or value.lower() not in _YES_NO:
            raise InvalidRequest(f"query: only book=true and book=false are known, not {name}", param="query")
        books = _YES_NO[value.lower()]
    return books
