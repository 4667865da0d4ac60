"""The calls that are made twice, directly and through kvrouter: small lists, multiplied."""

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.system.differential.vllm_answers import JSON, MODEL, Answer, Headers, Script, as_it_is, dumps

BOUNDARY = "b0undary"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@dataclass(frozen=True)
class Call:
    """One call, and what its engine makes of the answer that vLLM would give."""

    name: str
    target: str
    body: bytes = b""
    method: str = "POST"
    headers: Headers = (("content-type", JSON),)
    script: Script = as_it_is

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields of its body; none where it is no object of JSON."""
        try:
            fields = json.loads(self.body)
        except ValueError:
            return {}
        return fields if isinstance(fields, dict) else {}


USER = [{"role": "user", "content": "Where is my Ü cache? 🦙"}]
TOOL = {"name": "find", "description": "Finds KV.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]

GENERATED: Mapping[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": USER, "max_tokens": 16, "temperature": 0},
    COMPLETION: {"model": MODEL, "prompt": "Where is", "max_tokens": 16, "temperature": 0},
    RESPONSES: {"model": MODEL, "input": "Where is my cache?", "max_output_tokens": 16, "temperature": 0},
    MESSAGES: {"model": MODEL, "messages": USER, "max_tokens": 16, "temperature": 0},
}
"""The calls of routes that stream."""

PASSED: Mapping[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/v1/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": ["b"]},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v2/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v1/moderations": {"input": "a"},
    "/tokenize": {"prompt": "Ü 🦙"},
    "/v1/tokenize": {"messages": USER},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/detokenize": {"tokens": [1, 2, 3]},
    "/v1/chat/completions/batch": {"messages": [USER, USER]},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5, 6]},
    "/v2/embed": {"texts": ["a"], "input_type": "classification"},
    "/generate": {"text": "a"},
    "/encode": {"text": "a"},
    "/parse_function_call": {"text": "a", "tools": TOOLS},
    "/separate_reasoning": {"text": "a"},
}
"""The calls of routes whose answers come whole."""

FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")

_ABSENT = object()


def _asked(
    path: str, name: str, *, stream: bool = False, script: Script = as_it_is, **fields: object
) -> Call:
    """A call of ``path``; a field that is absent is left out."""
    body = {**GENERATED.get(path, {"model": MODEL, **PASSED.get(path, {})}), **fields}
    if stream:
        body["stream"] = True
    kept = {field: value for field, value in body.items() if value is not _ABSENT}
    how = "streamed" if stream else "whole"
    return Call(f"{path} {how}: {name}", path, dumps(kept), script=script)


def _both(path: str, name: str, script: Script = as_it_is, **fields: object) -> Iterator[Call]:
    """The call whole and streamed."""
    for stream in (False, True):
        yield _asked(path, name, stream=stream, script=script, **fields)


def form(path: str, *fields: tuple[str, str]) -> Call:
    """A form with a file of every byte there is."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields
    ]
    file = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="ü.wav"\r\n\r\n'
    data = b"".join((*parts, file.encode(), bytes(range(256)), f"\r\n--{BOUNDARY}--\r\n".encode()))
    told = ",".join(f"{name}={value}" for name, value in fields)
    return Call(f"{path} form: {told}", path, data, headers=_FORM)


_FORM = (("content-type", f"multipart/form-data; boundary={BOUNDARY}"),)


def plain_calls() -> Iterator[Call]:
    """Every route as its clients use it."""
    for path in GENERATED:
        yield from _both(path, "plain")
        yield from _both(path, "a field of tomorrow", of_tomorrow={"deep": [1, None, 1e400 > 1, "Ü"]})
    for path in PASSED:
        yield _asked(path, "plain")
    for path in FORMS:
        for extra in ((), (("stream", "true"),), (("stream", "True"),), (("response_format", "text"),)):
            yield form(path, ("model", MODEL), *extra)


