"""The replay's client against a small server of its own: what it measures, and what it calls an error."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from benchmarks.http_replay import client
from benchmarks.http_replay.client import DECODE_WORKER_HEADER, PREFILL_WORKER_HEADER, Answer, Target, replay
from benchmarks.http_replay.schedule import PlannedRequest
from tests.testing.asyncio_servers import port_of, serving_streams

Body = dict[str, object]
Handler = Callable[[Body, asyncio.StreamWriter], Awaitable[None]]

HEAD = (
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
    f"{PREFILL_WORKER_HEADER}: 3\r\n{DECODE_WORKER_HEADER}: 7\r\n\r\n"
)


def request(*, conversation: int = 0, turn: int = 0, due_s: float = 0.0, tokens: int = 2) -> PlannedRequest:
    return PlannedRequest(
        conversation=conversation,
        turn=turn,
        due_s=due_s,
        prompt=f" prompt {conversation} {turn}",
        output_tokens=tokens,
    )


def event(**fields: object) -> bytes:
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "mock", "choices": []}
    return b"data: " + json.dumps(chunk | fields).encode() + b"\n\n"


def text(content: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": content}, "finish_reason": None}])


def usage(*, output_tokens: int = 2, cached_tokens: int | None = 16) -> bytes:
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return event(
        usage={
            "prompt_tokens": 40,
            "completion_tokens": output_tokens,
            "total_tokens": 40 + output_tokens,
            "prompt_tokens_details": details,
        }
    )


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body: Body = json.loads(await reader.readexactly(length))
        await handler(body, writer)

    async with serving_streams(serve) as listening:
        yield f"http://127.0.0.1:{port_of(listening)}"


async def ask(handler: Handler, *conversations: list[PlannedRequest], limit_s: float = 60.0) -> list[Answer]:
    async with server(handler) as base_url:
        target = Target(base_url=base_url, model="mock", speedup=100.0, request_timeout_s=limit_s)
        return await replay(target, conversations)


async def good(_body: Body, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD.encode() + text("a") + text("b") + usage() + b"data: [DONE]\n\n")
    await writer.drain()


async def test_an_answer_has_the_servers_counts_and_workers() -> None:
    seen: list[Body] = []

    async def handler(body: Body, writer: asyncio.StreamWriter) -> None:
        seen.append(body)
        await good(body, writer)

    (answer,) = await ask(handler, [request()])
    assert answer.error is None
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (40, 2, 16)
    assert (answer.prefill_worker, answer.decode_worker) == ("3", "7")
    assert answer.ttft_s is not None
    assert answer.itl_s is not None
    assert answer.late_s >= 0
    (body,) = seen
    assert body["messages"] == [{"role": "user", "content": " prompt 0 0"}]
    assert body["max_tokens"] == 2
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


async def test_ttft_is_measured_at_the_first_text_not_the_role() -> None:
    role_read = asyncio.Event()
    times: list[float] = []

    async def handler(_body: Body, writer: asyncio.StreamWriter) -> None:
        role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        writer.write(HEAD.encode() + role)
        await writer.drain()
        started = asyncio.get_running_loop().time()
        await asyncio.wait_for(role_read.wait(), 60)
        times.append(asyncio.get_running_loop().time() - started)
        writer.write(text("a") + text("b") + usage() + b"data: [DONE]\n\n")

    asyncio.get_running_loop().call_later(0.05, role_read.set)
    (answer,) = await ask(handler, [request()])
    assert answer.ttft_s is not None
    assert answer.ttft_s >= times[0]


async def test_a_turn_waits_for_its_conversations_previous_answer() -> None:
    events: list[str] = []
    other_came = asyncio.Event()

    async def handler(body: Body, writer: asyncio.StreamWriter) -> None:
        messages = body["messages"]
        assert isinstance(messages, list)
        name = messages[0]["content"]
        events.append(f"begin{name}")
        if name == " prompt 1 0":
            other_came.set()
        else:
            await asyncio.wait_for(other_came.wait(), 60)
        events.append(f"end{name}")
        await good(body, writer)

    answers = await ask(handler, [request(), request(turn=1)], [request(conversation=1)])
    assert [(answer.conversation, answer.turn) for answer in answers] == [(0, 0), (0, 1), (1, 0)]
    assert events.index("end prompt 0 0") < events.index("begin prompt 0 1")
    assert events.index("begin prompt 1 0") < events.index("end prompt 0 0")


class HandClock:
    """Stands still until a test turns it."""

    now_s = 1_000.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(client, "time", clock)
    return clock


async def test_waiting_for_the_previous_answer_is_not_client_lateness(clock: HandClock) -> None:
    async def handler(body: Body, writer: asyncio.StreamWriter) -> None:
        clock.now_s += 60.0
        await good(body, writer)

    first, second = await ask(handler, [request(), request(turn=1)])
    assert (first.ttft_s, first.late_s, second.late_s) == (60.0, 0.0, 0.0)


async def test_requests_are_sent_at_their_due_time_over_the_speedup(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests_s: list[float] = []

    async def rest(delay_s: float) -> None:
        rests_s.append(delay_s)
        clock.now_s += delay_s

    ours = SimpleNamespace(sleep=rest, TaskGroup=asyncio.TaskGroup, timeout=asyncio.timeout)
    monkeypatch.setattr(client, "asyncio", ours)
    answers = await ask(good, [request(), request(turn=1, due_s=20_000.0), request(turn=2, due_s=19_000.0)])
    assert rests_s == [0.0, 200.0, 0.0]
    assert [answer.late_s for answer in answers] == [0.0, 0.0, 0.0]


async def test_a_refusal_is_an_error_and_the_conversation_continues() -> None:
    refused = False

    async def handler(body: Body, writer: asyncio.StreamWriter) -> None:
        nonlocal refused
        if refused:
            await good(body, writer)
            return
        refused = True
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    first, second = await ask(handler, [request(), request(turn=1)])
    assert first.error is not None
    assert "503" in first.error
    assert second.error is None


async def test_a_stream_that_breaks_is_an_error() -> None:
    async def handler(_body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n")
        writer.write(text("a"))

    (answer,) = await ask(handler, [request()])
    assert answer.error is not None
    assert answer.ttft_s is None


async def test_an_answer_that_hangs_is_an_error() -> None:
    done = asyncio.Event()

    async def handler(_body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.encode() + text("a"))
        await writer.drain()
        await done.wait()

    async with server(handler) as base_url:
        target = Target(base_url=base_url, model="mock", speedup=1.0, request_timeout_s=0.2)
        (answer,) = await replay(target, [[request()]])
        done.set()
    assert answer.error is not None
    assert answer.error.startswith("TimeoutError")


async def test_an_answer_of_another_length_is_an_error() -> None:
    (answer,) = await ask(good, [request(tokens=3)])
    assert answer.error == "2 tokens came, 3 were asked for"


async def test_an_answer_without_text_is_an_error() -> None:
    async def handler(_body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.encode() + usage() + b"data: [DONE]\n\n")

    (answer,) = await ask(handler, [request()])
    assert answer.error == "the answer has no text"


async def test_usage_without_cached_tokens_is_an_error() -> None:
    async def handler(_body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.encode() + text("ab") + usage(cached_tokens=None) + b"data: [DONE]\n\n")

    (answer,) = await ask(handler, [request()])
    assert answer.error == "the usage does not say how many prompt tokens were cached"


async def test_headers_that_do_not_name_the_workers_are_an_error() -> None:
    async def handler(_body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        writer.write(text("ab") + usage() + b"data: [DONE]\n\n")

    (answer,) = await ask(handler, [request()])
    assert answer.error == "the headers do not name the workers"


async def test_every_answer_is_reported_to_the_callback() -> None:
    reported: list[Answer] = []
    async with server(good) as base_url:
        target = Target(base_url=base_url, model="mock", speedup=1.0)
        answers = await replay(target, [[request(), request(turn=1)]], on_answer=reported.append)
    assert reported == answers
