"""What is asked of a second engine, and what never is: a client gets one answer, and no part of it twice."""

import json

import pytest

from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.transports.requests.port import StreamBroken
from tests.frontend.unit.test_frontend_passthrough import ROLE, event, goes_on, piece, streams, taking
from tests.testing.frontend_harness import running_frontend, token_ids
from tests.testing.router_harness import MODEL
from tests.testing.scripted_transport import ScriptedStream

BODY = b'{ "model": "%b", "messages": [{"role":"user","content":"hi"}], "odd" : 1.0 }' % MODEL.encode()
WHOLE = b'{ "id": "theirs", "odd" : 1.50 }\n'


async def test_an_answer_without_bytes_is_retried_with_the_same_body() -> None:
    def script(stream: ScriptedStream) -> None:
        if stream.request.attempt == 0:
            stream.feed(StreamBroken("the engine answered 500: out of memory"))
        else:
            stream.feed(EngineChunk(raw=WHOLE, finish=FinishReason.STOP))

    async with running_frontend(taking(1), taking(2), script=script) as frontend:
        response = await frontend.http.post("/v1/chat/completions", content=BODY)
        assert (response.status_code, response.content) == (200, WHOLE)
        first, second = frontend.plane.opened
        assert first.address != second.address
        assert first.request.call == second.request.call
        assert first.cancelled_for is not None, "whatever still runs there is cancelled"
        assert frontend.harness.booked() == 0


async def test_a_broken_answer_is_not_retried() -> None:
    def script(stream: ScriptedStream) -> None:
        stream.feed(EngineChunk(raw=WHOLE[:9]))
        stream.die()

    async with running_frontend(taking(1), taking(2), script=script) as frontend:
        response = await frontend.http.post("/v1/chat/completions", content=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_failed")
        assert len(frontend.plane.opened) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_sent_at_most_as_often_as_its_tries_allow(stream: bool) -> None:
    async with running_frontend(*map(taking, range(1, 7)), script=ScriptedStream.die) as frontend:
        response = await frontend.chat(stream=stream)
        assert response.json()["error"]["code"] == "worker_failed"
        assert len({each.address for each in frontend.plane.opened}) == len(frontend.plane.opened) == 3


async def test_a_stream_without_bytes_is_retried() -> None:
    def script(stream: ScriptedStream) -> None:
        (streams("Paris") if stream.request.attempt else ScriptedStream.die)(stream)

    async with running_frontend(taking(1), taking(2), script=script) as frontend:
        response = await frontend.chat(stream=True)
        assert response.content.startswith(event("") + event("Paris"))
        assert len(frontend.plane.opened) == 2


async def test_a_stream_broken_after_its_first_event_is_not_restarted() -> None:
    def script(stream: ScriptedStream) -> None:
        if stream.request.attempt == 0:
            stream.feed(ROLE)
            stream.die()
        else:
            streams("Paris")(stream)

    async with running_frontend(taking(1), taking(2), script=script) as frontend:
        response = await frontend.chat(stream=True)
        assert response.content.startswith(event(""))
        assert response.content.count(event("")) == 1
        assert b'"code":"worker_failed"' in response.content.replace(b" ", b"")
        assert len(frontend.plane.opened) == 1


async def test_a_second_engine_resumes_from_tokens_not_from_the_call() -> None:
    """The call would begin the answer again."""

    def script(stream: ScriptedStream) -> None:
        if stream.request.attempt == 0:
            stream.feed(ROLE, piece("Par"))
            stream.die()
        else:
            goes_on("is")(stream)

    async with running_frontend(taking(1), taking(2), script=script) as frontend:
        response = await frontend.chat(stream=True)
        assert response.content.count(b"Par") == 1
        second = await frontend.plane.wait_for(Leg.AGGREGATED, nth=1)
        assert second.request.resumed_tokens == len(token_ids("Par"))
        last = json.loads(response.content.decode().split("\n\n")[-3].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "stop"
