"""A real vLLM engine that prefills and one that decodes: what a handoff leaves behind, however it ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvrouter.app.attach.attachment import attach
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.core.workers import Role
from kvrouter.engines.attach import AttachSpec
from kvrouter.transports.requests.port import EngineStream
from tests.system.engines.calls import chat_body, companion, complete, prompt_of, stopped, until_feeds
from tests.system.engines.client_law import SCHEMA, TOOL
from tests.system.engines.real_engine import MODEL
from tests.system.engines.vllm_server import VllmServer
from tests.testing.engine_requests import engine_request
from tests.testing.processes import Fleet, Frontend, eventually

PREFILL, DECODE = 1, 2
"""Worker ids."""

LEASE_S = 30.0
"""How long vLLM keeps the KV of a prefill that nobody comes for."""

FREED_WITHIN_S = 15.0
"""Long before its lease ends, and far above what a busy machine needs."""

TOOLS = [TOOL]
NAMED = {"type": "function", "function": {"name": TOOL["function"]["name"]}}
PREFILLED: dict[str, dict[str, object]] = {
    "plain": {},
    "a tool that must be called": {"tools": TOOLS, "tool_choice": "required"},
    "a named tool": {"tools": TOOLS, "tool_choice": NAMED},
    "tools": {"tools": TOOLS},
    "tools that may be called": {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False},
    "tools in the prompt": {"tools": TOOLS, "tool_choice": "none"},
    "a schema": {"response_format": SCHEMA},
    "JSON": {"response_format": {"type": "json_object"}},
    "one of two": {"structured_outputs": {"choice": ["blocks", "transfers"]}},
    "a pattern": {"structured_outputs": {"regex": "[0-9]{4,}"}},
    "a stop": {"stop": ["e"], "include_stop_str_in_output": True},
    "a stop token": {"stop_token_ids": [300, 301, 302], "ignore_eos": True},
    "so many at least": {"min_tokens": 5, "max_tokens": 6},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "an answer of one token": {"max_completion_tokens": 1},
}
"""What chats ask for whose prompt a prefill engine without a tool parser computes."""

ALONE: dict[str, dict[str, object]] = {
    "several": {"n": 2, "temperature": 0.8, "seed": 7},
    "log probabilities of the prompt": {"prompt_logprobs": 1},
    "a cut prompt": {"truncate_prompt_tokens": -1},
}
"""What chats ask for that are computed by their decode engine alone."""


def _nixl(role: str, *, on_failure: str = "fail", connector: str = "NixlConnector") -> dict[str, object]:
    return {
        "kv_connector": connector,
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": on_failure,
    }


async def _start_decode(engine: VllmServer, *, on_failure: str = "fail") -> None:
    """It runs one request at a time, so that a test can make the others wait, and reads calls of tools."""
    flags = ("--max-num-seqs", "1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    await engine.start(kv_transfer=_nixl("kv_consumer", on_failure=on_failure), flags=flags)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    prefill = VllmServer(engine_folder, "prefill", core=0)
    decode = VllmServer(engine_folder, "decode", core=1)
    async with stopped({PREFILL: prefill, DECODE: decode}) as both:
        await prefill.start(kv_transfer=_nixl("kv_producer"))
        await _start_decode(decode)
        yield both


async def test_fetched_kv_is_reported_and_no_kv_waits_afterwards(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    frontend = await _before(engines, kvrouter)

    async def is_reported_of_none() -> bool:
        return bool((await _fetched(frontend, DECODE))["transfers"] == 0)

    await eventually(is_reported_of_none)  # what came before a router's first report is no news to it
    answer = await frontend.http.post("/v1/chat/completions", json=chat_body("Tell of transfers. " * 20))
    answer.raise_for_status()

    async def is_reported() -> bool:
        fetched = await _fetched(frontend, DECODE)
        return bool(fetched["transfers"] == 1 and fetched["bytes"] > 0 and fetched["seconds"] > 0)

    await eventually(is_reported)
    assert (await _fetched(frontend, DECODE))["failed"] == 0
    assert (await _fetched(frontend, PREFILL))["transfers"] == 0
    assert (await frontend.metrics()).total("kv_transfer_bytes_total", worker=str(DECODE)) > 0
    await _nothing_waits(engines[PREFILL])


async def test_answer_options_of_a_chat_do_not_change_its_prefilled_tokens(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    frontend = await _before(engines, kvrouter)
    prefilled: dict[str, float] = {}
    expected: dict[str, float] = {}
    for name, asked in {**PREFILLED, **ALONE}.items():
        body = chat_body(f"{name}: tell of transfers. " * 20, **{"max_tokens": 8, **asked})
        before = [await _computed(engines[PREFILL]), await _fetched_tokens(engines[DECODE])]
        answer = await frontend.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, f"{name}: {answer.text}"
        got = answer.json()
        prefilled[name] = await _computed(engines[PREFILL]) - before[0]
        expected[name] = got["usage"]["prompt_tokens"] if name in PREFILLED else 0
        assert (await _fetched_tokens(engines[DECODE]) > before[1]) is (name in PREFILLED), name
        direct = await engines[DECODE].ask("/v1/chat/completions", **body)
        assert _said(got) == _said(direct), name
    assert prefilled == expected
    metrics = await frontend.metrics()
    assert metrics.total("retries_total") == metrics.total("kv_lost_total") == 0
    await _nothing_waits(engines[PREFILL])


async def test_each_prompt_of_one_call_gets_its_own_answer(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    """A prefill engine keeps the KV of one: the decode engine computes all of them itself."""
    frontend = await _before(engines, kvrouter)
    body = {"prompt": [prompt_of(200), prompt_of(201)], "temperature": 0, "max_tokens": 6}
    answer = await frontend.http.post("/v1/completions", json={"model": MODEL, **body})
    direct = await engines[PREFILL].ask("/v1/completions", **body)
    got = answer.raise_for_status().json()
    assert [choice["text"] for choice in got["choices"]] == [choice["text"] for choice in direct["choices"]]
    await _nothing_waits(engines[PREFILL])


async def test_a_prefill_cancelled_while_running_leaves_no_kv_waiting(engines: dict[int, VllmServer]) -> None:
    async with _adapter(engines[PREFILL], Role.PREFILL) as prefill:
        stream = await prefill(engine_request(prompt_of(202, 60 * 32), Leg.PREFILL, max_tokens=1))
        await asyncio.sleep(0.005)
        stream.cancel("client left")
        assert [chunk async for chunk in stream][-1].finish is FinishReason.CANCELLED
        await _nothing_waits(engines[PREFILL])


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.1])
@pytest.mark.parametrize("prompt_blocks", [8, 60])
async def test_a_decode_cancelled_after_prefill_leaves_no_kv_waiting(
    engines: dict[int, VllmServer], after_s: float, prompt_blocks: int
) -> None:
    prompt = prompt_of(int(after_s * 1000) + prompt_blocks, prompt_blocks * 32)
    async with (
        _adapter(engines[PREFILL], Role.PREFILL) as prefill,
        _adapter(engines[DECODE], Role.DECODE) as decode,
    ):
        stream = await prefill(engine_request(prompt, Leg.PREFILL, max_tokens=1))
        params = [chunk async for chunk in stream][-1].kv_transfer_params
        assert params is not None
        assert params["do_remote_prefill"] is True
        fetching = await decode(engine_request(prompt, Leg.DECODE, kv_transfer_params=params, max_tokens=50))
        await asyncio.sleep(after_s)
        fetching.cancel("client left")
        assert [chunk async for chunk in fetching][-1].finish is FinishReason.CANCELLED
        await _nothing_waits(engines[PREFILL])


async def test_a_client_leaving_while_decode_is_queued_leaves_no_kv_waiting(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    frontend = await _before(engines, kvrouter)
    async with _is_busy(engines[DECODE]):
        asking = asyncio.create_task(complete(frontend, prompt_of(300)))
        await _waits_at(engines[DECODE], 1)
        assert await _used(engines[PREFILL]) > 0
        asking.cancel()
        await _nothing_waits(engines[PREFILL])
        await _waits_at(engines[DECODE], 0)


async def test_kv_for_a_dead_decode_engine_is_freed_after_its_lease(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    frontend = await _before(engines, kvrouter)
    async with _is_busy(engines[DECODE]):
        asking = asyncio.create_task(complete(frontend, prompt_of(400)))
        await _waits_at(engines[DECODE], 1)
        await engines[DECODE].kill()
    assert (await asking).status_code == 503
    await _nothing_waits(engines[PREFILL], limit_s=LEASE_S + FREED_WITHIN_S)


async def test_a_decode_engine_recomputing_lost_kv_causes_no_retry(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    await _start_decode(engines[DECODE], on_failure="recompute")
    frontend = await _before(engines, kvrouter)
    answer = await _loses_its_prefill_engine(engines, frontend, prompt_of(500))
    metrics = await frontend.metrics()
    assert metrics.total("kv_lost_total") == metrics.total("retries_total") == 0
    for wrong in ("too_many", "too_few"):
        assert metrics.total("index_predictions_total", prediction=wrong) == 0
    await _is_right(engines[DECODE], answer, prompt_of(500))

    async def is_reported() -> bool:
        return bool((await _fetched(frontend, DECODE))["failed"])

    await eventually(is_reported)


async def test_lost_kv_is_prefilled_again_if_the_decode_engine_fails(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    await engines[DECODE].kill()
    await engines[PREFILL].start(kv_transfer=_nixl("kv_producer"))
    await _start_decode(engines[DECODE])
    frontend = await _before(engines, kvrouter)
    answer = await _loses_its_prefill_engine(engines, frontend, prompt_of(600))
    metrics = await frontend.metrics()
    assert metrics.total("kv_lost_total") == 1
    await _is_right(engines[DECODE], answer, prompt_of(600))


async def test_tools_excluded_by_the_prefill_engine_do_not_change_answers(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    """It has no tool parser either, so it refuses tools that may be called: a decode engine computes them."""
    await engines[PREFILL].kill()
    flags = ("--exclude-tools-when-tool-choice-none",)
    await engines[PREFILL].start(kv_transfer=_nixl("kv_producer"), flags=flags)
    frontend = await _before(engines, kvrouter)
    with_tools = [name for name, asked in PREFILLED.items() if asked.get("tool_choice") in (None, "auto")]
    for name in ("a tool that must be called", "a named tool", *with_tools, "a tool that must be called"):
        asked = PREFILLED[name]
        body = chat_body(f"{name}: tell of tools left out. " * 20, **{"max_tokens": 8, **asked})
        before = await _fetched_tokens(engines[DECODE])
        answer = await frontend.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, f"{name}: {answer.text}"
        assert (await _fetched_tokens(engines[DECODE]) > before) is ("tools" not in asked), name
        assert _said(answer.json()) == _said(await engines[DECODE].ask("/v1/chat/completions", **body)), name


async def test_pushed_kv_gives_the_text_of_a_single_engine(
    engines: dict[int, VllmServer], kvrouter: Fleet
) -> None:
    await _start_push(engines)
    frontend = await _before(engines, kvrouter)
    for number in range(5):
        body = chat_body(f"{number}: tell of what is pushed. " * 20, max_tokens=8)
        answer = await frontend.http.post("/v1/chat/completions", json=body)
        assert answer.headers["x-kvrouter-prefill-worker"] == str(PREFILL)
        direct = await engines[PREFILL].ask("/v1/chat/completions", **body)
        assert _said(answer.raise_for_status().json()) == _said(direct)
    assert await _fetched_tokens(engines[DECODE]) > 0
    await _nothing_waits(engines[DECODE])
    await _nothing_waits(engines[PREFILL])
    metrics = await frontend.metrics()
    assert metrics.total("retries_total") == metrics.total("kv_lost_total") == 0


async def test_a_push_decode_leg_left_before_its_prefill_keeps_its_blocks(
    engines: dict[int, VllmServer],
) -> None:
    """This is why kvrouter sends the decode leg of a push pair after its prefill leg."""
    async with (
        _adapter(engines[PREFILL], Role.PREFILL) as prefill,
        _adapter(engines[DECODE], Role.DECODE) as decode,
    ):
        first, second = (
            engine_request(prompt_of(number), Leg.PREFILL, max_tokens=1) for number in (700, 701)
        )
        where = (await _chunks(await prefill(first)))[-1].kv_transfer_params
        await _chunks(await decode(replace(first, leg=Leg.DECODE, kv_transfer_params=where)))
        await _nothing_waits(engines[DECODE])
        ahead = {**(where or {}), "remote_request_id": second.engine_key, "remote_block_ids": None}
        leg = await decode(replace(second, leg=Leg.DECODE, kv_transfer_params=ahead))
        answer = asyncio.create_task(_chunks(leg))
        await _waits_at(engines[DECODE], 1)
        leg.cancel("its client left")
        assert (await answer)[-1].finish is FinishReason.CANCELLED
        await _waits_at(engines[DECODE], 0)
        await engines[DECODE].complete(prompt_of(702), max_tokens=8)  # its steps could free the blocks
        assert await _used(engines[DECODE]) > 0
        await _chunks(await prefill(second))
        await _nothing_waits(engines[DECODE])


async def _start_push(engines: dict[int, VllmServer]) -> None:
    for worker_id, role in ((PREFILL, "kv_producer"), (DECODE, "kv_consumer")):
        await engines[worker_id].kill()
        await engines[worker_id].start(kv_transfer=_nixl(role, connector="NixlPushConnector"))


async def _chunks(stream: EngineStream) -> list[EngineChunk]:
    return [chunk async for chunk in stream]


async def _before(engines: dict[int, VllmServer], kvrouter: Fleet) -> Frontend:
    for worker_id, role in ((PREFILL, "prefill"), (DECODE, "decode")):
        await companion(kvrouter, engines[worker_id], worker_id, "--role", role)
    frontend = await kvrouter.frontend()
    await until_feeds(frontend, {PREFILL: "live", DECODE: "live"})
    return frontend


async def _loses_its_prefill_engine(
    engines: dict[int, VllmServer], frontend: Frontend, prompt: list[int]
) -> httpx.Response:
    """A request whose prefill engine dies while decode waits for its turn."""
    async with _is_busy(engines[DECODE]):
        asking = asyncio.create_task(complete(frontend, prompt, max_tokens=8))
        await _waits_at(engines[DECODE], 1)
        await engines[PREFILL].kill()
    return await asking


async def _is_right(engine: VllmServer, answer: httpx.Response, prompt: list[int]) -> None:
    got = answer.raise_for_status().json()
    direct = await engine.complete(prompt, max_tokens=8)
    assert got["choices"][0]["text"] == direct["choices"][0]["text"]
    assert got["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"] == 8


@asynccontextmanager
async def _adapter(engine: VllmServer, role: Role) -> AsyncIterator[Callable[[Any], Awaitable[EngineStream]]]:
    """An engine as its worker has it."""
    at = AttachSpec(kind="vllm", worker_id=WorkerId(9), url=engine.url, wait_s=60.0, role=role)
    attached = await attach(at)
    try:
        yield attached.engine.submit
    finally:
        await attached.engine.stop()


@asynccontextmanager
async def _is_busy(engine: VllmServer) -> AsyncIterator[None]:
    """The engine has its hands full, until its client leaves."""
    body = {**chat_body("Go on. " * 5), "max_tokens": 1800, "ignore_eos": True, "stream": True}
    async with engine.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        yield


async def _fetched(frontend: Frontend, worker_id: int) -> dict[str, Any]:
    for worker in (await frontend.fleet())["workers"]:
        if worker["worker_id"] == worker_id:
            found: dict[str, Any] | None = worker["ranks"][0]["kv_transfers"]
            return found or {"transfers": None, "bytes": 0, "seconds": 0, "failed": 0}
    raise AssertionError(f"worker {worker_id} is not on the page")


async def _sample(engine: VllmServer, name: str, label: str = "") -> float:
    page = (await engine.http.get("/metrics")).raise_for_status().text
    (value,) = (
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith(name + "{") and label in line
    )
    return value


async def _computed(engine: VllmServer) -> float:
    """The prompt tokens of all calls that it has answered."""
    return await _sample(engine, "vllm:request_prompt_tokens_sum")


async def _fetched_tokens(engine: VllmServer) -> float:
    """The prompt tokens that came from another engine."""
    return await _sample(engine, "vllm:prompt_tokens_by_source_total", '"external_kv_transfer"')


def _said(answer: dict[str, Any]) -> list[object]:
    """What an answer says and how it ends, without the names that its engine made up."""
    said: list[object] = []
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        said.append((message["content"], calls, choice["finish_reason"]))
    return said


async def _used(engine: VllmServer) -> float:
    """The share of its blocks that requests hold, or that wait to be fetched."""
    return await _sample(engine, "vllm:kv_cache_usage_perc")


async def _nothing_waits(engine: VllmServer, *, limit_s: float = FREED_WITHIN_S) -> None:
    async def is_free() -> bool:
        return await _used(engine) == 0

    await eventually(is_free, limit_s=limit_s)


async def _waits_at(engine: VllmServer, n: int) -> None:
    async def so_many() -> bool:
        return await _sample(engine, "vllm:num_requests_waiting") == n

    await eventually(so_many)
