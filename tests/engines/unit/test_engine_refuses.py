"""An engine that refuses connections while its answers are open: what it still answers goes on, and what it
has not begun, or falls silent, is lost within a few probes.
"""

import asyncio

import pytest

from kvrouter.core.requests import EngineRequest, FinishReason, Leg
from kvrouter.engines.openai.engine import PROBE_EACH_S, REFUSED_PROBES, REFUSED_PROBES_DRAINING
from kvrouter.transports.requests.port import EngineStream, StreamBroken
from tests.testing.engine_requests import short_completion
from tests.testing.probed_engine import probed_engine, wait_for_probes
from tests.testing.scripted_engine import AnswerEnd, ScriptedAnswer, event_of, scripted_engine

TOKEN = event_of({"choices": [{"index": 0, "text": "x", "token_ids": [1], "finish_reason": None}]})
LAST = event_of({"choices": [{"index": 0, "text": "x", "token_ids": [1], "finish_reason": "stop"}]})
GENTLE = 10_000
"""More probes than a test sees: so does an engine that closes its port first and then ends its answers."""


async def first(stream: EngineStream) -> None:
    await anext(aiter(stream))


@pytest.mark.parametrize(
    ("request_", "ends"),
    [
        (short_completion(), AnswerEnd.NO_HEADERS),
        (short_completion(), AnswerEnd.HELD),
        (short_completion(stream=False), AnswerEnd.NO_HEADERS),
        (short_completion(stream=False), AnswerEnd.HELD),
        (short_completion(kind=Leg.PREFILL), AnswerEnd.NO_HEADERS),
    ],
)
async def test_leg_without_an_answer_breaks_when_connections_are_refused(
    request_: EngineRequest, ends: AnswerEnd
) -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(ScriptedAnswer(ends=ends))
        reading = asyncio.create_task(first(await watched.engine.submit(request_)))
        await scripted.called()
        await scripted.refuse()
        with pytest.raises(StreamBroken, match="refuses connections"):
            await reading
        await watched.until(answers=False)


async def test_silent_stream_breaks_when_connections_are_refused() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(ScriptedAnswer((TOKEN,), ends=AnswerEnd.HELD))
        stream = await watched.engine.submit(short_completion())
        await first(stream)
        reading = asyncio.create_task(first(stream))
        await scripted.refuse()
        with pytest.raises(StreamBroken, match="refuses connections"):
            await reading


async def test_active_stream_goes_on_to_its_end_while_connections_are_refused() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted, refused_probes=50) as watched:
        scripted.answers.append(ScriptedAnswer((TOKEN,), ends=AnswerEnd.HELD))
        stream = await watched.engine.submit(short_completion())
        await first(stream)
        await scripted.refuse()
        await watched.until(answers=False)
        for _ in range(40):  # 0.4 s, of which 0.25 s without a piece would be too long
            reading = asyncio.create_task(first(stream))
            await asyncio.sleep(0.01)
            await scripted.write(TOKEN)
            await reading
        await scripted.write(LAST + event_of("[DONE]"))
        scripted.release()
        assert [chunk.finish async for chunk in stream][-1] is FinishReason.STOP


async def test_slow_reader_gets_the_whole_answer_while_connections_are_refused() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(ScriptedAnswer((TOKEN,), ends=AnswerEnd.HELD))
        stream = await watched.engine.submit(short_completion())
        await first(stream)
        await scripted.write(LAST + event_of("[DONE]"))
        await scripted.refuse()
        await watched.until(answers=False)
        for _ in range(20):  # nobody reads for longer than an answer may be silent
            await asyncio.sleep(0.01)
        rest = [chunk async for chunk in stream]
        assert b"".join(chunk.raw for chunk in rest) == LAST.replace(b"[1]", b"null") + event_of("[DONE]")
        assert [token for chunk in rest for token in chunk.token_ids] == [1]
        assert rest[-1].finish is FinishReason.STOP


async def test_unanswered_leg_is_waited_for_under_a_high_probe_limit() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted, refused_probes=GENTLE) as watched:
        scripted.answers.append(
            ScriptedAnswer((TOKEN + LAST + event_of("[DONE]"),), ends=AnswerEnd.NO_HEADERS)
        )
        reading = asyncio.create_task(first(await watched.engine.submit(short_completion())))
        await scripted.called()
        await scripted.refuse()
        await watched.until(answers=False)
        scripted.release()
        await reading


async def test_an_engine_that_answers_its_probes_with_errors_keeps_its_legs() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        scripted.answers.append(
            ScriptedAnswer((TOKEN + LAST + event_of("[DONE]"),), ends=AnswerEnd.NO_HEADERS)
        )
        reading = asyncio.create_task(first(await watched.engine.submit(short_completion())))
        await scripted.called()
        scripted.set_page("/metrics", "", status=500)
        await wait_for_probes(scripted, 3 * REFUSED_PROBES)
        scripted.release()
        await reading


def test_refused_connection_limits_are_the_documented_seconds() -> None:
    assert (REFUSED_PROBES - 1) * PROBE_EACH_S == 2.0
    assert (REFUSED_PROBES_DRAINING - 1) * PROBE_EACH_S == 30.0
