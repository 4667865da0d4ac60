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
from tests.support.fleets import MODEL, card, decode_card, prefill_card
from tests.support.front import House, open_house, says, takeover_instructions
from tests.support.scripted_transport import ScriptedStream

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
async def asking(house: House, path: str = PATHS[0]) -> AsyncIterator[Reader]:
    async with asyncio.timeout(20), house.http.stream("POST", path, json=BODY) as response:
        yield Reader(response)


@pytest.mark.parametrize("path", PATHS)
async def test_a_silent_engines_client_gets_comments_and_then_its_bytes(path: str) -> None:
    async with open_house(taking(1), settings=OFTEN) as house, asking(house, path) as client:
        assert client.response.status_code == 200
        await client.until(SSE_KEEP_ALIVE, n=3)
        (stream,) = house.plane.opened
        stream.feed(piece("Par"))
        await client.until(event("Par"))
        client.read = b""
        await client.until(SSE_KEEP_ALIVE, n=2)
        streams("is")(stream)
        assert await client.rest() == event("") + event("is") + STOP
    assert house.bench.booked() == 0


async def test_a_request_that_waits_for_its_place_has_comments() -> None:
    async with open_house(taking(1), settings=OFTEN, script=streams("Par")) as house:
        house.plane.accepts.clear()
        async with asking(house) as client:
            await client.until(SSE_KEEP_ALIVE, n=2)
            assert not house.plane.opened
            house.plane.accepts.set()
            assert await client.rest() == event("") + event("Par") + STOP


async def test_a_request_prefilled_by_another_worker_has_comments() -> None:
    async with open_house(prefill_card(1), decode_card(2), settings=OFTEN) as house, asking(house) as client:
        await client.until(SSE_KEEP_ALIVE, n=2)
        assert [leg for leg, _ in house.plane.legs()] == [Leg.PREFILL]
        takeover_instructions(house.plane.opened[0])
        says("ok")(await house.plane.wait_for(Leg.DECODE))
        assert b'"content":"ok"' in await client.rest()


async def test_a_worker_lost_behind_a_comment_is_replaced() -> None:
    async with open_house(taking(1), taking(2), settings=OFTEN) as house, asking(house) as client:
        await client.until(SSE_KEEP_ALIVE)
        house.plane.opened[0].die()
        streams("Par")(await house.plane.wait_for(Leg.AGGREGATED, nth=1))
        assert await client.rest() == event("") + event("Par") + STOP


async def test_an_error_after_a_comment_is_the_last_event() -> None:
    async with open_house(taking(1), settings=OFTEN) as house, asking(house) as client:
        await client.until(SSE_KEEP_ALIVE)
        house.plane.opened[0].feed(InvalidRequest("not that one", param="theirs"))
        last = await client.rest()
    assert json.loads(last.removeprefix(b"data: "))["error"]["param"] == "theirs"


async def test_an_error_before_the_first_comment_has_a_status() -> None:
    def refuses(stream: ScriptedStream) -> None:
        stream.feed(InvalidRequest("not that one"))

    rarely = FrontendSettings(sse_keep_alive_s=60.0)
    async with open_house(taking(1), settings=rarely, script=refuses) as house, asking(house) as client:
        assert client.response.status_code == 400
        await client.response.aread()
    async with open_house(settings=rarely) as house, asking(house) as client:
        assert client.response.status_code == 503
        assert client.response.headers["retry-after"]
        await client.response.aread()


async def test_no_comment_is_written_inside_an_event() -> None:
    async with open_house(taking(1), settings=OFTEN) as house, asking(house) as client:
        stream = await house.plane.wait_for(Leg.AGGREGATED)
        whole = event("Par")
        stream.feed(EngineChunk(raw=whole[:30], text_chars=0))
        await client.until(whole[:30])
        async with asking(house) as clock:
            await clock.until(SSE_KEEP_ALIVE, n=3)
        stream.feed(
            EngineChunk(raw=whole[30:], text_chars=3), EngineChunk(raw=STOP, finish=FinishReason.STOP)
        )
        await client.rest()
    assert whole + STOP in client.read


@pytest.mark.parametrize("by", [taking(1), card(1)])
async def test_complete_answers_have_no_comments(by: WorkerCard) -> None:
    async with open_house(by, settings=OFTEN) as house, asyncio.TaskGroup() as tasks:
        whole = tasks.create_task(house.chat())
        stream = await house.plane.wait_for(Leg.AGGREGATED)
        async with asking(house) as clock:
            await clock.until(SSE_KEEP_ALIVE, n=2)
        if by.takes_calls:
            stream.feed(EngineChunk(raw=b'{"choices":[]}', finish=FinishReason.STOP))
        else:
            says("ok")(stream)
        assert (await whole).json()["choices"] is not None
