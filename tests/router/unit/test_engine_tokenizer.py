"""Prompts that a model's engines tokenize at their ``/tokenize``, and by load where none answers well."""

import asyncio
import json
import logging
from typing import Any

import pytest

from kvrouter.cli.doctor.findings import Severity
from kvrouter.router import engine_tokenizer, prompt_shapes
from kvrouter.router.prompt_shapes import ANSWERS_MIN, WINDOW_ANSWERS
from kvrouter.settings.tree import FrontendSettings, TokenizeFallback
from kvrouter.text.source import MOCK_FOLDER
from tests.app.unit.test_fleet_engines import Up, file_of, up
from tests.router.unit.test_routed_by_load import before, routing_of
from tests.testing.constants import SetConstants
from tests.testing.doctor import only_finding, run_doctor
from tests.testing.engine_publisher import Publisher, publisher, stored_event, vllm_batch
from tests.testing.log_events import event_of
from tests.testing.processes import Metrics, eventually
from tests.testing.scripted_engine import (
    JSON,
    AnswerEnd,
    ScriptedAnswer,
    ScriptedEngine,
    page,
    scripted_engine,
)

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 400}]}
COMPLETION = {"model": "tiny", "prompt": "x" * 400, "max_tokens": 3}
WHOLE = ScriptedAnswer((page("vllm-0.32.0-completion.json"),), content_type=JSON)
PATIENT = FrontendSettings(http_port=0, tokenize_engine_wait_s=60.0)
"""No engine answers too late, however slow the machine is."""
FALLBACK = FrontendSettings(
    http_port=0, tokenize_fallback=TokenizeFallback.ENGINE, tokenize_engine_wait_s=60.0
)
TOKENS = (7,) * 70


def failing(status: int) -> ScriptedAnswer:
    return ScriptedAnswer((b'{"detail":"Not Found"}',), status=status, content_type=JSON)


def asked(engine: ScriptedEngine) -> list[Any]:
    return [call.body for call in engine.calls if call.path == "/tokenize"]


def fields_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [vars(line)["kvrouter_fields"] for line in caplog.records if event_of(line) == event]


def of_events(engine: ScriptedEngine, events: Publisher) -> str:
    """The line of an engine that publishes its KV events."""
    return (
        f"{{kind: vllm, url: '{engine.url}', kv_events_endpoint: '{events.at.events}', "
        f"kv_events_replay_endpoint: '{events.at.replay}'}}"
    )


async def served(here: Up, engine: ScriptedEngine, call: dict[str, Any], *, path: str) -> None:
    if not engine.answers:
        engine.answers.append(WHOLE)
    answer = await here.http.post(path, json=call)
    assert (answer.status_code, answer.content) == (200, page("vllm-0.32.0-completion.json"))


async def explained(here: Up, call: dict[str, Any]) -> tuple[int, int]:
    """How many tokens routing takes a prompt to have, and how many blocks of it to be cached."""
    answer = (await here.http.post("/v1/route/explain", json=call)).json()
    (row,) = answer["decode"]["candidates"]
    return answer["isl_tokens"], row["overlap_blocks"]


async def outcomes(here: Up, outcome: str) -> float:
    metrics = Metrics((await here.http.get("/metrics")).text)
    return metrics.total("engine_tokenize_total", model="tiny", outcome=outcome)


async def test_a_model_tokenized_by_its_engine_is_routed_by_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with scripted_engine() as engine, publisher() as events:
        engine.tokens_of = lambda body: TOKENS
        line = of_events(engine, events)
        file = file_of(
            line.replace("vllm,", "vllm, api_key_env: OWN,"), model="{name: tiny, tokenizer: engine}"
        )
        async with up(file, environ={"OWN": "its own"}, frontend=PATIENT) as here:
            await events.publish(vllm_batch(stored_event(1), stored_event(2, parent=1)))
            for path, call in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):

                async def is_found(call: dict[str, Any] = call) -> bool:
                    return await explained(here, call) == (len(TOKENS), 2)

                await eventually(is_found)
                await served(here, engine, call, path=path)
            assert asked(engine)[0] == {"messages": CHAT["messages"]}
            assert asked(engine)[-1] == {"prompt": COMPLETION["prompt"]}
            assert {call.headers["authorization"] for call in engine.calls} == {"Bearer its own"}
            assert await routing_of(here) == ("cache", None)
            (model,) = (await here.http.get("/v1/fleet")).json()["models"]
            assert model["tokenized_by"] == "engine"
            assert await outcomes(here, "answered") == len(asked(engine))
            metrics = Metrics((await here.http.get("/metrics")).text)
            assert metrics.total("model_routed_by_load", model="tiny") == 0
            host, port = here.system.address
            note = only_finding(await run_doctor(f"http://{host}:{port}"), "tokenizers", Severity.NOTE)
            assert "tokenized by its engines" in note.seen
    assert [fields["reason"] for fields in fields_of(caplog, "tokenized_by_engine")] == [
        "its tokenizer is said to be engine"
    ]


