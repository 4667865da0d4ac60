"""Calls that go to engines as clients wrote them, and answers that come as engines wrote them."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from kvrouter.core.errors import InvalidRequest, ProtocolError
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import CallRoute, EngineChunk, EngineRequest, FinishReason, Leg
from kvrouter.core.workers import WorkerCard
from kvrouter.kernel.fleet.circuit import CircuitState
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.body_parsers import parse_passthrough
from tests.testing.frontend_harness import (
    FrontendHarness,
    error_of,
    metrics_of,
    mock_text,
    running_frontend,
    token_ids,
)
from tests.testing.log_events import event_of as logged_event
from tests.testing.router_harness import MODEL, card
from tests.testing.scripted_transport import ScriptedStream, ScriptedTransport
from tests.testing.waits import until

HEAD = {"id": "chatcmpl-theirs", "object": "chat.completion.chunk", "created": 7, "model": "their-name"}
DONE = b"data: [DONE]\n\n"
MESSAGES = [{"role": "user", "content": "hello"}]


def taking(worker_id: int) -> WorkerCard:
    return structs.replace(card(worker_id), takes_calls=True)


def event(text: str | None, *, finish: str | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "of_theirs": 1.0}
    return b"data: " + json.dumps({**HEAD, "choices": [choice]}).encode() + b"\n\n"


def piece(text: str, *, knows_text: bool = True) -> EngineChunk:
    return EngineChunk(token_ids(text), raw=event(text), text_chars=len(text) if knows_text else None)


ROLE = EngineChunk(raw=event(""), text_chars=0)
STOP = event(None, finish="stop") + DONE


def streams(*texts: str) -> Callable[[ScriptedStream], None]:
    """An engine that writes these texts, an event each."""

    def script(stream: ScriptedStream) -> None:
        stream.feed(ROLE, *map(piece, texts), EngineChunk(raw=STOP, finish=FinishReason.STOP, text_chars=0))

    return script


def dies_after(*texts: str, then: Callable[[ScriptedStream], None]) -> Callable[[ScriptedStream], None]:
    """The first worker writes these texts and is lost; whoever goes on does ``then``."""

    def script(stream: ScriptedStream) -> None:
        if stream.request.resumed_tokens:
            then(stream)
        else:
            stream.feed(ROLE, *map(piece, texts))
            stream.die()

    return script


def goes_on(*texts: str, finish: FinishReason = FinishReason.STOP) -> Callable[[ScriptedStream], None]:
    """A worker that goes on with tokens."""

    def script(stream: ScriptedStream) -> None:
        stream.feed(*(EngineChunk(token_ids(text)) for text in texts), EngineChunk(finish=finish))

    return script


def keeps_back(rest: str) -> Callable[[ScriptedStream], None]:
    """The first worker says "one EN", writes "one " since the rest may begin a stop string, and is lost."""

    def script(stream: ScriptedStream) -> None:
        if stream.request.resumed_tokens:
            goes_on(rest, finish=FinishReason.LENGTH)(stream)
        else:
            stream.feed(ROLE, EngineChunk(token_ids("one EN"), raw=event("one "), text_chars=4))
            stream.die()

    return script


async def streamed(frontend: FrontendHarness, **fields: object) -> bytes:
    response = await frontend.chat(fields=fields, stream=True)
    assert response.status_code == 200
    return response.content


def events_of(answer: bytes) -> list[dict[str, Any]]:
    lines = answer.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def text_of(answer: bytes) -> str:
    return "".join(
        choice["delta"].get("content") or "" for each in events_of(answer) for choice in each["choices"]
    )


async def test_a_whole_answer_and_its_call_keep_their_bytes() -> None:
    whole = b'{ "id": "theirs", "odd" : 1.50 }\n'

    def script(stream: ScriptedStream) -> None:
        stream.feed(EngineChunk(raw=whole[:9]), EngineChunk(raw=whole[9:], finish=FinishReason.STOP))

    body = b'{ "model": "%b", "messages": [{"role":"user","content":"hi"}], "odd" : 1.0 }' % MODEL.encode()
    async with running_frontend(taking(1), script=script) as frontend:
        response = await frontend.http.post("/v1/chat/completions", content=body)
        assert (response.status_code, response.content) == (200, whole)
        assert response.headers["x-kvrouter-decode-worker"] == "1"
        call = (await frontend.plane.wait_for(Leg.AGGREGATED)).request.call
        assert call is not None
        assert (call.route, call.body, call.stream) == (CallRoute.CHAT, body, False)
        asks = {"nvext": {"extra_fields": ["worker_id"]}}
        reported = (await frontend.chat(fields=asks)).json()
        assert reported == {**json.loads(whole), "nvext": reported["nvext"]}
        assert reported["nvext"]["worker_id"]["decode_worker_id"] == 1
        second = (await frontend.plane.wait_for(Leg.AGGREGATED, nth=1)).request.call
        assert second is not None
        assert "nvext" not in json.loads(second.body)


async def test_max_tokens_zero_passes_to_the_engine() -> None:
    own = b'{"choices":[{"text":"hello","finish_reason":"length"}]}'

    def script(stream: ScriptedStream) -> None:
        stream.feed(EngineChunk(raw=own, finish=FinishReason.LENGTH))

    body = {"model": MODEL, "prompt": "hello", "max_tokens": 0, "echo": True}
    async with running_frontend(taking(1), script=script) as frontend:
        answer = await frontend.http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.content) == (200, own)
        request = (await frontend.plane.wait_for(Leg.AGGREGATED)).request
    assert request.call is not None
    assert json.loads(request.call.body) == body
    assert request.sampling.max_tokens == 1


async def test_a_stream_keeps_its_bytes_with_nvext_before_its_end() -> None:
    async with running_frontend(taking(1), script=streams("Paris", " is")) as frontend:
        theirs = event("") + event("Paris") + event(" is") + STOP
        assert await streamed(frontend) == theirs
        reported = await streamed(frontend, nvext={"extra_fields": ["worker_id"]})
        assert reported.startswith(theirs.removesuffix(DONE))
        (added,) = events_of(reported)[4:]
        assert added["choices"] == []
        assert "nvext" in added


async def test_another_engine_resumes_under_the_same_id() -> None:
    async with running_frontend(
        taking(1), taking(2), script=dies_after("Par", "is", then=goes_on(" is", " nice"))
    ) as frontend:
        answer = await streamed(frontend, stream_options={"include_usage": True})
        second = await frontend.plane.wait_for(Leg.AGGREGATED, nth=1)
        before = [*token_ids("Par"), *token_ids("is")]
        assert list(second.request.token_ids[-len(before) :]) == before
    assert answer.startswith(event("") + event("Par") + event("is"))
    assert text_of(answer) == "Paris is nice"
    *written, usage = events_of(answer)[3:]
    assert {(each["id"], each["created"], each["model"]) for each in (*written, usage)} == {
        ("chatcmpl-theirs", 7, "their-name")
    }
    n_generated = len(before) + len(token_ids(" is")) + len(token_ids(" nice"))
    assert usage["usage"]["completion_tokens"] == n_generated


PING = EngineChunk(comments=b": keep-alive\n\n")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_an_engines_comment_passes_and_its_lost_worker_is_replaced(path: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "input": "hello", "stream": True}
    async with (
        running_frontend(taking(1), taking(2), script=lambda stream: stream.feed(PING)) as frontend,
        frontend.http.stream("POST", path, json=body) as response,
        asyncio.timeout(60),
    ):
        pieces = response.aiter_raw()
        assert await anext(pieces) == PING.comments
        (first,) = frontend.plane.opened
        assert response.headers["x-kvrouter-decode-worker"] == address_worker(first)
        first.die()
        second = await frontend.plane.wait_for(Leg.AGGREGATED, nth=1)
        assert second.address != first.address
        assert await anext(pieces) == PING.comments
        streams("Paris")(second)
        rest = b"".join([piece async for piece in pieces])
    assert rest == event("") + event("Paris") + STOP


def address_worker(stream: ScriptedStream) -> str:
    return stream.address.rpartition("/")[2]


async def test_an_error_after_a_comment_is_one_error_event() -> None:
    def script(stream: ScriptedStream) -> None:
        stream.feed(PING, InvalidRequest("not that one", param="theirs"))

    async with running_frontend(taking(1), script=script) as frontend:
        answer = await streamed(frontend)
        assert frontend.harness.booked() == 0
    assert answer.startswith(PING.comments)
    assert (
        json.loads(answer.removeprefix(PING.comments).removeprefix(b"data: "))["error"]["param"] == "theirs"
    )


async def test_another_engine_resumes_after_comments() -> None:
    merged = EngineChunk(token_ids("Par"), comments=b": data: x\n\n", raw=event("Par"), text_chars=3)

    def script(stream: ScriptedStream) -> None:
        if stream.request.resumed_tokens:
            goes_on("is")(stream)
        else:
            stream.feed(merged, PING)
            stream.die()

    async with running_frontend(taking(1), taking(2), script=script) as frontend:
        answer = await streamed(frontend)
    begin = merged.comments + event("Par") + PING.comments
    assert answer.startswith(begin)
    assert text_of(answer.removeprefix(begin)) == "is"


async def test_an_engine_that_only_writes_comments_is_silent() -> None:
    config = KvRouterConfig(stall_timeout_s=0.2)
    async with (
        asyncio.timeout(60),
        running_frontend(taking(1), taking(2), config=config) as frontend,
        asyncio.TaskGroup() as tasks,
    ):
        answer = tasks.create_task(streamed(frontend))
        first = await frontend.plane.wait_for(Leg.AGGREGATED)
        first.feed(ROLE, piece("Par"))
        while first.cancelled_for is None:
            first.feed(PING)
            await asyncio.sleep(0.02)
        goes_on("is")(await frontend.plane.wait_for(Leg.AGGREGATED, nth=1))
        assert text_of((await answer).replace(PING.comments, b"")) == "Paris"


@pytest.mark.parametrize("whole", [b"", b"no JSON", b"{}", b"[{}]"])
async def test_an_unreadable_answer_passes_unchanged(whole: bytes) -> None:
    def script(stream: ScriptedStream) -> None:
        stream.feed(EngineChunk(raw=whole, finish=FinishReason.STOP, unread="it is odd"))

    async with running_frontend(taking(1), script=script) as frontend:
        for stream in (False, True):
            response = await frontend.chat(stream=stream, fields={"nvext": {"extra_fields": ["worker_id"]}})
            assert response.status_code == 200
            assert response.content.startswith(whole)
            assert stream or response.content == whole


async def test_an_unreadable_answer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def script(stream: ScriptedStream) -> None:
        odd = EngineChunk(raw=event("a"), unread="choices: they are odd")
        stream.feed(odd, EngineChunk(raw=STOP, finish=FinishReason.STOP))

    async with running_frontend(taking(1), script=script) as frontend:
        for _ in range(3):
            assert await streamed(frontend) == event("a") + STOP
    (line,) = (each for each in caplog.records if logged_event(each) == "answer_unread")
    assert "worker=1" in line.getMessage()
    assert "choices: they are odd" in line.getMessage()


async def test_a_stop_string_across_a_resume_ends_the_answer() -> None:
    async with running_frontend(taking(1), taking(2), script=keeps_back("D two")) as frontend:
        answer = await streamed(frontend, stop="END")
    assert text_of(answer) == "one "
    assert events_of(answer)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_text_held_back_by_the_lost_engine_is_written_once() -> None:
    async with running_frontend(taking(1), taking(2), script=keeps_back("D two")) as frontend:
        answer = await streamed(frontend, stop="ENDLESS")
    assert text_of(answer) == "one END two"
    assert events_of(answer)[-1]["choices"][0]["finish_reason"] == "length"


SMALL_BUDGET = KvRouterConfig(retry_bodies_max_bytes=2_000)


async def kept_bytes(frontend: FrontendHarness) -> float:
    return (await metrics_of(frontend))["kvrouter_retry_body_bytes",]


async def test_the_largest_kept_body_is_dropped_and_not_resent() -> None:
    async with (
        running_frontend(taking(1), taking(2), config=SMALL_BUDGET) as frontend,
        asyncio.TaskGroup() as tasks,
    ):
        large = tasks.create_task(frontend.chat(stream=True, user="u" * 1_500))
        first = await frontend.plane.wait_for(Leg.AGGREGATED)
        assert 1_500 < await kept_bytes(frontend) < 2_000
        small = tasks.create_task(frontend.chat(stream=True, user="u" * 1_000))
        second = await frontend.plane.wait_for(Leg.AGGREGATED, nth=1)
        assert 1_000 < await kept_bytes(frontend) < 1_500
        assert first.request.call is not None
        assert len(first.request.call.body) > 1_500
        first.die()
        error = error_of(await large)
        assert error["code"] == "worker_failed"
        assert "retry_bodies_full" in str(error["message"])
        second.die()
        again = await frontend.plane.wait_for(Leg.AGGREGATED, nth=2)
        assert again.request.call == second.request.call
        streams("Paris")(again)
        assert text_of((await small).content) == "Paris"
        assert await kept_bytes(frontend) == 0
        assert (await metrics_of(frontend))["kvrouter_retry_bodies_dropped_total", MODEL] == 1


async def test_a_body_over_the_whole_budget_is_refused_before_it_is_sent() -> None:
    async with running_frontend(taking(1), script=streams("Paris"), config=SMALL_BUDGET) as frontend:
        response = await frontend.chat(stream=True, user="u" * 2_500)
        assert (response.status_code, error_of(response)["code"]) == (503, "retry_bodies_full")
        assert response.headers["retry-after"]
        assert not frontend.plane.opened
        assert await streamed(frontend) == event("") + event("Paris") + STOP
        assert await kept_bytes(frontend) == 0


@pytest.mark.parametrize(("fields", "is_kept"), [({}, True), ({"logprobs": True}, False)])
async def test_a_body_is_kept_after_the_first_output_only_if_resumable(
    fields: dict[str, object], is_kept: bool
) -> None:
    def script(stream: ScriptedStream) -> None:
        stream.feed(piece("Par"))

    body = {"model": MODEL, "messages": MESSAGES, "stream": True, **fields}
    async with running_frontend(taking(1), script=script) as frontend:
        async with frontend.http.stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = response.aiter_raw()  # whoever drops it in mid-answer closes the connection
            assert await anext(pieces) == event("Par")
            assert (await kept_bytes(frontend) > 0) is is_kept
        await until(lambda: frontend.harness.service.requests.retry_body_bytes == 0)


@pytest.mark.parametrize(
    ("fields", "knows_text"), [({"seed": 3}, True), ({"logprobs": True}, True), ({}, False)]
)
async def test_an_answer_with_more_than_text_is_not_resumed(
    fields: dict[str, object], knows_text: bool
) -> None:
    def script(stream: ScriptedStream) -> None:
        stream.feed(piece("Par", knows_text=knows_text))
        stream.die()

    async with running_frontend(taking(1), taking(2), script=script) as frontend:
        answer = await streamed(frontend, max_tokens=len(token_ids("Par")), **fields)
        assert len(frontend.plane.opened) == 1
        assert frontend.harness.booked() == 0
    assert answer.startswith(event("Par"))
    assert b"[DONE]" not in answer
    assert b'"code":"worker_failed"' in answer.replace(b" ", b"")


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_instead_of_engine_bytes_are_an_error(stream: bool) -> None:
    async with running_frontend(taking(1), script=goes_on("Paris")) as frontend:
        response = await frontend.chat(stream=stream)
        assert frontend.harness.booked() == 0
    if not stream:
        assert response.status_code == 500
    assert b"internal_error" in response.content
    assert b"[DONE]" not in response.content


NOTHING_KNOWN: tuple[dict[str, object], ...] = (
    {"prompt": ""},
    {"prompt": []},
    {"prompt": None},
    {"prompt": [1, -1]},
    {"prompt": [1, 2**32]},
    {"prompt": [1, "a"]},
    {"prompt": [1, 2.5]},
    {"prompt": [1, [2]]},
    {"prompt": {}},
    {"messages": [{"role": "nobody"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "chat_template": "odd"},
)


@pytest.mark.parametrize("fields", NOTHING_KNOWN)
async def test_the_engine_judges_an_untokenizable_text(fields: dict[str, object]) -> None:
    def script(stream: ScriptedStream) -> None:
        stream.feed(InvalidRequest("not that one", param="theirs"))

    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    async with running_frontend(taking(1), script=script) as frontend:
        response = await frontend.http.post(path, json={"model": MODEL, **fields})
        (sent,) = frontend.plane.opened
        assert sent.request.call is not None
        assert frontend.harness.booked() == 0
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "theirs"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_engine_judges_a_too_long_text(path: str) -> None:
    whole = b'{"id":"theirs"}'

    def script(stream: ScriptedStream) -> None:
        stream.feed(EngineChunk(raw=whole, finish=FinishReason.STOP))

    long = "x" * (2_000_000 if "chat" in path else mock_text().prompt_max_chars + 1)
    prompt = {"messages": [{"role": "user", "content": long}]} if "chat" in path else {"prompt": long}
    async with running_frontend(taking(1), script=script) as frontend:
        response = await frontend.http.post(path, json={"model": MODEL, **prompt})
        assert (response.status_code, response.content) == (200, whole)
        request = (await frontend.plane.wait_for(Leg.AGGREGATED)).request
        assert request.call is not None
        assert not request.call.resumable


async def test_a_fleet_of_both_kinds_answers_with_tokens() -> None:
    async with running_frontend(taking(1), card(2), script=goes_on("Paris")) as frontend:
        response = await frontend.chat()
        assert response.json()["choices"][0]["message"]["content"] == "Paris"
        assert (await frontend.plane.wait_for(Leg.AGGREGATED)).request.call is None


PLAIN = {"temperature": 0, "top_p": 0.9, "max_tokens": 5, "stop": ["a", "b"], "user": "me", "top_k": None}


@pytest.mark.parametrize(
    ("fields", "is_resumable"),
    [
        (PLAIN, True),
        ({"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False}, True),
        ({"seed": 3, "temperature": 0}, True),
        ({"seed": None, "response_format": {"type": "text"}}, True),
        ({"tools": [], "tool_choice": "auto"}, True),
        ({"seed": 3}, False),
        ({"seed": 3, "temperature": 0.1}, False),
        ({"n": 2}, False),
        ({"presence_penalty": 0.1}, False),
        ({"logprobs": True}, False),
        ({"tools": [{"type": "function"}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"max_tokens": 0}, False),
        ({"kv_transfer_params": None, "disaggregated_params": None}, True),
        ({"vllm_xargs": {"of_theirs": 1, "kv_transfer_params": None}}, False),
        ({"vllm_xargs": None}, True),
        ({"vllm_xargs": ["no object"]}, False),
        ({"stop": ["a"] * 5}, False),
        ({"include_stop_str_in_output": True}, False),
        ({"a_field_of_next_year": 1}, False),
    ],
)
def test_only_plain_text_calls_are_resumable(fields: dict[str, object], is_resumable: bool) -> None:
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True, **fields}).encode()
    passed = parse_passthrough(CallRoute.CHAT, body)
    assert passed.client_call.resumable is is_resumable
    assert passed.client_call.body == body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"[]", None),
        (b'{"model":"m","messages":[{}],"nvext":{"odd":1}}', "nvext"),
        (b'{"model":"m","messages":[{}],"kv_transfer_params":{"remote_host":"h"}}', "kv_transfer_params"),
        (b'{"model":"m","messages":[{}],"disaggregated_params":{}}', "disaggregated_params"),
        (b'{"model":"m","messages":[{}],"bootstrap_host": "h"}', "bootstrap_host"),
        (b'{"model":"m","messages":[{}],"vllm_xargs":{"\\ud800":1}}', None),
        (b'{"model":"m","messages":[{}],"extra_key":"b"}', "extra_key"),
        (b'{"model":"m","messages":[{}],"cache_salt":"a","\\u0065xtra_key":["b"]}', "extra_key"),
        (
            b'{"model":"m","messages":[{}],"vllm_xargs":{"kv_transfer_params":"x"}}',
            "vllm_xargs.kv_transfer_params",
        ),
        (
            b'{"model":"m","messages":[{}],"vllm\\u005fxargs":{"kv_transf\\u0065r_params":null,"ec_tr\\u0061nsfer_params":0}}',
            "vllm_xargs.ec_transfer_params",
        ),
        (
            b'{"model":"m","messages":[{}],"vllm_xargs":{},'
            b'"vllm_xargs": {"bootstrap_room":null,"bootstrap_room":[1]}}',
            "vllm_xargs.bootstrap_room",
        ),
    ],
)
def test_fields_that_routing_needs_are_checked_by_name(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_passthrough(CallRoute.CHAT, body)
    if param is not None:
        assert refused.value.param is not None
        assert refused.value.param.startswith(param)


class OlderWorkers(ScriptedTransport):
    """Workers of a version that knows no other route than those for generation."""

    async def open(self, address: str, request: EngineRequest) -> ScriptedStream:
        if request.call is not None and request.call.route.is_passed:
            error = ProtocolError("request: Invalid enum value - at `$.call.route`", param="request")
            return ScriptedStream.refused(request, address, error)
        return await super().open(address, request)


async def test_calls_of_a_route_that_older_workers_do_not_know_open_no_circuit() -> None:
    plane = OlderWorkers(streams("Paris"))
    async with running_frontend(taking(1), taking(2), plane=plane) as frontend:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
            for _ in range(8):
                answer = await frontend.http.post(path, json={"model": MODEL, **body})
                assert answer.status_code == 503
                assert error_of(answer)["refusals"] == {"excluded": 2}
        states = {frontend.harness.circuit_state(WorkerId(each)) for each in (1, 2)}
        assert states == {CircuitState.CLOSED}
        assert (await frontend.chat()).status_code == 200
