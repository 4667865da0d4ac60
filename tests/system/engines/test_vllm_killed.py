"""A real vLLM engine is killed in mid-answer: plain text goes on at the other one, and nobody notices."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.processes import Fleet
from tests.system.engines.calls import stopped, two_of
from tests.system.engines.killing import ANSWER_TOKENS, KILL_AT_CHARS, Killing, killing, long_chat
from tests.system.engines.vllm_server import VllmServer

SEAM_CHARS = 220
"""How long the stop string is that begins before the engine is killed, and ends after that."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    """Two engines with equal weights."""
    async with stopped(two_of(VllmServer, engine_folder)) as both:
        yield both


@pytest_asyncio.fixture(loop_scope="module")
async def both(engines: dict[int, VllmServer], kvrouter: Fleet) -> Killing:
    """Both of them alive."""
    return await killing(engines, kvrouter)


async def test_a_greedy_answer_goes_on_to_the_same_text(both: Killing) -> None:
    body = long_chat(stream_options={"include_usage": True})
    whole = await both.whole(body)
    got = await both.killed(body, KILL_AT_CHARS)
    assert got.error is None
    assert got.text == whole.text
    assert got.finish == whole.finish == "length"
    assert len(got.ids) == 1
    assert got.usage is not None
    assert got.usage["completion_tokens"] == ANSWER_TOKENS


async def test_a_stop_string_across_the_seam_ends_the_answer_where_it_should(both: Killing) -> None:
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
    "extra",
    [{"frequency_penalty": 0.5}, {"response_format": {"type": "json_object"}}],
    ids=["penalty", "json"],
)
async def test_what_nobody_could_go_on_with_ends_with_a_clear_error(
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
