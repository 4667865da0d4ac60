"""Routes whose calls and answers pass as they are, before engines that take calls as clients write them."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from kvrouter.core.requests import CallRoute
from kvrouter.frontend.openai.passed_routes import PASSED_ROUTES
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.text.source import MOCK_FOLDER
from tests.testing.mock_fleet import fleet_file, uniform_fleet
from tests.testing.mock_server import MockServer, mock_server, user, words
from tests.testing.scripted_engine import (
    JSON,
    AnswerEnd,
    ScriptedAnswer,
    ScriptedEngine,
    event_of,
    scripted_engine,
)

PATHS = [route.route.value for route in PASSED_ROUTES if not route.is_form]

CALLS: dict[str, dict[str, object]] = {
    "/v1/responses": {"input": "hi", "instructions": "be brief", "max_output_tokens": 9, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "system": "be brief"},
}
"""Calls with a prompt that is known here; what the others have does not matter."""


def call_of(path: str) -> dict[str, object]:
    return CALLS.get(path, {"input": ["a", "b"], "field_of_tomorrow": {"deep": [1, None]}})


def whole(value: object) -> ScriptedAnswer:
    return ScriptedAnswer((json.dumps(value).encode(),), content_type=JSON)


@asynccontextmanager
async def before(*engines: ScriptedEngine, router: KvRouterConfig | None = None) -> AsyncIterator[MockServer]:
    """The router before vLLM servers that have one model."""
    groups = "".join(
        f"  - {{name: w{number}, engine: {{kind: vllm, url: '{engine.url}', kv_events: false}}}}\n"
        for number, engine in enumerate(engines)
    )
    text = f"version: 1\nmodels: [{{name: tiny, tokenizer: '{MOCK_FOLDER}'}}]\nworkers:\n{groups}"
    async with mock_server(fleet_file(text), router=router) as here:
        yield here


@pytest.mark.parametrize("path", PATHS)
async def test_a_call_and_its_answer_pass_unchanged(path: str) -> None:
    said = {"object": "anything", "usage": {"prompt_tokens": 3, "total_tokens": 3}, "data": [[0.5, 1e-9]]}
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(whole(said))
        call = call_of(path)
        sent = {"model": "tiny", **call, "nvext": {"routing_constraints": {}}}
        response = await here.http.post(path, json=sent)
        assert response.status_code == 200
        assert response.content == json.dumps(said).encode()
        assert response.headers["x-kvrouter-decode-worker"] == "1"
        (got,) = engine.calls
        assert got.path == path
        assert got.body == {"model": "tiny", **call}
        metrics = await here.metrics()
        assert metrics.value("requests_total", route=path, model="tiny", status="200") == 1


def test_the_table_has_every_passed_route_once() -> None:
    assert [route.route for route in PASSED_ROUTES] == [route for route in CallRoute if route.is_passed]


RESPONSES = (
    'event: response.created\ndata: {"type":"response.created","response":{"usage":null}}\n\n',
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n',
    'event: response.completed\ndata: {"type":"response.completed","response":{"usage":'
    '{"input_tokens":7,"output_tokens":2,"input_tokens_details":{"cached_tokens":0}}}}\n\n',
)
MESSAGES = (
    'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":7}}}\n\n',
    'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"hi"}}\n\n',
    'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":2}}\n\n',
    'event: message_stop\ndata: {"type":"message_stop"}\n\n',
)
GENERATE = (
    'data: {"text":"h","meta_info":{"finish_reason":null,"prompt_tokens":7,"completion_tokens":1,'
    '"cached_tokens":4}}\n\n',
    'data: {"text":"hi","meta_info":{"finish_reason":{"type":"stop"},"prompt_tokens":7,"completion_tokens":2,'
    '"cached_tokens":4}}\n\n',
)
STREAMS = {"/v1/responses": RESPONSES, "/v1/messages": MESSAGES, "/generate": GENERATE}


def pieces(*events: str) -> tuple[bytes, ...]:
    return tuple(event.encode() for event in events)


@pytest.mark.parametrize("path", STREAMS)
async def test_events_pass_unchanged(path: str) -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(ScriptedAnswer(pieces(*STREAMS[path])))
        body = {"model": "tiny", **call_of(path), "stream": True}
        response = await here.http.post(path, json=body)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text == "".join(STREAMS[path])
        metrics = await here.metrics()
        assert metrics.value("completion_tokens_total", model="tiny") == 2
        assert metrics.value("time_to_first_token_seconds_count", model="tiny") == 1


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_without_its_last_event_passes_unchanged(path: str) -> None:
    """Also where its last event is missing: the engine closed it as complete."""
    *begun, _ = STREAMS[path]
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(ScriptedAnswer(pieces(*begun)))
        response = await here.http.post(path, json={"model": "tiny", **call_of(path), "stream": True})
        assert (response.status_code, response.text) == (200, "".join(begun))


async def behind_loss(here: MockServer, engine: ScriptedEngine, path: str, begun: str, **call: Any) -> str:
    """Send a call whose engine holds its answer behind ``begun``, lose the connection once the client has so
    much, and return what the client gets behind it.
    """
    text = ""
    async with here.http.stream("POST", path, **call) as response:
        async for piece in response.aiter_text():
            text += piece
            if text == begun:
                engine.cut()
    assert text.startswith(begun)
    return text.removeprefix(begun)


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_with_a_lost_connection_ends_with_an_error(path: str) -> None:
    *begun, _ = STREAMS[path]
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(ScriptedAnswer(pieces(*begun), ends=AnswerEnd.HELD))
        body = {"model": "tiny", **call_of(path), "stream": True}
        rest = await behind_loss(here, engine, path, "".join(begun), json=body)
        head = "event: error\n" if path == "/v1/messages" else ""
        assert rest.startswith(f"{head}data: ")
        assert json.loads(rest.removeprefix(f"{head}data: "))["error"]["code"] == "worker_failed"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings"])
async def test_a_call_without_a_begun_answer_is_retried_on_another_worker(path: str) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(2)]
        here = await stack.enter_async_context(before(*engines))
        engines[0].answers.extend(
            (ScriptedAnswer(ends=AnswerEnd.REFUSED),) * 2
        )  # on a kept connection, and a fresh one
        engines[1].answers.extend((whole({"object": "list"}),) * 20)
        while not engines[0].calls:
            response = await here.http.post(path, json={"model": "tiny", **call_of(path)})
            assert response.json() == {"object": "list"}
        assert (await here.metrics()).value("retries_total", model="tiny") == 1


async def test_an_engines_refusal_passes_unchanged() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        wrong = {"error": {"message": "input: too many", "param": "input", "type": "BadRequestError"}}
        for status in (400, 404):
            engine.answers.append(
                ScriptedAnswer((json.dumps(wrong).encode(),), status=status, content_type=JSON)
            )
            response = await here.http.post("/v1/embeddings", json={"model": "tiny", "input": "a"})
            assert (response.status_code, response.json()) == (status, wrong)


async def test_a_call_without_a_model_goes_to_the_only_model() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(whole({"tokens": [1]}))
        assert (await here.http.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert engine.calls[0].body == {"prompt": "a"}


async def test_reserved_fields_are_refused() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        for path, field, value in (
            ("/v1/responses", "kv_transfer_params", {"remote_host": "h"}),
            ("/v1/embeddings", "data_parallel_rank", 1),
            ("/v1/messages", "cache_salt", "a-tenant"),
            ("/generate", "cache_salt", "a-tenant"),
            ("/v1/score", "nvext.prefill_worker_id", 1),
            ("/v1/score", "nvext.token_data", [1]),
        ):
            inner = {"nvext": {field.removeprefix("nvext."): value}} if "." in field else {field: value}
            response = await here.http.post(path, json={"model": "tiny", **call_of(path), **inner})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert not engine.calls


async def test_a_tenants_salt_reaches_the_engine() -> None:
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(whole({}))
        body = {"model": "tiny", **CALLS["/v1/responses"]}
        await here.http.post("/v1/responses", json=body, headers={"x-tenant-id": "a"})
        assert engine.calls[0].body["cache_salt"] == "a"


async def test_token_engines_do_not_serve_passed_routes() -> None:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        response = await here.http.post("/v1/responses", json={"model": "mock", "input": "hi"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "route_not_served")
        assert (await here.http.get("/v1/responses")).status_code == 405


async def test_a_long_streamed_answer_arrives_completely_and_in_order() -> None:
    """A body of many pieces comes whole, and in order."""
    events = [
        event_of({"type": "response.output_text.delta", "delta": "x" * 5000, "n": n}) for n in range(400)
    ]
    async with scripted_engine() as engine, before(engine) as here:
        engine.answers.append(ScriptedAnswer((*events, *pieces(RESPONSES[-1]))))
        body = {"model": "tiny", **CALLS["/v1/responses"], "stream": True}
        response = await here.http.post("/v1/responses", json=body)
        assert response.content == b"".join(events) + RESPONSES[-1].encode()


async def test_equal_prompts_of_several_routes_go_to_one_worker() -> None:
    """Two engines, whose caches are predicted from the router's own decisions."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(2)]
        router = KvRouterConfig(kv_events=False, router_cost="blocks")
        here = await stack.enter_async_context(before(*engines, router=router))
        chat = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
        for number in range(4):
            prompt = words(first=number, n=400)
            answers: tuple[Any, ...] = ({"output": []}, {"content": []}, chat)
            paths = ("/v1/responses", "/v1/messages", "/v1/chat/completions")
            bodies: tuple[Any, ...] = (
                {"input": prompt},
                *({"messages": user(prompt), "max_tokens": 1},) * 2,
            )
            workers, overlaps = [], []
            for path, body, answer in zip(paths, bodies, answers, strict=True):
                for engine in engines:
                    engine.answers.clear()
                    engine.answers.append(whole(answer))
                response = await here.http.post(path, json={"model": "tiny", **body})
                assert response.status_code == 200, response.text
                workers.append(response.headers["x-kvrouter-decode-worker"])
                overlaps.append(int(response.headers["x-kvrouter-overlap-blocks"]))
            assert len(set(workers)) == 1
            assert overlaps[0] == 0
            assert overlaps[1] == overlaps[2] > 10


async def test_errors_of_anthropics_routes_have_anthropics_form() -> None:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refused = await here.http.post(path, json={"model": "mock", **CALLS["/v1/messages"]})
            assert refused.status_code == 404
            said = refused.json()
            assert said["type"] == "error"
            assert (said["error"]["type"], said["error"]["code"]) == ("not_found_error", "route_not_served")
        wrong = await here.http.post("/v1/messages", content=b"{")
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
