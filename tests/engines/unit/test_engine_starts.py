"""Several engines behind one URL are told from one that restarts, and what is known of their cache."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.ids import DpRank, WorkerId
from kvrouter.engines.kv_events.listener import EngineListener
from kvrouter.engines.openai import engine, engine_starts
from kvrouter.engines.openai.engine import ServedEngine, ZmqEvents
from kvrouter.engines.openai.engine_starts import CHECKS_ALIKE, STARTS_KEPT, EngineStarts
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.port import EngineState
from kvrouter.engines.sglang.attach import SglangClient, decode
from kvrouter.engines.sglang.attach import ask_start as ask_sglang_start
from kvrouter.engines.sglang.introspect import START_MAX_BYTES, ask_info
from tests.testing.constants import SetConstants
from tests.testing.engine_publisher import Publisher, publisher, stored_event, vllm_batch
from tests.testing.probed_engine import METRICS, ProbedEngine, probed_engine, wait_for_probes
from tests.testing.scripted_engine import (
    SGLANG_PAGES,
    AnswerEnd,
    ScriptedAnswer,
    ScriptedEngine,
    scripted_engine,
)
from tests.testing.tcp_proxy import TcpProxy
from tests.testing.waits import until

R0 = DpRank(0)
STARTED_LINE = "process_start_time_seconds 1.79528047303e+09"
OTHER_LINE = "process_start_time_seconds 1.79528047999e+09"


def test_an_earlier_start_that_comes_back_is_of_another_engine() -> None:
    starts = EngineStarts(1.0)
    told = [(starts.note(started), starts.is_several) for started in (1.0, 2.0, 1.0)]
    assert told == [(False, False), (True, False), (True, True)]
    assert not any(starts.note(started) for started in (2.0, 1.0, 3.0, 2.0, 3.0, None)), "it is known"


def test_one_engine_counts_again_after_checks_that_are_all_alike() -> None:
    starts = EngineStarts(1.0)
    for started in (2.0, 1.0, 2.0):
        starts.note(started)
    assert not any(starts.note(2.0) for _ in range(10 * CHECKS_ALIKE)), "a kept connection tells nothing"
    told = [starts.note(2.0, is_check=True) for _ in range(CHECKS_ALIKE)]
    assert told == [*[False] * (CHECKS_ALIKE - 1), True]
    assert not starts.is_several
    assert starts.note(1.0), "an engine of before counts as a restart until it and the other alternate"
    assert not starts.is_several


@given(st.lists(st.integers(1, 3), max_size=2 * STARTS_KEPT))
def test_restarts_alone_never_look_like_several_engines(probes: list[int]) -> None:
    starts = EngineStarts(0)
    told = [starts.note(start) for start, n in enumerate(probes) for _ in range(n)]
    assert sum(told) == max(len(probes) - 1, 0)
    assert not starts.is_several


@given(st.lists(st.sampled_from("ab"), min_size=1))
def test_two_engines_are_several_once_one_comes_back(answers: list[str]) -> None:
    starts = EngineStarts()
    for answer in answers:
        starts.note(answer)
    changes = sum(one != other for one, other in pairwise(answers))
    assert starts.is_several == (changes >= 2)


class Service(NamedTuple):
    """Two engines behind one address."""

    engines: tuple[ScriptedEngine, ScriptedEngine]
    proxy: TcpProxy

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    @property
    def ports(self) -> tuple[int, int]:
        one, other = (int(engine.url.rpartition(":")[2]) for engine in self.engines)
        return one, other


@asynccontextmanager
async def behind_a_service() -> AsyncIterator[tuple[Service, Publisher, ProbedEngine]]:
    """An engine whose connections go to each of two engines in turn; one of them publishes its events."""
    async with scripted_engine() as one, scripted_engine() as other, AsyncExitStack() as stack:
        other.replace(METRICS, STARTED_LINE, OTHER_LINE)
        made = Service((one, other), TcpProxy("127.0.0.1", 0))
        made.proxy.take_turns(*made.ports)
        await stack.enter_async_context(made.proxy)
        events = await stack.enter_async_context(publisher())
        watched = await stack.enter_async_context(
            probed_engine(one, {R0: events.at}, url=made.url, is_checked=True)
        )
        yield made, events, watched


async def several(watched: ProbedEngine) -> None:
    await watched.until(several_engines=True)
    assert (watched.state.answers, watched.state.knows_cache) == (True, False)
    assert "is an address before several engines: give kvrouter each engine's own URL" in watched.state.why


async def test_cache_of_several_engines_is_not_known_and_said_once() -> None:
    async with behind_a_service() as (at, events, watched):
        await events.subscribed.wait()
        await events.publish(vllm_batch(stored_event(1)))
        await several(watched)
        await until(lambda: watched.heard.n_cleared >= 1)
        assert watched.heard.held == []
        n_states = len(watched.states)
        await events.publish(vllm_batch(stored_event(2)))
        await wait_for_probes(at.engines[0], 20)
        assert (len(watched.states), watched.heard.held) == (n_states, [])
        assert watched.loads[-1].kv_transfers is None


async def test_one_engine_that_is_left_is_listened_to_again_once_that_works(
    set_constants: SetConstants, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(engine_starts, CHECKS_ALIKE=3)
    shown: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.append(context["exception"]))
    start = EngineListener.start

    def start_at_second_try(listener: EngineListener) -> None:
        if not shown:
            raise OSError("no descriptors left")
        start(listener)

    async with behind_a_service() as (at, events, watched):
        await several(watched)
        monkeypatch.setattr(EngineListener, "start", start_at_second_try)
        events.subscribed.clear()
        at.proxy.take_turns(at.ports[1])
        await at.engines[0].stop()
        await watched.until(several_engines=False)
        assert "is the address of one engine again" in watched.state.why
        await events.subscribed.wait()
        await events.publish(vllm_batch(stored_event(3)))
        await until(lambda: watched.heard.held == [3])
    assert [str(each) for each in shown] == ["no descriptors left"]


async def test_restart_of_one_engine_is_no_sign_of_several() -> None:
    async with scripted_engine() as scripted, probed_engine(scripted, is_checked=True) as watched:
        await wait_for_probes(scripted, 2)
        scripted.replace(METRICS, STARTED_LINE, OTHER_LINE)
        await watched.until(why="the engine restarted")
        await wait_for_probes(scripted, 40)
        assert [state.several_engines for state in watched.states] == [False]


async def test_sglang_tells_its_start_on_a_new_connection() -> None:
    async with scripted_engine(SGLANG_PAGES) as scripted:
        server = EngineServer(scripted.url)
        await server.open()
        try:
            first = await ask_sglang_start(server)
            scripted.replace("/server_info", '"load_weight": 0.03', '"load_weight": 0.04')
            assert first is not None
            assert await ask_sglang_start(server) not in (None, first)
            scripted.replace("/server_info", '"startup_time"', '"of_another_version"')
            assert await ask_sglang_start(server) is None
        finally:
            await server.close()


@asynccontextmanager
async def checked_sglang(url: str) -> AsyncIterator[list[EngineState]]:
    """The states of an SGLang engine that is probed and checked."""
    server = EngineServer(url)
    await server.open()
    info = await ask_info(server)
    served = ServedEngine(
        server,
        SglangClient(WorkerId(7), info),
        ZmqEvents({}, decode, 16),
        started=info.started,
        ask_start=ask_sglang_start,
        look_each_s=0.005,
    )
    states: list[EngineState] = []
    served.watch(states.append)
    await served.start(lambda *_: None, lambda _: None)
    try:
        yield states
    finally:
        await served.stop()


async def test_check_without_an_answer_holds_no_probe_for_long(set_constants: SetConstants) -> None:
    set_constants(engine, CHECK_LIMIT_S=0.01)
    async with scripted_engine(SGLANG_PAGES) as scripted, checked_sglang(scripted.url) as states:
        scripted.pages["/server_info"] = ScriptedAnswer(ends=AnswerEnd.NO_HEADERS)
        await until(lambda: scripted.asked["/v1/loads"] >= 20)
        assert states == []
        scripted.release()


async def test_sglang_engine_that_was_replaced_without_a_failed_probe_is_a_restart() -> None:
    async with scripted_engine(SGLANG_PAGES) as one, scripted_engine(SGLANG_PAGES) as other:
        other.replace("/server_info", '"load_weight": 0.03', '"load_weight": 0.04')
        async with (
            TcpProxy("127.0.0.1", int(one.url.rpartition(":")[2])) as proxy,
            checked_sglang(f"http://127.0.0.1:{proxy.port}") as states,
        ):
            await until(lambda: one.asked["/server_info"] >= 2)
            proxy.take_turns(int(other.url.rpartition(":")[2]))
            proxy.cut()
            await until(lambda: other.asked["/server_info"] >= 5)
    assert [(state.why, state.several_engines) for state in states] == [("the engine restarted", False)]
    assert states[-1].start is not None


@pytest.mark.parametrize("startup_time", [None, "a" * START_MAX_BYTES])
async def test_sglang_engine_whose_start_is_not_told_has_none(startup_time: object) -> None:
    async with scripted_engine(SGLANG_PAGES) as scripted:
        scripted.set_json("/server_info", {**scripted.json("/server_info"), "startup_time": startup_time})
        server = EngineServer(scripted.url)
        await server.open()
        try:
            assert (await ask_info(server)).started is None
            assert await ask_sglang_start(server) is None
            del scripted.pages["/server_info"]
            assert (await ask_info(server)).started is None
        finally:
            await server.close()


@pytest.mark.parametrize("status", [404, 500])
async def test_failed_check_is_not_a_failed_probe(status: int) -> None:
    async with scripted_engine() as scripted, probed_engine(scripted, is_checked=True) as watched:
        scripted.set_page(METRICS, "", status=status)
        await wait_for_probes(scripted, 20)
        assert watched.states == []
