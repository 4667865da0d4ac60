"""A leg as SGLang's server takes it: the client's call unchanged where possible, else token ids.

With disaggregation both legs get the same call and the same meeting place; the decode side waits for the KV
there.
"""

from uuid import uuid4

import msgspec

from kvrouter.core.errors import InvalidRequest, ProtocolError
from kvrouter.core.json import decoded
from kvrouter.core.requests import CallRoute, EngineRequest, Leg
from kvrouter.engines.openai.bodies import Body, ask_usage, body_of, bytes_of, drop, put
from kvrouter.engines.openai.engine import EngineCall
from kvrouter.engines.openai.events import (
    AnswerEvent,
    AnswerUsage,
    CachedTokens,
    Choice,
    Failure,
    Unasked,
)
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
"""What a client's call and SGLang's own sampling parameters call the same."""


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
"""What of a call SGLang would do, and the router alone may say: ``extra_key`` is joined to the salt, and with
the right one a call reads another tenant's KV; a rank that nobody prefilled on leaves its decode waiting.
"""


def call_of(request: EngineRequest, *, n_ranks: int = 1, tells_usage: bool = False) -> EngineCall:
    """Return how SGLang is asked for a leg; one that ``tells_usage`` to everybody is not asked for it. Raises
    InvalidRequest for an adapter where none can be had.
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
"""Routes that pass whose calls are aborted by their ``rid``."""


def _rid_of(request: EngineRequest) -> str:
    """What SGLang calls a leg. No two calls have one: it refuses the second, and 2 s after that aborts the
    first by its rid. Nor is it a client's choice: SGLang aborts all whose rid begins with what it is given.
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
        meeting = request.bootstrap
        put(
            body,
            bootstrap_host=meeting.host,
            bootstrap_port=meeting.port,
            bootstrap_room=meeting.room,
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
    """What was refused, or failed, is reported as an abort with a status, with a meaningless token."""
    if ended is None or ended.type != "abort" or ended.status_code is None:
        return None
    return Failure(ended.message, ended.status_code)


_generated = msgspec.json.Decoder(_Generated)


class GenerateReader:
    """Reads one answer of ``/generate``. Each event has all tokens so far, or, with the server's
    ``--incremental-streaming-output``, the new ones: the count next to them shows which.
    """

    def __init__(self) -> None:
        self._seen = 0

    def __call__(self, data: bytes) -> AnswerEvent:
        """Return what an event says that is new; raise ProtocolError for what is no answer."""
        said = decoded(_generated, data, "the engine's answer", param="data")
        meta = said.meta_info
        failure = said.error or _aborted(meta.finish_reason)
        if failure is not None:
            return AnswerEvent(error=failure)
        n_new = max(0, meta.completion_tokens - self._seen)
        if n_new > len(said.output_ids):
            raise ProtocolError(
                f"output_ids: {n_new} new tokens are counted, and {len(said.output_ids)} sent",
                param="output_ids",
            )
        new = said.output_ids[len(said.output_ids) - n_new :]
        self._seen = max(self._seen, meta.completion_tokens)
        return AnswerEvent(
            choices=(
                Choice(
                    token_ids=new,
                    finish_reason=None if meta.finish_reason is None else meta.finish_reason.type,
                ),
            ),
            usage=AnswerUsage(meta.prompt_tokens, meta.completion_tokens, CachedTokens(meta.cached_tokens)),
        )
