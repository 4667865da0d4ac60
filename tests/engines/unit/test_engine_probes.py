"""A served engine is looked after: its load, its silence, a new start, and how much of its cache is known."""

import asyncio

import pytest

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.core.ids import DpRank
from kvrouter.engines.openai.engine import SILENT_AFTER_PROBES, Probe
from kvrouter.engines.openai.pages import MODELS
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.port import EngineState
from kvrouter.transports.requests.port import WorkerUnreachable
from tests.testing.engine_publisher import Publisher, stored_event, vllm_batch
from tests.testing.engine_requests import short_completion
from tests.testing.probed_engine import METRICS, STARTED_S, probed_engine, wait_for_probes
from tests.testing.scripted_engine import page, scripted_engine
from tests.testing.waits import until

R0 = DpRank(0)
STARTED_LINE = "process_start_time_seconds 1.79528047303e+09"


async def test_engine_load_is_reported_at_every_probe() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        await until(lambda: len(watched.loads) >= 2)
        assert (watched.loads[0].total_blocks, watched.states) == (200, [])
        scripted.replace(
            METRICS, 'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0',
            'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5',
        )  # fmt: skip
        await until(lambda: watched.loads[-1].active_blocks == 100)


async def test_engine_is_silent_after_some_failed_probes_and_back_after_one() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        await wait_for_probes(scripted, 2)
        scripted.set_page(METRICS, "", status=500)
        await wait_for_probes(scripted, 2 * SILENT_AFTER_PROBES)
        assert watched.states == [], "it still serves its model: its load alone is unknown"
        scripted.set_page(MODELS, "", status=500)
        await watched.until(answers=False)
        assert f"{MODELS} answered 500" in watched.state.why
        await wait_for_probes(scripted, SILENT_AFTER_PROBES)
        scripted.set_page(METRICS, page("vllm-0.32.0-metrics.txt"))
        await watched.until(answers=True)
        assert [state.answers for state in watched.states] == [False, True]
        assert watched.state.why == "the engine answers again"


async def test_exception_in_a_probe_is_reported_and_probing_goes_on() -> None:
    class Mistaken:
        n_looks = 0

        async def look(self, server: EngineServer) -> Probe:
            self.n_looks += 1
            if self.n_looks == 1:
                raise RuntimeError("of ours")
            return Probe((), STARTED_S)

    shown: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.append(context["exception"]))
    ways = Mistaken()
    async with scripted_engine() as scripted, probed_engine(scripted, ways=ways) as watched:
        await until(lambda: ways.n_looks >= 3)
        assert watched.states == []
    assert [str(each) for each in shown] == ["of ours"]


async def test_exception_behind_a_probe_is_reported_and_probing_goes_on() -> None:
    shown: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.append(context["exception"]))
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:

        def fail(_: EngineState) -> None:
            raise OSError("no descriptors left")

        watched.engine.watch(fail)
        scripted.replace(METRICS, STARTED_LINE, "process_start_time_seconds 1.79528047999e+09")
        await until(lambda: bool(shown))
        await wait_for_probes(scripted, 3)
    assert [str(each) for each in shown] == ["no descriptors left"]


async def test_few_failed_probes_are_not_reported() -> None:
    class Flaky:
        """Every answer but the last of these fails."""

        n_looks = 0

        async def look(self, server: EngineServer) -> Probe:
            self.n_looks += 1
            if self.n_looks % SILENT_AFTER_PROBES:
                raise WorkerUnreachable("not now")
            return Probe((), STARTED_S)

    flaky = Flaky()
    async with scripted_engine() as scripted, probed_engine(scripted, ways=flaky) as watched:
        await until(lambda: flaky.n_looks >= 10 * SILENT_AFTER_PROBES)
        assert watched.states == []


@pytest.mark.parametrize("error", [ConfigError("no vLLM"), InvalidRequest("odd")])
async def test_probing_goes_on_after_an_unexpected_error(error: Exception) -> None:
    class Odd:
        fails = True

        async def look(self, server: EngineServer) -> Probe:
            if self.fails:
                raise error
            return Probe((), STARTED_S)

    odd = Odd()
    async with scripted_engine() as scripted, probed_engine(scripted, ways=odd) as watched:
        await watched.until(answers=False, why=str(error))
        odd.fails = False
        await watched.until(answers=True)


async def test_engine_down_for_a_while_is_silent_and_then_back() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        await wait_for_probes(scripted, 1)
        await scripted.stop()
        await watched.until(answers=False)
        stream = await watched.engine.submit(short_completion())
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
async def test_engine_that_comes_back_different_counts_as_not_answering(
    found: str, other: str, says: str
) -> None:
    async with scripted_engine() as scripted, probed_engine(scripted) as watched:
        await wait_for_probes(scripted, 1)
        scripted.replace(METRICS, found, other)
        scripted.replace(METRICS, STARTED_LINE, "process_start_time_seconds 1.9e+09")
        await watched.until(answers=False)
        assert says in watched.state.why
        scripted.replace(METRICS, other, found)
        await watched.until(answers=True)


async def test_restart_is_reported_and_the_cache_learned_from_its_beginning() -> None:
    first = Publisher()
    first.start()
    async with scripted_engine() as scripted, probed_engine(scripted, {R0: first.at}) as watched:
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
            await until(lambda: "the engine restarted" in [state.why for state in watched.states])
            assert watched.state.knows_cache
        finally:
            second.stop()


@pytest.mark.parametrize("started", [STARTED_S, None])
async def test_page_without_a_start_time_is_not_a_restart(started: float | None) -> None:
    async with scripted_engine() as scripted:
        scripted.replace(METRICS, STARTED_LINE, "")
        async with probed_engine(scripted, started=started) as watched:
            await wait_for_probes(scripted, 3)
            assert watched.states == []


async def test_lookahead_tokens_in_kv_events_are_reported() -> None:
    engine = Publisher()
    engine.start()
    try:
        async with scripted_engine() as scripted, probed_engine(scripted, {R0: engine.at}) as watched:
            await engine.subscribed.wait()
            await engine.publish(vllm_batch(stored_event(1)))
            await until(lambda: watched.heard.held == [1])
            assert watched.states == []
            await engine.publish(vllm_batch({**stored_event(2), "lookahead_token_ids": [[5, 6, 7]]}))
            await watched.until(answers=True, lookahead_tokens=3)
    finally:
        engine.stop()


async def test_lost_kv_events_make_the_known_cache_partial_until_a_clear() -> None:
    engine = Publisher(replays=False)
    engine.start()
    try:
        async with scripted_engine() as scripted, probed_engine(scripted, {R0: engine.at}) as watched:
            await engine.subscribed.wait()
            await engine.publish(vllm_batch(stored_event(1)), lost=True)
            await engine.publish(vllm_batch(stored_event(2)))
            await watched.until(answers=True, knows_cache=False)
            await until(lambda: watched.heard.held == [2])
            await engine.publish(vllm_batch({"type": "AllBlocksCleared"}))
            await watched.until(answers=True, knows_cache=True)
    finally:
        engine.stop()
