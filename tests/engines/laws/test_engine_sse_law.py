"""Answers of engines, cut anywhere on their way: the same events, bytes, tokens and end."""

import asyncio
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, cast

import aiohttp
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvrouter.core.requests import EngineChunk, FinishReason, merge_chunks
from kvrouter.engines.openai import sse
from kvrouter.engines.openai.answer_events import Unasked, without_token_ids
from kvrouter.engines.openai.sse import AnswerReading, CutEvent, EventCutter
from kvrouter.engines.openai.streams import RAW_CHUNK_BYTES, SseStream
from kvrouter.transports.requests.port import StreamBroken
from tests.testing.scripted_engine import event_of, page

PLAIN = AnswerReading(passes_raw=True)
ADDED = AnswerReading(passes_raw=True, added_token_ids=True, added_usage=True)
TOKENS = AnswerReading(passes_raw=False)

TRICKY = st.sampled_from(
    [
        'a,"token_ids":[1]',
        ',"prompt_token_ids":[1, 2]',
        '\\",\\"token_ids\\":[3]',
        "data: [DONE]\n\n",
        "\r\n\r\n",
        "日本",
        "\u2028",
        "",
    ]
)
TEXTS = TRICKY | st.text(max_size=12)
CHUNKS = st.lists(st.tuples(TEXTS, st.lists(st.integers(0, 2**32 - 1), max_size=3)), max_size=8)

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    """``data`` in pieces, cut at each of these places, whatever its length."""
    places = sorted({place % (len(data) + 1) for place in at} | {0, len(data)})
    return [data[begin:end] for begin, end in pairwise(places)]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


class Pieces:
    """Stands for an HTTP answer whose body comes in these pieces."""

    url = "http://engine"

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]
        self.is_closed = False

    raw_headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ()

    @property
    def content(self) -> "Pieces":
        return self

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def at_eof(self) -> bool:
        return not self._pieces

    def close(self) -> None:
        self.is_closed = True


def read(pieces: Sequence[bytes], reading: AnswerReading) -> tuple[list[EngineChunk], str | None]:
    """The chunks of an answer, and why it broke."""

    async def reads() -> tuple[list[EngineChunk], str | None]:
        answer = Pieces(pieces)

        async def opening() -> aiohttp.ClientResponse:
            return cast(aiohttp.ClientResponse, answer)

        stream = SseStream(opening(), reading)
        chunks: list[EngineChunk] = []
        broken: str | None = None
        try:
            async for chunk in stream:
                chunks.append(chunk)
        except StreamBroken as error:
            broken = error.message
        assert answer.is_closed
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return chunks, broken

    return asyncio.run(reads())


def chat_event(text: str, token_ids: Sequence[int] | None, finish: str | None = None) -> dict[str, object]:
    return {
        "id": "chatcmpl-1",
        "choices": [
            {"index": 0, "delta": {"content": text}, "finish_reason": finish, "token_ids": token_ids}
        ],
    }


USAGE = {"id": "chatcmpl-1", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3,
         "prompt_tokens_details": {"cached_tokens": 4}}}  # fmt: skip


@given(CUTS)
def test_text_is_passed_at_once_if_the_engine_sends_no_tokens(at: list[int]) -> None:
    events = [event_of(chat_event(text, None)) for text in ("", "a", "b")]
    wire = b"".join(events)
    end = event_of(chat_event("", None, "stop")) + event_of("[DONE]")
    got, broken = read([*cut(wire, at), end], ADDED)
    assert broken is None
    *before, _ = got
    assert written(before) == wire
    assert before[-1].text_chars is None


LINES = st.lists(
    st.sampled_from(
        [b"data: a", b"data:b", b"data", b"id: 1", b": ping", b"\xef\xbb\xbf", b"\n", b"\r\n", b"\r", b"\n\n"]
    ),
    max_size=20,
).map(b"".join)
"""Streams of lines of every kind, with every line end."""


def data_of(events: Sequence[CutEvent]) -> list[bytes]:
    """The data of those events that have any."""
    return [data for _, data in events if data]


def as_the_standard_says(wire: bytes) -> list[bytes]:
    """The data of the events in ``wire``, and of what comes behind the last one."""
    text = wire.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    found = []
    for block in text.split(b"\n\n"):
        lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
        found.append(b"\n".join(lines))
    return [data for data in found if data]


