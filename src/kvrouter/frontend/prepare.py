"""Prepares requests: reads a body within bounds, parses the call, and tokenizes its prompt."""

import asyncio
import dataclasses
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotReady
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import GenerateRequest, Sampling, TokenBuffer
from kvrouter.core.taints import adapter_taints
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
from kvrouter.frontend.response_passthrough import text_ids_of
from kvrouter.frontend.tenant_priorities import read_tenants
from kvrouter.router.model_router import ModelRouter
from kvrouter.router.router_service import RouterService
from kvrouter.settings.tree import FrontendSettings, UnknownNvext
from kvrouter.text.model import TextModel
from kvrouter.text.tokenizer import EncodePoolFull, PromptOverBudget

PROMPT_REFUSALS = (ContextLengthExceeded, EncodePoolFull, PromptOverBudget)
"""The errors of prompts that are counted as refused."""


class NamedModel(NamedTuple):
    """The model that a call's ``model`` names, and a LoRA adapter of it or None."""

    model: ModelName
    adapter: str | None


class CalledModel(NamedTuple):
    """The called model, a LoRA adapter or None, and the model's router, which may have no workers left."""

    name: ModelName
    adapter: str | None
    router: ModelRouter


def served_text(text: TextModel, router: ModelRouter | None) -> TextModel:
    """Return ``text`` with the shorter of its own context length and the workers' longest one, so that no
    single worker's card decides for all.
    """
    context_tokens = None if router is None else router.fleet.context_length_tokens
    if context_tokens is None or context_tokens >= text.context_length_tokens:
        return text
    return dataclasses.replace(text, context_length_tokens=context_tokens)


