"""How long bodies may be, route by route, and what long ones are read in."""

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.ids import ModelName, WorkerId
from kvrouter.core.requests import CallRoute, EngineChunk, FinishReason
from kvrouter.core.workers import WorkerCard
from kvrouter.frontend import prepare
from kvrouter.frontend.openai import parse
from kvrouter.frontend.openai.body import (
    ITEMS_MAX,
    NUMBERS_MIN,
    BodyBounds,
    BodyOverBounds,
    scanned,
)
from kvrouter.frontend.openai.passed_routes import PASSED_ROUTES
from kvrouter.frontend.prepare import BODY_BYTES_MAX, OFF_LOOP_BYTES, OUTSIDE_PROMPT_BYTES, PAGE_BYTES_MAX
from kvrouter.settings.tree import FrontendSettings
from kvrouter.text.tokenizer import FAST, EncodeLimits, EncodePool, PromptOverBudget
from tests.testing.calls import MakeFail, WatchCalls
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
from tests.testing.scripted_transport import ScriptedStream
from tests.testing.waits import until

CHAT = "/v1/chat/completions"
DERIVED_BYTES = OUTSIDE_PROMPT_BYTES + 3 * 16 * CONTEXT_TOKENS


def own(worker_id: int, *, context: int = CONTEXT_TOKENS, model: str = MODEL) -> WorkerCard:
    return structs.replace(card(worker_id, model=model), context_length=context)


JSON = {"content-type": "application/json"}


def taking_calls() -> WorkerCard:
    return structs.replace(own(1), takes_calls=True)


def says_user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


async def refusal(
    frontend: FrontendHarness, path: str, size_bytes: int, *, chunked: bool = False
) -> str | None:
    """What a body of spaces is refused with for its size alone; None when it is not."""

    async def pieces() -> AsyncIterator[bytes]:
        left = size_bytes
        while left:
            yield b" " * min(left, 1 << 20)
            left -= min(left, 1 << 20)

    response = await frontend.http.post(
        path, content=pieces() if chunked else b" " * size_bytes, headers=JSON
    )
    if response.status_code != 413:
        assert response.status_code == 400, response.text
        return None
    error = error_of(response)
    assert error["code"] == "request_too_large"
    return str(error["message"])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/route/explain"])
async def test_the_body_limit_follows_the_longest_context(path: str, chunked: bool) -> None:
    async with running_frontend(own(1)) as frontend:
        assert await refusal(frontend, path, DERIVED_BYTES, chunked=chunked) is None
        why = await refusal(frontend, path, DERIVED_BYTES + 1, chunked=chunked)
    assert why is not None
    assert f"over {DERIVED_BYTES} bytes" in why
    assert "KVROUTER_BODY_MAX_BYTES" in why


async def test_the_body_limit_counts_contexts_of_models_without_a_tokenizer() -> None:
    async with running_frontend(own(1), own(2, model="other", context=1_000_000)) as frontend:
        assert await refusal(frontend, CHAT, 12_000_000) is None
        assert await refusal(frontend, CHAT, OUTSIDE_PROMPT_BYTES + 12_000_001) is not None


@pytest.mark.parametrize("model", [MODEL, "other"])
async def test_the_body_limit_ignores_contexts_of_dead_workers(model: str) -> None:
    longer = own(2, model=model, context=1_000_000)
    text = replace(mock_text(), context_length_tokens=1_000_000)  # as of the longest card, whoever has it
    ids = b'{"model":"%s","prompt":[%s1]}' % (MODEL.encode(), b"1," * NUMBERS_MIN)
    async with running_frontend(
        own(1), own(3, model=model), longer, text=text, script=text_answer("ok")
    ) as frontend:
        assert await refusal(frontend, CHAT, DERIVED_BYTES + 1) is None
        reply = await frontend.http.post("/v1/completions", content=ids)
        assert "body_over_bounds" not in reply.text
        frontend.harness.service.model(ModelName(model)).fleet.set_alive(WorkerId(2), False)
        assert await refusal(frontend, CHAT, DERIVED_BYTES + 1) is not None
        refused = error_of(await frontend.http.post("/v1/completions", content=ids))
        assert refused["code"] == "body_over_bounds"


