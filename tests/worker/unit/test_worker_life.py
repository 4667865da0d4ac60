"""One worker from its start to its end, on memory planes, next to an engine that does what the test says."""

import asyncio
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError, InvalidRequest, KvrouterError, ShuttingDown, TopologyUnavailable
from kvrouter.core.events import Held
from kvrouter.core.ids import DpRank
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.core.workers import Enforcement, LoadReport, ModelRuntimeConfig
from kvrouter.engines.port import EngineState
from kvrouter.telemetry.log_forms import traceback_text
from kvrouter.transports.requests.port import StreamBroken, WorkerUnreachable
from kvrouter.worker import KvPublisher
from tests.testing.calls import MakeFail
from tests.testing.log_events import event_of, events_of
from tests.testing.scripted_worker import accepted
from tests.testing.waits import until
from tests.testing.worker_harness import COLUMN, EPOCH, RANK, STORED, WorkerHarness


@pytest.fixture
async def harness() -> WorkerHarness:
    made = WorkerHarness()
    await made.start()
    return made


async def test_a_started_worker_is_discovered_serves_legs_and_publishes(harness: WorkerHarness) -> None:
    card = await harness.cards.get()
    assert card == harness.worker.card
    stream = await accepted(harness.requests, harness.worker.card.address, harness.request())
    harness.engine.streams[0].chunks.put_nowait(EngineChunk((5,), FinishReason.LENGTH))
    assert [chunk.token_ids async for chunk in stream] == [(5,)]
    harness.engine.tell(STORED)
    batch = await harness.batches.get()
    assert (batch.rank, batch.epoch, batch.first_event_id, batch.events) == (RANK, EPOCH, 0, (STORED,))
    load = LoadReport(RANK, 1, 10)
    harness.engine.report(load)
    assert harness.loads == [load]
    snapshot = await harness.events.recover_snapshot(RANK)
    assert snapshot is not None
    assert (snapshot.next_event_id, snapshot.events) == (1, (Held(COLUMN, COLUMN),))
    await harness.worker.stop()


async def test_stopping_withdraws_the_worker_and_is_idempotent(harness: WorkerHarness) -> None:
    await harness.cards.get()
    await harness.worker.stop()
    await harness.worker.stop()
    assert await harness.cards.get() is None
    assert await harness.events.recover_snapshot(RANK) is None
    with pytest.raises(WorkerUnreachable):
        await accepted(harness.requests, harness.worker.card.address, harness.request())


async def test_a_drain_waits_for_running_legs_and_refuses_new_legs(harness: WorkerHarness) -> None:
    await harness.cards.get()
    stream = await accepted(harness.requests, harness.worker.card.address, harness.request())
    drain = asyncio.create_task(harness.worker.drain(60.0))
    card = await harness.cards.get()
    assert card is not None
    assert card.draining
    with pytest.raises(ShuttingDown):
        await accepted(harness.requests, harness.worker.card.address, harness.request(request_id="late"))
    assert (drain.done(), harness.worker.running_legs) == (False, 1)
    harness.engine.streams[0].chunks.put_nowait(EngineChunk((5,), FinishReason.LENGTH))
    assert [chunk.token_ids async for chunk in stream] == [(5,)]
    assert await drain
    assert await harness.cards.get() is None
    assert harness.engine.stops == 1


async def test_a_silent_engine_is_published_and_refuses_new_legs(harness: WorkerHarness) -> None:
    """Those that run go on, and somebody who looks does not take it for a worker that leaves."""
    tell = harness.engine.on_state
    assert tell is not None
    joined = await harness.cards.get()
    stream = await accepted(harness.requests, harness.worker.card.address, harness.request())
    tell(EngineState(answers=False, why="answered 500"))
    silent = await harness.cards.get()
    assert joined is not None
    assert silent is not None
    assert (silent.engine_silent, silent.draining, silent.takes_new_requests) == (True, False, False)
    with pytest.raises(ShuttingDown, match="the engine of worker 6 does not answer"):
        await accepted(harness.requests, harness.worker.card.address, harness.request(request_id="late"))
    harness.engine.streams[0].chunks.put_nowait(EngineChunk((5,), FinishReason.LENGTH))
    assert [chunk.token_ids async for chunk in stream] == [(5,)]
    tell(EngineState())
    assert await harness.cards.get() == joined
    await accepted(harness.requests, harness.worker.card.address, harness.request(request_id="later"))
    await harness.worker.stop()


