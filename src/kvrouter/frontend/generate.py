"""The two generation routes: from a parsed call to the last byte of its answer."""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from kvrouter.core.errors import KvrouterError
from kvrouter.core.requests import CallRoute, GenerateRequest
from kvrouter.frontend.bodies import Bodies
from kvrouter.frontend.http import Disconnected, Request, Responder
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.frontend.openai.answers import RouteKind
from kvrouter.frontend.openai.parse import Call, ChatCall, CompletionCall, parse_chat, parse_completion
from kvrouter.frontend.openai.passthrough import parse_passed
from kvrouter.frontend.prepare import RequestPreparer
from kvrouter.frontend.response_passthrough import pass_stream, pass_whole
from kvrouter.frontend.response_tokens import ChunkReader, answer_query, answer_stream, answer_whole
from kvrouter.frontend.response_writer import RequestIds, ResponseWriter, cancel_with
from kvrouter.service.router import RouterService
from kvrouter.text.detokenizer import StopMatcher
from kvrouter.text.model import TextModel

CLIENT_LEFT_STATUS = 499

_PARSERS: Mapping[RouteKind, Callable[..., ChatCall | CompletionCall]] = {
    RouteKind.CHAT: parse_chat,
    RouteKind.COMPLETION: parse_completion,
}
_ROUTES = {RouteKind.CHAT: CallRoute.CHAT, RouteKind.COMPLETION: CallRoute.COMPLETION}


class GenerateRoutes:
    """Handles ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(
        self,
        service: RouterService,
        preparer: RequestPreparer,
        bodies: Bodies,
        observed: FrontendInstrumentation,
    ) -> None:
        self._service = service
        self._preparer = preparer
        self._bodies = bodies
        self._observed = observed
        self._ids = RequestIds()

    async def chat(self, request: Request, responder: Responder) -> None:
        """``POST /v1/chat/completions``."""
        await self._answer(RouteKind.CHAT, request, responder)

    async def completion(self, request: Request, responder: Responder) -> None:
        """``POST /v1/completions``."""
        await self._answer(RouteKind.COMPLETION, request, responder)

    async def _answer(self, kind: RouteKind, request: Request, responder: Responder) -> None:
        """Answer one call; a client that leaves cancels whatever its request waits for."""
        exchange = ResponseWriter(kind, responder, self._ids.take(request.header("x-request-id")))
        cancel_with(responder)
        try:
            await self._serve(exchange, request)
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

    async def _serve(self, exchange: ResponseWriter, request: Request) -> None:
        received_s = time.monotonic()
        call, generate, text, matcher = await self._prepared(exchange, request)
        if call.nvext.asks_only:
            await answer_query(exchange, call, generate, self._service.explain(generate))
            return
        async with self._service.generate(generate, received_s=received_s) as generation:
            if matcher is None:
                if call.stream:
                    await pass_stream(exchange, call, generation, text)
                else:
                    await pass_whole(exchange, call, generation)
                return
            reading = ChunkReader(generation, text.detokenizer(), matcher)
            if call.stream:
                await answer_stream(exchange, call, reading)
            else:
                await answer_whole(exchange, call, reading)

    async def _prepared(self, exchange: ResponseWriter, request: Request) -> "_Prepared":
        """Return the call, without its body: what is not needed of that ends here, and not with the answer.

        Engines that take calls as clients write them get the body itself, again when one fails.
        """
        body = await self._bodies.scan(request.take_body())
        reader = self._preparer.nvext_reader(request.headers)
        called = self._preparer.called_model(body)
        exchange.model = called.name
        if called.router.fleet.takes_calls:
            text = self._preparer.text(called.name)
            passed = await self._bodies.parse(
                body, partial(parse_passed, _ROUTES[exchange.kind], reader=reader)
            )
            generate = await self._preparer.prepare_passed(passed, called, text, exchange.request_id)
            return _Prepared(passed.call, generate, text)
        text = self._preparer.text_of(called, body)
        parsed = await self._bodies.parse(body, partial(_PARSERS[exchange.kind], nvext=reader))
        matcher = StopMatcher(parsed.call.stops)
        generate = await self._preparer.prepare(parsed, called, text, exchange.request_id)
        return _Prepared(parsed.call, generate, text, matcher)


class _Prepared(NamedTuple):
    """A call to be served; ``matcher`` None: its engine writes the answer."""

    call: Call
    generate: GenerateRequest
    text: TextModel
    matcher: StopMatcher | None = None