@given(LINES, CUTS)
@example(b"data: a\r\n\r\n\ndata: b\n\n", [11])
@example(b"data: a\r\rdata: b\r\n\rdata: c", [9, 20])
def test_events_follow_the_sse_standard_however_the_bytes_are_cut(wire: bytes, at: list[int]) -> None:
    cutter = EventCutter()
    events = [event for piece in cut(wire, at) for event in cutter.push(piece)]
    events.append(cutter.end())
    assert data_of(events) == as_the_standard_says(wire)
    assert b"".join(raw for raw, _ in events) == wire


@given(LINES | st.binary(max_size=60), CUTS, st.sampled_from([PLAIN, ADDED]))
def test_any_engine_stream_passes_unchanged_and_finishes_once(
    wire: bytes, at: list[int], reading: AnswerReading
) -> None:
    got, broken = read(cut(wire, at), reading)
    assert (written(got), broken) == (wire, None)
    assert got[-1].finish is FinishReason.STOP
    assert not any(chunk.finish for chunk in got[:-1])


def written(chunks: Sequence[EngineChunk]) -> bytes:
    """What a client gets."""
    return b"".join(chunk.comments + chunk.raw for chunk in chunks)


def test_comment_is_passed_at_once_and_does_not_begin_the_answer() -> None:
    ping, first = b": keep-alive\n\n", event_of(chat_event("", None))
    got, _ = read([ping, ping, first + ping, event_of(chat_event("a", [1])), ping], ADDED)
    assert [chunk.is_comment for chunk in got] == [True, True, False, False, True, False]
    assert got[2].raw == first + ping
    assert merge_chunks(got[:2]).is_comment
    assert written([merge_chunks(got)]) == written(got)


@given(st.lists(st.text("abc{}:\"' é", max_size=9), max_size=6), st.sampled_from([b"\n", b"\r\n"]), CUTS)
def test_every_line_ending_gives_the_same_data(datas: list[str], ending: bytes, at: list[int]) -> None:
    raws = [b"data: " + data.encode() + ending * 2 for data in datas]
    cutter = EventCutter()
    events = [event for piece in cut(b"".join(raws), at) for event in cutter.push(piece)]
    assert data_of(events) == [data.strip().encode() for data in datas if data.strip()]
    assert b"".join(raw for raw, _ in [*events, cutter.end()]) == b"".join(raws)


def test_comments_are_events_without_data_and_lines_of_data_are_joined() -> None:
    events = list(EventCutter().push(b": ping\n\ndata: a\ndata: b\nid: 7\n\n"))
    assert [data for _, data in events] == [b"", b"a\nb"]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20))
def test_held_bytes_are_bounded_by_the_event_limit(pieces: list[bytes]) -> None:
    limit_bytes, held = 64, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sse, "EVENT_MAX_BYTES", limit_bytes)
        cutter = EventCutter()
        for piece in pieces:
            held += len(piece) - sum(len(raw) for raw, _ in cutter.push(piece))
            assert held <= limit_bytes


@given(st.integers(0, 3), st.integers(0, 200), CUTS)
def test_too_long_event_passes_unchanged(n_before: int, n_bytes: int, at: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sse, "EVENT_MAX_BYTES", 64)
        short = event_of("a")
        wire = short * n_before + b"data: " + b"x" * n_bytes + b"\n\n" + short
        got, broken = read(cut(wire, at), PLAIN)
    assert (written(got), broken) == (wire, None)


ODD_FIELDS = ("choices", "usage", "kv_transfer_params", "system_fingerprint", "error")
ODD_CHOICE_FIELDS = ("index", "delta", "message", "text", "finish_reason", "token_ids")


@st.composite
def odd_events(draw: st.DrawFn) -> bytes:
    """An event of which any field that is read may be anything, but for what the router would ask for."""
    values = JSON_VALUES | st.dictionaries(st.sampled_from(["content", "prompt_tokens", "code"]), JSON_VALUES)
    event = draw(st.dictionaries(st.sampled_from(ODD_FIELDS), values))
    choices = st.lists(st.dictionaries(st.sampled_from(ODD_CHOICE_FIELDS), values), min_size=1, max_size=2)
    if draw(st.booleans()) or not event.get("choices"):
        event["choices"] = draw(choices)
    if isinstance(event.get("error"), dict):
        del event["error"]
    data = json.dumps(event, ensure_ascii=draw(st.booleans()))
    assume(re.search(r'"(?:prompt_)?token_ids": \[[0-9, ]*\]', data) is None)
    ending = draw(st.sampled_from(["\n\n", "\r\n\r\n", "\r\r", "\n\r\n"]))
    return f"data: {data}{ending}".encode()


