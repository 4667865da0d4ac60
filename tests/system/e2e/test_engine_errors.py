"""Errors of engines reach clients as the engines wrote them, on every route."""

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack

import httpx
import pytest

from kvrouter.core.constraints import RouterMode
from kvrouter.settings.router_settings import KvRouterConfig
from tests.system.e2e.test_passed_routes import before
from tests.testing.mock_server import MockServer
from tests.testing.scripted_engine import JSON, ScriptedAnswer, ScriptedEngine, event_of, scripted_engine

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")
BODIES: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
}
BODY = b'{"error": {"message" :"no\\u00e9","type": "TheirType","code": "their_code","of_theirs":1.0}}\n'
HEADERS = {
    "Retry-After": "7",
    "WWW-Authenticate": 'Basic realm="engine"',
    "Allow": "POST",
    "x-should-retry": "false",
    "X-RateLimit-Reset-Requests": "1s",
}
OFTEN = KvRouterConfig(circuit_failures=1000)
"""No circuit opens in these tests."""

IN_TURN = KvRouterConfig(circuit_failures=1000, router_mode=RouterMode.ROUND_ROBIN)

CALLS_FAULT = (201, 202, 400, 404, 405, 409, 413, 415, 422, 431, 451, 498, 501)
ENGINES_FAULT = (401, 403, 408, 421, 429, 499, 500, 502, 503, 504, 507, 599)


async def ask(here: MockServer, path: str, **more: object) -> httpx.Response:
    return await here.http.post(path, json={"model": "tiny", **BODIES[path], **more})


def refusal(status: int, body: bytes = BODY) -> ScriptedAnswer:
    return ScriptedAnswer((body,), status=status, content_type="application/problem+json", headers=HEADERS)


def asked(engines: Sequence[ScriptedEngine]) -> int:
    return sum(len(engine.calls) for engine in engines)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_error_answer_passes_unchanged(path: str, stream: bool) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(2)]
        here = await stack.enter_async_context(before(*engines, router=OFTEN))
        for status in (*CALLS_FAULT, *ENGINES_FAULT):
            for engine in engines:
                engine.answers.clear()
                engine.answers.append(refusal(status))
            already = asked(engines)
            response = await ask(here, path, stream=stream)
            assert (response.status_code, response.content) == (status, BODY)
            assert response.headers["content-type"] == "application/problem+json"
            for name, value in HEADERS.items():
                assert response.headers[name] == value
            assert asked(engines) - already == (1 if status in CALLS_FAULT else 2), status


async def test_an_engines_error_event_and_the_bytes_after_it_pass_unchanged() -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}
    said = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
    failed = b'data: {"error" :{"message":"died","code":500}}\r\n\r\n: bye\n\ndata: [DONE]\n\n'
    before_it = event_of(role) + event_of(said)
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(ScriptedAnswer((event_of(role), event_of(said), failed[:60], failed[60:])))
        response = await ask(here, CHAT, stream=True, seed=1)
        assert (response.status_code, response.content) == (200, before_it + failed)
        engine.answers.append(ScriptedAnswer((event_of(role), failed)))  # before the first token
        response = await ask(here, CHAT, stream=True)
        assert (response.status_code, response.content) == (200, event_of(role) + failed)
        assert response.headers["content-type"].startswith("text/event-stream")
        metrics = await here.metrics()
        assert metrics.value("errors_total", model="tiny", code="worker_failed") == 1
        assert metrics.value("errors_total", model="tiny", code="no_eligible_worker") == 1


async def test_an_error_body_with_status_200_passes_unchanged() -> None:
    body = b'{"error": {"message":"died","code":500, "of_theirs":1}}'
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(ScriptedAnswer((body,), content_type=JSON))
        response = await ask(here, CHAT)
        assert (response.status_code, response.content) == (200, body)


async def test_a_call_that_one_engine_fails_is_answered_by_another() -> None:
    good = b'{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}]}'
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(2)]
        here = await stack.enter_async_context(before(*engines, router=OFTEN))
        for status in ENGINES_FAULT:
            pair = [refusal(status), ScriptedAnswer((good,), content_type=JSON)]
            for engine, answer in zip(engines, pair, strict=True):
                engine.answers.clear()
                engine.answers.extend([answer] * 2)
            for _ in range(2):
                response = await ask(here, CHAT)
                assert (response.status_code, response.content) == (200, good), status


