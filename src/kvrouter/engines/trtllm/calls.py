"""A leg as TensorRT-LLM's server takes it: the client's call unchanged where possible, else token ids.

A prefill leg is ``context_only``: its answer has the place of the KV, and the first token. The decode leg is
``generation_only``, gets all of that back, and its answer begins with the same token: the context engine's
output for it is not sent to the client. The server refuses unknown fields.
"""

from dataclasses import replace
from functools import partial
from hashlib import blake2b

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import CallRoute, EngineRequest, Leg
from kvrouter.engines.openai.bodies import (
    Body,
    body_of,
    bytes_of,
    drop,
    flag_inside,
    has_other_value,
    has_several_prompts,
    put,
    put_inside,
)
from kvrouter.engines.openai.engine import EngineCall
from kvrouter.engines.openai.fetching import KV_FAILURES
from kvrouter.engines.openai.passed import passed_call, passed_form
from kvrouter.engines.openai.sse import AnswerReading
from kvrouter.engines.trtllm.handoff import ContextHandoff, PrefillReader, answered_as, without_handoff

_DRAWN = (
    "temperature",
    "top_p",
    "top_k",
    "top_p_min",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "prompt_ignore_length",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "priority",
)
"""Fields of a client's call that determine how a completion of its tokens is drawn."""

_SHARED_ID_BITS = 61
_FIRST_SHARED_ID = 1 << 62
"""Ids that several engines share are above those that an engine gives itself, and fit 63 bits."""

LOST_KV = (*KV_FAILURES, InvalidRequest)
"""The errors by which a decode engine reports that it got no KV. It answers 400 for any failure, and an
invalid call would have been refused by the prefill engine."""


def call_of(request: EngineRequest, *, has_shared_ids: bool) -> EngineCall:
    """Return how TensorRT-LLM is asked for a leg; with ``has_shared_ids`` both legs of a handoff have one id.

    Raises InvalidRequest naming a field that the server has no place for, or that must be an object.
    """
    if request.lora_name is not None:
        raise InvalidRequest(
            "model: TensorRT-LLM's server takes adapters by their files, not by name", param="model"
        )
    if request.call is not None and request.call.form is not None:
        return passed_form(request.call, request.call.form, model=None)
    if request.call is not None and request.call.route.is_passed:
        return passed_call(request.call, _body_of(request)[0])
    handoff = None if request.kv_transfer_params is None else ContextHandoff.of(request.kv_transfer_params)
    if request.leg is Leg.PREFILL:
        return _prefill(request, has_shared_ids=has_shared_ids)
    passes_raw = request.call is not None and not request.resumed_tokens
    if handoff is not None and handoff.answer is not None:
        return _answered(request, handoff.answer, passes_raw=passes_raw)
    body, path = _body_of(request)
    reading = AnswerReading(passes_raw=passes_raw)
    streams = not passes_raw or _streams(request)
    adds_usage = streams and not _has_usage(body)
    if adds_usage:
        put_inside(body, "stream_options", include_usage=True)
    if handoff is not None:
        put(body, disaggregated_params=handoff.for_decode)
        prompt = list(request.token_ids) if handoff.prompt_token_ids is None else handoff.prompt_token_ids
        if not streams:
            reading = replace(reading, cleaned=without_handoff)
        if prompt:  # without, the prompt is read again from the call: its tokens are known nowhere else
            put(body, **{"prompt_token_ids" if path == CallRoute.CHAT.value else "prompt": prompt})
    return EngineCall(
        path=path,
        body=bytes_of(body),
        streams=streams,
        reading=replace(reading, added_usage=passes_raw and adds_usage),
        kv_failures=LOST_KV,
    )


def _prefill(request: EngineRequest, *, has_shared_ids: bool) -> EngineCall:
    body, path = _body_of(request)
    several = {name: has_other_value(body, name, b"1") for name in ("n", "best_of")}
    several["prompt"] = has_several_prompts(body)
    for name, is_several in several.items():
        if is_several:
            raise InvalidRequest(
                f"{name}: TensorRT-LLM hands one answer over to a decode worker, not several", param=name
            )
    drop(body, "stream_options")  # which is refused with an answer that is not streamed
    context: dict[str, object] = {"request_type": "context_only"}
    if has_shared_ids:
        context["disagg_request_id"] = _shared_id(request.engine_key)
    put(body, stream=False, disaggregated_params=context)
    return EngineCall(
        path=path,
        body=bytes_of(body),
        streams=False,
        reading=AnswerReading(passes_raw=False),
        reader=partial(PrefillReader, request.token_ids),
    )


def _answered(request: EngineRequest, answer: str, *, passes_raw: bool) -> EngineCall:
    """The answer ended with the token that the prefill engine made: no engine has to go on with it."""
    is_streamed = passes_raw and _streams(request)
    body, _ = _body_of(request)
    raw, read = answered_as(answer.encode(), is_streamed=is_streamed, has_usage=_has_usage(body))
    return EngineCall(
        path="",
        body=b"",
        streams=False,
        reading=AnswerReading(passes_raw=passes_raw),
        reader=lambda: read,
        answered=raw,
    )


def _streams(request: EngineRequest) -> bool:
    return request.call is not None and request.call.stream


def _body_of(request: EngineRequest) -> tuple[Body, str]:
    """The body of a leg, and its path."""
    if request.call is None or request.resumed_tokens:
        if request.cache_namespace is not None:
            raise _no_salt()
        return _tokens(request), CallRoute.COMPLETION.value
    body = body_of(request.call.body)
    if request.cache_namespace is not None:
        if request.call.route is not CallRoute.CHAT:
            raise _no_salt()
        put(body, cache_salt=request.cache_namespace)
    return body, request.call.route.value


def _no_salt() -> InvalidRequest:
    return InvalidRequest("cache_salt: TensorRT-LLM's server takes one for chats alone", param="cache_salt")


def _tokens(request: EngineRequest) -> Body:
    """Return a completion of token ids, for legs without a client's call or resumed from another worker.

    Stop strings stay with the router: only it has the text before these tokens.
    """
    body: Body = {}
    sampling = request.sampling
    if request.call is not None:
        client_body = body_of(request.call.body)
        body = {name: client_body[name] for name in _DRAWN if name in client_body}
    else:
        drawn = {name: getattr(sampling, name, None) for name in _DRAWN}
        put(body, **{name: value for name, value in drawn.items() if value is not None})
        put(body, top_k=max(0, sampling.top_k))  # 0 is all of them
    put(
        body,
        model=request.model,
        prompt=list(request.token_ids),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stream=True,
        detokenize=False,
    )
    return body


def _has_usage(body: Body) -> bool:
    """Whether the client gets the usage at the end of its stream: so it does by any ``stream_options``."""
    return flag_inside(body, "stream_options", "include_usage", default=True) not in (None, False)


def _shared_id(engine_key: str) -> int:
    digest = int.from_bytes(blake2b(engine_key.encode(), digest_size=8).digest(), "big")
    return _FIRST_SHARED_ID | digest >> (64 - _SHARED_ID_BITS)