_OPTIONS = {"stream_options": {"include_usage": True}}
FIELDS: tuple[dict[str, Any], ...] = (
    {"max_tokens": _ABSENT},
    {"max_tokens": None},
    {"max_tokens": 16.0},
    {"max_tokens": "16"},
    {"max_tokens": "sixteen"},
    {"max_tokens": 1.5},
    {"max_tokens": _ABSENT, "max_completion_tokens": 16.0},
    {"max_tokens": None, "max_completion_tokens": None},
    {"n": 1.0},
    {"n": "2"},
    {"n": 2},
    {"n": None},
    {"stop": None},
    {"stop": []},
    {"stop": "x"},
    {"stop": ["a", "b", "c", "d", "e"]},
    {"stop": 5},
    {"temperature": "0.5", "top_p": None, "seed": None, "user": None, "metadata": {"a": "b"}},
    {"logprobs": 1, "top_logprobs": 2},
    {"return_token_ids": True},
    {"return_token_ids": "true"},
    {"return_token_ids": False},
    {"return_token_ids": None},
    {"stream_options": None},
    {"nvext": None},
    {"cache_salt": None},
    {"model": _ABSENT},
    {"model": None},
    {"model": ""},
    {"priority": "0", "ignore_eos": "false", "top_k": -1.0},
)
"""Fields of chats and completions: absent, null, and of types that an engine takes all the same."""

STREAM_FIELDS: tuple[dict[str, Any], ...] = (
    {"stream": "true"},
    {"stream": "True"},
    {"stream": "1"},
    {"stream": 1},
    {"stream": 1.0},
    {"stream": "off"},
    {"stream": 0},
    {"stream": None},
    {"stream": "maybe"},
    {"stream": []},
    {"stream": True, **_OPTIONS},
    {"stream": True, "stream_options": {"include_usage": None}},
    {"stream": True, "stream_options": {"include_usage": "yes"}},
    {"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": 1}},
    {"stream": True, "stream_options": {}},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"stream": True, **_OPTIONS, "return_token_ids": True},
    {"stream": True, **_OPTIONS, "n": 2},
)

CHAT_FIELDS: tuple[dict[str, Any], ...] = (
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none"},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "find"}}},
    {"tools": None, "tool_choice": None},
    {"tools": []},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tools": [{"type": "custom", "custom": {"name": "g"}}]},
    {"tools": "none"},
    {"reasoning_effort": "high"},
    {"chat_template_kwargs": None},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template": "{{ 1/0 }}"},
    {"documents": [{"title": "a", "text": "b"}]},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": "true", "add_special_tokens": 0},
    {"messages": [{"role": "developer", "content": "be brief"}, *USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Ü"}]}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": []}, *USER]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [{"role": "alien", "content": "x"}]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": []},
    {"messages": "hi"},
    {"messages": _ABSENT},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "text"}, "modalities": ["text"]},
    {"structured_outputs": {"choice": ["a"]}},
)

COMPLETION_FIELDS: tuple[dict[str, Any], ...] = (
    {"prompt": ["a", "b"]},
    {"prompt": ["a"]},
    {"prompt": [5, 6, 7]},
    {"prompt": [[5, 6], [7]]},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": None},
    {"prompt": _ABSENT},
    {"prompt": 5},
    {"prompt": [5.0, 6.0]},
    {"prompt": ["a", 5]},
    {"echo": True, "suffix": "x", "best_of": 1},
)

