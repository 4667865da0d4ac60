"""Prepares a request: from a body, read within bounds, to token ids, or an error that names the field."""

import asyncio
import dataclasses
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from kvrouter.core.constraints import RoutingConstraints, adapter_taint
from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotReady
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import GenerateRequest, Sampling, TokenBuffer
from kvrouter.core.workers import CONTEXT_TOKENS_UNKNOWN
from kvrouter.frontend.engine_tokens import ModelTexts, PromptTokenizer
from kvrouter.frontend.http import BodyLimit
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.frontend.openai.body import (
    NUMBERS_MIN,
    BodyBounds,
    BodyOverBounds,
    ScannedBody,
    named_model,
    scanned,
)
from kvrouter.frontend.openai.form import Form, read_form
from kvrouter.frontend.openai.parse import Call, ChatCall, CompletionCall, Header, NvextReader, refuse_unknown
from kvrouter.frontend.openai.passthrough import PassthroughCall
from kvrouter.frontend.pins import check_pins
from kvrouter.frontend.response_passthrough import estimated_tokens
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.router_service import RouterService
from kvrouter.settings.tree import FrontendSettings, UnknownNvext
from kvrouter.text.model import TextModel
from kvrouter.text.tokenizer import EncodePoolFull, PromptOverBudget


class Named(NamedTuple):
    """What a call's ``model`` means: a model, and an adapter of it or none."""

    model: ModelName
    adapter: str | None


class CalledModel(NamedTuple):
    """The model that a call names, and the adapter; ``router`` has its workers, which may all have left."""

    name: ModelName
    adapter: str | None
    router: ModelRouter


def served_text(text: TextModel, router: ModelRouter | None) -> TextModel:
    """Return ``text`` with the longest context of the workers who may answer, or with its own where that is
    shorter: no single worker's card decides for all.
    """
    context_tokens = None if router is None else router.fleet.context_length_tokens
    if context_tokens is None or context_tokens >= text.context_length_tokens:
        return text
    return dataclasses.replace(text, context_length_tokens=context_tokens)


