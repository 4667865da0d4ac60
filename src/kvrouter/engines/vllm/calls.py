"""A leg as vLLM's server takes it: the client's call unchanged where possible, else token ids."""

import dataclasses
from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from kvrouter.core.requests import CallRoute, ClientCall, EngineRequest, Leg, Sampling
from kvrouter.engines.openai.answer_events import AnswerEvent, ReadEvent, read_event
from kvrouter.engines.openai.bodies import (
    Body,
    ask_usage,
    body_of,
    bytes_of,
    drop,
    drop_inside,
    has_other_value,
    has_several_answers,
    has_several_prompts,
    names_model,
    put,
)
from kvrouter.engines.openai.engine import EngineCall
from kvrouter.engines.openai.passed import passed_call, passed_form
from kvrouter.engines.openai.sse import AnswerReading

KvParams = Mapping[str, object]

ASK_FOR_KV: KvParams = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Asks a prefill worker to keep its KV for a decode worker, by vLLM's NIXL connector."""

KEEP_KV: KvParams = {"do_remote_decode": False, "do_remote_prefill": False}
"""Asks a decode worker with ``bidirectional_kv_xfer`` to keep its KV for a prefill worker."""

_KEPT_UNTIL = "remote_blocks_expiry_time"

KV_TO_BE_FOUND: KvParams = {}
"""Params of a prefill with KV that the decode engine finds by itself: empty."""

NOT_PREFILLED = b'{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{}}'
"""The prefill of a call that its decode engine computes from the first token on."""

_WHERE_KV_IS = ("kv_transfer_params", "ec_transfer_params")
"""Fields of a call and of its ``vllm_xargs`` that vLLM reads, and only the router sets."""

_REPEATS_STORES = "kv_cache_report_mode"
"""A field of ``vllm_xargs``: blocks that are published twice get no second removal."""

RANK_HEADER = "X-data-parallel-rank"
REQUEST_ID_HEADER = "X-Request-Id"

_CHAT_ONLY = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "reasoning_effort",
    "include_reasoning",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "echo",
    "truncate_prompt_tokens",
)
"""Fields of a call that a completion of its tokens has no use for, or reads otherwise."""


_ANSWER_ONLY = (
    "stream_options",
    "stream_interval",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "structural_tag",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "thinking_token_budget",
    "repetition_detection",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_tokens_as_token_ids",
)
"""Fields of a call that shape its answer, but neither the tokens of its prompt nor their KV: grammars, ends,
log probabilities. An engine may fail over one of them in an answer of one token. Any other field stays in the
prefill leg: sampling parameters too, which an engine refuses there before it has computed."""


_REQUIRED = b'"required"'
_AUTO = b'"auto"'


TOOLS_BYTES_PER_TOKEN = 16
"""Four times as many as JSON has, of which a template may leave some out: a prompt with fewer tokens, by one
for this many bytes of tools, lacks the tools."""


class ToolsLeftOut:
    """Whether an engine leaves the tools out of a prompt for which no tool may be called, as vLLM does with
    ``--exclude-tools-when-tool-choice-none``: only its answers to prefill legs show it.
    """

    def __init__(self) -> None:
        self.is_known = False


def call_of(
    request: EngineRequest,
    *,
    model: str,
    n_ranks: int = 1,
    tells_where_kv_waits: bool = True,
    writes_choices: bool = False,
    is_decode: bool = False,
    tools_left_out: ToolsLeftOut | None = None,
) -> EngineCall:
    """Return the call to vLLM for a leg; ``model`` is the engine's name for it.

    A prefill engine that ``tells_where_kv_waits`` does so in every answer; of another engine an answer
    without it means that the decode engine finds the KV, in storage that both share. An engine that
    ``writes_choices`` writes into the prompt which tool must be called, and which form the answer must have.
    A prefill leg of a decode engine (``is_decode``) keeps KV that a prefill engine fetches.
    ``tools_left_out`` remembers the result of the engine's prefill legs.

    Raises InvalidRequest naming a field that has to be an object and is not.
    """
    headers = {REQUEST_ID_HEADER: request.engine_key}
    if n_ranks > 1:
        headers[RANK_HEADER] = str(request.dp_rank)
    call = request.call
    if call is not None and call.form is not None:
        sent = passed_form(call, call.form, model=request.lora_name or model)
        return dataclasses.replace(sent, headers={**headers, **sent.headers})
    if request.call is not None and request.call.route.is_passed:
        return passed_call(request.call, _common(request, model), headers)
    if request.leg is Leg.PREFILL:
        return _prefill(
            request,
            model,
            headers,
            tells_where_kv_waits=tells_where_kv_waits,
            writes_choices=writes_choices,
            is_decode=is_decode,
            tools_left_out=tools_left_out or ToolsLeftOut(),
        )
    if request.call is not None and not request.resumed_tokens:
        return _as_written(request, request.call, model, headers)
    return _tokens(request, model, headers)


