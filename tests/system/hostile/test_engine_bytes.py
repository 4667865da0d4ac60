"""Bytes of an engine are as untrusted as a client's: small ones that would become millions of objects."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from kvrouter.core.requests import EngineChunk
from kvrouter.engines.openai.metrics import PAGE_MAX_BYTES, read_metrics
from kvrouter.engines.openai.server import ANSWER_MAX_BYTES, EngineServer
from kvrouter.engines.openai.sse import AnswerReading
from kvrouter.engines.openai.streams import SseStream, WholeStream
from kvrouter.transports.requests.port import EngineStream, StreamBroken, WorkerUnreachable
from tests.testing.scripted_engine import JSON, ScriptedAnswer, ScriptedEngine

PIECE = 1 << 20
COMPLETIONS = "/v1/completions"


def pieces(head: bytes, unit: bytes, size_bytes: int, end: bytes) -> tuple[bytes, ...]:
    piece = unit * (PIECE // len(unit))
    return (head, *([piece] * (size_bytes // len(piece))), end)


OBJECTS = pieces(b'{"choices":[', b"{},", 60 << 20, b"{}]}")
TOKENS = pieces(b'{"choices":[{"token_ids":[', b"1,", 60 << 20, b"1]}]}")
EVENT = pieces(b'data: {"choices":[', b"{},", 15 << 20, b"{}]}\n\ndata: [DONE]\n\n")


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    scripted = ScriptedEngine()
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest.fixture
async def server(engine: ScriptedEngine) -> AsyncIterator[EngineServer]:
    asked = EngineServer(engine.url)
    await asked.open()
    yield asked
    await asked.close()


async def read(stream: EngineStream) -> list[EngineChunk]:
    return [chunk async for chunk in stream]


class Blocks:
    """How many blocks of memory Python holds at most more than at the beginning, objects nearly all."""

    def __enter__(self) -> "Blocks":
        tracemalloc.start()
        return self

    @property
    def now_bytes(self) -> int:
        return tracemalloc.get_traced_memory()[0]

    def __exit__(self, *_exc: object) -> None:
        self.peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


@pytest.mark.parametrize("answer", [OBJECTS, TOKENS], ids=["choices", "token_ids"])
async def test_a_whole_answers_memory_is_bounded_by_its_bytes(
    engine: ScriptedEngine, server: EngineServer, answer: tuple[bytes, ...]
) -> None:
    engine.answers.append(ScriptedAnswer(answer, content_type=JSON))
    with Blocks() as held:
        stream = WholeStream(server.ask(COMPLETIONS, b"{}"), AnswerReading(passes_raw=True))
        try:
            await read(stream)
        except StreamBroken as error:
            assert "more" in error.message  # noqa: PT017 - one that passes unread is fine too
    size_bytes = sum(map(len, answer))
    print(f"{size_bytes >> 20} MiB of an answer: {held.peak_bytes >> 20} MiB at most")
    assert held.peak_bytes < 4 * size_bytes


async def test_a_too_long_answer_leaves_no_memory_behind(
    engine: ScriptedEngine, server: EngineServer
) -> None:
    """An error's traceback holds what its frames hold, until the garbage collector comes by."""
    engine.answers.append(ScriptedAnswer(pieces(b'{"a":"', b"a", ANSWER_MAX_BYTES, b'"}'), content_type=JSON))
    with Blocks() as held:
        with pytest.raises(StreamBroken, match="bytes allowed") as failed:
            await server.ask(COMPLETIONS, b"{}")
        assert failed.tb is not None
        print(f"{held.now_bytes >> 10} KiB stay")
        assert held.now_bytes < 4 * PIECE


async def test_an_events_memory_is_bounded_by_its_bytes(engine: ScriptedEngine, server: EngineServer) -> None:
    engine.answers.append(ScriptedAnswer(EVENT))
    with Blocks() as held:
        stream = SseStream(server.post(COMPLETIONS, b"{}"), AnswerReading(passes_raw=True))
        try:
            await read(stream)
        except StreamBroken as error:
            assert error.message  # noqa: PT017 - one that passes unread is fine too
    size_bytes = sum(map(len, EVENT))
    print(f"{size_bytes >> 20} MiB of an event: {held.peak_bytes >> 20} MiB at most")
    assert held.peak_bytes < 8 * size_bytes


async def test_metrics_and_errors_are_read_up_to_a_limit(
    engine: ScriptedEngine, server: EngineServer
) -> None:
    engine.pages["/metrics"] = ScriptedAnswer(pieces(b"", b"other 1\nwanted_x 2\nwanted 3\n", 60 << 20, b""))
    engine.pages["/v1/models"] = ScriptedAnswer(OBJECTS, status=500)
    turns = 0

    async def bystander() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(bystander())
    with Blocks() as held:
        page = await server.metrics(("wanted",))
        assert page is not None
        assert server.has_long_metrics
        assert set(read_metrics(page, ("wanted",))) == {"wanted"}
        with pytest.raises(WorkerUnreachable, match="answered 500"):
            await server.look("/v1/models")
    task.cancel()
    print(f"{held.peak_bytes >> 10} KiB at most, {turns} turns of the loop")
    assert held.peak_bytes < PAGE_MAX_BYTES
