"""The two generation routes over a real socket, before workers that do as the test says."""

import asyncio
import json

import pytest

from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.core.workers import Enforcement, Role
from kvrouter.settings.tree import FrontendSettings
from tests.testing.frontend_harness import (
    CONTEXT_TOKENS,
    FrontendHarness,
    error_of,
    mock_text,
    running_frontend,
    text_answer,
    token_ids,
)
from tests.testing.router_harness import MODEL, card
from tests.testing.scripted_transport import ScriptedStream, silent

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def events_of(text: str) -> list[str]:
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def content_of(events: list[str]) -> str:
    choices = [json.loads(event)["choices"] for event in events[:-1]]
    return "".join(each[0].get("delta", each[0]).get("content") or "" for each in choices if each)


async def streamed(frontend: FrontendHarness, path: str = CHAT, **fields: object) -> list[str]:
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {"prompt": "hello"}
    response = await frontend.http.post(path, json={"model": MODEL, "stream": True, **prompt, **fields})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


# What a client gets


async def test_a_whole_chat_has_text_usage_and_worker_headers() -> None:
    async with running_frontend(
        card(7, zone="a"), script=text_answer("Paris is", " nice", cached=16)
    ) as frontend:
        response = await frontend.chat("Where?")
        body = response.json()
    assert response.status_code == 200
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Paris is nice"}
    assert body["choices"][0]["finish_reason"] == "stop"
    n_tokens = len(token_ids("Paris is")) + len(token_ids(" nice"))
    assert body["usage"]["completion_tokens"] == n_tokens
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert response.headers["x-kvrouter-decode-worker"] == "7"
    assert response.headers["x-kvrouter-decode-dp-rank"] == "0"
    assert response.headers["x-kvrouter-decode-domain"] == "zone=a"
    assert response.headers["x-kvrouter-overlap-blocks"] == "0"
    assert "x-kvrouter-prefill-worker" not in response.headers


async def test_a_streamed_chat_is_the_same_text_in_events() -> None:
    async with running_frontend(card(1), script=text_answer("Paris is", " nice")) as frontend:
        events = await streamed(frontend, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    assert content_of(events) == "Paris is nice"
    assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(events[-3])["choices"][0]["finish_reason"] == "stop"
    usage = json.loads(events[-2])
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] > 0
    assert [json.loads(event)["usage"] for event in events[:-2]] == [None] * (len(events) - 2)


async def test_a_completion_takes_text_and_token_ids() -> None:
    async with running_frontend(card(1), script=text_answer(" there")) as frontend:
        texts = await frontend.complete("hello")
        ids = await frontend.complete(list(token_ids("hello")))
        events = await streamed(frontend, COMPLETIONS)
    assert texts.json()["choices"][0]["text"] == ids.json()["choices"][0]["text"] == " there"
    assert texts.json()["usage"] == ids.json()["usage"]
    assert json.loads(events[0])["choices"][0]["text"] == " there"
    first, second = (stream.request.token_ids for stream in frontend.plane.opened[:2])
    assert first == second