@pytest.mark.parametrize("cards", [(), (own(2), taking_calls()), (taking_calls(),)])
async def test_models_that_take_images_or_are_unknown_have_the_largest_body_limit(
    cards: tuple[WorkerCard, ...],
) -> None:
    has_most = not cards or all(each.takes_calls for each in cards)
    async with running_frontend(*cards) as frontend:
        assert (await refusal(frontend, CHAT, DERIVED_BYTES + 1) is None) == has_most
        assert await refusal(frontend, CHAT, BODY_BYTES_MAX + 1) is not None


@pytest.mark.parametrize("most_bytes", [1_000, 5_000_000])
async def test_the_setting_overrides_the_body_limit(most_bytes: int) -> None:
    async with running_frontend(own(1), settings=FrontendSettings(body_max_bytes=most_bytes)) as frontend:
        assert await refusal(frontend, CHAT, most_bytes) is None
        why = await refusal(frontend, CHAT, most_bytes + 1)
    assert why is not None
    assert f"over {most_bytes} bytes" in why


async def test_admin_routes_have_a_small_body_limit() -> None:
    async with running_frontend(taking_calls()) as frontend:
        assert await refusal(frontend, "/busy_threshold", PAGE_BYTES_MAX) is None
        assert "no body of this route" in (
            await refusal(frontend, "/busy_threshold", PAGE_BYTES_MAX + 1) or ""
        )


async def test_long_bodies_are_read_off_the_event_loop(watch_calls: WatchCalls) -> None:
    scans, decodes = watch_calls(prepare, "scanned"), watch_calls(parse, "decode_body")
    async with running_frontend(own(1), script=text_answer("ok")) as frontend:
        assert (await frontend.chat("hello")).status_code == 200
        assert (await frontend.chat("hello", metadata={"a": "x" * OFF_LOOP_BYTES})).status_code == 200
    here = threading.current_thread().name
    assert [call.thread == here for call in scans] == [True, False]
    assert [call.thread == here for call in decodes] == [True, False]


async def test_token_ids_are_limited_by_the_longest_context() -> None:
    ids = b",".join([b"1"] * 300_000)
    body = b'{"model":"%s","prompt":[%s]}' % (MODEL.encode(), ids)
    async with running_frontend(own(1), own(2, model="other", context=300_000)) as frontend:
        reply = await frontend.http.post("/v1/completions", content=body)
        assert error_of(reply)["code"] == "context_length_exceeded"
        reply = await frontend.http.post("/v1/completions", content=body.replace(b"[", b"[1,", 1))
        assert (error_of(reply)["code"], error_of(reply)["param"]) == ("body_over_bounds", "prompt")
    async with running_frontend(own(1), settings=FrontendSettings(body_max_token_ids=10)) as frontend:
        assert error_of(await frontend.complete([1] * 11))["code"] == "body_over_bounds"


TOO_LONG = 1_000_001
"""Characters of messages that no template of the mock model, with its context here, is given."""


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        ("chat/completions", {"messages": says_user("a" * TOO_LONG)}, "messages", "context_length_exceeded"),
        (
            "chat/completions",
            {"messages": says_user("\U0001f600" * 999_990)},
            "messages",
            "prompt_over_budget",
        ),
        ("completions", {"prompt": "a" * (13 * CONTEXT_TOKENS + 1)}, "prompt", "context_length_exceeded"),
        ("route/explain", {"prompt": ["a" * TOO_LONG]}, "prompt", "context_length_exceeded"),
        ("chat/completions", {"messages": [], "model": "other"}, "model", "model_not_found"),
    ],
)
async def test_a_too_long_prompt_is_refused_before_it_is_decoded(
    path: str, fields: dict[str, object], param: str, code: str, make_fail: MakeFail
) -> None:
    make_fail(parse, "decode_body", AssertionError("it was decoded"))
    settings = FrontendSettings(body_max_bytes=BODY_BYTES_MAX)
    text = replace(mock_text(), pool=EncodePool(EncodeLimits(bytes_max=FAST.bytes_per_byte * 2**20)))
    async with running_frontend(own(1), settings=settings, text=text) as frontend:
        error = error_of(await frontend.http.post(f"/v1/{path}", json={"model": MODEL, **fields}))
        counted = frontend.harness.telemetry.prompts_refused.value(code)
    assert (error["param"], error["code"]) == (param, code)
    assert counted == (param != "model")


