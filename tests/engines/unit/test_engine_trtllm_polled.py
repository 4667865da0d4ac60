"""TensorRT-LLM's own events, asked for over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvrouter.core.events import Cleared, KvEvent, Stored
from kvrouter.core.ids import DpRank
from kvrouter.engines.kv_events.listener import EventListener
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.trtllm import polled as polled_module
from kvrouter.engines.trtllm.polled import EVENTS_AT_ONCE, Polled
from tests.testing.calls import MakeFail
from tests.testing.trtllm_server import ScriptedTrtllm, created, native, removed, scripted_trtllm, stored
from tests.testing.waits import until

A, B, C = (1, [1, 2, 3, 4]), (2, [5, 6, 7, 8]), (3, [9, 10, 11, 12])


@dataclass
class Recorded:
    """All that one listener reported."""

    events: list[KvEvent] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    listener: EventListener | None = None

    def on_events(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        assert dp_rank == DpRank(0)
        self.events.extend(events)

    def is_partial(self) -> bool:
        assert self.listener is not None
        return self.listener.is_partial

    @property
    def stored(self) -> int:
        return sum(event.n_blocks for event in self.events if isinstance(event, Stored))

    def heard(self, words: str) -> bool:
        return any(words in change for change in self.changes)


@asynccontextmanager
async def listening(engine: ScriptedTrtllm) -> AsyncIterator[Recorded]:
    server = EngineServer(engine.url)
    await server.open()
    reported = Recorded()
    (listener,) = Polled(server, 4, poll_each_s=0.002).listeners(reported.on_events, reported.changes.append)
    reported.listener = listener
    listener.start()
    try:
        yield reported
    finally:
        listener.stop()
        listener.stop()
        await server.close()


@asynccontextmanager
async def hearing(*polls: Any) -> AsyncIterator[tuple[ScriptedTrtllm, Recorded]]:
    async with scripted_trtllm(*polls) as engine, listening(engine) as reported:
        yield engine, reported


async def polled(engine: ScriptedTrtllm, *polls: Any) -> None:
    """Have these answered, and then some empty ones."""
    engine.events.extend(polls)
    last = engine.n_polls + len(engine.events) + 2
    await until(lambda: engine.n_polls >= last)


async def test_polled_events_form_one_stream() -> None:
    async with hearing([native(0, created()), native(1, stored(A, B))]) as (engine, reported):
        await polled(engine, [native(2, stored(C, parent=2)), native(3, removed(3))])
        assert [type(event).__name__ for event in reported.events] == ["Stored", "Stored", "Removed"]
        assert (reported.is_partial(), reported.changes) == (False, [])


async def test_every_event_of_a_long_poll_is_taken() -> None:
    blocks = [native(n, stored((n, [n, n, n, n]))) for n in range(1, 3 * EVENTS_AT_ONCE)]
    async with hearing([native(0, created()), *blocks]) as (engine, reported):
        await polled(engine)
        assert (reported.stored, reported.is_partial()) == (len(blocks), False)


async def test_missing_events_clear_the_rank_and_leave_it_partial_until_a_clear() -> None:
    async with hearing([native(0, created()), native(1, stored(A))]) as (engine, reported):
        await polled(engine, [native(4, stored(B))])
        assert [type(event) for event in reported.events] == [Stored, Cleared, Stored]
        assert reported.is_partial()
        assert reported.heard("KV events from 2 to 3 are lost for good")
        await polled(engine, [native(5, {"type": "all_cleared"})])
        assert not reported.is_partial()
        assert reported.heard("its whole cache is known again")


async def test_listener_that_attaches_late_is_partial() -> None:
    async with hearing([native(7, stored(A))]) as (engine, reported):
        await polled(engine)
        assert (reported.is_partial(), reported.stored) == (True, 1)
        assert reported.heard("KV events from 0 to 6 are lost for good")


async def test_engine_without_any_event_is_reported_once() -> None:
    async with hearing() as (engine, reported):
        await polled(engine)
        assert reported.is_partial()
        assert len(reported.changes) == 1
        assert reported.heard("event_buffer_max_size")
        await polled(engine, [native(0, created())])
        assert not reported.is_partial()


async def test_restarted_engine_is_followed_from_its_first_event() -> None:
    async with hearing([native(0, created()), native(1, stored(A))]) as (engine, reported):
        await polled(engine, [native(0, created()), native(1, stored(A, B)), native(2, removed(2))])
        assert [type(event).__name__ for event in reported.events] == [
            "Stored", "Cleared", "Stored", "Removed",
        ]  # fmt: skip
        assert not reported.is_partial()
        assert reported.heard("restarted")


async def test_events_of_other_ranks_are_ignored_and_reported_once() -> None:
    other = [native(0, created(), attention_dp_rank=1), native(1, stored(A), attention_dp_rank=1)]
    async with hearing([native(0, created(), attention_dp_rank=0), *other]) as (engine, reported):
        await polled(engine, [native(1, stored(B), attention_dp_rank=0)])
        assert (reported.stored, reported.is_partial(), len(reported.changes)) == (1, False, 1)
        assert reported.heard("its rank 1 is not looked at")


@pytest.mark.parametrize("answer", ["<html>", [{"event_id": -1, "data": {}}]])
async def test_unreadable_poll_clears_the_rank(answer: Any) -> None:
    async with hearing([native(0, created()), native(1, stored(A))], answer) as (engine, reported):
        await polled(engine, [native(3, stored(B))])
        assert [type(event) for event in reported.events] == [Stored, Cleared, Stored]
        assert reported.is_partial()
        assert reported.heard("cannot be read")


async def test_unreadable_event_clears_the_rank() -> None:
    odd = native(2, {"type": "removed"})
    async with hearing([native(0, created()), native(1, stored(A)), odd]) as (engine, reported):
        await polled(engine)
        assert [type(event) for event in reported.events] == [Stored, Cleared]
        assert reported.heard("one of its KV events cannot be read: data")


async def test_polling_goes_on_after_a_server_outage() -> None:
    async with hearing([native(0, created()), native(1, stored(A))]) as (engine, reported):
        await polled(engine)
        await engine.stop()
        await engine.start()
        engine.events_status = 500
        await polled(engine)
        engine.events_status = 200
        await polled(engine, [native(2, stored(B, parent=1))])
        assert (reported.stored, reported.is_partial(), reported.changes) == (2, False, [])


async def test_polling_ends_if_the_server_has_no_events_page() -> None:
    async with scripted_trtllm() as engine:
        engine.events_status = 404
        async with listening(engine) as reported:
            await until(lambda: reported.heard("it cannot be asked for KV events"))
            assert reported.is_partial()
        assert engine.n_polls == 1


async def test_exception_in_polling_is_reported_and_clears_the_rank(make_fail: MakeFail) -> None:
    shown: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: shown.append(context["exception"]))
    async with hearing([native(0, created()), native(1, stored(A))]) as (engine, reported):
        await polled(engine)
        make_fail(polled_module, "native_batches", RuntimeError("of ours"))
        await until(lambda: reported.heard("a mistake of ours"))
        assert isinstance(reported.events[-1], Cleared)
        assert reported.is_partial()
    assert [str(each) for each in shown] == ["of ours"]