async def test_usage_can_come_with_every_event() -> None:
    async with running_frontend(card(1), script=text_answer("a", "b")) as frontend:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await streamed(frontend, stream_options=options)
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[1:3]]
    assert counts == [1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_split_over_chunks_ends_answer_and_engine(stream: bool) -> None:
    def script(worker: ScriptedStream) -> None:
        for piece in ("one tw", "o EN", "D three"):
            worker.feed(EngineChunk(token_ids=token_ids(piece)))

    async with running_frontend(card(1), script=script) as frontend:
        if stream:
            events = await streamed(frontend, stop=["END"])
            text, finish = content_of(events), json.loads(events[-2])["choices"][0]["finish_reason"]
        else:
            choice = (await frontend.chat(stop="END")).json()["choices"][0]
            text, finish = choice["message"]["content"], choice["finish_reason"]
        assert (text, finish) == ("one two ", "stop")
        assert frontend.plane.opened[0].cancelled_for is not None
        assert frontend.harness.booked() == 0
        assert frontend.harness.telemetry.cancellations.value(MODEL, "decode") == 0, "nobody left"


async def test_held_back_text_is_delivered_if_not_a_stop_string() -> None:
    async with running_frontend(card(1), script=text_answer("a EN", finish=FinishReason.LENGTH)) as frontend:
        choice = (await frontend.chat(stop=["END"])).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a EN", "length")


async def test_half_a_character_is_never_sent() -> None:
    ids = token_ids("né 😀!")
    assert "\ufffd" in mock_text().tokenizer.decode(ids[:3]), "a token ends inside a character"

    def script(worker: ScriptedStream) -> None:
        for token_id in ids:
            worker.feed(EngineChunk(token_ids=(token_id,)))
        worker.feed(EngineChunk(finish=FinishReason.STOP))

    async with running_frontend(card(1), script=script) as frontend:
        events = await streamed(frontend)
    assert content_of(events) == "né 😀!"
    assert "\ufffd" not in "".join(events)


async def test_a_pair_is_named_with_its_domains_and_its_timing() -> None:
    def script(worker: ScriptedStream) -> None:
        if worker.request.leg is Leg.PREFILL:
            worker.feed(
                EngineChunk(token_ids=(1,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 1})
            )
        else:
            text_answer("ok")(worker)

    cards = (
        card(1, Role.PREFILL, zone="a,b", enforcement=Enforcement.REQUIRED),
        card(2, Role.DECODE, zone="a,b"),
    )
    async with running_frontend(*cards, script=script) as frontend:
        response = await frontend.chat(nvext={"extra_fields": ["worker_id", "timing"]})
        events = await streamed(frontend, nvext={"extra_fields": ["worker_id"]})
    headers, nvext = response.headers, response.json()["nvext"]
    assert (headers["x-kvrouter-prefill-worker"], headers["x-kvrouter-decode-worker"]) == ("1", "2")
    assert headers["x-kvrouter-prefill-domain"] == headers["x-kvrouter-decode-domain"] == "zone=a%2Cb"
    assert nvext["worker_id"] == {
        "prefill_worker_id": 1,
        "prefill_dp_rank": 0,
        "decode_worker_id": 2,
        "decode_dp_rank": 0,
    }
    assert nvext["timing"]["total_time_ms"] >= nvext["timing"]["ttft_ms"] >= nvext["timing"]["queue_ms"]
    assert json.loads(events[-2])["nvext"]["worker_id"]["prefill_worker_id"] == 1


async def test_a_clients_request_id_is_kept_and_made_unique_if_running() -> None:
    async with running_frontend(card(1), script=silent) as frontend:
        body = {"model": MODEL, "prompt": "hi"}
        calls = [
            asyncio.create_task(frontend.http.post(COMPLETIONS, json=body, headers={"x-request-id": "mine"}))
            for _ in range(2)
        ]
        async with asyncio.timeout(60):
            for nth in range(2):
                text_answer("ok")(await frontend.plane.wait_for(Leg.AGGREGATED, nth=nth))
        ids = {response.headers["x-request-id"] for response in await asyncio.gather(*calls)}
        frontend.plane.script = text_answer("ok")
        bad = await frontend.http.post(COMPLETIONS, json=body, headers={"x-request-id": "no spaces"})
    assert len(ids) == 2
    assert "mine" in ids
    assert all(each.startswith("mine") for each in ids)
    assert bad.headers["x-request-id"] != "no spaces"


async def test_sampling_reaches_the_engine() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        await frontend.chat(temperature=0, seed=5, max_completion_tokens=9, nvext={"cache_salt": "tenant"})
        request = frontend.plane.opened[0].request
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.max_tokens) == (0.0, 5, 9)
    assert request.cache_namespace == "tenant"


# What a client gets instead


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"n": 2}, 400, "invalid_request", "n"),
        ({"messages": []}, 400, "invalid_request", "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, 400, "invalid_request", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_request", "messages[0].content"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "invalid_request", "stop"),
        ({"stop": [""]}, 400, "invalid_request", "stop"),
        ({"max_tokens": CONTEXT_TOKENS}, 400, "context_length_exceeded", "max_tokens"),
        ({"max_completion_tokens": 512}, 400, "context_length_exceeded", "max_completion_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, 400, "invalid_request", "min_tokens"),
        (
            {"messages": [{"role": "user", "content": "word " * CONTEXT_TOKENS}]},
            400,
            "context_length_exceeded",
            "messages",
        ),
        ({"nvext": {"worker_id": 9}}, 400, "unknown_worker", "nvext.worker_id"),
        ({"nvext": {"worker_id": 1, "dp_rank": 4}}, 400, "unknown_worker", "nvext.dp_rank"),
        ({"nvext": {"prefill_worker_id": 9}}, 400, "unknown_worker", "nvext.prefill_worker_id"),
        (
            {
                "nvext": {
                    "routing_constraints": {
                        "required_taints": ["dynamo.topology/zone=a", "dynamo.topology/zone=b"]
                    }
                }
            },
            400,
            "invalid_request",
            "nvext.routing_constraints.required_taints",
        ),
        (
            {"nvext": {"routing_constraints": {"required_taints": ["gpu=h200"]}}},
            503,
            "no_eligible_worker",
            None,
        ),
    ],
)
async def test_an_invalid_call_is_answered_with_its_field(
    fields: dict[str, object], status: int, code: str, param: str | None
) -> None:
    async with running_frontend(card(1, zone="a"), script=text_answer("ok")) as frontend:
        for stream in (False, True):
            response = await frontend.chat(fields={"stream": stream, **fields})
            error = error_of(response)
            assert response.status_code == status
            assert (error["code"], error["param"]) == (code, param)
            assert ("retry-after" in response.headers) == (status == 503)
        assert frontend.plane.opened == []
        assert frontend.harness.booked() == 0
        assert frontend.harness.service.requests.running == 0


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ([1, 2**31], "prompt[1]"), ("word " * CONTEXT_TOKENS, "prompt"), (["a", "b"], "prompt")],
)
async def test_an_invalid_prompt_is_named(prompt: object, param: str) -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        response = await frontend.complete(prompt)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


