"""What vLLM 0.32 answers on its routes, from the body of a call alone: the same call gets the same bytes.

The forms are those of its models of answers: a stream leaves out the fields that vLLM never set, a whole
answer has all of them. A call that asks for ``return_token_ids`` also gets events in which no character is
whole yet.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL = "tiny"
JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
Headers = tuple[tuple[str, str], ...]

TOKENS: tuple[tuple[str, list[int]], ...] = (
    ("Gr", [11]),
    ("üße ", [12, 13]),
    ("", [14]),
    ("", [15]),
    ("🦙", [16]),
    (' "a\\b"\n\u2028', [17]),
    ("", [18]),
    ("你", [19]),
)
"""The texts of an answer, and the tokens they are made of; an empty text is a token that ends in the middle
of a character.
"""

TEXT = "".join(text for text, _ in TOKENS)


@dataclass(frozen=True)
class Asked:
    """A call as the engine got it."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass(frozen=True)
class Answer:
    """An answer and the pieces that it is written in; ``is_stream`` of chunks, else of a known length."""

    pieces: tuple[bytes, ...] = ()
    status: int = 200
    headers: Headers = (("content-type", JSON),)
    is_stream: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


Script = Callable[[Answer], Answer]
"""What an engine makes of the answer that vLLM would give."""


def as_it_is(answer: Answer) -> Answer:
    """The script of a call that vLLM answers by itself."""
    return answer


class Refused(Exception):
    """The call is not what the route takes."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, kind: str = "Bad Request"):
        self.answer = json_answer(
            {"error": {"message": message, "type": kind, "param": param, "code": status}}, status
        )


@dataclass(frozen=True)
class Wanted:
    """What of a call its answer depends on, read as leniently as pydantic does."""

    fields: Mapping[str, Any]
    stream: bool = field(init=False)
    n: int = field(init=False)
    max_tokens: int | None = field(init=False)
    include_usage: bool = field(init=False)

    def __post_init__(self) -> None:
        options = self.fields.get("stream_options") or {}
        for name, value in (
            ("stream", _bool(self.fields, "stream")),
            ("n", _int(self.fields, "n") or 1),
            ("max_tokens", _int(self.fields, "max_tokens")),
            ("include_usage", _bool(options, "include_usage")),
        ):
            object.__setattr__(self, name, value)

    @property
    def ids(self) -> bool:
        return _bool(self.fields, "return_token_ids")

    @property
    def each_usage(self) -> bool:
        return _bool(self.fields.get("stream_options") or {}, "continuous_usage_stats")

    @property
    def tool(self) -> str | None:
        """The name of the tool that the answer calls."""
        choice = self.fields.get("tool_choice")
        tools = self.fields.get("tools") or []
        if not tools or choice in (None, "none", "auto"):
            return None
        name = tools[0].get("function", tools[0]).get("name")
        return str(name)

    @property
    def usage(self) -> dict[str, Any]:
        n = len(TOKENS) * self.n
        return {
            "prompt_tokens": 7,
            "total_tokens": 7 + n,
            "completion_tokens": n,
            "prompt_tokens_details": None,
        }


_WORDS = {"true": True, "t": True, "1": True, "yes": True, "y": True, "on": True}
_WORDS |= {"false": False, "f": False, "0": False, "no": False, "n": False, "off": False}


def _bool(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if isinstance(value, str):
        value = _WORDS.get(value.lower(), value)
    if value is None:
        return False
    if value in (0, 1) and not isinstance(value, str):
        return bool(value)
    raise Refused(f"1 validation error:\n  Input should be a valid boolean: {name}", f"body.{name}")


def _int(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.5
    if not number.is_integer():
        raise Refused(f"1 validation error:\n  Input should be a valid integer: {name}", f"body.{name}")
    return int(number)


def dumps(value: object) -> bytes:
    """JSON as vLLM writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def json_answer(value: object, status: int = 200, *headers: tuple[str, str]) -> Answer:
    """A whole answer."""
    return Answer((dumps(value),), status, (("content-type", JSON), *headers))


def stream_answer(events: Iterator[Any], *, done: bool = True, named: bool = False) -> Answer:
    """A streamed answer, an event a piece; ``named`` ones have a line that says what they are."""
    pieces = [
        (b"event: %s\n" % event["type"].encode() if named else b"") + b"data: " + dumps(event) + b"\n\n"
        for event in events
    ]
    if done:
        pieces.append(b"data: [DONE]\n\n")
    return Answer(tuple(pieces), headers=(("content-type", EVENTS),), is_stream=True)