class RequestPreparer:
    """Prepares requests from calls, both for sending and for explanations."""

    def __init__(
        self,
        service: RouterService,
        texts: ModelTexts,
        instrumentation: FrontendInstrumentation,
        settings: FrontendSettings,
    ) -> None:
        self._service = service
        self._texts = texts.texts
        self._instrumentation = instrumentation
        self.tokenizer = PromptTokenizer(service, texts, instrumentation, settings)
        refuses_unknown = settings.unknown_nvext is UnknownNvext.REFUSE
        self._on_unknown = refuse_unknown if refuses_unknown else instrumentation.routing_hint_ignored
        given = settings.tenant_priorities
        self._tenants = None if given is None else read_tenants(given)

    def nvext_reader(self, headers: Iterable[Header]) -> NvextReader:
        """Return a reader of the routing hints of a call with these headers."""
        on_header = self._instrumentation.routing_hint_ignored
        return NvextReader(headers, self._on_unknown, on_header, self._tenants)

    def named(self, name: str) -> NamedModel:
        """Return the model and adapter that ``name`` stands for; an unknown name is returned as a model."""
        if self._service.find(ModelName(name)) is None:
            for model in self._service.models():
                if name in model.fleet.names:
                    return NamedModel(model.fleet.model, model.fleet.names[name])
        return NamedModel(ModelName(name), None)

    def names(self) -> dict[str, NamedModel]:
        """Return the names that calls can use: models, their aliases and their adapters."""
        known = set(self.models())
        names = (name for model in self._service.models() for name in model.fleet.names)
        found = {name: self.named(name) for name in (*known, *names)}
        return {name: found[name] for name in sorted(found) if found[name].model in known}

    def models(self) -> list[ModelName]:
        """Return the models that calls can use: they have workers, and either those take passed-through calls
        or the router has their tokenizer.
        """
        return sorted(
            model.fleet.model
            for model in self._service.models()
            if len(model.fleet) and (model.fleet.takes_calls or model.fleet.model in self._texts)
        )

    def called_model(self, body: ScannedBody) -> CalledModel:
        """Return the model of the call in ``body``; the only served model if it names none.

        Raises :class:`InvalidRequest` for a call without a name if several are served, :class:`UnknownModel`,
        and :class:`ModelNotReady` while the model's workers may still register.
        """
        name = named_model(body)
        return self.only_model() if name is None else self._called(name)

    def _called(self, model: str) -> CalledModel:
        router = self._service.find(ModelName(model))
        if router is not None:
            return CalledModel(ModelName(model), None, router)
        name, adapter = self.named(model)
        return CalledModel(name, adapter, self._service.model(name))

    def called_model_of(self, form: Form) -> CalledModel:
        """Return the model that a form names, or the only served one if it names none."""
        model = form.text("model", "")
        return self._called(model) if model else self.only_model()

    def only_model(self) -> CalledModel:
        """Return the only served model. Raises :class:`InvalidRequest` if there are several,
        :class:`ModelNotReady` if there is none.
        """
        models = self.models()
        if not models:
            raise ModelNotReady("model: none is served here yet", param="model")
        if len(models) > 1:
            raise InvalidRequest(f"model: must be given: {len(models)} models are served", param="model")
        return CalledModel(models[0], None, self._service.model(models[0]))

    def text_of(self, called: CalledModel, body: ScannedBody) -> TextModel | None:
        """Return the text model of a call, after refusing a prompt in ``body`` that is too long, before it is
        decoded. None if the engines take calls and the router has no tokenizer.

        Raises :class:`ModelNotReady`, and as :meth:`TextModel.refuse_chat_size` does.
        """
        if called.router.fleet.takes_calls and called.name not in self._texts:
            return None
        text = self.text(called.name)
        try:
            for field, refuse in (("messages", text.refuse_chat_size), ("prompt", text.refuse_prompt_size)):
                if field in body.fields:
                    _, _, chars, text_bytes = body.fields[field]
                    refuse(chars, text_bytes)
        except PROMPT_REFUSALS as refused:
            self._instrumentation.prompt_refused(refused.code)
            raise
        return text

    def text(self, model: ModelName) -> TextModel:
        """Return the text model with the context of :func:`served_text`; raise :class:`ModelNotReady` without
        one.
        """
        text = self._texts.get(model)
        if text is None:
            raise ModelNotReady(f"model: the tokenizer of {model!r} is not loaded here", param="model")
        return served_text(text, self._service.find(model))

    def passthrough_text(self, model: ModelName) -> TextModel | None:
        """Return the text model for a passed-through call; None without one: the call is routed by load."""
        text = self._texts.get(model)
        return None if text is None else served_text(text, self._service.find(model))

    def context_length_tokens(self, model: ModelName) -> int | None:
        """Return the context length of a model, prompt and answer together, in tokens; None if unknown."""
        text, router = self._texts.get(model), self._service.find(model)
        known = None if router is None else router.fleet.context_length_tokens
        is_unknown = known is None and router is not None and len(router.fleet) > 0
        return known if text is None or is_unknown else served_text(text, router).context_length_tokens

    async def prepare_passthrough(
        self, passthrough: PassthroughCall, called: CalledModel, text: TextModel | None, request_id: RequestId
    ) -> GenerateRequest:
        """Return the request of a passed-through call, tokenized as far as the router can.

        For images or a template of the client's, routing gets the known part, with a placeholder name for
        each image, and no other worker can resume the answer. Without a ``text`` only the length of the
        prompt is estimated.
        """
        call, written = passthrough.call, passthrough.client_call
        model, adapter, router = called
        check_pins(call, router)
        constraints = call.constraints
        if adapter is not None:
            required = constraints.required_taints | adapter_taints([adapter])
            constraints = replace(constraints, required_taints=required)
        began_s = time.perf_counter()
        try:
            tokens, shape = await self.tokenizer.tokens_of(passthrough, router, text)
        except PROMPT_REFUSALS as refused:
            self._instrumentation.prompt_refused(refused.code)
            raise
        if text is not None:
            self._instrumentation.tokenized(time.perf_counter() - began_s, model)
        context_tokens = router.fleet.context_length_tokens or CONTEXT_TOKENS_UNKNOWN
        if text is not None:
            context_tokens = text.context_length_tokens
        isl_tokens = len(tokens.token_ids)
        room_tokens = max(1, context_tokens - isl_tokens)
        wanted_tokens = isl_tokens + (call.max_tokens or 1)  # the engine judges a prompt over every context
        return GenerateRequest(
            request_id=request_id,
            model=model,
            token_ids=tokens.token_ids,
            sampling=Sampling(max_tokens=min(call.max_tokens or room_tokens, room_tokens)),
            constraints=constraints,
            override=call.override,
            pin=call.pin,
            prefill_pin=call.prefill_pin,
            lora_name=adapter,
            cache_namespace=call.cache_namespace,
            service_level=call.service_level,
            call=written if tokens.is_exact else replace(written, resumable=False),
            has_media=tokens.has_media,
            shape=shape,
            context_tokens=0 if tokens.estimate or wanted_tokens > context_tokens else wanted_tokens,
            isl_tokens_estimate=min(tokens.estimate, context_tokens),
            text_ids=tokens.text_ids,
        )

    async def prepare(
        self,
        parsed: ChatCall | CompletionCall,
        called: CalledModel,
        text: TextModel | None,
        request_id: RequestId,
    ) -> GenerateRequest:
        """Return the request of a call: check its pins, render, tokenize, check the lengths. Long texts are
        tokenized off the event loop. Without a ``text`` an engine tokenizes, or the length is estimated.
        """
        check_pins(parsed.call, called.router)
        if text is None:
            request = _estimated_request(parsed, called, request_id)
            prompt = parsed.messages if isinstance(parsed, ChatCall) else parsed.prompt
            if not request.is_prompt_unknown or isinstance(prompt, array):
                return request
            token_ids = await self.tokenizer.unread_tokens(prompt, called.router)
            if token_ids is None:
                return request
            return replace(request, token_ids=token_ids, isl_tokens_estimate=0, text_ids=None)
        began_s = time.perf_counter()
        try:
            token_ids, field = await _token_ids(parsed, text)
        except PROMPT_REFUSALS as refused:
            self._instrumentation.prompt_refused(refused.code)
            raise
        self._instrumentation.tokenized(time.perf_counter() - began_s, called.name)
        return _request(parsed.call, called.name, token_ids, text, request_id, field=field)

    def refresh_gauges(self) -> None:
        """Set the gauges of the memory of prompts being tokenized and of the models routed by load."""
        pools = {text.pool for text in self._texts.values()}
        self._instrumentation.tokenizing(sum(pool.held_bytes for pool in pools))
        self._instrumentation.by_load(
            {
                model.fleet.model: self.tokenizer.why_by_load(model) is not None
                for model in self._service.models()
            }
        )


