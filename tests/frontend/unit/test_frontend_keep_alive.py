"""Comments of the router's own in streams that are silent: before the first token, in mid-answer, never in
mid-event.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvrouter.core.errors import InvalidRequest
from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.core.workers import WorkerCard
from kvrouter.frontend.keep_alive import SSE_KEEP_ALIVE
from kvrouter.settings.tree import FrontendSettings
from tests.frontend.unit.test_frontend_passthrough import STOP, event, piece, streams, taking
from tests.testing.frontend_harness import FrontendHarness, handoff_script, running_frontend, text_answer
from tests.testing.router_harness import MODEL, card, decode_card, prefill_card
from tests.testing.scripted_transport import ScriptedStream

OFTEN = FrontendSettings(sse_keep_alive_s=0.02)
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "input": "hi", "stream": True}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


class Reader:
    """A client that reads its stream bit by bit."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._pieces = response.aiter_raw()
        self.read = b""

    async def until(self, wanted: bytes, *, n: int = 1) -> None:
        while self.read.count(wanted) < n:
            self.read += await anext(self._pieces)

    async def rest(self) -> bytes:
        async for more in self._pieces:
            self.read += more
        return self.read.replace(SSE_KEEP_ALIVE, b"")


@asynccontextmanager
async def asking(frontend: FrontendHarness, path: str = PATHS[0]) -> AsyncIterator[Reader]:
    async with asyncio.timeout(60), frontend.http.stream("POST", path, json=BODY) as response:
        yield Reader(response)


@pytest.mark.parametrize("path", PATHS)
async def test_clients_of_a_silent_engine_get_comments_then_its_bytes(path: str) -> None:
    async with running_frontend(taking(1), settings=OFTEN) as frontend, asking(frontend, path) as client:
        assert client.response.status_code == 200
        await client.until(SSE_KEEP_ALIVE, n=3)
        (stream,) = frontend.plane.opened
        stream.feed(piece("Par"))
        await client.until(event("Par"))
        client.read = b""
        await client.until(SSE_KEEP_ALIVE, n=2)
        streams("is")(stream)
        assert await client.rest() == event("") + event("is") + STOP
    assert frontend.harness.booked() == 0


async def test_a_request_waiting_for_acceptance_gets_comments() -> None:
    async with running_frontend(taking(1), settings=OFTEN, script=streams("Par")) as frontend:
        frontend.plane.accepts.clear()
        async with asking(frontend) as client:
            await client.until(SSE_KEEP_ALIVE, n=2)
            assert not frontend.plane.opened
            frontend.plane.accepts.set()
            assert await client.rest() == event("") + event("Par") + STOP


async def test_a_request_prefilled_by_another_worker_has_comments() -> None:
    async with (
        running_frontend(prefill_card(1), decode_card(2), settings=OFTEN) as frontend,
        asking(frontend) as client,
    ):
        await client.until(SSE_KEEP_ALIVE, n=2)
        assert [leg for leg, _ in frontend.plane.legs()] == [Leg.PREFILL]
        handoff_script(frontend.plane.opened[0])
        text_answer("ok")(await frontend.plane.wait_for(Leg.DECODE))
        assert b'"content":"ok"' in await client.rest()


async def test_a_worker_lost_after_a_comment_is_replaced() -> None:
    async with running_frontend(taking(1), taking(2), settings=OFTEN) as frontend, asking(frontend) as client:
        await client.until(SSE_KEEP_ALIVE)
        frontend.plane.opened[0].die()
        streams("Par")(await frontend.plane.wait_for(Leg.AGGREGATED, nth=1))
        assert await client.rest() == event("") + event("Par") + STOP


async def test_an_error_after_a_comment_is_the_last_event() -> None:
    async with running_frontend(taking(1), settings=OFTEN) as frontend, asking(frontend) as client:
        await client.until(SSE_KEEP_ALIVE)
        frontend.plane.opened[0].feed(InvalidRequest("not that one", param="theirs"))
        last = await client.rest()
    assert json.loads(last.removeprefix(b"data: "))["error"]["param"] == "theirs"


async def test_an_error_before_the_first_comment_has_a_status() -> None:
    def refuses(stream: ScriptedStream) -> None:
        stream.feed(InvalidRequest("not that one"))

    rarely = FrontendSettings(sse_keep_alive_s=60.0)
    async with (
        running_frontend(taking(1), settings=rarely, script=refuses) as frontend,
        asking(frontend) as client,
    ):
        assert client.response.status_code == 400
        await client.response.aread()
    async with running_frontend(settings=rarely) as frontend, asking(frontend) as client:
        assert client.response.status_code == 503
        assert client.response.headers["retry-after"]
        await client.response.aread()


async def test_no_comment_is_written_inside_an_event() -> None:
    async with running_frontend(taking(1), settings=OFTEN) as frontend, asking(frontend) as client:
        stream = await frontend.plane.wait_for(Leg.AGGREGATED)
        whole = event("Par")
        stream.feed(EngineChunk(raw=whole[:30], text_chars=0))
        await client.until(whole[:30])
        async with asking(frontend) as clock:
            await clock.until(SSE_KEEP_ALIVE, n=3)
        stream.feed(
            EngineChunk(raw=whole[30:], text_chars=3), EngineChunk(raw=STOP, finish=FinishReason.STOP)
        )
        await client.rest()
    assert whole + STOP in client.read


@pytest.mark.parametrize("by", [taking(1), card(1)])
async def test_complete_answers_have_no_comments(by: WorkerCard) -> None:
    async with running_frontend(by, settings=OFTEN) as frontend, asyncio.TaskGroup() as tasks:
        whole = tasks.create_task(frontend.chat())
        stream = await frontend.plane.wait_for(Leg.AGGREGATED)
        async with asking(frontend) as clock:
            await clock.until(SSE_KEEP_ALIVE, n=2)
        if by.takes_calls:
            stream.feed(EngineChunk(raw=b'{"choices":[]}', finish=FinishReason.STOP))
        else:
            text_answer("ok")(stream)
        assert (await whole).json()["choices"] is not None