def _logprobs(wanted: Wanted, text: str) -> object:
    if not wanted.fields.get("logprobs"):
        return None
    token = {"token": text, "logprob": -1e-05, "bytes": list(text.encode())}
    return {"content": [{**token, "top_logprobs": [token, {**token, "logprob": -12.25}]}]}


def _chat(wanted: Wanted) -> Answer:
    if wanted.fields.get("messages") in (None, []) or isinstance(wanted.fields.get("messages"), str):
        raise Refused("1 validation error:\n  Field required: messages", "body.messages")
    if wanted.stream:
        return stream_answer(_chat_events(wanted))
    message: dict[str, Any] = {"role": "assistant", "content": TEXT, "refusal": None, "annotations": None}
    message |= {"audio": None, "function_call": None}
    if wanted.tool is not None:
        call = {"name": wanted.tool, "arguments": '{"zone": "a"}'}
        message |= {
            "content": None,
            "tool_calls": [{"id": "chatcmpl-tool-1", "type": "function", "function": call}],
        }
    message["reasoning"] = "hm" if wanted.fields.get("reasoning_effort") else None
    choices = [
        {
            "index": index,
            "message": message,
            "logprobs": _logprobs(wanted, TEXT),
            "finish_reason": "stop" if wanted.tool is None else "tool_calls",
            "stop_reason": None,
            "token_ids": [11, 12] if wanted.ids else None,
        }
        for index in range(wanted.n)
    ]
    return json_answer(
        {
            **_head("chatcmpl-1", "chat.completion"),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": "vllm-0.32.0",
            "usage": wanted.usage,
            "prompt_logprobs": None,
            "prompt_token_ids": [1, 2, 3] if wanted.ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
        }
    )


def _head(answer_id: str, kind: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": 1_795_000_000, "model": MODEL}


def _deltas(wanted: Wanted) -> Iterator[tuple[dict[str, Any], str, list[int]]]:
    """The deltas of one answer, their texts and tokens."""
    if wanted.tool is not None:
        function: dict[str, Any] = {"name": wanted.tool, "arguments": ""}
        begun = {"id": "chatcmpl-tool-1", "type": "function", "index": 0, "function": function}
        yield {"tool_calls": [begun]}, "", [21]
        for part in ('{"zone"', ': "ü', '"}'):
            yield {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}, part, [22]
        return
    if wanted.fields.get("reasoning_effort"):
        yield {"reasoning": "hm "}, "hm ", [9]
    for text, ids in TOKENS:
        yield ({"content": text} if text else {}), text, ids


def _chat_events(wanted: Wanted) -> Iterator[dict[str, Any]]:
    head = _head("chatcmpl-1", "chat.completion.chunk")
    usage = {"usage": {**wanted.usage}} if wanted.each_usage else {}
    for index in range(wanted.n):
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        asked = {"prompt_token_ids": [1, 2, 3] if wanted.ids else None, "prompt_text": None}
        yield {**head, "choices": [{**first, "finish_reason": None}], **usage, **asked}
    for delta, text, ids in _deltas(wanted):
        logprobs = _logprobs(wanted, text)
        if not delta and logprobs is None and not wanted.ids:
            continue
        told = {"token_ids": ids if wanted.ids else None}
        for index in range(wanted.n):
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **told}
            yield {**head, "choices": [choice], **usage}
    finish = {"finish_reason": "stop" if wanted.tool is None else "tool_calls", "stop_reason": None}
    for index in range(wanted.n):
        told = {"token_ids": [2] if wanted.ids else None}
        choice = {"index": index, "delta": {"content": ""}, "logprobs": None, **finish, **told}
        fingerprint = {} if wanted.include_usage else {"system_fingerprint": "vllm-0.32.0"}
        yield {**head, "choices": [choice], **usage, **fingerprint}
    if wanted.include_usage:
        yield {**head, "choices": [], "usage": _shown(wanted), "system_fingerprint": "vllm-0.32.0"}


def _shown(wanted: Wanted) -> dict[str, Any]:
    return {name: value for name, value in wanted.usage.items() if value is not None}