@given(st.lists(odd_events(), max_size=4), CUTS, st.sampled_from([PLAIN, ADDED]), st.booleans())
@example(
    [b'data: {"choices":[{"index":"0","delta":{"content":["a"]},"finish_reason":7}]}\n\n'], [], ADDED, True
)
@example([b'data: {"choices":[{"text":5}],"usage":"x"}\n\n', b"data: text\n\n"], [3], PLAIN, False)
def test_event_with_a_field_of_another_type_passes_unchanged(
    events: list[bytes], at: list[int], reading: AnswerReading, says_done: bool
) -> None:
    wire = b"".join(events) + (b"data: [DONE]\n\n" if says_done else b"")
    got, broken = read(cut(wire, at), reading)
    assert (written(got), broken) == (wire, None)
    assert sum(chunk.finish is not None for chunk in got) == 1


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[{"index":0,"text":"a","token_ids":"x"}]}',
        b'{"choices":[{"text":5,"token_ids":null,"finish_reason":"length"}]}',
        b'{"choices":null}',
        b"no JSON",
    ],
)
def test_unreadable_event_is_marked_unread_without_a_text_length(data: bytes) -> None:
    got, _ = read([b"data: " + data + b"\n\n", b"data: [DONE]\n\n"], ADDED)
    assert got[0].text_chars is None
    assert got[0].unread
    is_length = b"length" in data
    assert got[-1].finish is (FinishReason.LENGTH if is_length else FinishReason.STOP)


def test_events_sent_only_for_added_tokens_are_held_and_tokens_kept() -> None:
    def chunk(delta: object, token_ids: list[int] | None, finish: str | None = None) -> dict[str, object]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish,
            "token_ids": token_ids,
        }
        return {"id": "chatcmpl-1", "choices": [choice]}

    said = [
        chunk({"role": "assistant", "content": ""}, None),
        chunk({}, [1]),
        chunk({}, [2]),
        chunk({"content": "é"}, [3]),
        chunk({"content": "x"}, [4]),
        chunk({}, [5]),
        chunk({}, [6], "length"),
    ]
    direct = [event_of(chunk(e["choices"][0]["delta"], None, e["choices"][0]["finish_reason"]))  # type: ignore[index]
              for e in said if e["choices"][0]["delta"] or e["choices"][0]["finish_reason"]]  # type: ignore[index]  # fmt: skip
    got, broken = read([*map(event_of, said), event_of(USAGE), event_of("[DONE]")], ADDED)
    assert broken is None
    assert written(got) == b"".join(direct) + event_of("[DONE]")
    assert [token for each in got for token in each.token_ids] == [1, 2, 3, 4, 5, 6]
    assert all(each.raw for each in got if each.token_ids)
    assert all(each.text_chars is not None for each in got if each.raw)


def test_usage_in_every_event_is_kept() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    events = [{**chat_event("a", None), "usage": usage}, {**chat_event("", None, "stop"), "usage": usage}]
    wire = b"".join(map(event_of, [*events, {**USAGE, "system_fingerprint": "f"}, "[DONE]"]))
    got, _ = read([wire], ADDED)
    assert written(got) == wire


@given(CHUNKS, CUTS, st.sampled_from([PLAIN, ADDED, TOKENS]), st.booleans(), st.booleans())
def test_text_tokens_and_end_of_an_answer_arrive_whole_in_order(
    chunks: list[tuple[str, list[int]]],
    at: list[int],
    reading: AnswerReading,
    tells_usage: bool,
    says_done: bool,
) -> None:
    events = [chat_event(text, ids) for text, ids in chunks]
    events.append(chat_event("", None, "stop"))
    end = event_of("[DONE]") if says_done else b""
    wire = b"".join(map(event_of, [*events, *([USAGE] if tells_usage else [])])) + end
    got, broken = read(cut(wire, at), reading)
    assert broken is None
    assert [chunk.finish for chunk in got if chunk.finish] == [FinishReason.STOP]
    assert got[-1].finish is FinishReason.STOP
    assert [token for chunk in got for token in chunk.token_ids] == [t for _, ids in chunks for t in ids]
    assert [c.cached_tokens for c in got if c.cached_tokens is not None] == [4] * tells_usage
    raw = b"".join(chunk.raw for chunk in got)
    if reading is PLAIN:
        assert raw == wire
    elif reading is TOKENS:
        assert raw == b""
    else:
        bare = [chat_event(text, None) for text, _ in chunks]
        bare.append(chat_event("", None, "stop"))
        assert raw == b"".join(map(event_of, bare)) + end
        assert sum(chunk.text_chars or 0 for chunk in got) == sum(len(text) for text, _ in chunks)
        assert all(chunk.text_chars is not None for chunk in got if chunk.raw)