def test_prompts_tokenized_on_the_loop_use_no_encode_budget() -> None:
    pool = EncodePool(EncodeLimits(off_loop_chars=10, bytes_max=1))
    text = replace(mock_text(), pool=pool)
    text.refuse_prompt_size(10, 10)
    with pytest.raises(PromptOverBudget):
        text.refuse_prompt_size(11, 11)


@pytest.mark.parametrize(
    "text", [{"messages": says_user("a" * 900_000 + "\U0001f600")}, {"prompt": ["a" * 6_000]}]
)
def test_a_call_refused_for_another_field_does_not_decode_its_text(text: dict[str, object]) -> None:
    data = msgspec.json.encode({"model": MODEL, **text, "n": 2})
    body = scanned(data, BodyBounds())
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"^n: "):
            parse.parse_either(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5_000


async def test_token_ids_are_counted_and_their_text_is_bounded_too() -> None:
    async with running_frontend(own(1), script=text_answer("ok")) as frontend:
        reply = await frontend.complete("a text", nvext={"token_data": [1, 2, 3]})
        refused = await frontend.complete("a" * TOO_LONG, nvext={"token_data": [1, 2, 3]})
    assert (reply.status_code, reply.json()["usage"]["prompt_tokens"]) == (200, 3)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "last"),
    [
        (rb'{"a":1,"\u0061":2,"a":3}', b"3"),
        (rb'{"a":1,"a":3,"\u0061":2}', b"2"),
        (rb'{"\u0061":1,"a":3,"\u0061":2}', b"2"),
    ],
)
def test_the_last_of_repeated_fields_counts_with_any_escapes(body: bytes, last: bytes) -> None:
    assert bytes(scanned(body, BodyBounds()).raw("a") or b"") == last
    assert msgspec.json.decode(body)["a"] == int(last)


async def test_a_requests_body_is_released_before_its_answer() -> None:
    """While the answer is on its way, no more is held for a long body than for a short one."""
    kept_bytes = 8_000_000
    body = msgspec.json.encode(
        {"model": MODEL, "prompt": "hello", "stream": True, "metadata": {"a": "x" * kept_bytes}}
    )
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    fed: list[ScriptedStream] = []

    def begins(stream: ScriptedStream) -> None:
        stream.feed(EngineChunk(token_ids=token_ids("ok")))
        fed.append(stream)

    settings = FrontendSettings(body_max_bytes=BODY_BYTES_MAX)
    async with running_frontend(own(1), script=begins, settings=settings) as frontend:
        assert (await frontend.http.get("/health")).status_code == 200
        reader, writer = await asyncio.open_connection(*frontend.address)
        tracemalloc.start()
        try:
            for data in (head, body):
                writer.write(data)
                await writer.drain()
            await reader.readuntil(b"text_completion")
            # The thread that scanned it may let go of it a moment after it has reported so.
            await until(lambda: tracemalloc.get_traced_memory()[0] < kept_bytes / 4)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        fed[0].feed(EngineChunk(finish=FinishReason.STOP))
        await reader.readuntil(b"[DONE]")
        writer.close()
    assert peak_bytes > kept_bytes, "it was held once"


MANY = b"[%s]" % b",".join([b"{}"] * 100_000)
EMBEDDINGS = next(each for each in PASSED_ROUTES if each.route is CallRoute.EMBEDDINGS)


@pytest.mark.parametrize("name", [b"model", b"stream", b"max_tokens", b"cache_salt", b"nvext", b"vllm_xargs"])
def test_a_call_with_an_unread_prompt_counts_only_read_fields(name: bytes) -> None:
    bounds = BodyBounds(read_fields=EMBEDDINGS.read_fields)
    whole = scanned(b'{"model":"m","input":%s,"%s":1}' % (MANY, name), bounds)
    assert bytes(whole.raw("input") or b"") == MANY
    with pytest.raises(BodyOverBounds) as refused:
        scanned(b'{"input":1,"%s":{"x":%s}}' % (name, MANY), bounds)
    assert refused.value.param == f"{name.decode()}.x"


def test_unread_body_fields_count_toward_the_field_bound() -> None:
    fields = b",".join(b'"%d":1' % at for at in range(ITEMS_MAX + 1))
    with pytest.raises(BodyOverBounds, match="elements or fields"):
        scanned(b"{%s}" % fields, BodyBounds(read_fields=EMBEDDINGS.read_fields))
