"""What an engine writes at once may be longer than any message of a request plane."""

from collections.abc import AsyncIterator

import pytest

from kvrouter.engines.openai.engine import ServedEngine, ZmqEvents
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.vllm.events import decode
from tests.testing.engine_laws import ends_once, read
from tests.testing.engine_requests import completion_request
from tests.testing.probed_engine import vllm_client
from tests.testing.request_transports import REQUEST_TRANSPORTS, RequestTransportSetup
from tests.testing.scripted_engine import JSON, ScriptedAnswer, event_of, scripted_engine, sse

LONG = {"choices": [{"index": 0, "text": "x" * 3_000_000, "finish_reason": None}]}
LAST = {"choices": [{"index": 0, "text": "y", "finish_reason": "stop"}]}


@pytest.fixture(params=sorted(REQUEST_TRANSPORTS))
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[RequestTransportSetup]:
    of = await REQUEST_TRANSPORTS[request.param]()
    yield of
    await of.close()


@pytest.mark.parametrize("streams", [True, False])
async def test_a_long_answer_arrives_byte_for_byte_over_every_plane(
    setup: RequestTransportSetup, streams: bool
) -> None:
    body = sse(LAST, LONG, LAST) if streams else event_of({**LONG, **LAST, "more": LONG})[6:-2]
    async with scripted_engine() as scripted:
        scripted.answers.append(
            ScriptedAnswer((body,)) if streams else ScriptedAnswer((body,), content_type=JSON)
        )
        server = EngineServer(scripted.url)
        await server.open()
        engine = ServedEngine(server, vllm_client(), ZmqEvents({}, decode, 32))
        address, _ = await setup.serve(engine)
        chunks = await read(await setup.transport.open(address, completion_request([1, 2], stream=streams)))
        await engine.stop()
    assert b"".join(chunk.raw for chunk in chunks) == body
    assert ends_once(chunks)