@given(CHUNKS, CUTS, st.integers(0, 10_000))
@example([], [], 10_000)
def test_cut_answer_gives_whole_events_only_and_an_end_only_if_sent(
    chunks: list[tuple[str, list[int]]], at: list[int], n_left_out: int
) -> None:
    events = [event_of(chat_event(text, ids)) for text, ids in chunks]
    events += [event_of(chat_event("", None, "length")), event_of(USAGE)]
    whole = [len(b"".join(events[:n])) for n in range(len(events) + 1)]
    wire = b"".join(events)
    sent = wire[: len(wire) - 1 - n_left_out % len(wire)]
    got, broken = read(cut(sent, at), TOKENS)
    if len(sent) == whole[len(chunks) + 1]:
        assert (broken, got[-1].finish) == (None, FinishReason.LENGTH)
        return
    assert broken is not None
    assert all(chunk.finish is None for chunk in got)
    n_tokens = [sum(len(ids) for _, ids in chunks[:n]) for n, end in enumerate(whole) if end <= len(sent)][-1]
    assert sum(len(chunk.token_ids) for chunk in got) == n_tokens


@given(st.integers(1, 40), st.integers(1, 400))
def test_many_events_of_one_read_are_chunks_of_a_bounded_size(n: int, text_chars: int) -> None:
    event = event_of(chat_event("x" * text_chars, [1]))
    got, broken = read([event * n + event_of(chat_event("", None, "stop")) + event_of("[DONE]")], PLAIN)
    assert broken is None
    last_bytes = 200
    assert all(len(chunk.raw) < RAW_CHUNK_BYTES + len(event) + last_bytes for chunk in got)
    assert sum(len(chunk.token_ids) for chunk in got) == n


@given(TEXTS, JSON_VALUES, st.lists(st.integers(0, 2**32 - 1), max_size=4), st.booleans())
@example('","token_ids":[1]', ['","token_ids":[1]'], [5], True)
def test_removing_token_ids_changes_nothing_else(
    text: str, other: object, ids: list[int], is_ascii: bool
) -> None:
    def event(token_ids: list[int] | None, prompt_token_ids: list[int] | None) -> bytes:
        choice = {"index": 0, "text": text, "other": other, "token_ids": token_ids}
        said = {"id": text, "choices": [choice], "prompt_token_ids": prompt_token_ids, "prompt_text": None}
        return json.dumps(said, separators=(",", ":"), ensure_ascii=is_ascii).encode()

    assume(not {"token_ids", "prompt_token_ids"} & _keys(other))
    assert without_token_ids(event(ids, ids)) == event(None, None)
    assert without_token_ids(event(None, None)) == event(None, None)
    bare = (
        event(None, None).replace(b',"token_ids":null}]', b"}]").replace(b',"prompt_token_ids":null,', b",")
    )
    assert without_token_ids(event(ids, ids), Unasked.NOTHING) == bare
    assert without_token_ids(bare, Unasked.NOTHING) == bare


def _keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_keys, value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()


@given(CUTS)
def test_recorded_chat_with_added_tokens_passes_like_one_without(at: list[int]) -> None:
    got, broken = read(cut(page("vllm-0.32.0-chat-tokens.sse"), at), ADDED)
    assert broken is None
    raw = b"".join(chunk.raw for chunk in got)
    assert _shape(raw) == _shape(page("vllm-0.32.0-chat.sse"))
    assert [token for chunk in got for token in chunk.token_ids] == [1390, 1043, 4]
    assert (got[-1].finish, sum(chunk.text_chars or 0 for chunk in got)) == (FinishReason.LENGTH, 14)


@given(CUTS)
def test_recorded_completion_gives_its_tokens_and_finish_reason(at: list[int]) -> None:
    got, broken = read(cut(page("vllm-0.32.0-completion-tokens.sse"), at), ADDED)
    assert broken is None
    assert [token for chunk in got for token in chunk.token_ids] == [1629, 1581, 1629]
    assert got[-1].finish is FinishReason.LENGTH
    assert b'"usage"' not in b"".join(chunk.raw for chunk in got)


def _shape(stream: bytes) -> list[object]:
    """The events but for what each answer has of its own, and the fingerprint, which moves with the usage."""
    events: list[object] = []
    for _, data in EventCutter().push(stream):
        if not data or data == b"[DONE]":
            continue
        event = json.loads(data)
        for field in ("id", "created", "system_fingerprint"):
            event.pop(field, None)
        events.append(event)
    return events
