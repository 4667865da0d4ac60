"""A listener on real sockets: attaching late, a new start, a replay that does not come."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrouter.core.events import KvEvent
from kvrouter.core.ids import DpRank
from kvrouter.engines.kv_events.engine_events import EngineTraits
from kvrouter.engines.kv_events.listener import EngineListener, EventsAt
from kvrouter.engines.vllm.events import decode
from tests.testing.engine_publisher import Publisher, publisher, stored_event, vllm_batch
from tests.testing.engine_recorder import EventRecorder
from tests.testing.event_transports import waiting_libzmq
from tests.testing.waits import until

RANK = DpRank(3)


def batch(name: int, parent: int | None = None) -> bytes:
    return vllm_batch(stored_event(name, parent=parent, token=name), dp_rank=RANK)


@asynccontextmanager
async def listening(
    at: EventsAt, replay_limit_s: float = 30.0, *, heard: EventRecorder | None = None
) -> AsyncIterator[tuple[EngineListener, EventRecorder]]:
    heard = heard or EventRecorder()
    listener = EngineListener(
        at,
        decode,
        EngineTraits(32, dp_rank=RANK),
        on_events=heard.on_events,
        on_change=heard.on_change,
        replay_limit_s=replay_limit_s,
    )
    listener.start()
    try:
        yield listener, heard
    finally:
        listener.stop()
        listener.stop()


async def test_batches_published_before_attaching_are_replayed() -> None:
    async with publisher() as engine:
        for name in (1, 2, 3):
            await engine.publish(batch(name))
        async with listening(engine.at) as (listener, heard):
            await until(lambda: heard.held == [1, 2, 3])
            assert (engine.questions, listener.is_partial, heard.ranks) == ([0], False, {RANK})


async def test_attaching_after_the_replay_ring_overflowed_is_partial() -> None:
    async with publisher(ring_batches_max=1) as engine:
        for name in (1, 2, 3):
            await engine.publish(batch(name))
        async with listening(engine.at) as (listener, heard):
            await until(lambda: heard.held == [3])
            assert listener.is_partial
            assert heard.said == ["KV events of the batches 0 to 1 are lost for good", *heard.said[1:]]


@pytest.mark.parametrize("n_of_the_new_start", [0, 1, 2, 5])
async def test_restarted_engine_is_followed_from_its_first_batch(n_of_the_new_start: int) -> None:
    first = Publisher()
    first.start()
    async with listening(first.at) as (listener, heard):
        for name in (1, 2):
            await first.publish(batch(name))
        await first.subscribed.wait()
        await until(lambda: heard.held == [1, 2])
        first.stop()
        second = Publisher()
        second.start(first.at)
        names = [10 + i for i in range(n_of_the_new_start)]
        for name in names:
            await second.publish(batch(name))
        try:
            await until(lambda: heard.n_cleared == 1 and heard.held == names)
            await second.subscribed.wait()
            await second.publish(batch(99))
            await until(lambda: heard.held == [*names, 99])
            assert not listener.is_partial
            assert "its publisher of KV events restarted" in heard.said
        finally:
            second.stop()


async def test_missing_replay_is_reported_and_listening_goes_on() -> None:
    async with publisher() as engine:
        engine.replay_silent = True
        async with listening(engine.at, replay_limit_s=0.05) as (listener, heard):
            await engine.subscribed.wait()
            await until(lambda: bool(heard.said))
            assert "did not answer to a replay within 0.05 s" in heard.said[0]
            await engine.publish(batch(1))
            await until(lambda: heard.held == [1])
            assert not listener.is_partial


async def test_unreadable_replay_is_reported_and_leaves_the_cache_partial() -> None:
    async with publisher() as engine:
        for name in (1, 2, 3):
            await engine.publish(batch(name))
        engine.broken_replays = {1}
        async with listening(engine.at) as (listener, heard):
            await until(lambda: heard.held == [3])
            assert listener.is_partial
            assert any("cannot be read" in why for why in heard.said)


async def test_late_listener_without_replay_is_partial_until_a_clear() -> None:
    async with publisher(replays=False) as engine:
        for name in (1, 2, 3):
            await engine.publish(batch(name))
        async with listening(engine.at) as (listener, heard):
            await engine.subscribed.wait()
            await engine.publish(batch(4))
            await until(lambda: heard.held == [4])
            assert listener.is_partial
            await engine.publish(vllm_batch({"type": "AllBlocksCleared"}, dp_rank=RANK))
            await until(lambda: not listener.is_partial)
            assert heard.said[-1] == "its whole cache is known again"


async def test_malformed_batch_is_reported_and_listening_goes_on() -> None:
    async with publisher() as engine, listening(engine.at) as (_, heard):
        await engine.subscribed.wait()
        await engine.send_frames((b"kv-events", b"1", b""))
        await engine.publish(batch(1))
        await until(lambda: heard.held == [1] and bool(heard.said))  # a replay may bring the batch sooner
        assert heard.said == ["a message of its KV events cannot be read: seq: 8 bytes, not 1"]
        await engine.publish(b"\xc1")
        await engine.publish(batch(2))
        await until(lambda: heard.held == [2])
        assert heard.n_cleared == 1


async def test_exception_in_a_sink_is_reported_and_clears_the_ranks() -> None:
    shown: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.append(context["exception"]))
    mistake = RuntimeError("of ours")

    class Mistaken(EventRecorder):
        def on_events(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
            super().on_events(dp_rank, events)
            if self.held == [1, 2]:
                raise mistake

    async with publisher() as engine, listening(engine.at, heard=Mistaken()) as (listener, heard):
        await engine.subscribed.wait()
        await engine.publish(batch(1))
        await until(lambda: heard.held == [1])
        await engine.publish(batch(2))
        await until(lambda: heard.held == [] and heard.n_cleared == 1)
        assert (listener.is_partial, shown) == (True, [mistake])
        assert heard.said[0] == "its KV events are heard no more: a mistake of ours, which the log shows"


async def test_a_listener_that_was_stopped_hears_nothing() -> None:
    async with publisher() as engine:
        async with listening(engine.at) as (_, heard):
            await engine.publish(batch(1))
            await until(lambda: heard.held == [1])
        await engine.publish(batch(2))
        assert heard.held == [1]


async def test_a_listener_stops_while_libzmq_waits_for_ever() -> None:
    async with publisher() as engine:
        with waiting_libzmq() as n_waiting:
            async with listening(engine.at) as (_, heard):
                await engine.publish(batch(1))
                await until(lambda: heard.held == [1])
            await until(lambda: n_waiting() == 1)