@pytest.mark.parametrize("fallback", [*TokenizeFallback])
async def test_prompts_without_a_tokenizer_use_the_configured_fallback(
    fallback: TokenizeFallback, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with scripted_engine() as engine:
        engine.tokens_of = lambda body: TOKENS
        front = FrontendSettings(http_port=0, tokenize_fallback=fallback)
        async with up(before(engine), frontend=front) as here:
            await served(here, engine, CHAT, path="/v1/chat/completions")
            is_asked = fallback is TokenizeFallback.ENGINE
            assert bool(asked(engine)) is is_asked
            assert await explained(here, CHAT) == ((len(TOKENS), 2) if is_asked else (100, 3))
            assert (await routing_of(here))[0] == ("cache" if is_asked else "load")
    event = "tokenized_by_engine" if fallback is TokenizeFallback.ENGINE else "routed_by_load"
    assert [each["reason"] for each in fields_of(caplog, event)] == ["tiny-model is no folder here"]


async def test_a_slow_tokenize_route_delays_a_few_calls_then_is_not_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scripted_engine() as engine:
        engine.tokens_of = lambda body: ScriptedAnswer(ends=AnswerEnd.NO_HEADERS)
        front = FrontendSettings(http_port=0, tokenize_engine_wait_s=0.05)
        async with up(before(engine, tokenizer="engine"), frontend=front) as here:
            for _ in range(engine_tokenizer.FAILURES_MAX + 3):
                await served(here, engine, CHAT, path="/v1/chat/completions")
            assert len(asked(engine)) == engine_tokenizer.FAILURES_MAX
            assert await outcomes(here, "late") == engine_tokenizer.FAILURES_MAX
            assert await routing_of(here) == (
                "load",
                "POST /tokenize of its engines: no answer within 0.05 s",
            )
            engine.release()
    assert len(fields_of(caplog, "engine_tokenize_failed")) == 1


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_without_tokenize_is_asked_and_reported_once(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_engine() as engine:
        engine.tokens_of = lambda body: failing(status)
        async with up(before(engine, tokenizer="engine"), frontend=PATIENT) as here:
            for _ in range(3):
                await served(here, engine, CHAT, path="/v1/chat/completions")
                await served(here, engine, COMPLETION, path="/v1/completions")
            assert len(asked(engine)) == 1
            assert await explained(here, CHAT) == (100, 3)
            routing, reason = await routing_of(here)
            assert (routing, reason) == ("load", "POST /tokenize of its engines: Not Found")
            metrics = Metrics((await here.http.get("/metrics")).text)
            assert metrics.total("model_routed_by_load", model="tiny") == 1
            assert await outcomes(here, "absent") == 1
            host, port = here.system.address
            finding = only_finding(await run_doctor(f"http://{host}:{port}"), "tokenizers", Severity.WARNING)
            assert "POST /tokenize of its engines: Not Found" in finding.seen
    (failed,) = fields_of(caplog, "engine_tokenize_failed")
    assert (failed["model"], failed["reason"]) == ("tiny", "Not Found")


async def test_tokenize_calls_go_to_the_engine_that_has_the_route() -> None:
    async with scripted_engine() as one, scripted_engine() as two:
        one.tokens_of = lambda body: failing(404)
        two.tokens_of = lambda body: TOKENS
        one.answers.extend([WHOLE] * 8)
        two.answers.extend([WHOLE] * 8)
        async with up(before(one, two, tokenizer="engine"), frontend=PATIENT) as here:
            for _ in range(6):
                assert (await here.http.post("/v1/chat/completions", json=CHAT)).is_success
            assert (len(asked(one)), len(asked(two))) == (1, 5)
            assert (await routing_of(here))[0] == "cache"


MISTAKEN = {
    "60 MB": b'{"tokens":[' + b"1," * 30_000_000 + b"1]}",
    "more tokens than are decoded": b'{"tokens":[' + b"1," * 300_000 + b"1]}",
    "deep": b'{"tokens":' + b"[" * 100_000,
    "no tokens": b'{"tokens":[]}',
    "negative": b'{"tokens":[-1]}',
    "too large": b'{"tokens":[4294967296]}',
    "texts": b'{"tokens":["1"]}',
    "a number": b"1",
    "nothing": b"",
    "a page": b"<html>",
    "an error": b'{"error":{"message":"no","code":500}}',
}


@pytest.mark.parametrize("what", sorted(MISTAKEN))
async def test_an_invalid_tokenize_answer_is_ignored(what: str) -> None:
    async with scripted_engine() as engine:
        engine.tokens_of = lambda body: ScriptedAnswer((MISTAKEN[what],), content_type=JSON)
        front = FrontendSettings(http_port=0, tokenize_engine_wait_s=0.5)
        async with up(before(engine, tokenizer="engine"), frontend=front) as here:
            await served(here, engine, CHAT, path="/v1/chat/completions")
            assert await explained(here, CHAT) == (100, 3)
            assert await outcomes(here, "failed") + await outcomes(here, "late") == 2


async def test_tokenize_refusals_of_bad_calls_do_not_disable_the_engine() -> None:
    async with scripted_engine() as engine:
        engine.tokens_of = lambda body: failing(400) if "wrong" in str(body) else TOKENS
        async with up(before(engine, tokenizer="engine"), frontend=FALLBACK) as here:
            wrong = {"model": "tiny", "messages": [{"role": "wrong", "content": "hi"}]}
            for _ in range(engine_tokenizer.FAILURES_MAX + 1):
                await served(here, engine, wrong, path="/v1/chat/completions")
            assert await explained(here, CHAT) == (len(TOKENS), 0)


NOT_ASKED: dict[str, dict[str, Any]] = {
    "an image": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    },
    "a template of its own": {**CHAT, "chat_template": "{{ messages }}"},
    "a long prompt": {"messages": [{"role": "user", "content": "x" * engine_tokenizer.ASKED_BYTES_MAX}]},
}


@pytest.mark.parametrize("what", sorted(NOT_ASKED))
async def test_images_own_templates_and_long_prompts_are_not_sent_to_tokenize(what: str) -> None:
    async with scripted_engine() as engine:
        engine.tokens_of = lambda body: TOKENS
        async with up(before(engine, tokenizer="engine"), frontend=FALLBACK) as here:
            await served(here, engine, {"model": "tiny", **NOT_ASKED[what]}, path="/v1/chat/completions")
    assert asked(engine) == []


async def test_concurrent_tokenize_calls_are_limited(set_constants: SetConstants) -> None:
    set_constants(engine_tokenizer, ASKING_MAX=2)
    async with scripted_engine() as engine:
        engine.tokens_of = lambda body: ScriptedAnswer(ends=AnswerEnd.NO_HEADERS)
        engine.answers.extend([WHOLE] * 6)
        async with up(before(engine, tokenizer="engine"), frontend=FALLBACK) as here:
            calls = [here.http.post("/v1/chat/completions", json=CHAT) for _ in range(6)]
            waiting = asyncio.gather(*calls)

            async def four_not_asked() -> bool:
                return await outcomes(here, "not_asked") == 4

            await eventually(four_not_asked)
            assert len(asked(engine)) == 2
            engine.release()
            assert all(answer.is_success for answer in await waiting)


def counted(prompt_tokens: int) -> ScriptedAnswer:
    """An answer of which two blocks of the prompt had been cached."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 1,
        "total_tokens": prompt_tokens + 1,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
    return ScriptedAnswer((json.dumps({**body, "usage": usage}).encode(),), content_type=JSON)


async def test_a_blind_shape_is_tokenized_by_its_engine(
    caplog: pytest.LogCaptureFixture, set_constants: SetConstants
) -> None:
    caplog.set_level(logging.INFO)
    set_constants(prompt_shapes, SPAN_S=0.0)
    async with scripted_engine() as engine, publisher() as events:
        engine.tokens_of = lambda body: TOKENS
        file = file_of(of_events(engine, events), model=f"{{name: tiny, tokenizer: '{MOCK_FOLDER}'}}")
        async with up(file, frontend=FALLBACK) as here:
            await events.publish(vllm_batch(stored_event(1), stored_event(2, parent=1)))

            async def chats(n: int, prompt_tokens: int) -> None:
                for _ in range(n):
                    engine.answers.append(counted(prompt_tokens))
                    assert (await here.http.post("/v1/chat/completions", json=CHAT)).is_success

            async def shapes() -> dict[str, bool]:
                (model,) = (await here.http.get("/v1/fleet")).json()["models"]
                return {seen["shape"]: seen["blind"] for seen in model["prompt_shapes"]}

            await chats(ANSWERS_MIN, len(TOKENS))
            assert (asked(engine), await shapes()) == ([], {"chat user": True})
            await chats(ANSWERS_MIN, len(TOKENS))
            assert await explained(here, CHAT) == (len(TOKENS), 2)
            assert await shapes() == {"chat user": True, "chat user by /tokenize": False}
            await explained(here, COMPLETION)
            assert asked(engine) == [{"messages": CHAT["messages"]}] * (ANSWERS_MIN + 1)
            await chats(2 * WINDOW_ANSWERS, len(TOKENS) + 1)  # from now on it answers otherwise than it does
            assert await shapes() == {"chat user": True, "chat user by /tokenize": True}
            n_asked = len(asked(engine))
            await chats(1, len(TOKENS))
            assert len(asked(engine)) == n_asked
    (said,) = fields_of(caplog, "tokenized_by_engine")
    assert "'chat user'" in said["reason"]