class RequestPreparer:
    """One way in, for requests that are sent and for those that are only explained."""

    def __init__(
        self,
        service: RouterService,
        texts: ModelTexts,
        observed: FrontendInstrumentation,
        settings: FrontendSettings,
    ) -> None:
        self._service = service
        self._texts = texts.texts
        self._observed = observed
        self.tokenizer = PromptTokenizer(service, texts, observed, settings)
        refuses_unknown = settings.unknown_nvext is UnknownNvext.REFUSE
        self._on_unknown = refuse_unknown if refuses_unknown else observed.routing_hint_ignored

    def nvext_reader(self, headers: Iterable[Header]) -> NvextReader:
        """Return what reads the routing hints of a call with these headers."""
        return NvextReader(headers, self._on_unknown, self._observed.routing_hint_ignored)

    def named(self, name: str) -> Named:
        """Return the model that calls mean by ``name``, and the adapter; an unknown name as it is."""
        if self._service.find(ModelName(name)) is None:
            for model in self._service.models():
                if name in model.fleet.names:
                    return Named(model.fleet.model, model.fleet.names[name])
        return Named(ModelName(name), None)

    def names(self) -> dict[str, Named]:
        """All that can be asked for: models, their other names, and their adapters."""
        known = set(self.models())
        names = (name for model in self._service.models() for name in model.fleet.names)
        found = {name: self.named(name) for name in (*known, *names)}
        return {name: found[name] for name in sorted(found) if found[name].model in known}

    def models(self) -> list[ModelName]:
        """The models that can be asked for: they have workers, who take calls as they are written, or their
        tokenizer is here.
        """
        return sorted(
            model.fleet.model
            for model in self._service.models()
            if len(model.fleet) and (model.fleet.takes_calls or model.fleet.model in self._texts)
        )

    def called_model(self, body: ScannedBody) -> CalledModel:
        """Return the model of the call in ``body``, the only one that is served where it names none.

        Raises :class:`InvalidRequest` where there are several then, :class:`UnknownModel`, and
        :class:`ModelNotReady` while its workers may be on their way: engines may take what is refused without
        them.
        """
        name = named_model(body)
        return self.only_model() if name is None else self._called(name)

    def _called(self, model: str) -> CalledModel:
        name, adapter = self.named(model)
        return CalledModel(name, adapter, self._service.model(name))

    def called_model_of(self, form: Form) -> CalledModel:
        """The same of a form; engines take an empty field for none."""
        model = form.text("model", "")
        return self._called(model) if model else self.only_model()

    def only_model(self) -> CalledModel:
        """Return the only model that is served. Raises :class:`InvalidRequest` where there are several,
        :class:`ModelNotReady` where there is none.
        """
        models = self.models()
        if not models:
            raise ModelNotReady("model: none is served here yet", param="model")
        if len(models) > 1:
            raise InvalidRequest(f"model: must be given: {len(models)} models are served", param="model")
        return CalledModel(models[0], None, self._service.model(models[0]))

    def text_of(self, called: CalledModel, body: ScannedBody) -> TextModel | None:
        """Return what turns the model's text into tokens, once the prompt in ``body`` is known to be no
        longer than any that it takes: of a longer one nothing is built. None where engines tokenize, and it
        is not here.

        Raises :class:`ModelNotReady`, and what :meth:`TextModel.refuse_chat_size` raises.
        """
        if called.router.fleet.takes_calls and called.name not in self._texts:
            return None
        text = self.text(called.name)
        with self._counting_refusals():
            for field, refuse in (("messages", text.refuse_chat_size), ("prompt", text.refuse_prompt_size)):
                if field in body.fields:
                    _, _, chars, text_bytes = body.fields[field]
                    refuse(chars, text_bytes)
        return text

    def text(self, model: ModelName) -> TextModel:
        """Return what turns the model's text into tokens; raise :class:`ModelNotReady` if it is not here.

        Its context is the one that :func:`served_text` says.
        """
        text = self._texts.get(model)
        if text is None:
            raise ModelNotReady(f"model: the tokenizer of {model!r} is not loaded here", param="model")
        return served_text(text, self._service.find(model))

    def passthrough_text(self, model: ModelName) -> TextModel | None:
        """The same for a model whose engines tokenize: None where it is not here, and the call is routed by
        load.
        """
        text = self._texts.get(model)
        return None if text is None else served_text(text, self._service.find(model))

    def context_length_tokens(self, model: ModelName) -> int | None:
        """What prompt and answer of a model may have together; None where nobody tells."""
        text, router = self._texts.get(model), self._service.find(model)
        known = None if router is None else router.fleet.context_length_tokens
        is_unknown = known is None and router is not None and len(router.fleet) > 0
        return known if text is None or is_unknown else served_text(text, router).context_length_tokens

    async def prepare_passthrough(
        self, passed: PassthroughCall, called: CalledModel, text: TextModel | None, request_id: RequestId
    ) -> GenerateRequest:
        """Tokenize a call that goes to its engine as it was written, so far as it is known here.

        Where it is not (images, a template of the client's own), routing sees the part that is, and names
        that stand for images; no other worker could go on with the answer. Without a ``text`` only the length
        of the prompt is estimated.
        """
        call, written = passed.call, passed.client_call
        model, adapter, router = called
        check_pins(call, router)
        began_s = time.perf_counter()
        with self._counting_refusals():
            tokens, shape = await self.tokenizer.tokens_of(passed, router, text)
        if text is not None:
            self._observed.tokenized(time.perf_counter() - began_s, model)
        context_tokens = router.fleet.context_length_tokens or CONTEXT_TOKENS_UNKNOWN
        if text is not None:
            context_tokens = text.context_length_tokens
        isl_tokens = len(tokens.token_ids)
        room_tokens = max(1, context_tokens - isl_tokens)
        wanted_tokens = isl_tokens + (call.max_tokens or 1)  # more than anybody has is the engine's to judge
        return GenerateRequest(
            request_id=request_id,
            model=model,
            token_ids=tokens.token_ids,
            sampling=Sampling(max_tokens=min(call.max_tokens or room_tokens, room_tokens)),
            constraints=call.constraints if adapter is None else _with_adapter(call.constraints, adapter),
            override=call.override,
            pin=call.pin,
            prefill_pin=call.prefill_pin,
            lora_name=adapter,
            cache_namespace=call.cache_namespace,
            call=written if tokens.is_exact else replace(written, resumable=False),
            has_media=tokens.has_media,
            shape=shape,
            context_tokens=0 if tokens.estimate or wanted_tokens > context_tokens else wanted_tokens,
            isl_tokens_estimate=min(tokens.estimate, context_tokens),
        )

    async def prepare(
        self,
        parsed: ChatCall | CompletionCall,
        called: CalledModel,
        text: TextModel | None,
        request_id: RequestId,
    ) -> GenerateRequest:
        """Check what can never be met, template, tokenize and check the lengths; long texts are tokenized off
        the event loop. Without a ``text`` an engine is asked, or the length of the prompt estimated.
        """
        check_pins(parsed.call, called.router)
        if text is None:
            request = _estimated_request(parsed, called, request_id)
            prompt = parsed.messages if isinstance(parsed, ChatCall) else parsed.prompt
            if not request.is_prompt_unknown or isinstance(prompt, array):
                return request
            asked = await self.tokenizer.unread_tokens(prompt, called.router)
            return request if asked is None else replace(request, token_ids=asked, isl_tokens_estimate=0)
        began_s = time.perf_counter()
        with self._counting_refusals():
            token_ids, field = await _token_ids(parsed, text)
        self._observed.tokenized(time.perf_counter() - began_s, called.name)
        return _request(parsed.call, called.name, token_ids, text, request_id, field=field)

    def refresh_gauges(self) -> None:
        """Set the gauges of the memory that the prompts being tokenized are counted to hold, and of the
        models that are routed by load.
        """
        pools = {text.pool for text in self._texts.values()}
        self._observed.tokenizing(sum(pool.held_bytes for pool in pools))
        self._observed.by_load(
            {
                model.fleet.model: self.tokenizer.why_by_load(model) is not None
                for model in self._service.models()
            }
        )

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (ContextLengthExceeded, EncodePoolFull, PromptOverBudget) as refused:
            self._observed.prompt_refused(refused.code)
            raise