def _completion(wanted: Wanted) -> Answer:
    prompt = wanted.fields.get("prompt")
    if prompt is None:
        raise Refused("Either prompt or prompt_embeds must be provided.", "prompt")
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    n = wanted.n * (len(prompt) if several else 1)
    if wanted.stream:
        return stream_answer(_completion_events(wanted, n))
    logprobs = None
    if wanted.fields.get("logprobs") is not None:
        logprobs = {
            "text_offset": [0],
            "token_logprobs": [-1e-05],
            "tokens": [TEXT],
            "top_logprobs": [{TEXT: -1e-05}],
        }
    choice = {"text": TEXT, "logprobs": logprobs, "finish_reason": "length", "stop_reason": None}
    told = {"token_ids": [11, 12] if wanted.ids else None, "prompt_logprobs": None}
    told["prompt_token_ids"] = [1, 2, 3] if wanted.ids else None
    head = _head("cmpl-1", "text_completion")
    choices = [{"index": index, **choice, **told} for index in range(n)]
    rest = {"service_tier": None, "system_fingerprint": "vllm-0.32.0", "usage": wanted.usage}
    return json_answer({**head, "choices": choices, **rest, "kv_transfer_params": None})


def _completion_events(wanted: Wanted, n: int) -> Iterator[dict[str, Any]]:
    head = _head("cmpl-1", "text_completion")
    usage = {"usage": {**wanted.usage}} if wanted.each_usage else {}
    for at, (text, ids) in enumerate(TOKENS):
        is_last = at == len(TOKENS) - 1
        for index in range(n):
            choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
            choice |= {"finish_reason": "length" if is_last else None, "stop_reason": None}
            choice["prompt_token_ids"] = [1, 2, 3] if wanted.ids and at == 0 else None
            choice["token_ids"] = ids if wanted.ids else None
            fingerprint = (
                {"system_fingerprint": "vllm-0.32.0"} if is_last and not wanted.include_usage else {}
            )
            yield {**head, "choices": [choice], **usage, **fingerprint}
    if wanted.include_usage:
        yield {**head, "choices": [], "usage": _shown(wanted), "system_fingerprint": "vllm-0.32.0"}


def _responses(wanted: Wanted) -> Answer:
    usage = {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 8,
        "total_tokens": 15,
    }
    content: dict[str, Any] = {"annotations": [], "text": TEXT, "type": "output_text", "logprobs": None}
    message = {
        "id": "msg_1",
        "content": [content],
        "role": "assistant",
        "status": "completed",
        "type": "message",
    }
    response = {
        "id": "resp_1",
        "created_at": 1_795_000_000,
        "model": MODEL,
        "object": "response",
        "usage": None,
    }
    finished = {**response, "output": [message], "status": "completed", "usage": usage}
    if not wanted.stream:
        return json_answer(finished)

    def events() -> Iterator[dict[str, Any]]:
        yield {
            "type": "response.created",
            "sequence_number": 0,
            "response": {**response, "status": "in_progress"},
        }
        for number, (text, _) in enumerate(TOKENS, 1):
            place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
            yield {"type": "response.output_text.delta", "sequence_number": number, **place, "delta": text}
        yield {"type": "response.completed", "sequence_number": 9, "response": finished}

    return stream_answer(events(), done=False, named=True)


def _messages(wanted: Wanted) -> Answer:
    usage: dict[str, Any] = {
        "input_tokens": 7,
        "output_tokens": 8,
        "cache_creation_input_tokens": None,
        "cache_read_input_tokens": 0,
    }
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "stop_sequence": None}
    if not wanted.stream:
        told: dict[str, Any] = {"content": [{"type": "text", "text": TEXT}], "stop_reason": "end_turn"}
        return json_answer({**message, **told, "usage": usage})

    def events() -> Iterator[dict[str, Any]]:
        yield {
            "type": "message_start",
            "message": {**message, "content": [], "stop_reason": None, "usage": usage},
        }
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        for text, _ in TOKENS:
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        yield {"type": "content_block_stop", "index": 0}
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": usage,
        }
        yield {"type": "message_stop"}

    return stream_answer(events(), done=False, named=True)


def _transcription(wanted: Wanted) -> Answer:
    if wanted.fields.get("response_format") == "text":
        return Answer((TEXT.encode(),), headers=(("content-type", "text/plain; charset=utf-8"),))
    if not wanted.stream:
        return json_answer({"text": TEXT, "usage": {"type": "duration", "seconds": 1}})

    def events() -> Iterator[dict[str, Any]]:
        for text, _ in TOKENS:
            choice: dict[str, Any] = {"delta": {"content": text}, "finish_reason": None}
            yield {**_head("trsc-1", "transcription.chunk"), "choices": [choice]}
        choice = {"delta": {"content": ""}, "finish_reason": "stop"}
        yield {**_head("trsc-1", "transcription.chunk"), "choices": [choice]}

    return stream_answer(events())