def _as_written(
    request: EngineRequest, call: ClientCall, model: str, headers: Mapping[str, str]
) -> EngineCall:
    body = _common(request, model)
    adds_tokens = call.resumable and call.stream and "return_token_ids" not in body
    if adds_tokens:
        put(body, return_token_ids=True)
    adds_usage = call.stream and not has_several_answers(body) and ask_usage(body)
    if request.kv_transfer_params:
        put(body, kv_transfer_params=request.kv_transfer_params)
    return EngineCall(
        path=call.route.value,
        body=bytes_of(body),
        headers=headers,
        streams=call.stream,
        reading=AnswerReading(passes_raw=True, added_token_ids=adds_tokens, added_usage=adds_usage),
    )


def _prefill(
    request: EngineRequest,
    model: str,
    headers: Mapping[str, str],
    *,
    tells_where_kv_waits: bool,
    writes_choices: bool,
    is_decode: bool,
    tools_left_out: ToolsLeftOut,
) -> EngineCall:
    """Return the call for one token of the same prompt; the engine then keeps its KV for the decode worker.

    It is kept for one answer to one prompt, and freed once that has fetched it: the other answers of a call
    with several would fetch freed KV. These calls go to their decode engine alone.

    A tool that must be called becomes one that must not: the tools stay in the prompt, and no engine asks for
    a parser. Without ``tool_choice`` it would be ``auto``, which needs one: so where the client wants that,
    the engine is asked as for a tool that must not be called if it refuses. An engine that leaves the tools
    out then has KV of another prompt, with fewer tokens than are known here: the decode engine computes all
    of that call. From then on the engine is asked with ``auto``, and its refusals are left to the decode
    engine.
    """
    body = _common(request, model)
    path = CallRoute.COMPLETION.value
    if request.call is not None and not request.resumed_tokens:
        path = request.call.route.value
        is_written = has_other_value(body, "response_format") or _must_call_a_tool(body)
        if _is_for_one_engine(body) or (writes_choices and is_written):
            return EngineCall(
                path=path,
                body=b"",
                streams=False,
                reading=AnswerReading(passes_raw=False),
                answered=NOT_PREFILLED,
            )
        if request.call.route is CallRoute.CHAT:
            drop(body, "max_completion_tokens")
    else:
        _put_prompt(body, request)
    drop(body, *_ANSWER_ONLY)
    read = read_kept if is_decode else read_event if tells_where_kv_waits else _read_kv_as_found
    tools_tokens = len(memoryview(body.get("tools", b""))) // TOOLS_BYTES_PER_TOKEN
    reader = _PrefillReader(read, len(request.token_ids) - tools_tokens, tools_left_out)
    if _must_call_a_tool(body):
        reader.is_without_calls = not tools_left_out.is_known
        put(body, tool_choice="none" if reader.is_without_calls else "auto")
    may_refuse = _may_call_a_tool(body) and not tools_left_out.is_known
    kv_params = request.kv_transfer_params or (KEEP_KV if is_decode else ASK_FOR_KV)
    put(body, stream=False, max_tokens=1, kv_transfer_params=kv_params)
    return EngineCall(
        path=path,
        body=bytes_of(body),
        headers=headers,
        streams=False,
        reading=AnswerReading(passes_raw=False),
        reader=lambda: reader,
        otherwise=partial(reader.without_calls, body) if may_refuse else None,
    )