def _with_adapter(constraints: RoutingConstraints, adapter: str) -> RoutingConstraints:
    """Only a worker whose engine has the adapter can answer."""
    return replace(constraints, required_taints=constraints.required_taints | {adapter_taint(adapter)})


def answer_tokens(
    isl_tokens: int,
    max_tokens: int | None,
    *,
    context_length_tokens: int,
    prompt_field: str,
    max_tokens_field: str,
) -> int:
    """Return how long the answer may be, in tokens: ``max_tokens``, or None for all that the context leaves.

    Raises :class:`InvalidRequest` for an empty prompt, :class:`ContextLengthExceeded` when prompt and answer
    do not fit into the context together; both name the field to blame.
    """
    if isl_tokens == 0:
        raise InvalidRequest(f"{prompt_field}: must not be empty", param=prompt_field)
    room_tokens = context_length_tokens - isl_tokens
    if room_tokens < 1:
        raise ContextLengthExceeded(
            f"{prompt_field}: {isl_tokens} tokens, and the model's context holds {context_length_tokens}, "
            "the answer included",
            param=prompt_field,
        )
    if max_tokens is None:
        return room_tokens
    if max_tokens > room_tokens:
        raise ContextLengthExceeded(
            f"{max_tokens_field}: {isl_tokens} tokens of prompt leave room for {room_tokens} in the "
            f"model's context of {context_length_tokens}, not for {max_tokens}",
            param=max_tokens_field,
        )
    return max_tokens


async def _token_ids(parsed: ChatCall | CompletionCall, text: TextModel) -> tuple[TokenBuffer, str]:
    """Return the prompt, and the field that it came from."""
    token_data = parsed.call.nvext.token_data
    if token_data is not None:
        field = "nvext.token_data"
        return _checked_ids(token_data, text.tokenizer.vocab_size, field=field), field
    if isinstance(parsed, ChatCall):
        return await text.encode_chat(parsed.messages), "messages"
    if isinstance(parsed.prompt, str):
        return await text.encode_prompt(parsed.prompt), "prompt"
    return _checked_ids(parsed.prompt, text.tokenizer.vocab_size, field="prompt"), "prompt"