async def test_a_draining_worker_stays_draining_when_its_engine_changes_state(harness: WorkerHarness) -> None:
    tell = harness.engine.on_state
    assert tell is not None
    await harness.cards.get()
    await harness.worker.begin_drain()
    tell(EngineState(answers=False))
    tell(EngineState(answers=True, knows_cache=False, lookahead_tokens=3))
    states = [await harness.cards.get(), await harness.cards.get()]
    assert [(card.draining, card.engine_silent) for card in states if card is not None] == [(True, False)] * 2
    assert [card.cache_is_partial for card in states if card is not None] == [False, True]
    assert [card.lookahead_tokens for card in states if card is not None] == [0, 3]
    await harness.worker.stop()


async def test_the_card_names_the_engines_start_until_another_one_is_known(harness: WorkerHarness) -> None:
    tell = harness.engine.on_state
    assert tell is not None
    await harness.cards.get()
    starts = []
    for state in (EngineState(start="8.5"), EngineState(answers=False), EngineState(start="9.5")):
        tell(state)
        card = await harness.cards.get()
        assert card is not None
        starts.append(card.engine_start)
    assert starts == ["8.5", "8.5", "9.5"]
    await harness.worker.stop()


async def test_a_drain_past_its_limit_breaks_running_legs(harness: WorkerHarness) -> None:
    stream = await accepted(harness.requests, harness.worker.card.address, harness.request())
    assert not await harness.worker.drain(0.0)
    with pytest.raises(StreamBroken):
        await anext(aiter(stream))


@pytest.mark.parametrize("ending", ["cancel", "broken", "exhausted"])
async def test_a_leg_is_counted_until_it_is_cancelled_broken_or_exhausted(
    harness: WorkerHarness, ending: str
) -> None:
    stream = await accepted(harness.requests, harness.worker.card.address, harness.request())
    assert harness.worker.running_legs == 1
    chunks = harness.engine.streams[0].chunks
    match ending:
        case "cancel":
            stream.cancel("left")
            stream.cancel("left again")
        case "broken":
            chunks.put_nowait(StreamBroken("engine"))
            with pytest.raises(KvrouterError):
                await anext(aiter(stream))
        case "exhausted":
            chunks.put_nowait(EngineChunk((5,), FinishReason.LENGTH))
            async for _ in stream:
                pass
    assert harness.worker.running_legs == 0
    await harness.worker.stop()


