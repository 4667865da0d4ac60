"""A real vLLM engine is killed in mid-answer: plain text goes on at the other one, and nobody notices."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engines.vllm_server import VllmServer
from tests.engines.words import Told, beside, chat_body, lines_of, until_feeds
from tests.support.processes import Fleet, Frontend

ANSWER_TOKENS = 600
KILL_AT_CHARS = 400
SEAM_CHARS = 220
"""How long the stop string is that begins before the engine is killed, and ends after that."""

QUESTION = "Tell a story of blocks that fill up, one after the other. "

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Pair:
    """Two engines, and a frontend before them."""

    engines: dict[int, VllmServer]
    frontend: Frontend

    async def whole(self, body: dict[str, object]) -> Told:
        """The answer of an engine that is asked directly."""
        return await _told(self.engines[1], body)

    async def killed(self, body: dict[str, object], at_chars: int) -> Told:
        """The answer through the frontend, whose engine is killed once so many characters have come."""
        told, is_killed = Told(), False
        async for answer, line in lines_of(self.frontend.http, "/v1/chat/completions", body):
            told.take(line)
            if len(told.text) >= at_chars and not is_killed:
                is_killed = True
                await self.engines[int(answer.headers["x-kvrouter-decode-worker"])].kill()
        assert is_killed
        return told


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(engine_folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    """Two engines with equal weights."""
    both = {number: VllmServer(engine_folder, f"vllm-{number}", core=number - 1) for number in (1, 2)}
    try:
        yield both
    finally:
        for engine in both.values():
            await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def pair(engines: dict[int, VllmServer], kvrouter: Fleet) -> Pair:
    """Both engines alive, and attached."""
    for engine in engines.values():
        if not engine.is_running:
            await engine.start()
    for number, engine in engines.items():
        await beside(kvrouter, engine, number)
    frontend = await kvrouter.frontend()
    await until_feeds(frontend, dict.fromkeys(engines, "live"))
    return Pair(engines, frontend)


async def test_a_greedy_answer_goes_on_to_the_same_text(pair: Pair) -> None:
    body = _long(stream_options={"include_usage": True})
    whole = await pair.whole(body)
    got = await pair.killed(body, KILL_AT_CHARS)
    assert got.error is None
    assert got.text == whole.text
    assert got.finish == whole.finish == "length"
    assert len(got.ids) == 1
    assert got.usage is not None
    assert got.usage["completion_tokens"] == ANSWER_TOKENS


async def test_a_stop_string_across_the_seam_ends_the_answer_where_it_should(pair: Pair) -> None:
    text = (await pair.whole(_long())).text
    begin = KILL_AT_CHARS
    stop = text[begin : begin + SEAM_CHARS]
    assert text.find(stop) == begin
    body = _long(stop=[stop])
    whole = await pair.whole(body)
    assert whole.text == text[:begin]
    # The engine holds back as much as could be the stop string: it is that far ahead of its client.
    got = await pair.killed(body, begin - SEAM_CHARS + 40)
    assert got.error is None
    assert got.text == whole.text
    assert got.finish == whole.finish == "stop"


@pytest.mark.parametrize(
    "extra",
    [{"frequency_penalty": 0.5}, {"response_format": {"type": "json_object"}}],
    ids=["penalty", "json"],
)
async def test_what_nobody_could_go_on_with_ends_with_a_clear_error(
    pair: Pair, extra: dict[str, object]
) -> None:
    body = _long(**extra)
    whole = await pair.whole(body)
    got = await pair.killed(body, min(KILL_AT_CHARS, len(whole.text) // 3))
    assert got.error is not None
    assert got.error["code"] == "worker_failed"
    assert "cannot go on elsewhere" in got.error["message"]
    assert whole.text.startswith(got.text)
    assert got.finish is None


def _long(**body: object) -> dict[str, object]:
    return chat_body(QUESTION, max_tokens=ANSWER_TOKENS, ignore_eos=True, **body)


async def _told(engine: VllmServer, body: dict[str, object]) -> Told:
    told = Told()
    async for _, line in lines_of(engine.http, "/v1/chat/completions", body):
        told.take(line)
    return told
