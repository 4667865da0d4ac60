"""An engine behind its own server, as the worker beside it has it: legs, loads, silence, a new start."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.core.ids import DpRank, ModelName, RequestId, WorkerId
from kvrouter.core.requests import (
    Bootstrap,
    CallRoute,
    ClientCall,
    EngineChunk,
    EngineRequest,
    FinishReason,
    KvLoss,
    Leg,
    Sampling,
)
from kvrouter.core.workers import LoadReport
from kvrouter.engines.customs.listener import EventsAt
from kvrouter.engines.openai.engine import SILENT_AFTER_LOOKS, Look, ServedEngine, Told
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.port import EngineState, WatchedEngine
from kvrouter.engines.vllm.events import decode
from kvrouter.engines.vllm.facts import RankFacts, VllmFacts
from kvrouter.engines.vllm.ways import VllmWays
from kvrouter.planes.requests.port import StreamBroken, WorkerFull, WorkerUnreachable
from tests.support.engine_heard import Heard
from tests.support.engine_publisher import Publisher, stored_event, vllm_batch
from tests.support.engine_server import JSON, Answer, Ends, ScriptedEngine, event_of, page, scripted_engine
from tests.support.waits import until

R0 = DpRank(0)
METRICS = "/metrics"
STARTED = 1.79528047303e09
STARTED_LINE = "process_start_time_seconds 1.79528047303e+09"

FACTS = VllmFacts(
    version="0.32.0",
    models=("tiny",),
    adapters=(),
    root="tiny-model",
    context_length=2048,
    prefix_caching=True,
    ranks={R0: RankFacts(32, 200)},
    events={},
    started_s=STARTED,
)


@dataclass
class Watched:
    """An attached engine, and all that it told."""

    engine: ServedEngine
    heard: Heard = field(default_factory=Heard)
    loads: list[LoadReport] = field(default_factory=list)
    states: list[EngineState] = field(default_factory=list)

    @property
    def state(self) -> EngineState:
        return self.states[-1] if self.states else EngineState()

    async def until(self, **wanted: object) -> None:
        await until(lambda: all(getattr(self.state, name) == value for name, value in wanted.items()))


@asynccontextmanager
async def attached(
    scripted: ScriptedEngine,
    events_at: Mapping[DpRank, EventsAt] | None = None,
    *,
    started: float | None = STARTED,
    ways: Any = None,
) -> AsyncIterator[Watched]:
    server = EngineServer(scripted.url)
    await server.open()
    engine = ServedEngine(
        server,
        ways or VllmWays(WorkerId(7), FACTS, model="tiny"),
        Told(events_at or {}, decode, 32),
        started=started,
        look_each_s=0.005,
    )
    assert isinstance(engine, WatchedEngine)
    watched = Watched(engine)
    engine.watch(watched.states.append)
    await engine.start(watched.heard.on_events, watched.loads.append)
    try:
        async with asyncio.timeout(60):
            yield watched
    finally:
        await engine.stop()
        await engine.stop()


def leg(*, stream: bool = True, kind: Leg = Leg.AGGREGATED) -> EngineRequest:
    body = b'{"model":"tiny","prompt":"hi","stream":%b}' % (b"true" if stream else b"false")
    return EngineRequest(
        request_id=RequestId("r"),
        attempt=0,
        leg=kind,
        model=ModelName("tiny"),
        token_ids=array("I", [1, 2]),
        sampling=Sampling(max_tokens=3),
        call=ClientCall(route=CallRoute.COMPLETION, body=body, stream=stream, resumable=True),
    )


async def looks(scripted: ScriptedEngine, n: int) -> None:
    """Wait for so many looks more."""
    last = scripted.asked[METRICS] + n
    await until(lambda: scripted.asked[METRICS] >= last)


async def test_its_load_is_told_at_every_look() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        await until(lambda: len(watched.loads) >= 2)
        assert (watched.loads[0].total_blocks, watched.states) == (200, [])
        scripted.replace(
            METRICS, 'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0',
            'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5',
        )  # fmt: skip
        await until(lambda: watched.loads[-1].active_blocks == 100)


async def test_an_engine_is_silent_after_some_looks_and_back_after_one() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        await looks(scripted, 2)
        scripted.set_page(METRICS, "", status=500)
        await watched.until(answers=False)
        assert "answered 500" in watched.state.why
        scripted.set_page(METRICS, page("vllm-0.32.0-metrics.txt"))
        await watched.until(answers=True)
        assert [state.answers for state in watched.states] == [False, True]
        assert watched.state.why == "the engine answers again"


async def test_a_mistake_in_a_look_is_shown_and_looking_goes_on() -> None:
    class Mistaken:
        n_looks = 0

        async def look(self, server: EngineServer) -> Look:
            self.n_looks += 1
            if self.n_looks == 1:
                raise RuntimeError("of ours")
            return Look((), STARTED)

    shown: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.append(context["exception"]))
    ways = Mistaken()
    async with scripted_engine() as scripted, attached(scripted, ways=ways) as watched:
        await until(lambda: ways.n_looks >= 3)
        assert watched.states == []
    assert [str(each) for each in shown] == ["of ours"]


async def test_fewer_looks_in_vain_are_not_told() -> None:
    class Flaky:
        """Every answer but the last of these fails."""

        n_looks = 0

        async def look(self, server: EngineServer) -> Look:
            self.n_looks += 1
            if self.n_looks % SILENT_AFTER_LOOKS:
                raise WorkerUnreachable("not now")
            return Look((), STARTED)

    flaky = Flaky()
    async with scripted_engine() as scripted, attached(scripted, ways=flaky) as watched:
        await until(lambda: flaky.n_looks >= 10 * SILENT_AFTER_LOOKS)
        assert watched.states == []


@pytest.mark.parametrize("error", [ConfigError("no vLLM"), InvalidRequest("odd")])
async def test_no_odd_answer_ends_the_looking(error: Exception) -> None:
    class Odd:
        fails = True

        async def look(self, server: EngineServer) -> Look:
            if self.fails:
                raise error
            return Look((), STARTED)

    odd = Odd()
    async with scripted_engine() as scripted, attached(scripted, ways=odd) as watched:
        await watched.until(answers=False, why=str(error))
        odd.fails = False
        await watched.until(answers=True)


async def test_nobody_listens_for_a_while() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        await looks(scripted, 1)
        await scripted.stop()
        await watched.until(answers=False)
        stream = await watched.engine.submit(leg())
        with pytest.raises(WorkerUnreachable):
            await anext(aiter(stream))
        await scripted.start()
        await watched.until(answers=True)


@pytest.mark.parametrize(
    ("found", "other", "says"),
    [
        ('block_size="32"', 'block_size="64"', "other block size: 64, not 32"),
        ('engine="0"', 'engine="1"', "other ranks: [1], not [0]"),
    ],
)
async def test_an_engine_that_comes_back_as_another_is_set_aside(found: str, other: str, says: str) -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        await looks(scripted, 1)
        scripted.replace(METRICS, found, other)
        scripted.replace(METRICS, STARTED_LINE, "process_start_time_seconds 1.9e+09")
        await watched.until(answers=False)
        assert says in watched.state.why
        scripted.replace(METRICS, other, found)
        await watched.until(answers=True)


async def test_a_new_start_is_told_and_its_cache_is_learned_from_the_beginning() -> None:
    first = Publisher()
    first.start()
    async with scripted_engine() as scripted, attached(scripted, {R0: first.at}) as watched:
        await first.subscribed.wait()
        await first.publish(vllm_batch(stored_event(1), stored_event(2, parent=1)))
        await until(lambda: watched.heard.held == [1, 2])
        first.stop()
        second = Publisher()
        second.start(first.at)
        await second.publish(vllm_batch(stored_event(11)))
        try:
            scripted.replace(METRICS, STARTED_LINE, "process_start_time_seconds 1.9e+09")
            await until(lambda: watched.heard.held == [11])
            assert watched.heard.n_cleared == 1
            await until(lambda: "the engine was started anew" in [state.why for state in watched.states])
            assert watched.state.knows_cache
        finally:
            second.stop()


@pytest.mark.parametrize("started", [STARTED, None])
async def test_a_page_that_does_not_tell_the_start_is_no_new_start(started: float | None) -> None:
    async with scripted_engine() as scripted:
        scripted.replace(METRICS, STARTED_LINE, "")
        async with attached(scripted, started=started) as watched:
            await looks(scripted, 3)
            assert watched.states == []


async def test_events_that_are_gone_for_good_make_what_is_known_a_part() -> None:
    engine = Publisher(replays=False)
    engine.start()
    try:
        async with scripted_engine() as scripted, attached(scripted, {R0: engine.at}) as watched:
            await engine.subscribed.wait()
            await engine.publish(vllm_batch(stored_event(1)), lost=True)
            await engine.publish(vllm_batch(stored_event(2)))
            await watched.until(answers=True, knows_cache=False)
            await until(lambda: watched.heard.held == [2])
            await engine.publish(vllm_batch({"type": "AllBlocksCleared"}))
            await watched.until(answers=True, knows_cache=True)
    finally:
        engine.stop()


async def test_a_streamed_leg_passes_the_engines_bytes() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(Answer((page("vllm-0.32.0-completion-tokens.sse"),)))
        chunks = [chunk async for chunk in await watched.engine.submit(leg())]
        assert [token for chunk in chunks for token in chunk.token_ids] == [1629, 1581, 1629]
        assert chunks[-1].finish is FinishReason.LENGTH
        assert b'"prompt_token_ids":[' not in b"".join(chunk.raw for chunk in chunks)
        call = await scripted.called()
        assert (call.path, call.body["return_token_ids"]) == ("/v1/completions", True)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer.error(404, "vllm-0.32.0-error-model.json"), InvalidRequest),
        (Answer((b"",), status=503), WorkerFull),
        (Answer(ends=Ends.REFUSED), WorkerUnreachable),
    ],
)
async def test_a_streamed_leg_that_is_refused_tells_so_when_it_is_read(
    answer: Answer, kind: type[Exception]
) -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(answer)
        stream = await watched.engine.submit(leg())
        with pytest.raises(kind):
            await anext(aiter(stream))
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(stream))


async def test_a_streamed_leg_is_accepted_before_the_engine_sends_the_head_of_its_answer() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(Answer(ends=Ends.NO_HEADERS))
        await watched.engine.submit(leg())
        await scripted.called()


@pytest.mark.parametrize("request_", [leg(stream=False), leg(kind=Leg.PREFILL)])
async def test_a_whole_answer_is_accepted_at_once_and_the_read_tells_what_was_wrong(
    request_: EngineRequest,
) -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        whole = Answer((page("vllm-0.32.0-completion.json"),), content_type=JSON)
        scripted.answers.extend([Answer.error(404, "vllm-0.32.0-error-model.json"), whole])
        refused = await watched.engine.submit(request_)
        with pytest.raises(InvalidRequest, match="does not exist"):
            await anext(aiter(refused))
        chunks = [chunk async for chunk in await watched.engine.submit(request_)]
        assert [chunk.finish for chunk in chunks] == [FinishReason.LENGTH]


async def test_a_cancelled_leg_is_gone_at_the_engine_too() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.extend([Answer(ends=Ends.HELD), Answer(ends=Ends.NO_HEADERS)])
        for i, request in enumerate((leg(), leg(stream=False))):
            stream = await watched.engine.submit(request)
            call = await scripted.called(i + 1)
            stream.cancel("the client left")
            await call.left.wait()


async def test_a_leg_that_nobody_wants_while_its_headers_are_awaited_is_gone_too() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(Answer(ends=Ends.NO_HEADERS))
        stream = await watched.engine.submit(leg())
        reading = asyncio.ensure_future(anext(aiter(stream)))
        call = await scripted.called()
        stream.cancel("the client left")
        await call.left.wait()
        assert await reading == EngineChunk(finish=FinishReason.CANCELLED, error="the client left")


def fetching(*, stream: bool = True, bootstrap: bool = False) -> EngineRequest:
    """A decode leg that comes for its KV."""
    if bootstrap:
        return replace(leg(stream=stream, kind=Leg.DECODE), bootstrap=Bootstrap("h", 1, 2))
    return replace(leg(stream=stream, kind=Leg.DECODE), kv_transfer_params={"remote_port": 1})


DIED = {"error": {"message": "no KV came", "code": 500}}
TOKEN = {"choices": [{"index": 0, "text": "x", "token_ids": [1], "finish_reason": None}]}
DOWN = Answer((b'{"error":{"message":"no KV came"}}',), status=500)


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (fetching(), DOWN),
        (fetching(bootstrap=True), DOWN),
        (fetching(), Answer((event_of(DIED),))),
        (fetching(stream=False), DOWN),
        (fetching(stream=False), Answer((event_of(DIED)[6:],), content_type=JSON)),
    ],
)
async def test_a_decode_leg_that_fails_before_its_first_token_did_not_get_its_kv(
    request_: EngineRequest, answer: Answer
) -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(answer)
        (chunk,) = [chunk async for chunk in await watched.engine.submit(request_)]
    assert (chunk.finish, chunk.kv_lost) == (FinishReason.ERROR, KvLoss.BROKEN)
    assert "no KV came" in str(chunk.error)


@pytest.mark.parametrize(
    ("request_", "answer", "kind"),
    [
        (fetching(), Answer((event_of(TOKEN), event_of(DIED))), StreamBroken),
        (fetching(), Answer((event_of(TOKEN),), ends=Ends.CUT), StreamBroken),
        (fetching(), Answer(ends=Ends.CUT), StreamBroken),
        (fetching(), Answer(ends=Ends.REFUSED), WorkerUnreachable),
        (fetching(stream=False), Answer(ends=Ends.REFUSED), WorkerUnreachable),
        (fetching(), Answer((b"",), status=503), WorkerFull),
        (fetching(), Answer.error(404, "vllm-0.32.0-error-model.json"), InvalidRequest),
        (leg(), DOWN, WorkerUnreachable),
        (leg(kind=Leg.DECODE), DOWN, WorkerUnreachable),
        (leg(), Answer((event_of(DIED),)), StreamBroken),
        (leg(kind=Leg.PREFILL), DOWN, WorkerUnreachable),
    ],
)
async def test_any_other_failure_is_the_engines_or_the_calls(
    request_: EngineRequest, answer: Answer, kind: type[Exception]
) -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(answer)
        with pytest.raises(kind):
            assert all([chunk.kv_lost is None async for chunk in await watched.engine.submit(request_)])


async def test_a_decode_leg_that_gets_its_kv_is_as_any_other_and_can_be_cancelled() -> None:
    async with scripted_engine() as scripted, attached(scripted) as watched:
        scripted.answers.append(Answer((page("vllm-0.32.0-completion-tokens.sse"),)))
        chunks = [chunk async for chunk in await watched.engine.submit(fetching())]
        assert [token for chunk in chunks for token in chunk.token_ids] == [1629, 1581, 1629]
        scripted.answers.append(Answer(ends=Ends.HELD))
        stream = await watched.engine.submit(fetching())
        call = await scripted.called(2)
        stream.cancel("the client left")
        await call.left.wait()