async def test_a_leg_of_another_model_or_rank_is_refused_by_name(harness: WorkerHarness) -> None:
    for request, param in (
        (harness.request(model="other"), "model"),
        (harness.request(dp_rank=1), "dp_rank"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await harness.worker.submit(request)
        assert refused.value.param == param
    assert harness.engine.streams == []
    await harness.worker.stop()


async def test_a_dying_worker_publishes_no_withdrawal(harness: WorkerHarness) -> None:
    await harness.cards.get()
    harness.engine.tell(STORED)
    harness.worker.die("power")
    await asyncio.sleep(0)
    assert harness.batches.empty()
    assert harness.cards.empty()
    assert await harness.events.recover_snapshot(RANK) is None
    with pytest.raises(WorkerUnreachable):
        await accepted(harness.requests, harness.worker.card.address, harness.request())


async def test_heartbeats_repeat_the_latest_load() -> None:
    """An engine at rest reports nothing more: a router that missed the last one thinks it busy for ever."""
    harness = WorkerHarness(heartbeat_s=0.001)
    await harness.start()
    busy, idle = LoadReport(RANK, 9, 10), LoadReport(RANK, 0, 10)
    harness.engine.report(busy)
    harness.engine.report(idle)
    await until(lambda: harness.loads.count(idle) >= 3)
    assert harness.loads[-1] == idle
    await harness.worker.stop()


@pytest.mark.parametrize("kv_events", [True, False])
async def test_heartbeats_repeat_only_the_last_load_until_the_worker_stops(
    kv_events: bool,
) -> None:
    harness = WorkerHarness(heartbeat_s=0.001)
    harness.worker.card = replace(harness.worker.card, publishes_kv_events=kv_events)
    await harness.start()
    harness.engine.report(LoadReport(RANK, 9, 10))
    harness.worker.publisher.publish_load(active_blocks=0, total_blocks=10)
    await until(lambda: len(harness.loads) >= 5)
    assert harness.loads[1:] == [LoadReport(RANK, 0, 10)] * (len(harness.loads) - 1)
    await harness.worker.stop()
    n_loads = len(harness.loads)
    harness.engine.report(LoadReport(RANK, 9, 10))
    harness.worker.publisher.heartbeat([])
    assert len(harness.loads) == n_loads


async def test_heartbeats_publish_an_empty_batch_with_the_next_event_id() -> None:
    harness = WorkerHarness(heartbeat_s=0.001)
    await harness.start()
    batch = await harness.batches.get()
    assert (batch.rank, batch.first_event_id, batch.events) == (RANK, 0, ())
    await harness.worker.stop()


async def test_a_failed_task_is_logged_without_the_error_message(
    caplog: pytest.LogCaptureFixture, make_fail: MakeFail
) -> None:
    words = "what a client wrote"
    heartbeats = make_fail(KvPublisher, "heartbeat", ValueError(words))
    harness = WorkerHarness(heartbeat_s=0.0)
    await harness.start()
    await until(lambda: bool(heartbeats))
    await asyncio.sleep(0)
    await harness.worker.stop()
    (record,) = caplog.records
    assert (event_of(record), vars(record)["kvrouter_fields"]) == ("internal_error", {"worker": "6"})
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
    text = traceback_text(record.exc_info[1])
    assert text.endswith("ValueError\n")
    assert words not in text


async def test_a_failed_start_publishes_no_card_and_stops_its_engine() -> None:
    harness = WorkerHarness()
    harness.requests.serve(harness.worker.card.address, harness.worker)
    with pytest.raises(ConfigError):
        await harness.start()
    assert harness.cards.empty()
    assert harness.engine.stops == 1
    assert await harness.events.recover_snapshot(RANK) is None


def environ(folder: Path, **variables: str) -> dict[str, str]:
    return {
        "DYN_TOPOLOGY_ENABLED": "true",
        "DYN_TOPOLOGY_MOUNT_PATH": str(folder),
        "DYN_KV_TRANSFER_DOMAIN": "zone",
        "DYN_TOPOLOGY_POLL_S": "0.001",
        **variables,
    }


async def test_the_card_has_the_workers_domain_and_follows_its_changes(tmp_path: Path) -> None:
    (tmp_path / "zone").write_text("a")
    harness = WorkerHarness(environ=environ(tmp_path))
    await harness.start()
    card = await harness.cards.get()
    assert card is not None
    assert card.runtime_config == ModelRuntimeConfig(
        topology_domains={"zone": "a"},
        kv_transfer_domain="zone",
        kv_transfer_enforcement=Enforcement.REQUIRED,
    )
    (tmp_path / "zone").write_text("b")
    moved = await harness.cards.get()
    assert moved is not None
    while moved.runtime_config.topology_domains != {"zone": "b"}:  # a write may be seen half done
        moved = await harness.cards.get()
        assert moved is not None
    assert (moved.incarnation, moved.runtime_config.kv_transfer_domain) == (EPOCH, "zone")
    await harness.worker.stop()


async def test_a_worker_without_its_topology_value_does_not_start(tmp_path: Path) -> None:
    harness = WorkerHarness(environ=environ(tmp_path, DYN_TOPOLOGY_TIMEOUT_S="0"))
    with pytest.raises(TopologyUnavailable):
        await harness.start()
    assert harness.engine.on_events is None
    assert harness.cards.empty()


async def test_kv_events_of_unknown_ranks_are_dropped_and_reported_once(
    harness: WorkerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    on_events = harness.engine.on_events
    assert on_events is not None
    for strange in (3, 70_000, 2**31 - 1):
        on_events(DpRank(strange), (STORED,))
    harness.engine.tell(STORED)
    assert (await harness.batches.get()).rank == RANK
    assert harness.batches.empty()
    (record,) = caplog.records
    assert (event_of(record), vars(record)["kvrouter_fields"]["detail"]) == (
        "config_warning",
        "KV events of dp_rank 3 are dropped: this worker has dp_rank 0",
    )
    await harness.worker.stop()


async def test_a_topology_setting_without_effect_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "zone").write_text("a")
    harness = WorkerHarness(environ=environ(tmp_path, DYN_KV_TRANSFER_PREFERRED_WEIGHT="0.5"))
    with caplog.at_level(logging.WARNING):
        await harness.start()
    assert events_of(caplog.records) == ["config_warning"]
    await harness.worker.stop()
