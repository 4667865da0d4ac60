"""A leg as SGLang's server takes it: the client's call unchanged where possible, else token ids.

With disaggregation both legs get the same call and the same bootstrap values; the decode side waits for the
KV there.
"""

from uuid import uuid4

import msgspec

from kvrouter.core.errors import InvalidRequest, ProtocolError
from kvrouter.core.json import decoded
from kvrouter.core.requests import CallRoute, EngineRequest, Leg
from kvrouter.engines.openai.answer_events import (
    AnswerEvent,
    AnswerUsage,
    CachedTokens,
    Choice,
    Failure,
    Unasked,
)
from kvrouter.engines.openai.bodies import Body, ask_usage, body_of, bytes_of, drop, put
from kvrouter.engines.openai.engine import EngineCall
from kvrouter.engines.openai.passed import passed_call, passed_form
from kvrouter.engines.openai.sse import AnswerReading

GENERATE = "/generate"

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
)
"""Sampling parameters with the same name in a client's call and in SGLang's own."""


_DECIDED_BY_ROUTER = (
    "extra_key",
    "session_params",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
"""Fields of a call that only the router may set: ``extra_key`` is joined to the salt, and with the right one
a call reads another tenant's KV; a rank without the prefill leaves its decode waiting."""


def call_of(request: EngineRequest, *, n_ranks: int = 1, tells_usage: bool = False) -> EngineCall:
    """Return the call to SGLang for a leg; an engine that ``tells_usage`` in every stream is not asked for
    it. Raises InvalidRequest for an adapter on a route without adapters.
    """
    if request.call is None or request.resumed_tokens:
        return _tokens(request, n_ranks)
    call = request.call
    if call.route.is_passed and request.lora_name is not None:
        raise InvalidRequest(
            f"model: adapters are for chats and completions, not for {call.route}", param="model"
        )
    if call.form is not None:
        return passed_form(call, call.form, model=None)  # it has one model, whatever the form calls it
    body = body_of(call.body)
    if call.route.is_passed:
        drop(body, *_DECIDED_BY_ROUTER, "lora_path", "rid", "request_id")
        if call.route in _TAKES_RID:
            put(body, rid=_rid_of(request))
        if n_ranks > 1:
            put(body, routed_dp_rank=request.dp_rank)
        if request.cache_namespace is not None:
            put(body, cache_salt=request.cache_namespace)
        return passed_call(call, body)
    _put_common(body, request, n_ranks)
    is_prefill = request.leg is Leg.PREFILL
    adds_tokens = adds_usage = False
    if is_prefill:
        put(body, stream=False)
        drop(body, "stream_options")
    elif call.stream:
        is_completion = call.route is CallRoute.COMPLETION  # the stream of a chat refuses to report tokens
        adds_tokens = is_completion and call.resumable and "return_token_ids" not in body
        if adds_tokens:
            put(body, return_token_ids=True)
        adds_usage = not tells_usage and ask_usage(body)
    return EngineCall(
        path=call.route.value,
        body=bytes_of(body),
        streams=call.stream and not is_prefill,
        reading=AnswerReading(
            passes_raw=not is_prefill,
            added_token_ids=adds_tokens,
            unasked=Unasked.NOTHING,
            added_usage=adds_usage,
        ),
    )


def _tokens(request: EngineRequest, n_ranks: int) -> EngineCall:
    """Token ids in and out. Stop strings stay with the router: only it knows the text before these tokens."""
    body: Body = {}
    put(
        body,
        input_ids=list(request.token_ids),
        sampling_params=_sampling(request),
        stream=request.leg is not Leg.PREFILL,
    )
    _put_common(body, request, n_ranks)
    return EngineCall(
        path=GENERATE,
        body=bytes_of(body),
        streams=request.leg is not Leg.PREFILL,
        reading=AnswerReading(passes_raw=False),
        reader=GenerateReader,
    )


_TAKES_RID = frozenset({CallRoute.GENERATE, CallRoute.ENCODE})
"""Routes that pass and have calls that are aborted by their ``rid``."""


def _rid_of(request: EngineRequest) -> str:
    """Return the ``rid`` of a leg, a unique one: SGLang refuses a second call with a rid, and 2 s later
    aborts the first. Clients cannot choose it: SGLang aborts all calls with a rid that begins with the given
    one.
    """
    return f"{request.engine_key}#{request.leg}#{uuid4().hex[:8]}"


def _put_common(body: Body, request: EngineRequest, n_ranks: int) -> None:
    drop(body, *_DECIDED_BY_ROUTER)
    put(body, rid=_rid_of(request))
    if n_ranks > 1:
        put(body, routed_dp_rank=request.dp_rank)
    if request.cache_namespace is not None:
        put(body, cache_salt=request.cache_namespace)
    if request.lora_name is not None:
        put(body, lora_path=request.lora_name)
    if request.bootstrap is not None:
        bootstrap = request.bootstrap
        put(
            body,
            bootstrap_host=bootstrap.host,
            bootstrap_port=bootstrap.port,
            bootstrap_room=bootstrap.room,
        )


def _sampling(request: EngineRequest) -> dict[str, object]:
    sampling = request.sampling
    params: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
    }
    if request.call is not None:
        body = body_of(request.call.body)
        params.update((name, body[name]) for name in _SAME_NAME if name in body)
        return params
    params.update((name, getattr(sampling, name)) for name in _SAME_NAME if hasattr(sampling, name))
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params


class _Ended(msgspec.Struct, frozen=True):
    type: str
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Ended | None = None
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None


class _Generated(msgspec.Struct, frozen=True):
    output_ids: tuple[int, ...] = ()
    meta_info: _Meta = _Meta()
    error: Failure | None = None


def _aborted(ended: _Ended | None) -> Failure | None:
    """A refusal or failure is reported as an abort with a status, with a meaningless token."""
    if ended is None or ended.type != "abort" or ended.status_code is None:
        return None
    return Failure(ended.message, ended.status_code)


_generated = msgspec.json.Decoder(_Generated)


class GenerateReader:
    """Reads one answer of ``/generate``. Each event has all tokens so far, or, with the server's
    ``--incremental-streaming-output``, the new ones: the count next to them shows which.
    """

    def __init__(self) -> None:
        self._n_sent = 0

    def __call__(self, data: bytes) -> AnswerEvent:
        """Return the new part of an event; raise ProtocolError if it is no answer."""
        answer = decoded(_generated, data, "the engine's answer", param="data")
        meta = answer.meta_info
        failure = answer.error or _aborted(meta.finish_reason)
        if failure is not None:
            return AnswerEvent(error=failure)
        n_new = max(0, meta.completion_tokens - self._n_sent)
        if n_new > len(answer.output_ids):
            raise ProtocolError(
                f"output_ids: {n_new} new tokens are counted, and {len(answer.output_ids)} sent",
                param="output_ids",
            )
        new = answer.output_ids[len(answer.output_ids) - n_new :]
        self._n_sent = max(self._n_sent, meta.completion_tokens)
        return AnswerEvent(
            choices=(
                Choice(
                    token_ids=new,
                    finish_reason=None if meta.finish_reason is None else meta.finish_reason.type,
                ),
            ),
            usage=AnswerUsage(meta.prompt_tokens, meta.completion_tokens, CachedTokens(meta.cached_tokens)),
        )
