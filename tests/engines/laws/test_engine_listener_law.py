"""A listener on real sockets: whatever is lost, repeated or late, each batch counts once and in order."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.engines.kv_events.engine_events import EngineTraits
from kvrouter.engines.kv_events.listener import EngineListener
from kvrouter.engines.vllm.events import decode
from tests.testing.engine_publisher import Publisher, publisher, stored_event, vllm_batch
from tests.testing.engine_recorder import EventRecorder
from tests.testing.waits import until

ORDERED = ["send", "lose", "repeat"]
BLOCK_SIZE = 2


def batch(seq: int) -> bytes:
    """The batch of this number stores the block of the next one."""
    return vllm_batch(stored_event(seq + 1, token=seq, block_size=BLOCK_SIZE))


async def publish_all(
    engine: Publisher, n_before: int, ways: list[str], heard: EventRecorder
) -> EngineListener:
    """Publish some before anybody listens, and more in these ways; return who heard the last one."""
    for _ in range(n_before):
        await engine.publish(batch(len(engine.payloads)))
    listener = EngineListener(
        engine.at, decode, EngineTraits(BLOCK_SIZE), on_events=heard.on_events, on_change=heard.on_change
    )
    listener.start()
    try:
        await engine.subscribed.wait()
        for way in ways:
            if way == "repeat" and engine.payloads:
                await engine.send(len(engine.payloads) - 1)
            elif way == "repeat old" and engine.payloads:
                await engine.send(len(engine.payloads) // 2)
            elif way == "swap":
                await engine.publish(batch(len(engine.payloads)), lost=True)
                await engine.publish(batch(len(engine.payloads)))
                await engine.send(len(engine.payloads) - 2)
            else:
                await engine.publish(batch(len(engine.payloads)), lost=way == "lose")
        await engine.publish(batch(len(engine.payloads)))
        last = len(engine.payloads)
        await until(lambda: bool(heard.held) and heard.held[-1] == last)
    finally:
        listener.stop()
    return listener


@settings(max_examples=30)
@given(
    st.integers(0, 3),
    st.lists(st.sampled_from([*ORDERED, "repeat old", "swap"]), max_size=14),
    st.booleans(),
)
def test_batches_still_in_the_replay_ring_are_never_missed(
    n_before: int, ways: list[str], with_topic: bool
) -> None:
    async def run() -> None:
        heard = EventRecorder()
        async with publisher(with_topic=with_topic) as engine:
            listener = await publish_all(engine, n_before, ways, heard)
            assert heard.stored == list(range(1, len(engine.payloads) + 1))
        assert (heard.n_cleared, listener.is_partial, heard.said) == (0, False, [])

    asyncio.run(run())


@settings(max_examples=30)
@given(st.integers(0, 4), st.lists(st.sampled_from(ORDERED), max_size=14), st.integers(1, 3) | st.none())
def test_batches_lost_for_good_are_reported_and_none_counts_twice(
    n_before: int, ways: list[str], ring_batches_max: int | None
) -> None:
    async def run() -> None:
        heard = EventRecorder()
        replays = ring_batches_max is not None
        async with publisher(ring_batches_max=ring_batches_max or 0, replays=replays) as engine:
            listener = await publish_all(engine, n_before, ways, heard)
            n_published = len(engine.payloads)
        assert heard.held == sorted(set(heard.held))
        is_whole = heard.held == list(range(1, n_published + 1))
        assert listener.is_partial is not is_whole
        assert is_whole or heard.said

    asyncio.run(run())