PASSED_FIELDS: Mapping[str, tuple[dict[str, Any], ...]] = {
    RESPONSES: (
        {"stream": "true"},
        {"max_output_tokens": "16"},
        {"max_output_tokens": None},
        {"instructions": None, "tools": None},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Ü"}]}]},
        {"input": None},
        {"previous_response_id": "resp_0"},
        {"model": _ABSENT},
        {"tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}]},
    ),
    MESSAGES: (
        {"stream": "true"},
        {"max_tokens": "16"},
        {"max_tokens": _ABSENT},
        {"system": None},
        {"system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [{"name": "f", "input_schema": {}}]},
        {"model": _ABSENT},
    ),
    "/v1/embeddings": ({"model": _ABSENT}, {"input": None}, {"encoding_format": None, "dimensions": "4"}),
    "/tokenize": ({"model": _ABSENT}, {"add_special_tokens": "false"}),
    "/rerank": ({"top_n": "1"}, {"documents": [{"text": "a"}]}),
}

LONG: Mapping[str, dict[str, Any]] = {
    "/detokenize": {"tokens": [*range(100_000)]},
    "/v1/embeddings": {"input": [[*range(100)]] * 1_000},
    "/rerank": {"documents": ["a"] * 10_000},
    "/generate": {"input_ids": [*range(20_000)]},
}
"""More than is counted of a call whose prompt is read here."""


def field_calls() -> Iterator[Call]:
    """Fields that a client may leave out, or write in another type."""
    for path, own in ((CHAT, CHAT_FIELDS), (COMPLETION, COMPLETION_FIELDS)):
        for fields in (*FIELDS, *own):
            yield from _both(path, _told(fields), **fields)
        for fields in STREAM_FIELDS:
            yield _asked(path, _told(fields), **fields)
    for path, variants in PASSED_FIELDS.items():
        for fields in variants:
            yield _asked(path, _told(fields), **fields)
    for path, fields in LONG.items():
        yield _asked(path, f"many {', '.join(fields)}", **fields)


def _told(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={'absent' if value is _ABSENT else value!r}" for name, value in fields.items())


Json = Any


def of_each_object(edit: Callable[[dict[str, Json]], Json]) -> Script:
    """Edit the answer, or the data of each of its events, where it is an object."""

    def script(answer: Answer) -> Answer:
        return replace(answer, pieces=tuple(_edited(piece, edit, answer) for piece in answer.pieces))

    return script


def _edited(piece: bytes, edit: Callable[[dict[str, Json]], Json], answer: Answer) -> bytes:
    head, sign, data = piece.rpartition(b"data: ") if answer.is_stream else (b"", b"", piece)
    try:
        value = json.loads(data)
    except ValueError:
        return piece
    tail = b"\n\n" if answer.is_stream else b""
    return head + sign + dumps(edit(value)) + tail


def of_each_choice(edit: Callable[[dict[str, Json]], Json]) -> Script:
    """Edit every choice."""
    return of_each_object(
        lambda value: (
            {**value, "choices": [edit(choice) for choice in value["choices"]]}
            if isinstance(value.get("choices"), list)
            else value
        )
    )


def _without(*names: str) -> Callable[[dict[str, Json]], Json]:
    return lambda value: {name: inner for name, inner in value.items() if name not in names}


def _with(**fields: Json) -> Callable[[dict[str, Json]], Json]:
    return lambda value: {**value, **fields}


def _if_there(**fields: Json) -> Callable[[dict[str, Json]], Json]:
    """Other values of the fields that an answer has."""
    return lambda value: {**value, **{name: inner for name, inner in fields.items() if name in value}}


def _if_filled(**fields: Json) -> Callable[[dict[str, Json]], Json]:
    """Other values of the fields in which an answer has something."""
    return lambda value: {**value, **{name: inner for name, inner in fields.items() if value.get(name)}}


def _in_delta(edit: Callable[[dict[str, Json]], Json]) -> Callable[[dict[str, Json]], Json]:
    return lambda choice: {
        name: edit(value) if name in ("delta", "message") else value for name, value in choice.items()
    }


ANSWERS: Mapping[str, Script] = {
    "no usage": of_each_object(_without("usage")),
    "usage null": of_each_object(_with(usage=None)),
    "usage of texts": of_each_object(_with(usage={"prompt_tokens": "7", "completion_tokens": "8"})),
    "usage of fractions": of_each_object(_with(usage={"prompt_tokens": 7.0, "total_tokens": 1e3})),
    "usage a list": of_each_object(_with(usage=[7])),
    "usage below zero": of_each_object(_with(usage={"prompt_tokens": -1, "input_tokens": -1})),
    "usage beyond 64 bits": of_each_object(_with(usage={"prompt_tokens": 1 << 70})),
    "details of texts": of_each_object(_with(usage={"prompt_tokens_details": {"cached_tokens": "3"}})),
    "details a list": of_each_object(_with(usage={"prompt_tokens_details": [], "input_tokens_details": 0})),
    "no id, no model": of_each_object(_without("id", "model", "created", "object")),
    "id a number": of_each_object(_with(id=5, created="now", model=None)),
    "a field of tomorrow": of_each_object(_with(of_tomorrow={"token_ids": [1, 2], "choices": [None]})),
    "error null": of_each_object(_with(error=None)),
    "an error in it": of_each_object(_with(error={"message": "Ü", "type": None, "code": "x", "param": 5})),
    "an error of text": of_each_object(_with(error="it broke")),
    "kv_transfer_params odd": of_each_object(_with(kv_transfer_params="none")),
    "fingerprint a number": of_each_object(_with(system_fingerprint=5)),
    "type a number": of_each_object(_if_there(type=5)),
    "choices null": of_each_object(_if_filled(choices=None)),
    "choices of texts": of_each_object(_if_filled(choices=["a", None, 5])),
    "floats and escapes": of_each_object(_with(x=[-0.0, 1e-05, 1e22, 0.1], y="\u2028\x7f\\u00fc🦙")),
}
"""What an engine may answer on each route: fields absent, null, of other types, and unknown ones."""

CHOICES: Mapping[str, Script] = {
    "index absent": of_each_choice(_without("index")),
    "index a text": of_each_choice(_with(index="0")),
    "index 5": of_each_choice(_with(index=5)),
    "finish_reason a number": of_each_choice(_if_there(finish_reason=0)),
    "finish_reason unknown": of_each_choice(
        lambda choice: {**choice, "finish_reason": choice.get("finish_reason") and "of_tomorrow"}
    ),
    "no finish_reason": of_each_choice(_without("finish_reason", "stop_reason", "logprobs")),
    "content null": of_each_choice(_in_delta(_with(content=None))),
    "content of parts": of_each_choice(_in_delta(_with(content=[{"type": "text", "text": "Ü"}]))),
    "content a number": of_each_choice(_in_delta(_with(content=5))),
    "a refusal": of_each_choice(_in_delta(_with(refusal="no", audio={"id": "a"}, function_call={}))),
    "delta null": of_each_choice(_if_there(delta=None, message=None, text=None)),
    "delta of tomorrow": of_each_choice(_in_delta(_with(of_tomorrow={"a": [1]}, token_ids="x"))),
    "no delta": of_each_choice(_without("delta", "message", "text")),
    "token_ids in a text": of_each_choice(_in_delta(_with(content='"token_ids":[1,2],"a":1'))),
    "token_ids of texts": of_each_choice(_if_there(token_ids=["1"])),
    "token_ids absent": of_each_choice(_without("token_ids")),
}
"""What an engine may answer in a choice."""


def answer_calls() -> Iterator[Call]:
    """Answers that routing can't read, or not all of."""
    for path in GENERATED:
        for name, script in ANSWERS.items():
            yield from _both(path, f"answer with {name}", script)
    for path in (CHAT, COMPLETION):
        for name, script in CHOICES.items():
            yield from _both(path, f"answer with {name}", script)
    for path in ("/v1/embeddings", "/rerank", "/tokenize"):
        for name in ("usage of texts", "error null", "choices of texts", "no usage"):
            yield _asked(path, f"answer with {name}", script=ANSWERS[name])


OWN_HEADERS: Headers = (
    ("endpoint-load-metrics", "named_metrics.kv_cache_usage_perc=0.5"),
    ("metadata", '{"data":[]}'),
    ("x-ratelimit-remaining-requests", "5"),
    ("retry-after", "7"),
    ("x-of-tomorrow", "a"),
    ("set-cookie", "a=b"),
)


_METADATA = [{"index": at, "embed_dtype": "float32", "start": at, "end": at + 1} for at in range(300)]
_BYTES: Headers = (("content-type", "application/octet-stream"), ("metadata", json.dumps(_METADATA)))
"""As vLLM answers a call for the embeddings of 300 inputs in bytes."""


def _cut(data: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


def _gzipped(answer: Answer) -> Answer:
    data = gzip.compress(answer.body, mtime=0)
    return replace(
        answer, pieces=tuple(_cut(data, 50)), headers=(*answer.headers, ("content-encoding", "gzip"))
    )


BODIES: Mapping[str, Script] = {
    "no JSON": lambda answer: replace(answer, pieces=(b"it is what it is",)),
    "JSON cut off": lambda answer: replace(answer, pieces=(answer.body[:-9],)),
    "a list": lambda answer: replace(answer, pieces=(b"[" + answer.body + b"]",)),
    "a number": lambda answer: replace(answer, pieces=(b"5",)),
    "blanks around": lambda answer: replace(answer, pieces=(b" \n" + answer.body + b"\r\n",)),
    "no UTF-8": lambda answer: replace(answer, pieces=(answer.body.replace("ü".encode(), b"\xff"),)),
    "a byte order mark": lambda answer: replace(answer, pieces=(b"\xef\xbb\xbf" + answer.body,)),
    "nothing": lambda answer: replace(answer, pieces=()),
    "a name twice": lambda answer: replace(answer, pieces=(answer.body[:-1] + b',"usage":null,"usage":5}',)),
    "in chunks": lambda answer: replace(answer, pieces=tuple(_cut(answer.body, 7)), is_stream=True),
    "gzip": _gzipped,
    "bytes": lambda answer: replace(answer, pieces=(bytes(range(256)) * 300,), headers=_BYTES),
    "another type": lambda answer: replace(answer, headers=(("content-type", "application/x-ndjson"),)),
    "no type": lambda answer: replace(answer, headers=()),
    "status 202": lambda answer: replace(answer, status=202),
    "headers of its own": lambda answer: replace(answer, headers=(*answer.headers, *OWN_HEADERS)),
}
"""Whole answers that are no object of JSON, or come in another way."""


def _data(edit: Callable[[bytes], bytes]) -> Script:
    """Edit all bytes of a stream, and cut it into pieces that no event ends with."""
    return lambda answer: replace(answer, pieces=tuple(_cut(edit(answer.body), 40)))


_FOR_ROUTER = re.compile(rb'"choices":\[\]|"delta":\{\},')
"""What an event has that an engine only sends when it is asked for usage or tokens: nothing is put next to
it, so that the same is there without it.
"""


def _before_each(line: bytes) -> Callable[[bytes], bytes]:
    """Put a line, or several, before each event."""

    def edit(data: bytes) -> bytes:
        events = data.split(b"\n\n")[:-1]
        return b"".join((event if _FOR_ROUTER.search(event) else line + event) + b"\n\n" for event in events)

    return edit


def _mixed(data: bytes) -> bytes:
    """Every third event ends its lines with a line feed, with both, and with a carriage return."""
    ends = (b"\n", b"\r\n", b"\r")
    written, at = [], 0
    for event in data.split(b"\n\n")[:-1]:
        written.append(event.replace(b"\n", ends[at % 3]) + 2 * ends[at % 3])
        at += not _FOR_ROUTER.search(event)
    return b"".join(written)


def _two_lines(data: bytes) -> bytes:
    """The data of each event on two lines, cut where JSON has a blank."""
    return data.replace(b',"object"', b',\ndata: "object"').replace(b',"sequence', b',\ndata:"sequence')


STREAMS: Mapping[str, Script] = {
    "cut inside of characters": _data(lambda data: data),
    "a byte a piece": lambda answer: replace(answer, pieces=tuple(_cut(answer.body, 1))),
    "all at once": lambda answer: replace(answer, pieces=(answer.body,)),
    "a comment first": _data(lambda data: b": keep-alive\n\n" + data),
    "comments between": _data(_before_each(b": keep-alive\n\n")),
    "comments in events": _data(lambda data: data.replace(b"data: {", b": \xc3\xbc\ndata: {")),
    "carriage returns and line feeds": _data(lambda data: data.replace(b"\n", b"\r\n")),
    "carriage returns": _data(lambda data: data.replace(b"\n", b"\r")),
    "mixed line ends": _data(_mixed),
    "several data lines": _data(_two_lines),
    "ids and retries": _data(lambda data: data.replace(b"data: {", b"id: 5\nretry: 100\ndata: {")),
    "names of events": _data(lambda data: data.replace(b"data: {", b"event: x\ndata: {")),
    "no blank behind the colon": _data(lambda data: data.replace(b"data: ", b"data:")),
    "no last blank line": _data(lambda data: data[:-1]),
    "no last line end": _data(lambda data: data[:-2]),
    "no last event": _data(lambda data: b"\n\n".join(data.split(b"\n\n")[:-2]) + b"\n\n"),
    "events behind the last": _data(lambda data: data + b'data: {"late":1}\n\n'),
    "empty events": _data(_before_each(b"data:\n\n\n\n")),
    "a byte order mark": _data(lambda data: b"\xef\xbb\xbf" + data),
    "an event of no JSON": _data(lambda data: b"data: it is what it is\n\n" + data),
    "an event of a list": _data(lambda data: b"data: [1,2]\n\n" + data),
    "no UTF-8": _data(lambda data: data.replace("ü".encode(), b"\xff")),
    "blanks in its JSON": _data(lambda data: re.sub(rb'(?<!fingerprint)":', b'" : ', data)),
    "gzip": _gzipped,
    "headers of its own": BODIES["headers of its own"],
    "an error in mid-stream": _data(
        lambda data: (
            b"\n\n".join(data.split(b"\n\n")[:3])
            + b'\n\ndata: {"error":{"message":"\xc3\xbc","type":"InternalServerError","code":500}}'
            + b"\n\ndata: [DONE]\n\n"
        )
    ),
    "nothing": lambda answer: replace(answer, pieces=()),
    "a whole answer": lambda answer: Answer((dumps({"id": "x-1", "choices": [], "usage": None}),)),
}
"""Streams in the forms that the standard of server-sent events allows, and in some that it doesn't."""


def form_calls() -> Iterator[Call]:
    """The forms of whole and of streamed answers."""
    for path in GENERATED:
        for name, script in BODIES.items():
            yield _asked(path, f"answer of {name}", script=script)
        for name, script in STREAMS.items():
            yield _asked(path, f"answer of {name}", stream=True, script=script)
    for name, script in STREAMS.items():
        yield _asked(CHAT, f"answer of {name}, n=2", stream=True, script=script, n=2)
    for path in ("/v1/embeddings", "/rerank", "/tokenize"):
        for name in (
            "gzip",
            "no JSON",
            "bytes",
            "a list",
            "nothing",
            "in chunks",
            "headers of its own",
            "status 202",
        ):
            yield _asked(path, f"answer of {name}", script=BODIES[name])


STATUSES = (400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 500, 501, 502, 503, 504)
BLAMES_ENGINE = frozenset({401, 403, 408, 429, 500, 502, 503, 504})


def _refusal(status: int, form: str) -> Script:
    body, content_type = {
        "OpenAI's": (
            dumps(
                {"error": {"message": "Ü no", "type": "OwnType", "param": "x", "code": "own_code", "more": 1}}
            ),
            JSON,
        ),
        "flat": (
            dumps({"object": "error", "message": "no", "type": "T", "param": None, "code": status}),
            JSON,
        ),
        "FastAPI's": (dumps({"detail": [{"loc": ["body", "x"], "msg": "no", "type": "missing"}]}), JSON),
        "text": (b"no, and not a bit of JSON", "text/plain; charset=utf-8"),
        "empty": (b"", ""),
    }[form]
    headers = [("content-type", content_type)] if content_type else []
    headers += {
        401: [("www-authenticate", 'Bearer realm="x"')],
        405: [("allow", "GET, PUT")],
        429: [("retry-after", "17"), ("x-ratelimit-remaining-requests", "0")],
        503: [("retry-after", "3")],
    }.get(status, [])
    pieces = (body,) if body else ()
    return lambda answer: Answer(pieces, status, tuple(headers))


FORMS_OF_REFUSALS = ("OpenAI's", "flat", "FastAPI's", "text", "empty")


def refused_calls() -> Iterator[Call]:
    """Errors of an engine: every status in every form."""
    for status in STATUSES:
        for how in FORMS_OF_REFUSALS:
            yield from _both(CHAT, f"{status} {how}", _refusal(status, how))
        for at, path in enumerate((COMPLETION, RESPONSES, MESSAGES, "/v1/embeddings", "/tokenize")):
            how = FORMS_OF_REFUSALS[(status + at) % 5]
            yield _asked(
                path,
                f"{status} {how}",
                stream=path in GENERATED and at % 2 == 0,
                script=_refusal(status, how),
            )


def odd_calls() -> Iterator[Call]:
    """Calls that no route takes, and the pages of an engine."""
    whole = dumps(GENERATED[CHAT])
    for path in (*GENERATED, "/v1/embeddings", "/tokenize"):
        yield Call(f"{path}: an empty body", path)
        yield Call(f"{path}: cut off JSON", path, whole[:-1])
        yield Call(f"{path}: a list", path, b"[]")
        yield Call(f"{path}: GET", path, method="GET", headers=())
        yield Call(f"{path}: PUT", path, whole, method="PUT")
        yield Call(f"{path}: DELETE", path, method="DELETE", headers=())
        yield _asked(path, "an unknown model", model="nobody's")
        yield replace(_asked(path, "a slash behind it"), target=f"{path}/")
        yield replace(_asked(path, "a query"), target=f"{path}?api-version=2026-01-01")
    for content_type in (
        "text/plain",
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/x",
    ):
        yield Call(f"{CHAT}: as {content_type}", CHAT, whole, headers=(("content-type", content_type),))
    yield Call(f"{CHAT}: of no type", CHAT, whole, headers=())
    yield Call(f"{CHAT}: blanks around", CHAT, b"\n " + whole + b"\r\n")
    yield Call(f"{CHAT}: a name twice", CHAT, whole[:-1] + b',"max_tokens":"17"}')
    yield Call(f"{CHAT}: a byte order mark", CHAT, b"\xef\xbb\xbf" + whole)
    yield Call(f"{CHAT}: a half of a pair in UTF-8", CHAT, whole.replace(b"cache", b"\xed\xa0\xbd"))
    for path in (CHAT, COMPLETION, "/v1/embeddings"):
        fields = GENERATED.get(path, {"model": MODEL, **PASSED.get(path, {})})
        for encoding in ("utf-16", "utf-16-be", "utf-32"):
            yield Call(f"{path}: in {encoding}", path, json.dumps(fields).encode(encoding))
        for number in ("NaN", "Infinity", "-Infinity", "1e400", f"1{'0' * 400}"):
            body = json.dumps(fields).encode()[:-1] + b',"x":[%b]}' % number.encode()
            yield Call(f"{path}: a field of {number:.9}", path, body)
    for path in (
        "/v1/models",
        "/version",
        "/ping",
        "/load",
        "/health",
        f"/v1/models/{MODEL}",
        "/v1/nothing",
        "/",
    ):
        yield Call(f"{path}: GET", path, method="GET", headers=())
    for path in ("/v1/models/", "/version/", "/ping/"):
        yield Call(f"{path}: GET", path, method="GET", headers=())
    for path in ("/v1/nothing", "/v1/models", "/health", "/ping", "/v1/responses/resp_1/cancel"):
        yield Call(f"{path}: POST", path, b"{}")


REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"kv_transfer_params": {"remote_host": "10.0.0.1"}}),
    (COMPLETION, {"vllm_xargs": {"kv_transfer_params": "{}"}}),
    (CHAT, {"data_parallel_rank": 1}),
    (CHAT, {"worker_id": 1}),
    (CHAT, {"nvext": {"required_taint": ["a"]}}),
    (MESSAGES, {"cache_salt": "a"}),
    (CHAT, {"metadata": json.loads("[" * 70 + "]" * 70)}),
)
"""Fields that are the router's to judge: they say where a call may go, or how much is made of it."""


def router_calls() -> Iterator[Call]:
    """Calls that are for the router, or that it can read and an engine cannot."""
    for path, fields in REFUSED:
        yield _asked(path, f"refused here, {', '.join(fields)}", **fields)
    plain = dumps(GENERATED[CHAT])
    gzipped = (("content-type", JSON), ("content-encoding", "gzip"))
    yield Call(f"{CHAT}: gzipped", CHAT, gzip.compress(plain, mtime=0), headers=gzipped)
    for path in ("/health", "/version"):
        yield Call(f"{path}: HEAD", path, method="HEAD", headers=())
    for path in (CHAT, "/version"):
        yield Call(f"{path}: OPTIONS", path, method="OPTIONS", headers=())


def all_calls() -> tuple[Call, ...]:
    """Every call, by a name of its own."""
    made = (
        *plain_calls(),
        *field_calls(),
        *answer_calls(),
        *form_calls(),
        *refused_calls(),
        *odd_calls(),
        *router_calls(),
    )
    names = [call.name for call in made]
    assert len(set(names)) == len(names), "two calls have one name"
    return made