def _checked_ids(token_ids: TokenBuffer, vocab_size: int, *, field: str) -> TokenBuffer:
    ids = np.frombuffer(token_ids, np.uint32)
    place = int(ids.argmax()) if len(ids) else 0
    if len(ids) and ids[place] >= vocab_size:
        at = f"{field}[{place}]"
        raise InvalidRequest(
            f"{at}: the model's vocabulary ends at {vocab_size - 1}, not {ids[place]}", param=at
        )
    return token_ids


def _request(
    call: Call,
    model: ModelName,
    token_ids: TokenBuffer,
    text: TextModel,
    request_id: RequestId,
    *,
    field: str,
) -> GenerateRequest:
    max_tokens = answer_tokens(
        len(token_ids),
        call.max_tokens,
        context_length_tokens=text.context_length_tokens,
        prompt_field=field,
        max_tokens_field=call.max_tokens_field,
    )
    return GenerateRequest(
        request_id=request_id,
        model=model,
        token_ids=token_ids,
        sampling=call.sampling(max_tokens),
        constraints=call.constraints,
        override=call.override,
        pin=call.pin,
        prefill_pin=call.prefill_pin,
        cache_namespace=call.cache_namespace,
        context_tokens=len(token_ids) + (call.max_tokens or 1),
    )


def _estimated_request(
    parsed: ChatCall | CompletionCall, called: CalledModel, request_id: RequestId
) -> GenerateRequest:
    """A request whose prompt cannot be read here, unless it is in token ids."""
    call = parsed.call
    prompt = parsed.messages if isinstance(parsed, ChatCall) else parsed.prompt
    token_ids, estimate = call.nvext.token_data or array("I"), 0
    if isinstance(prompt, array):
        token_ids = prompt
    elif not token_ids:
        estimate = estimated_tokens(prompt)
    context_tokens = called.router.fleet.context_length_tokens or CONTEXT_TOKENS_UNKNOWN
    return GenerateRequest(
        request_id=request_id,
        model=called.name,
        token_ids=token_ids,
        sampling=call.sampling(call.max_tokens or context_tokens),
        constraints=call.constraints,
        override=call.override,
        pin=call.pin,
        prefill_pin=call.prefill_pin,
        cache_namespace=call.cache_namespace,
        isl_tokens_estimate=min(estimate, context_tokens),
    )


OFF_LOOP_BYTES = 128 * 1024
"""A longer body is read in a thread: a tenth of a millisecond to scan, some tenths to decode."""

THREADS = 2
BODY_BYTES_MAX = 64 * 1024 * 1024
"""No body is longer than this unless a setting says so, whatever contexts could need."""

PAGE_BYTES_MAX = 64 * 1024
"""For the routes of operators, whose bodies are a few numbers."""

OUTSIDE_PROMPT_BYTES = 2 * 1024 * 1024
"""The rest of a body, next to the text of a prompt: names of fields, quotes, everything that is no prompt."""

ESCAPED_BYTES_PER_BYTE = 3
"""JSON that is written in ASCII has six bytes for a character of two, and twelve for one of four."""

TOKEN_CHARS_MIN = 16
"""Characters of a token, though the longest of a vocabulary be shorter: escaped ones are written longer."""

TOKEN_ID_BYTES = 12
"""A token id in a list: ten digits, a comma, a space."""

NUMBERS_MAX = 16_777_216
"""Token ids, though a worker say that its context is longer."""

Parsed = TypeVar("Parsed")


