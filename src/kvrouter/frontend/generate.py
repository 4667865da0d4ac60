"""The two generation routes: from a parsed call to the last byte of its answer."""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

from kvrouter.core.errors import InvalidRequest, KvrouterError
from kvrouter.core.requests import CallRoute
from kvrouter.frontend.answered import Reading, answer_query, answer_stream, answer_whole
from kvrouter.frontend.bodies import Bodies
from kvrouter.frontend.exchange import Exchange, cancel_with
from kvrouter.frontend.http import Disconnected, Request, Responder
from kvrouter.frontend.observed import FrontObserved
from kvrouter.frontend.openai.answers import Kind
from kvrouter.frontend.openai.nvext import NvextReader
from kvrouter.frontend.openai.parse import ChatCall, CompletionCall, parse_chat, parse_completion
from kvrouter.frontend.openai.passed import parse_passed
from kvrouter.frontend.openai.scanned import ScannedBody
from kvrouter.frontend.passing import pass_stream, pass_whole
from kvrouter.frontend.prepare import Hall
from kvrouter.frontend.request_ids import RequestIds
from kvrouter.service.router import RouterService
from kvrouter.text.stops import StopMatcher

CLIENT_LEFT_STATUS = 499

_PARSERS: Mapping[Kind, Callable[..., ChatCall | CompletionCall]] = {
    Kind.CHAT: parse_chat,
    Kind.COMPLETION: parse_completion,
}
_ROUTES = {Kind.CHAT: CallRoute.CHAT, Kind.COMPLETION: CallRoute.COMPLETION}


class GenerateRoutes:
    """Handles ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, service: RouterService, hall: Hall, bodies: Bodies, observed: FrontObserved) -> None:
        self._service = service
        self._hall = hall
        self._bodies = bodies
        self._observed = observed
        self._ids = RequestIds()

    async def chat(self, request: Request, responder: Responder) -> None:
        """``POST /v1/chat/completions``."""
        await self._answer(Kind.CHAT, request, responder)

    async def completion(self, request: Request, responder: Responder) -> None:
        """``POST /v1/completions``."""
        await self._answer(Kind.COMPLETION, request, responder)

    async def _answer(self, kind: Kind, request: Request, responder: Responder) -> None:
        """Answer one call; a client that leaves cancels whatever its request waits for."""
        exchange = Exchange(kind, responder, self._ids.take(request.header("x-request-id")))
        cancel_with(responder)
        try:
            await self._serve(exchange, request.body, self._hall.nvext_reader(request.headers))
        except KvrouterError as error:
            self._observed.failed(error, model=exchange.model)
            exchange.fail(error)
        except (asyncio.CancelledError, Disconnected):
            if responder.disconnected is None:
                raise
            exchange.status = CLIENT_LEFT_STATUS
        finally:
            self._ids.give_back(exchange.request_id)
            self._observed.answered(route=request.path, model=exchange.model, status=exchange.status)

    async def _serve(self, exchange: Exchange, data: bytes, reader: NvextReader) -> None:
        received_s = time.monotonic()
        body = await self._bodies.scan(data)
        exchange.model = self._hall.model_in(body)
        if self._hall.passes(body):
            await self._serve_passed(exchange, body, reader, received_s)
            return
        try:
            parsed = await self._bodies.parse(body, partial(_PARSERS[exchange.kind], nvext=reader))
        except InvalidRequest:
            self._hall.refuse_on_its_way(body)
            raise
        call = parsed.call
        text = self._hall.text_of(call)
        matcher = StopMatcher(call.stops)
        generate = await self._hall.prepare(parsed, text, exchange.request_id)
        if call.nvext.asks_only:
            await answer_query(exchange, call, generate, self._service.explain(generate))
            return
        async with self._service.generate(generate, received_s=received_s) as generation:
            reading = Reading(generation, text.detokenizer(), matcher)
            if call.stream:
                await answer_stream(exchange, call, reading)
            else:
                await answer_whole(exchange, call, reading)

    async def _serve_passed(
        self, exchange: Exchange, body: ScannedBody, reader: NvextReader, received_s: float
    ) -> None:
        """The engines of this model take calls as clients write them, and answer for themselves."""
        parse = partial(parse_passed, _ROUTES[exchange.kind], reader=reader)
        passed = await self._bodies.parse(body, parse)
        call = passed.call
        text = self._hall.text_of(call)
        generate = await self._hall.prepare_passed(passed, text, exchange.request_id)
        if call.nvext.asks_only:
            await answer_query(exchange, call, generate, self._service.explain(generate))
            return
        async with self._service.generate(generate, received_s=received_s) as generation:
            if call.stream:
                await pass_stream(exchange, call, generation, text)
            else:
                await pass_whole(exchange, call, generation)