def answer_tokens(
    isl_tokens: int,
    max_tokens: int | None,
    *,
    context_length_tokens: int,
    prompt_field: str,
    max_tokens_field: str,
) -> int:
    """Return the longest answer in tokens: ``max_tokens``, or the rest of the context for None.

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
    """Return the prompt's token ids, and the field that it came from."""
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
        service_level=call.service_level,
        context_tokens=len(token_ids) + (call.max_tokens or 1),
    )


def _estimated_request(
    parsed: ChatCall | CompletionCall, called: CalledModel, request_id: RequestId
) -> GenerateRequest:
    """Return a request whose prompt the router cannot tokenize, unless it is in token ids."""
    call = parsed.call
    prompt = parsed.messages if isinstance(parsed, ChatCall) else parsed.prompt
    token_ids, text_ids = call.nvext.token_data or array("I"), None
    if isinstance(prompt, array):
        token_ids = prompt
    elif not token_ids:
        text_ids = text_ids_of(prompt)
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
        service_level=call.service_level,
        isl_tokens_estimate=min(len(text_ids or ()), context_tokens),
        text_ids=text_ids,
    )


OFF_LOOP_BYTES = 128 * 1024
"""Longer bodies are read in a thread; this many bytes take 0.1 ms to scan and some 0.1 ms to decode."""

THREADS = 2
BODY_BYTES_MAX = 64 * 1024 * 1024
"""The longest body, whatever contexts need, unless a setting allows more."""

PAGE_BYTES_MAX = 64 * 1024
"""The longest body of the admin routes, whose bodies are small."""

OUTSIDE_PROMPT_BYTES = 2 * 1024 * 1024
"""Allowance for the parts of a body besides the prompt's text: field names, quotes, other fields."""

ESCAPED_BYTES_PER_BYTE = 3
"""JSON escaped to ASCII takes 6 bytes for a character of 2 bytes of UTF-8, and 12 for one of 4."""

