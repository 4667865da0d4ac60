"""A real engine is killed in mid-answer: the answer goes on elsewhere, or ends with a clear error."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.system.engines.calls import (
    cached_tokens,
    complete,
    predicted_tokens,
    prompt_of,
    stopped,
    two_of,
    until_feeds,
    worker_of,
)
from tests.system.engines.killing import (
    ANSWER_TOKENS,
    CHAT,
    COMPLETION,
    KILL_AT_CHARS,
    Killing,
    killing,
    long_chat,
    long_completion,
)
from tests.system.engines.real_engine import RealEngine
from tests.system.engines.sglang_server import PAGE_SIZE, SglangServer
from tests.system.engines.vllm_server import VllmServer
from tests.testing.processes import Fleet, eventually

SEAM_CHARS = 220
"""How long the stop string is that begins before the engine is killed, and ends after that."""

KINDS: dict[str, type[RealEngine]] = {"vllm": VllmServer, "sglang": SglangServer}
GOES_ON = {"vllm": (CHAT, long_chat), "sglang": (COMPLETION, long_completion)}
"""The call of each engine whose tokens the router knows, with its body."""

vllm_alone = pytest.mark.parametrize("kind", ["vllm"], indirect=True)
sglang_alone = pytest.mark.parametrize("kind", ["sglang"], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(kind: str, engine_folder: Path) -> AsyncIterator[dict[int, RealEngine]]:
    """Two engines with equal weights."""
    async with stopped(two_of(KINDS[kind], engine_folder)) as both:
        yield both


@pytest_asyncio.fixture(loop_scope="module")
async def both(engines: dict[int, RealEngine], kvrouter: Fleet) -> Killing:
    """Both of them alive."""
    return await killing(engines, kvrouter)


async def test_a_greedy_answer_resumes_with_the_same_text(kind: str, both: Killing) -> None:
    path, body_of = GOES_ON[kind]
    body = body_of(stream_options={"include_usage": True})
    whole = await both.whole(body, path)
    got = await both.killed(body, KILL_AT_CHARS, path)
    assert got.error is None
    assert got.text == whole.text
    assert got.finish == whole.finish == "length"
    assert len(got.ids) == 1
    assert got.usage is not None
    assert got.usage["completion_tokens"] == ANSWER_TOKENS


@vllm_alone
async def test_a_stop_string_across_a_resume_ends_the_answer(both: Killing) -> None:
    text = (await both.whole(long_chat())).text
    begin = KILL_AT_CHARS
    stop = text[begin : begin + SEAM_CHARS]
    assert text.find(stop) == begin
    body = long_chat(stop=[stop])
    whole = await both.whole(body)
    assert whole.text == text[:begin]
    # The engine holds back as much as could be the stop string: it is that far ahead of its client.
    got = await both.killed(body, begin - SEAM_CHARS + 40)
    assert got.error is None
    assert got.text == whole.text
    assert got.finish == whole.finish == "stop"


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        pytest.param("vllm", {"frequency_penalty": 0.5}, id="penalty"),
        pytest.param("vllm", {"response_format": {"type": "json_object"}}, id="json"),
        pytest.param("sglang", {}, id="chat whose tokens are unknown"),
    ],
    indirect=["kind"],
)
async def test_a_non_resumable_answer_ends_with_a_clear_error(
    both: Killing, extra: dict[str, object]
) -> None:
    body = long_chat(**extra)
    whole = await both.whole(body)
    got = await both.killed(body, min(KILL_AT_CHARS, len(whole.text) // 3))
    assert got.error is not None
    assert got.error["code"] == "worker_failed"
    assert "cannot go on elsewhere" in got.error["message"]
    assert whole.text.startswith(got.text)
    assert got.finish is None


@sglang_alone
async def test_a_restarted_engine_is_known_to_be_empty(both: Killing) -> None:
    prompt = prompt_of(1)
    home = worker_of(await complete(both.frontend, prompt))

    async def is_known() -> bool:
        return await _held_blocks(both, home) >= len(prompt) // PAGE_SIZE

    async def is_forgotten() -> bool:
        return not await is_known()

    await eventually(is_known)
    await both.engines[home].kill()
    await both.engines[home].start()
    await eventually(is_forgotten)
    await until_feeds(both.frontend, {home: "live"})
    prompt += [1, 2]
    answer = await complete(both.frontend, prompt, nvext={"worker_id": home})
    assert worker_of(answer) == home
    assert predicted_tokens(answer, len(prompt), PAGE_SIZE) == cached_tokens(answer) == 0


@sglang_alone
async def test_load_from_requests_outside_the_router_is_reported(both: Killing) -> None:
    """Of an answer that the router does not know of."""
    body = long_completion(stream=True)
    async with both.engines[1].http.stream("POST", COMPLETION, json=body) as answer:
        assert answer.status_code == 200

        async def is_seen() -> bool:
            report = (await _rank(both, 1))["report"]
            return report is not None and report["active_blocks"] > 0

        await eventually(is_seen)


async def _held_blocks(both: Killing, worker_id: int) -> int:
    return int((await _rank(both, worker_id))["index_blocks"])


async def _rank(both: Killing, worker_id: int) -> Any:
    """Its only rank, as the frontend sees it."""
    workers = (await both.frontend.fleet())["workers"]
    (rank,) = next(worker for worker in workers if worker["worker_id"] == worker_id)["ranks"]
    return rank
