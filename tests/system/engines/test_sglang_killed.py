"""A real SGLang engine is killed in mid-answer, and comes back."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.processes import Fleet, eventually
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
    COMPLETION,
    KILL_AT_CHARS,
    QUESTION,
    Killing,
    killing,
    long_chat,
)
from tests.system.engines.real_engine import MODEL
from tests.system.engines.sglang_server import PAGE_SIZE, SglangServer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, SglangServer]]:
    """Two engines with equal weights."""
    async with stopped(two_of(SglangServer, engine_folder)) as both:
        yield both


@pytest_asyncio.fixture(loop_scope="module")
async def both(engines: dict[int, SglangServer], kvrouter: Fleet) -> Killing:
    """Both of them alive."""
    return await killing(engines, kvrouter)


async def test_a_completion_goes_on_to_the_same_text(both: Killing) -> None:
    body = _long_completion(stream_options={"include_usage": True})
    whole = await both.whole(body, COMPLETION)
    got = await both.killed(body, KILL_AT_CHARS, COMPLETION)
    assert got.error is None
    assert got.text == whole.text
    assert got.finish == whole.finish == "length"
    assert len(got.ids) == 1
    assert got.usage is not None
    assert got.usage["completion_tokens"] == ANSWER_TOKENS


async def test_a_chat_whose_tokens_nobody_knows_ends_with_a_clear_error(both: Killing) -> None:
    body = long_chat()
    whole = await both.whole(body)
    got = await both.killed(body, KILL_AT_CHARS)
    assert got.error is not None
    assert got.error["code"] == "worker_failed"
    assert "cannot go on elsewhere" in got.error["message"]
    assert whole.text.startswith(got.text)
    assert got.finish is None


async def test_an_engine_that_was_started_again_is_known_to_be_empty(both: Killing) -> None:
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


async def test_its_load_is_seen(both: Killing) -> None:
    """Of an answer that the router does not know of."""
    body = _long_completion(stream=True)
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


def _long_completion(**body: object) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": QUESTION,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        **body,
    }