class Bodies:
    """Scans and parses the bodies of one HTTP app; :meth:`close` ends its threads.

    A body that is refused costs one scan, without the interpreter. One that is not costs what its bounds
    allow to be built of it.
    """

    def __init__(
        self,
        service: RouterService,
        texts: Mapping[ModelName, TextModel],
        observed: FrontendInstrumentation,
        settings: FrontendSettings,
    ) -> None:
        self._service = service
        self._texts = texts
        self._observed = observed
        self._settings = settings
        self._bounds = BodyBounds(
            depth=settings.body_max_depth,
            values=settings.body_max_values,
            items=settings.body_max_items,
            numbers=settings.body_max_token_ids or NUMBERS_MIN,
            text_bytes=settings.body_max_text_bytes,
        )
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvrouter-body")

    async def scan(
        self, data: bytes, read_fields: frozenset[str] | None = None, *, takes_nan: bool = False
    ) -> ScannedBody:
        """Look through a body of which ``read_fields`` are read, None: all. Raises :class:`InvalidRequest`
        with the field's path as ``param``.
        """
        bounds = self._bounds_of(data)
        if read_fields is not None or takes_nan:
            bounds = dataclasses.replace(bounds, read_fields=read_fields, takes_nan=takes_nan)
        try:
            if len(data) <= OFF_LOOP_BYTES:
                return scanned(data, bounds)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, scanned, data, bounds)
        except BodyOverBounds as refused:
            self._observed.body_refused(refused.bound)
            raise

    async def parse(self, body: ScannedBody, parse: Callable[[ScannedBody], Parsed]) -> Parsed:
        """Return ``parse(body)``."""
        if len(body.data) <= OFF_LOOP_BYTES:
            return parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse, body)

    async def form(self, content_type: str, data: bytes) -> Form:
        """Look through a body that is a form; raise :class:`InvalidRequest` naming the field."""
        if len(data) <= OFF_LOOP_BYTES:
            return read_form(content_type, data)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, read_form, content_type, data)

    async def read(self, data: bytes, parse: Callable[[ScannedBody], Parsed]) -> Parsed:
        """Scan and parse."""
        return await self.parse(await self.scan(data), parse)

    def prompt_limit(self) -> BodyLimit:
        """Return how long a body with a prompt may be: what the longest context here can need."""
        if self._settings.body_max_bytes is not None:
            return BodyLimit(self._settings.body_max_bytes, "as KVROUTER_BODY_MAX_BYTES says")
        needed_bytes: list[int] = []
        for model in self._service.models():
            needed_bytes.append(TOKEN_ID_BYTES * (model.fleet.context_length_tokens or 0))
            if model.fleet.takes_calls:
                needed_bytes.append(BODY_BYTES_MAX)  # its calls may hold images, of which nobody here knows
        for name, text in self._texts.items():
            # Of a model without any worker so far nobody knows whether it takes calls.
            router = self._service.find(name)
            needed = BODY_BYTES_MAX if router is None else _needed_bytes(served_text(text, router))
            needed_bytes.append(needed)
        most_bytes = max(needed_bytes, default=BODY_BYTES_MAX)
        return BodyLimit(
            min(BODY_BYTES_MAX, OUTSIDE_PROMPT_BYTES + most_bytes),
            "which no prompt for the longest context here needs; KVROUTER_BODY_MAX_BYTES sets another limit",
        )

    def page_limit(self) -> BodyLimit:
        """Return how long the body of an operator's route may be."""
        return BodyLimit(PAGE_BYTES_MAX, "which no body of this route needs")

    def close(self) -> None:
        """Read no more bodies."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _bounds_of(self, data: bytes) -> BodyBounds:
        """The bounds of a long body: as many token ids as the longest context here holds."""
        if self._settings.body_max_token_ids is not None or len(data) < 2 * NUMBERS_MIN:
            return self._bounds
        texts = (served_text(text, self._service.find(name)) for name, text in self._texts.items())
        contexts = [text.context_length_tokens for text in texts]
        contexts += [model.fleet.context_length_tokens or 0 for model in self._service.models()]
        numbers = min(NUMBERS_MAX, max(NUMBERS_MIN, *contexts, 0))
        return dataclasses.replace(self._bounds, numbers=numbers)


def _needed_bytes(text: TextModel) -> int:
    """How long the text of a prompt may be in JSON."""
    chars = max(text.prompt_max_chars, TOKEN_CHARS_MIN * text.context_length_tokens)
    return max(ESCAPED_BYTES_PER_BYTE * chars, TOKEN_ID_BYTES * text.context_length_tokens)