class _PrefillReader:
    """Reads the answer to a prefill leg; a prompt without its tools counts as not prefilled."""

    def __init__(self, read: ReadEvent, tokens_with_tools: int, tools_left_out: ToolsLeftOut) -> None:
        self._read = read
        self._tokens_with_tools = tokens_with_tools
        self._tools_left_out = tools_left_out
        self.is_without_calls = False
        """Whether the engine was asked to call no tool where the client's call may."""

    def without_calls(self, body: Body) -> bytes:
        """Return the body that asks for no call of a tool."""
        self.is_without_calls = True
        put(body, tool_choice="none")
        return bytes_of(body)

    def __call__(self, data: bytes) -> AnswerEvent:
        event = self._read(data)
        counted = None if event.usage is None else event.usage.prompt_tokens
        if not self.is_without_calls or counted is None or counted >= self._tokens_with_tools:
            return event
        self._tools_left_out.is_known = True
        return self._read(NOT_PREFILLED)


def _must_call_a_tool(body: Body) -> bool:
    choice = bytes(memoryview(body.get("tool_choice", b""))[: len(_REQUIRED) + 1])
    return choice == _REQUIRED or choice.startswith(b"{")


def _may_call_a_tool(body: Body) -> bool:
    return has_other_value(body, "tools", b"[]") and not has_other_value(body, "tool_choice", _AUTO)


def _is_for_one_engine(body: Body) -> bool:
    """Whether KV of another engine is useless: for several answers, log probabilities of the prompt, which
    the decode engine would compute itself, and prompts that are cut to the room that the answer leaves.
    """
    echoes = has_other_value(body, "echo", b"false") and has_other_value(body, "logprobs", b"false")
    return (
        echoes
        or has_other_value(body, "prompt_logprobs")
        or bytes(memoryview(body.get("truncate_prompt_tokens", b""))[:2]).lstrip(b'"').startswith(b"-")
        or has_other_value(body, "use_beam_search", b"false")
        or has_other_value(body, "n", b"1")
        or has_other_value(body, "best_of", b"1")
        or has_other_value(body, "prompt_embeds", b"[]")
        or has_several_prompts(body)
    )


def read_kept(data: bytes) -> AnswerEvent:
    """Read the answer to :data:`KEEP_KV`. KV without a time until which it is kept is no use: an engine would
    fetch it even where its blocks are another prompt's by then.
    """
    event = read_event(data)
    params = event.kv_transfer_params
    if params is not None and not isinstance(params.get(_KEPT_UNTIL), float | int):
        return replace(event, kv_transfer_params={})
    return event


def _read_kv_as_found(data: bytes) -> AnswerEvent:
    event = read_event(data)
    if event.kv_transfer_params is None and event.finish is not None:
        return replace(event, kv_transfer_params=KV_TO_BE_FOUND)
    return event


def _tokens(request: EngineRequest, model: str, headers: Mapping[str, str]) -> EngineCall:
    """Return a completion of token ids, for legs without a client's call or resumed from another worker.

    Stop strings stay with the router: only it has the text before these tokens.
    """
    body = _common(request, model)
    _put_prompt(body, request)
    drop(body, "stop", "n", "best_of")
    put(
        body,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
        max_tokens=request.sampling.max_tokens,
        min_tokens=request.sampling.min_tokens,
    )
    if request.kv_transfer_params:
        put(body, kv_transfer_params=request.kv_transfer_params)
    return EngineCall(
        path=CallRoute.COMPLETION.value,
        body=bytes_of(body),
        headers=headers,
        streams=True,
        reading=AnswerReading(passes_raw=False),
    )


def _common(request: EngineRequest, model: str) -> Body:
    body = body_of(request.call.body) if request.call is not None else _sampled(request.sampling)
    if request.call is None or request.resumed_tokens or names_model(body):
        put(body, model=request.lora_name or model)
    if request.cache_namespace is not None:
        put(body, cache_salt=request.cache_namespace)
    drop(body, *_WHERE_KV_IS)
    drop_inside(body, "vllm_xargs", *_WHERE_KV_IS, _REPEATS_STORES)
    return body


def _put_prompt(body: Body, request: EngineRequest) -> None:
    drop(body, *_CHAT_ONLY)
    put(body, prompt=list(request.token_ids))


def _sampled(sampling: Sampling) -> Body:
    """The body of a request that no client wrote."""
    body: Body = {}
    put(
        body,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
    )
    if sampling.seed is not None:
        put(body, seed=sampling.seed)
    return body