def _embeddings(wanted: Wanted) -> Answer:
    row = {"index": 0, "object": "embedding", "embedding": [0.5, -1e-09, 1.0, 3.0517578125e-05]}
    usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0, "prompt_tokens_details": None}
    return json_answer({**_head("embd-1", "list"), "data": [row], "usage": usage})


def _any(wanted: Wanted) -> Answer:
    data: list[Any] = [{"index": 0, "score": 1e-09, "label": "Ü", "document": {"text": TEXT}}]
    return json_answer({"id": "x-1", "model": MODEL, "data": data, "usage": {"total_tokens": 3}})


def _tokens(wanted: Wanted) -> Answer:
    return json_answer({"count": 3, "max_model_len": 2048, "tokens": [1, 2, 3], "token_strs": None})


def _text(wanted: Wanted) -> Answer:
    return json_answer({"prompt": TEXT})


def _count(wanted: Wanted) -> Answer:
    return json_answer({"input_tokens": 7, "context_management": None})


_GENERATES: Mapping[str, Callable[[Wanted], Answer]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/v1/messages/count_tokens": _count,
    "/v1/embeddings": _embeddings,
    "/v1/audio/transcriptions": _transcription,
    "/v1/audio/translations": _transcription,
    "/tokenize": _tokens,
    "/v1/tokenize": _tokens,
    "/detokenize": _text,
    "/v1/detokenize": _text,
}

_OTHERS = frozenset(
    (
        *(
            "/pooling",
            "/classify",
            "/v1/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
        ),
        *("/v1/moderations", "/v1/chat/completions/batch", "/generative_scoring", "/v2/embed", "/generate"),
        *("/encode", "/parse_function_call", "/separate_reasoning"),
    )
)
"""Routes of which an answer is any object."""

_PERMISSION = {
    "id": "modelperm-1",
    "object": "model_permission",
    "created": 1_795_000_000,
    "organization": "*",
}
_CARD = {
    **{"id": MODEL, "object": "model", "created": 1_795_000_000, "owned_by": "vllm", "root": "tiny-model"},
    **{"parent": None, "max_model_len": 2048, "permission": [_PERMISSION]},
}

PAGES: Mapping[str, bytes] = {
    "/v1/models": dumps({"object": "list", "data": [_CARD]}),
    "/version": b'{"version":"0.32.0"}',
    "/load": b'{"server_load":0}',
    "/health": b"",
    "/ping": b"",
    "/kv_event_sources": b"{}",
}


def answer_of(asked: Asked) -> Answer:
    """What vLLM answers."""
    path = asked.path
    takes = "POST" if path in _GENERATES or path in _OTHERS else "GET" if path in PAGES else None
    if takes is None:
        bare = path.rstrip("/")
        if bare in _GENERATES or bare in _OTHERS or bare in PAGES:
            location = f"http://{asked.headers.get('host', '')}{bare}"
            return Answer(status=307, headers=(("location", location),))
        return json_answer({"detail": "Not Found"}, 404)
    if asked.method != takes and not (path == "/ping" and asked.method == "POST"):
        return json_answer({"detail": "Method Not Allowed"}, 405, ("allow", takes))
    if takes == "GET":
        page = PAGES[path]
        return Answer((page,), headers=(("content-type", JSON),) if page else ())
    try:
        fields = _fields(asked)
        named = fields.get("model")
        if named not in (None, "", MODEL):
            raise Refused(f"The model `{named}` does not exist.", "model", 404, "NotFoundError")
        return _GENERATES.get(path, _any)(Wanted(fields))
    except Refused as refused:
        return refused.answer


def _fields(asked: Asked) -> Mapping[str, Any]:
    content_type = asked.headers.get("content-type", "").lower()
    if content_type.startswith("multipart/form-data"):
        parts = asked.body.split(b"--" + content_type.partition("boundary=")[2].strip('"').encode())
        found = {}
        for part in parts[1:-1]:
            head, _, value = part.partition(b"\r\n\r\n")
            found[head.partition(b'name="')[2].partition(b'"')[0].decode()] = value[:-2].decode(
                "utf-8", "replace"
            )
        return found
    if content_type.partition(";")[0] != JSON:
        raise Refused("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
    try:
        fields = json.loads(asked.body)
    except ValueError as error:
        raise Refused(f"1 validation error:\n  JSON decode error: {error}", "body") from error
    if not isinstance(fields, dict):
        raise Refused("1 validation error:\n  Input should be a valid dictionary", "body")
    return fields