async def test_a_redirect_is_not_followed_and_reveals_no_address() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(
            ScriptedAnswer((b"",), status=307, headers={"Location": engine.url + "/elsewhere"})
        )
        response = await ask(here, CHAT)
        assert response.status_code == 503
        assert "answered 307" in response.json()["error"]["message"]
        assert engine.url not in response.text
        assert "location" not in response.headers
        assert len(engine.calls) == 1


async def test_an_aborted_answer_is_retried_elsewhere_or_passes() -> None:
    """As vLLM ends what it runs when it is asked to end."""
    aborted, whole = (
        json.dumps({"choices": [{"index": 0, "text": "a", "finish_reason": reason}]}).encode()
        for reason in ("abort", "length")
    )
    async with scripted_engine() as ending, scripted_engine() as running:
        ending.answers.extend(ScriptedAnswer((aborted,), content_type=JSON) for _ in range(20))
        running.answers.extend(ScriptedAnswer((whole,), content_type=JSON) for _ in range(20))
        async with before(ending, router=OFTEN) as here:
            answer = await ask(here, "/v1/completions")
            assert (answer.status_code, answer.content) == (200, aborted)
        async with before(ending, running, router=OFTEN) as here:
            while len(ending.calls) < 3:
                answer = await ask(here, "/v1/completions")
                assert (answer.status_code, answer.content) == (200, whole)


MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "a"}]}
MESSAGE_END: dict[str, object] = {"type": "message_stop"}
USAGE = {"input_tokens": 3, "output_tokens": 1}
WHOLE: dict[str, Sequence[dict[str, object]]] = {
    "/v1/messages": ({**MESSAGE, "usage": USAGE}, {**MESSAGE, "stop_reason": "end_turn", "usage": USAGE}),
    "/v1/responses": (
        {"object": "response", "status": "cancelled", "usage": USAGE},
        {"object": "response", "status": "completed", "usage": USAGE},
    ),
}
"""As vLLM writes them: one that it aborted, and one that came to its end."""

BEGINS: dict[str, dict[str, object]] = {
    "/v1/messages": {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}},
    "/v1/responses": {"type": "response.created", "response": {"status": "in_progress"}},
}
ENDS: dict[str, Sequence[Sequence[dict[str, object]]]] = {
    "/v1/messages": tuple(
        ({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}}, MESSAGE_END)
        for reason in (None, "end_turn")
    ),
    "/v1/responses": tuple(
        ({"type": "response.completed", "response": {"status": status}},)
        for status in ("cancelled", "completed")
    ),
}


def named(*events: dict[str, object]) -> tuple[bytes, ...]:
    return tuple(f"event: {event['type']}\n".encode() + event_of(event) for event in events)


@pytest.mark.parametrize("path", WHOLE)
async def test_an_aborted_passed_answer_is_retried_elsewhere_or_passes(path: str) -> None:
    aborted, whole = (json.dumps(answer).encode() for answer in WHOLE[path])
    async with scripted_engine() as ending, scripted_engine() as running:
        ending.answers.extend(ScriptedAnswer((aborted,), content_type=JSON) for _ in range(20))
        running.answers.extend(ScriptedAnswer((whole,), content_type=JSON) for _ in range(20))
        async with before(ending, router=OFTEN) as here:
            answer = await ask(here, path)
            assert (answer.status_code, answer.content) == (200, aborted)
        async with before(ending, running, router=IN_TURN) as here:
            while len(ending.calls) < 3:
                answer = await ask(here, path)
                assert (answer.status_code, answer.content) == (200, whole)


@pytest.mark.parametrize("path", ENDS)
@pytest.mark.parametrize("has_begun", [False, True])
async def test_an_aborted_passed_stream_is_retried_or_ends_with_an_error(path: str, has_begun: bool) -> None:
    """Of which nothing had come it is asked for elsewhere; the others end with an error."""
    aborted, ended = (named(*events) for events in ENDS[path])
    (begun,) = named(BEGINS[path])
    whole = begun + b"".join(ended)
    async with scripted_engine() as ending, scripted_engine() as running:
        first = (begun,) if has_begun else ()
        ending.answers.extend(ScriptedAnswer((*first, *aborted)) for _ in range(20))
        running.answers.extend(ScriptedAnswer((begun, *ended)) for _ in range(20))
        async with before(ending, running, router=IN_TURN) as here:
            while len(ending.calls) < 3:
                already = len(ending.calls)
                answer = await ask(here, path, stream=True)
                if not has_begun or len(ending.calls) == already:
                    assert (answer.status_code, answer.content) == (200, whole)
                    continue
                assert answer.content.startswith(begun)
                assert b"the engine aborted the answer" in answer.content
                assert aborted[-1] not in answer.content