async def test_a_body_that_is_not_json_is_a_400() -> None:
    async with running_frontend(card(1)) as frontend:
        response = await frontend.http.post(CHAT, content=b'{"model": "mock", NaN}')
    assert response.status_code == 400
    assert error_of(response)["param"] is None


async def test_a_body_over_the_limit_is_a_413() -> None:
    async with running_frontend(card(1), settings=FrontendSettings(body_max_bytes=1000)) as frontend:
        response = await frontend.chat("x" * 2000)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


async def test_a_text_too_long_for_the_context_is_refused_and_counted() -> None:
    long = "x" * (mock_text().prompt_max_chars + 1)
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        completion, chat = await frontend.complete(long), await frontend.chat(long)
        counted = frontend.harness.telemetry.prompts_refused.value("context_length_exceeded")
    for response, field in ((completion, "prompt"), (chat, "messages")):
        assert (response.status_code, error_of(response)["param"]) == (400, field)
        assert error_of(response)["code"] == "context_length_exceeded"
        assert "characters" in str(error_of(response)["message"])
    assert counted == 2


async def test_prompt_and_answer_over_the_context_are_refused() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        full = await frontend.complete([1] * CONTEXT_TOKENS, max_tokens=1)
        fits = await frontend.complete([1] * (CONTEXT_TOKENS - 1), max_tokens=1)
        over = await frontend.complete([1] * (CONTEXT_TOKENS - 1), max_tokens=2)
    assert (error_of(full)["code"], error_of(full)["param"]) == ("context_length_exceeded", "prompt")
    assert (error_of(over)["code"], error_of(over)["param"]) == ("context_length_exceeded", "max_tokens")
    assert fits.status_code == 200


async def test_refusals_are_counted_by_reason() -> None:
    async with running_frontend(card(1, draining=True), card(2)) as frontend:
        response = await frontend.chat(nvext={"routing_constraints": {"required_taints": ["gpu=h200"]}})
    error = error_of(response)
    assert response.status_code == 503
    assert error["refusals"] == {"draining": 1, "taint_missing": 1}
    assert response.headers["retry-after"] == "1"


async def test_a_model_without_a_tokenizer_is_not_ready_and_not_listed() -> None:
    async with running_frontend(card(1, model="other"), card(2), script=text_answer("ok")) as frontend:
        response = await frontend.chat(model="other")
        listed = (await frontend.http.get("/v1/models")).json()
    assert (response.status_code, error_of(response)["code"]) == (503, "model_not_ready")
    assert [model["id"] for model in listed["data"]] == [MODEL]


async def test_an_engine_failing_before_the_first_token_gives_an_error_status() -> None:
    async with running_frontend(card(1), card(2), script=lambda stream: stream.die()) as frontend:
        whole = await frontend.chat()
        stream = await frontend.chat(stream=True)
    for response in (whole, stream):
        assert response.status_code in {502, 503}
        assert error_of(response)


async def test_an_engine_failing_in_mid_stream_gives_one_error_event() -> None:
    def script(worker: ScriptedStream) -> None:
        worker.feed(EngineChunk(token_ids=token_ids("half an ans")))
        worker.die()

    async with running_frontend(card(1), script=script) as frontend:
        events = await streamed(frontend, seed=3)
        assert frontend.harness.booked() == 0
    assert "[DONE]" not in events
    assert json.loads(events[-1])["error"]["code"] in {"worker_failed", "no_eligible_worker"}
    assert content_of(events).startswith("half")


async def test_a_draining_router_refuses_new_requests() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        await frontend.harness.service.requests.drain(0.0)
        response = await frontend.chat()
    assert response.status_code == 503
    assert error_of(response)["code"] == "shutting_down"
    assert response.headers["retry-after"] == "1"


# What is counted


async def test_every_call_is_counted_by_route_model_and_status() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        await frontend.chat()
        await frontend.complete()
        await frontend.chat(model="made-up")
        await frontend.chat(n=2)
        requests = frontend.harness.telemetry.requests
        assert requests.value(CHAT, MODEL, "200") == 1
        assert requests.value(COMPLETIONS, MODEL, "200") == 1
        assert requests.value(CHAT, "unknown", "404") == 1
        assert requests.value(CHAT, MODEL, "400") == 1
        assert frontend.harness.telemetry.tokenization_duration.count(MODEL) == 2
        assert frontend.harness.telemetry.http_events.value("request") == 4
        assert frontend.harness.telemetry.http_connections.value() == 1