TOKEN_CHARS_MIN = 16
"""The least characters per token that a body may have: JSON escapes lengthen characters."""

TOKEN_ID_BYTES = 12
"""The length of a token id in a JSON list: ten digits, a comma, a space."""

NUMBERS_MAX = 16_777_216
"""The most token ids of a body, even if a worker announces a longer context."""

Parsed = TypeVar("Parsed")


class Bodies:
    """Scans and parses the bodies of one HTTP app; :meth:`close` ends its threads.

    A refused body costs one native scan. An accepted one also costs its decoding, within its bounds.
    """

    def __init__(
        self,
        service: RouterService,
        texts: Mapping[ModelName, TextModel],
        instrumentation: FrontendInstrumentation,
        settings: FrontendSettings,
    ) -> None:
        self._service = service
        self._texts = texts
        self._instrumentation = instrumentation
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
        """Scan a body; ``read_fields`` are the fields to be decoded, None for all. Raises
        :class:`InvalidRequest` with the field's path as ``param``.
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
            self._instrumentation.body_refused(refused.bound)
            raise

    async def parse(self, body: ScannedBody, parse: Callable[[ScannedBody], Parsed]) -> Parsed:
        """Return ``parse(body)``, run in a thread for a long body."""
        if len(body.data) <= OFF_LOOP_BYTES:
            return parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse, body)

    async def form(self, content_type: str, data: bytes) -> Form:
        """Read a form; raise :class:`InvalidRequest` naming the field."""
        if len(data) <= OFF_LOOP_BYTES:
            return read_form(content_type, data)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, read_form, content_type, data)

    async def read(self, data: bytes, parse: Callable[[ScannedBody], Parsed]) -> Parsed:
        """Scan and parse."""
        return await self.parse(await self.scan(data), parse)

    def prompt_limit(self) -> BodyLimit:
        """Return the longest body with a prompt: as much as the longest served context can need."""
        if self._settings.body_max_bytes is not None:
            return BodyLimit(self._settings.body_max_bytes, "as KVROUTER_BODY_MAX_BYTES says")
        needed_bytes: list[int] = []
        for model in self._service.models():
            needed_bytes.append(TOKEN_ID_BYTES * (model.fleet.context_length_tokens or 0))
            if model.fleet.takes_calls:
                needed_bytes.append(BODY_BYTES_MAX)  # its calls may hold images of unknown size
        for name, text in self._texts.items():
            # Whether a model takes calls is unknown before its first worker.
            router = self._service.find(name)
            needed = BODY_BYTES_MAX if router is None else _needed_bytes(served_text(text, router))
            needed_bytes.append(needed)
        most_bytes = max(needed_bytes, default=BODY_BYTES_MAX)
        return BodyLimit(
            min(BODY_BYTES_MAX, OUTSIDE_PROMPT_BYTES + most_bytes),
            "which no prompt for the longest context here needs; KVROUTER_BODY_MAX_BYTES sets another limit",
        )

    def page_limit(self) -> BodyLimit:
        """Return the longest body of an admin route."""
        return BodyLimit(PAGE_BYTES_MAX, "which no body of this route needs")

    def close(self) -> None:
        """End the threads; no further body is read."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _bounds_of(self, data: bytes) -> BodyBounds:
        """Return a body's bounds; a long one may have as many token ids as the longest served context."""
        if self._settings.body_max_token_ids is not None or len(data) < 2 * NUMBERS_MIN:
            return self._bounds
        texts = (served_text(text, self._service.find(name)) for name, text in self._texts.items())
        contexts = [text.context_length_tokens for text in texts]
        contexts += [model.fleet.context_length_tokens or 0 for model in self._service.models()]
        numbers = min(NUMBERS_MAX, max(NUMBERS_MIN, *contexts, 0))
        return dataclasses.replace(self._bounds, numbers=numbers)


def _needed_bytes(text: TextModel) -> int:
    """Return the longest JSON of a prompt's text, in bytes."""
    chars = max(text.prompt_max_chars, TOKEN_CHARS_MIN * text.context_length_tokens)
    return max(ESCAPED_BYTES_PER_BYTE * chars, TOKEN_ID_BYTES * text.context_length_tokens)
