"""What an engine writes at once may be longer than any message of a request plane."""

from collections.abc import AsyncIterator

import pytest

from kvrouter.engines.openai.engine import ServedEngine, ZmqEvents
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.vllm.events import decode
from tests.support.engine_answers import vllm_ways
from tests.support.engine_laws import ends_once, read
from tests.support.engine_legs import written
from tests.support.engine_server import JSON, Answer, event_of, scripted_engine, sse
from tests.support.wires import WIRES, Wire

LONG = {"choices": [{"index": 0, "text": "x" * 3_000_000, "finish_reason": None}]}
LAST = {"choices": [{"index": 0, "text": "y", "finish_reason": "stop"}]}


@pytest.fixture(params=sorted(WIRES))
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[Wire]:
    of = await WIRES[request.param]()
    yield of
    await of.close()


@pytest.mark.parametrize("streams", [True, False])
async def test_a_long_answer_arrives_byte_for_byte_over_every_plane(wire: Wire, streams: bool) -> None:
    body = sse(LAST, LONG, LAST) if streams else event_of({**LONG, **LAST, "more": LONG})[6:-2]
    async with scripted_engine() as scripted:
        scripted.answers.append(Answer((body,)) if streams else Answer((body,), content_type=JSON))
        server = EngineServer(scripted.url)
        await server.open()
        engine = ServedEngine(server, vllm_ways(), ZmqEvents({}, decode, 32))
        address, _ = await wire.serve(engine)
        chunks = await read(await wire.transport.open(address, written([1, 2], stream=streams)))
        await engine.stop()
    assert b"".join(chunk.raw for chunk in chunks) == body
    assert ends_once(chunks)
