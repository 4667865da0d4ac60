"""A leg's answer over real sockets: as it comes, cancelled, broken off, refused late."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, KvrouterError
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.engines.openai import streams
from kvrouter.engines.openai.answer_events import read_event
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.openai.sse import BEHIND_MAX_BYTES, AnswerReading
from kvrouter.engines.openai.streams import PIECE_BYTES, SseStream, WholeStream
from kvrouter.engines.sglang.calls import GenerateReader
from kvrouter.transports.requests.encoding import decode_chunk, encode_chunk
from kvrouter.transports.requests.port import StreamBroken, WorkerFull, WorkerUnreachable
from tests.testing.constants import SetConstants
from tests.testing.scripted_engine import (
    EMPTY_CHAT,
    JSON,
    AnswerEnd,
    ReceivedCall,
    ScriptedAnswer,
    ScriptedEngine,
    event_of,
    page,
    sse,
)

RAW = AnswerReading(passes_raw=True)
TOKENS = AnswerReading(passes_raw=False)
PATH = "/v1/completions"
WHOLE = page("vllm-0.32.0-completion.json")


def token(token_id: int, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": "x", "token_ids": [token_id], "finish_reason": finish}]}


@dataclass
class Asked:
    """An engine that was asked for one leg."""

    engine: ScriptedEngine
    server: EngineServer

    async def stream(self, reading: AnswerReading = RAW) -> SseStream:
        return SseStream(self.server.post(PATH, b"{}"), reading)

    def whole(self, reading: AnswerReading = TOKENS) -> WholeStream:
        return WholeStream(self.server.ask(PATH, b"{}"), reading)

    async def call(self) -> ReceivedCall:
        return await self.engine.called()


@asynccontextmanager
async def asked(*answers: ScriptedAnswer) -> AsyncIterator[Asked]:
    engine = ScriptedEngine()
    engine.answers.extend(answers)
    await engine.start()
    server = EngineServer(engine.url)
    await server.open()
    try:
        async with asyncio.timeout(60):
            yield Asked(engine, server)
    finally:
        await server.close()
        await engine.stop()


async def read(stream: SseStream | WholeStream) -> list[EngineChunk]:
    return [chunk async for chunk in stream]


async def test_a_recorded_answer_passes_byte_for_byte() -> None:
    recorded = page("vllm-0.32.0-chat.sse")
    async with asked(ScriptedAnswer((recorded[:100], recorded[100:101], recorded[101:]))) as at:
        chunks = await read(await at.stream())
    assert b"".join(chunk.raw for chunk in chunks) == recorded
    assert chunks[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("fingerprint", ["vllm-0.32.0-tp1", 'a "quote", a \\ and an é', ""])
async def test_fingerprint_of_the_usage_event_moves_to_the_last_event(fingerprint: str) -> None:
    last = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 2}, "system_fingerprint": fingerprint}
    reading = AnswerReading(passes_raw=True, added_usage=True)
    async with asked(ScriptedAnswer((sse(token(1), last, usage),))) as at:
        chunks = await read(await at.stream(reading))
    own = sse(token(1), {**last, "system_fingerprint": fingerprint})
    assert b"".join(chunk.raw for chunk in chunks) == own


LAST: dict[str, object] = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}


@pytest.mark.parametrize("late", [{"object": "error", "message": "no", "code": 500}, {"error": None}])
async def test_event_after_the_last_one_that_is_not_usage_passes(late: dict[str, object]) -> None:
    own = sse(token(1), LAST, late)
    async with asked(ScriptedAnswer((own,))) as at:
        chunks = await read(await at.stream(AnswerReading(passes_raw=True, added_usage=True)))
    assert b"".join(chunk.raw for chunk in chunks) == own


async def test_comments_after_the_last_event_are_held_up_to_a_limit() -> None:
    last, comments = event_of(LAST), b": keep-alive\n\n" * (BEHIND_MAX_BYTES // 14 + 1)
    answer = ScriptedAnswer((last + comments,), ends=AnswerEnd.HELD)
    async with asked(answer) as at:
        stream = await at.stream(AnswerReading(passes_raw=True, added_usage=True))
        chunk = await anext(stream)
        assert chunk.raw == last + comments
        stream.cancel("the client left")


async def test_long_unstreamed_answer_is_passed_in_bounded_pieces() -> None:
    long = json.dumps({"choices": [{"index": 0, "text": "x" * 1_000_000, "finish_reason": "stop"}]}).encode()
    async with asked(
        ScriptedAnswer((long,), content_type=JSON), ScriptedAnswer((long,), content_type=JSON)
    ) as at:
        *pieces, last = await read(at.whole(RAW))
        given_up = at.whole(RAW)
        await anext(given_up)
        given_up.cancel("the client left")
        rest = await read(given_up)
    assert b"".join(piece.raw for piece in (*pieces, last)) == long
    assert {len(piece.raw) for piece in pieces} == {PIECE_BYTES}
    assert ([piece.finish for piece in pieces], last.finish) == ([None] * len(pieces), FinishReason.STOP)
    assert [chunk.finish for chunk in rest] == [FinishReason.CANCELLED]


async def test_long_event_is_passed_in_bounded_pieces() -> None:
    long = event_of({"choices": [{"index": 0, "text": "x" * 1_500_000, "finish_reason": None}]})
    recorded = event_of(token(1)) + long + sse(token(2, "stop"))
    async with asked(ScriptedAnswer((recorded[:9_000], recorded[9_000:]))) as at:
        chunks = await read(await at.stream())
    assert b"".join(chunk.raw for chunk in chunks) == recorded
    assert max(len(chunk.raw) for chunk in chunks) == PIECE_BYTES
    assert [t for chunk in chunks for t in chunk.token_ids] == [1, 2]
    assert [chunk.finish for chunk in chunks][-2:] == [None, FinishReason.STOP]


async def test_ended_stream_leaves_its_connection_for_reuse(set_constants: SetConstants) -> None:
    set_constants(streams, END_LIMIT_S=60.0)
    late = ScriptedAnswer((sse(token(1, "stop")),), ends=AnswerEnd.HELD)
    async with asked(
        late, ScriptedAnswer((WHOLE,), content_type=JSON), replace(late, ends=AnswerEnd.WHOLE)
    ) as at:
        stream = await at.stream()
        assert (await anext(stream)).raw == late.pieces[0]
        ending = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        assert not ending.done()
        at.engine.release()
        assert [chunk.finish for chunk in await ending] == [FinishReason.STOP]
        await read(at.whole())
        await read(await at.stream())
        assert len({call.port for call in at.engine.calls}) == 1


async def test_stream_left_open_after_its_last_event_is_closed(
    set_constants: SetConstants,
) -> None:
    set_constants(streams, END_LIMIT_S=0.01)
    ended = ScriptedAnswer((sse(token(1, "stop")),))
    async with asked(replace(ended, ends=AnswerEnd.HELD), ended) as at:
        assert (await read(await at.stream()))[-1].finish is FinishReason.STOP
        await (await at.call()).left.wait()
        assert (await read(await at.stream()))[-1].finish is FinishReason.STOP


async def test_token_is_passed_as_soon_as_the_engine_wrote_it() -> None:
    async with asked(ScriptedAnswer((event_of(token(1)),), ends=AnswerEnd.HELD)) as at:
        stream = await at.stream(TOKENS)
        assert (await anext(stream)).token_ids == (1,)
        assert not (await at.call()).left.is_set()


async def test_cancelling_closes_the_connection_and_ends_a_waiting_read() -> None:
    async with asked(ScriptedAnswer((event_of(token(1)),), ends=AnswerEnd.HELD)) as at:
        stream = await at.stream()
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        stream.cancel("the client left")
        stream.cancel("again")
        last = await waiting
        assert (last.finish, last.error) == (FinishReason.CANCELLED, "the client left")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await (await at.call()).left.wait()


async def test_stream_cancelled_before_its_first_read_ends_as_cancelled() -> None:
    async with asked(ScriptedAnswer((sse(token(1, "stop")),))) as at:
        stream = await at.stream()
        stream.cancel("no more")
        assert [chunk.finish for chunk in await read(stream)] == [FinishReason.CANCELLED]


@pytest.mark.parametrize(
    ("answer", "n_tokens", "says"),
    [
        (
            ScriptedAnswer((event_of(token(1)), b'data: {"choices"'), ends=AnswerEnd.HELD),
            1,
            "its answer broke off",
        ),
        (ScriptedAnswer((event_of(token(1)), b'data: {"choices"')), 1, "in the middle of an event"),
        (ScriptedAnswer((event_of(token(1)),)), 1, "without a finish reason"),
        (ScriptedAnswer((event_of(token(1)) + b"data: nonsense\n\n",)), 1, "the engine's answer"),
        (ScriptedAnswer((event_of(token(1)) + event_of({"error": {"message": "died"}}),)), 1, "died"),
        (ScriptedAnswer((b"data: [1]\n\n",)), 0, "the engine's answer"),
        (ScriptedAnswer(()), 0, "without a finish reason"),
    ],
)
async def test_answer_that_breaks_off_is_a_broken_stream(
    answer: ScriptedAnswer, n_tokens: int, says: str
) -> None:
    async with asked(answer) as at:
        stream = await at.stream(TOKENS)
        for _ in range(n_tokens):
            assert (await anext(stream)).token_ids == (1,)
        if answer.ends is AnswerEnd.HELD:
            at.engine.cut()
        with pytest.raises(StreamBroken, match=says):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_closing_the_engine_server_breaks_its_streams() -> None:
    async with asked(ScriptedAnswer((event_of(token(1)),), ends=AnswerEnd.HELD)) as at:
        stream = await at.stream()
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await at.server.close()
        with pytest.raises(StreamBroken):
            await waiting


async def test_closing_the_engine_server_fails_waiting_unstreamed_reads() -> None:
    async with asked(
        ScriptedAnswer(ends=AnswerEnd.NO_HEADERS),
        ScriptedAnswer((b"{",), content_type=JSON, ends=AnswerEnd.HELD),
    ) as at:
        unheard, begun = at.whole(), at.whole()
        waiting = [asyncio.create_task(anext(stream)) for stream in (unheard, begun)]
        await at.engine.called(2)
        await at.server.close()
        for each in waiting:
            with pytest.raises((WorkerUnreachable, StreamBroken)):
                await each


@pytest.mark.parametrize(
    "body",
    [
        b"no JSON",
        b"",
        b"[1]",
        b"{}",
        b'{"choices":null,"usage":"x"}',
        b'{"choices":[{"index":"0","message":{"content":["a"]},"finish_reason":7,"token_ids":"a"}]}',
        b'{"choices":[{"text":5}],"error":"text","system_fingerprint":1,"kv_transfer_params":[]}',
        b'{"choices":[{"text":"a","finish_reason":"odd"}],"usage":{"prompt_tokens":-1,"completion_tokens":1e99}}',
        b'{"error":null,"detail":"\xff"}',
    ],
)
async def test_any_unstreamed_answer_passes_unchanged(body: bytes) -> None:
    async with asked(ScriptedAnswer((body,), content_type=JSON)) as at:
        (chunk,) = await read(at.whole(RAW))
    assert (chunk.raw, chunk.finish) == (body, FinishReason.STOP)
    assert decode_chunk(encode_chunk(chunk)) == chunk


async def test_aborted_unstreamed_answer_breaks_and_keeps_the_answer() -> None:
    """vLLM that is asked to end answers what it runs with what there is of it."""
    body = json.dumps(token(1, "abort")).encode()
    async with asked(ScriptedAnswer((body,), content_type=JSON)) as at:
        with pytest.raises(StreamBroken, match="aborted") as lost:
            await read(at.whole(RAW))
    assert lost.value.answer is not None
    assert (lost.value.answer.status, lost.value.answer.body) == (200, body)


@pytest.mark.parametrize(
    ("goes_on", "events", "is_lost"),
    [
        (True, [token(1), token(2, "abort")], True),
        (True, [token(1, "abort")], True),
        (False, [token(1, "abort")], True),
        (False, [token(1), token(2, "abort")], False),
    ],
)
async def test_aborted_stream_breaks_only_where_another_engine_can_go_on(
    goes_on: bool, events: list[object], is_lost: bool
) -> None:
    """What came before is not lost, nor is the end of an answer that would end there in any case."""
    async with asked(ScriptedAnswer((*map(event_of, events), b"data: [DONE]\n\n"))) as at:
        stream = await at.stream(AnswerReading(passes_raw=True, added_token_ids=goes_on))
        chunks: list[EngineChunk] = []
        try:
            async for chunk in stream:
                chunks.append(chunk)
        except StreamBroken as error:
            assert (is_lost, error.message) == (True, streams.ABORTED)  # noqa: PT017
            assert all(b"abort" not in chunk.raw for chunk in chunks)
        else:
            assert not is_lost
            assert b"".join(chunk.raw for chunk in chunks).endswith(b"data: [DONE]\n\n")


ROLE, USAGE_OF_NONE, END = EMPTY_CHAT
PASSED = AnswerReading(passes_raw=True, has_choices=False)


def delta(finish: str | None = None, **fields: object) -> bytes:
    return event_of({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


@pytest.mark.parametrize(
    "first",
    [
        delta(content="x"),
        delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]),
        delta(reasoning="x"),
        delta("stop"),
        b": keep-alive\n\n",
    ],
)
def test_role_waits_for_content_or_a_comment_and_is_passed_unchanged(first: bytes) -> None:
    events = streams._StreamedEvents(RAW, read_event)
    events.cut(ROLE)
    assert not events.ready
    events.cut(first)
    assert [chunk.raw for chunk in events.ready] == [ROLE + first]


def test_events_without_content_wait_in_bounded_memory() -> None:
    events = streams._StreamedEvents(RAW, read_event)
    roles = PIECE_BYTES // len(ROLE)
    events.cut(ROLE * roles)
    assert not events.ready
    events.cut(ROLE)
    assert b"".join(chunk.raw for chunk in events.ready) == ROLE * (roles + 1)


def test_passed_routes_events_do_not_wait() -> None:
    events = streams._StreamedEvents(PASSED, read_event)
    events.cut(USAGE_OF_NONE)
    assert [chunk.raw for chunk in events.ready] == [USAGE_OF_NONE]


@pytest.mark.parametrize(
    ("reading", "answer"),
    [
        (RAW, [delta(content="x"), USAGE_OF_NONE]),
        (RAW, [delta(tool_calls=[{"index": 0}]), USAGE_OF_NONE]),
        (RAW, [event_of({"choices": [{"text": "", "token_ids": [1]}]}), USAGE_OF_NONE]),
        (RAW, [delta("stop"), USAGE_OF_NONE]),
        (RAW, [ROLE]),
        (PASSED, [USAGE_OF_NONE]),
    ],
)
async def test_answer_with_content_or_without_a_count_of_tokens_ends_well(
    reading: AnswerReading, answer: list[bytes]
) -> None:
    async with asked(ScriptedAnswer((*answer, END))) as at:
        chunks = await read(await at.stream(reading))
    assert b"".join(chunk.raw for chunk in chunks) == b"".join((*answer, END))
    assert chunks[-1].finish is FinishReason.STOP


async def test_comment_before_the_answer_is_passed_at_once() -> None:
    async with asked(ScriptedAnswer((b": keep-alive\n\n",), ends=AnswerEnd.HELD)) as at:
        chunk = await anext(await at.stream())
        assert (chunk.is_comment, chunk.comments) == (True, b": keep-alive\n\n")
        assert not (await at.call()).left.is_set()


@pytest.mark.parametrize(
    ("events", "kind", "says"),
    [
        ([{"error": {"message": "no tool", "code": 400, "param": "tools"}}], InvalidRequest, "no tool"),
        ([{"error": {"message": "core died", "code": 500}}], StreamBroken, "core died"),
        ([{"error": {"message": "odd", "code": "400"}}], StreamBroken, "odd"),
        ([token(1), {"error": {"message": "late", "code": 400}}], StreamBroken, "late"),
    ],
)
async def test_error_event_blames_the_call_only_if_no_answer_has_begun(
    events: list[object], kind: type[KvrouterError], says: str
) -> None:
    async with asked(ScriptedAnswer(tuple(map(event_of, events)))) as at:
        stream = await at.stream()
        with pytest.raises(kind, match=says):
            await read(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_sglang_context_error_event_blames_the_call() -> None:
    async with asked(ScriptedAnswer((page("sglang-0.5.23-error-in-stream.sse"),))) as at:
        with pytest.raises(ContextLengthExceeded, match="1018 tokens"):
            await read(await at.stream())


@pytest.mark.parametrize("name", ["sglang-0.5.23-generate-error.sse", "sglang-0.5.23-generate-abort.sse"])
async def test_sglang_refusal_of_token_ids_in_either_form_blames_the_call(name: str) -> None:
    async with asked(ScriptedAnswer((page(name),))) as at:
        stream = SseStream(at.server.post(PATH, b"{}"), TOKENS, GenerateReader())
        with pytest.raises(ContextLengthExceeded, match="tokens"):
            await read(stream)


async def test_sglang_tokens_are_each_given_once() -> None:
    async with asked(ScriptedAnswer((page("sglang-0.5.23-generate.sse"),))) as at:
        chunks = await read(SseStream(at.server.post(PATH, b"{}"), TOKENS, GenerateReader()))
    assert [t for chunk in chunks for t in chunk.token_ids] == [1309, 722, 504, 1369, 1022, 1252]
    assert (chunks[-1].finish, chunks[-1].raw) == (FinishReason.LENGTH, b"")


async def test_unstreamed_answer_is_one_chunk() -> None:
    async with asked(ScriptedAnswer((WHOLE,), content_type=JSON)) as at:
        assert await read(at.whole(RAW)) == [
            EngineChunk(
                finish=FinishReason.LENGTH, cached_tokens=0, raw=WHOLE, prompt_tokens=1, completion_tokens=3
            )
        ]


async def test_prefill_answer_gives_transfer_params_and_passes_no_bytes() -> None:
    params = {
        "remote_engine_id": "e",
        "remote_block_ids": [1, 2],
        "remote_port": 5600,
        "transfer_mode": "push",
    }
    body = WHOLE.replace(b'"kv_transfer_params":null', b'"kv_transfer_params":' + _json(params))
    async with asked(ScriptedAnswer((body,), content_type=JSON)) as at:
        (chunk,) = await read(at.whole())
    assert (chunk.kv_transfer_params, chunk.raw) == (params, b"")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ScriptedAnswer.error(400, "vllm-0.32.0-error-context.json"), ContextLengthExceeded),
        (ScriptedAnswer.error(404, "vllm-0.32.0-error-model.json"), InvalidRequest),
        (ScriptedAnswer((b"",), status=429), WorkerFull),
        (ScriptedAnswer((b"",), status=500), WorkerUnreachable),
        (ScriptedAnswer(ends=AnswerEnd.REFUSED), StreamBroken),
        (ScriptedAnswer((WHOLE[:20],), content_type=JSON, ends=AnswerEnd.CUT), StreamBroken),
        (ScriptedAnswer((b"no JSON",), content_type=JSON), StreamBroken),
        (ScriptedAnswer((b"{}",), content_type=JSON), StreamBroken),
        (ScriptedAnswer((b'{"error":{"message":"died","code":500}}',), content_type=JSON), StreamBroken),
        (ScriptedAnswer((b'{"error":{"message":"n","code":400}}',), content_type=JSON), InvalidRequest),
    ],
)
async def test_read_of_an_unstreamed_answer_raises_the_engine_error(
    answer: ScriptedAnswer, kind: type[KvrouterError]
) -> None:
    async with asked(answer) as at:
        stream = at.whole()
        with pytest.raises(kind) as caught:
            await anext(stream)
        assert isinstance(caught.value, WorkerFull) is (kind is WorkerFull)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_cancelling_an_unstreamed_answer_closes_its_connection() -> None:
    async with asked(ScriptedAnswer(ends=AnswerEnd.NO_HEADERS)) as at:
        stream = at.whole()
        waiting = asyncio.create_task(anext(stream))
        call = await at.call()
        stream.cancel("the client left")
        assert (await waiting).finish is FinishReason.CANCELLED
        await call.left.wait()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.parametrize(
    "answer", [ScriptedAnswer((WHOLE,), content_type=JSON), ScriptedAnswer((b"",), status=500)]
)
async def test_answer_that_came_before_a_cancellation_is_not_read(answer: ScriptedAnswer) -> None:
    async with asked(answer) as at:
        answering = asyncio.create_task(at.server.ask(PATH, b"{}"))

        async def answered() -> bytes:
            return await answering

        stream = WholeStream(answered(), TOKENS, read_event)
        await asyncio.wait({answering})
        for _ in range(5):
            await asyncio.sleep(0)
        stream.cancel("no more")
        assert [chunk.finish for chunk in await read(stream)] == [FinishReason.CANCELLED]


def _json(value: object) -> bytes:
    return event_of(value)[6:-2]
