"""Prepares a request: from a parsed call to token ids, or an error that names the field."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvrouter.config import UnknownNvext
from kvrouter.core.constraints import RoutingConstraints, adapter_taint
from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotReady
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import GenerateRequest, Sampling, TokenBuffer
from kvrouter.frontend.instrumentation import FrontendInstrumentation
from kvrouter.frontend.openai.nvext import Header, NvextReader, refuse_unknown
from kvrouter.frontend.openai.parse import Call, ChatCall, CompletionCall
from kvrouter.frontend.openai.passthrough import PassedCall, model_of
from kvrouter.frontend.openai.scanned import ScannedBody
from kvrouter.frontend.pin_checks import refuse_contradictions
from kvrouter.frontend.response_passthrough import passed_tokens
from kvrouter.service.model_router import ModelRouter
from kvrouter.service.router import RouterService
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
        texts: Mapping[ModelName, TextModel],
        observed: FrontendInstrumentation,
        *,
        unknown_nvext: UnknownNvext = UnknownNvext.REFUSE,
    ) -> None:
        self._service = service
        self._texts = texts
        self._observed = observed
        refuses_unknown = unknown_nvext is UnknownNvext.REFUSE
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
        """The models that can be asked for: they have workers, and their tokenizer is here."""
        return sorted(
            model.fleet.model
            for model in self._service.models()
            if len(model.fleet) and model.fleet.model in self._texts
        )

    def called_model(self, body: ScannedBody) -> CalledModel:
        """Return the model of the call in ``body``. Raises :class:`InvalidRequest` where it names none,
        :class:`UnknownModel`, and :class:`ModelNotReady` while its workers may be on their way: engines may
        take what is refused without them.
        """
        name, adapter = self.named(model_of(body))
        return CalledModel(name, adapter, self._service.model(name))

    def text_of(self, called: CalledModel, body: ScannedBody) -> TextModel:
        """Return what turns the model's text into tokens, once the prompt in ``body`` is known to be no
        longer than any that it takes: of a longer one nothing is built.

        Raises :class:`ModelNotReady`, and what :meth:`TextModel.refuse_chat_size` raises.
        """
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

    async def prepare_passed(
        self, passed: PassedCall, called: CalledModel, text: TextModel, request_id: RequestId
    ) -> GenerateRequest:
        """Tokenize a call that goes to its engine as it was written, so far as it is known here.

        Where it is not (images, a template of the client's own), routing sees the part that is, and names
        that stand for images; no other worker could go on with the answer.
        """
        call, written = passed.call, passed.client_call
        model, adapter, router = called
        refuse_contradictions(call, router)
        began_s = time.perf_counter()
        with self._counting_refusals():
            token_ids, is_exact, has_media = await passed_tokens(passed, text)
        self._observed.tokenized(model=model, seconds=time.perf_counter() - began_s)
        room_tokens = max(1, text.context_length_tokens - len(token_ids))
        wanted_tokens = len(token_ids) + (
            call.max_tokens or 1
        )  # more than anybody has is the engine's to judge
        return GenerateRequest(
            request_id=request_id,
            model=model,
            token_ids=token_ids,
            sampling=Sampling(max_tokens=min(call.max_tokens or room_tokens, room_tokens)),
            constraints=call.constraints if adapter is None else _with_adapter(call.constraints, adapter),
            override=call.override,
            pin=call.pin,
            prefill_pin=call.prefill_pin,
            lora_name=adapter,
            cache_namespace=call.cache_namespace,
            call=written if is_exact else replace(written, resumable=False),
            has_media=has_media,
            context_tokens=wanted_tokens if wanted_tokens <= text.context_length_tokens else 0,
        )

    async def prepare(
        self,
        parsed: ChatCall | CompletionCall,
        called: CalledModel,
        text: TextModel,
        request_id: RequestId,
    ) -> GenerateRequest:
        """Check what can never be met, template, tokenize and check the lengths; long texts are tokenized off
        the event loop.
        """
        refuse_contradictions(parsed.call, called.router)
        began_s = time.perf_counter()
        with self._counting_refusals():
            token_ids, field = await _token_ids(parsed, text)
        self._observed.tokenized(model=parsed.call.model, seconds=time.perf_counter() - began_s)
        return _request(parsed.call, token_ids, text, request_id, field=field)

    def refresh_gauge(self) -> None:
        """Set the gauge of the memory that the prompts being tokenized are counted to hold."""
        pools = {text.pool for text in self._texts.values()}
        self._observed.tokenizing(sum(pool.held_bytes for pool in pools))

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
    call: Call, token_ids: TokenBuffer, text: TextModel, request_id: RequestId, *, field: str
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
        model=call.model,
        token_ids=token_ids,
        sampling=call.sampling(max_tokens),
        constraints=call.constraints,
        override=call.override,
        pin=call.pin,
        prefill_pin=call.prefill_pin,
        cache_namespace=call.cache_namespace,
        context_tokens=len(token_ids) + (call.max_tokens or 1),
    )
