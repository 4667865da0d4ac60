"""One worker from its start to its end, on memory planes, next to an engine that does what the test says."""

import asyncio
import json
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
from kvrouter.telemetry.logs import JsonFormatter
from kvrouter.transports.requests.port import StreamBroken, WorkerUnreachable
from kvrouter.worker import KvPublisher
from tests.support.calls import MakeFail
from tests.support.logged import events_of
from tests.support.lone_worker import COLUMN, EPOCH, RANK, STORED, House
from tests.support.waits import until


@pytest.fixture
async def house() -> House:
    made = House()
    await made.start()
    return made


async def test_a_started_worker_is_found_serves_and_publishes(house: House) -> None:
    card = await house.cards.get()
    assert card == house.worker.card
    stream = await house.requests.open(house.worker.card.address, house.request())
    house.engine.streams[0].chunks.put_nowait(EngineChunk((5,), FinishReason.LENGTH))
    assert [chunk.token_ids async for chunk in stream] == [(5,)]
    house.engine.tell(STORED)
    batch = await house.batches.get()
    assert (batch.rank, batch.epoch, batch.first_event_id, batch.events) == (RANK, EPOCH, 0, (STORED,))
    load = LoadReport(RANK, 1, 10)
    house.engine.report(load)
    assert house.loads == [load]
    snapshot = await house.events.recover_snapshot(RANK)
    assert snapshot is not None
    assert (snapshot.next_event_id, snapshot.events) == (1, (Held(COLUMN, COLUMN),))
    await house.worker.stop()


async def test_stopping_says_goodbye_and_may_come_twice(house: House) -> None:
    await house.cards.get()
    await house.worker.stop()
    await house.worker.stop()
    assert await house.cards.get() is None
    assert await house.events.recover_snapshot(RANK) is None
    with pytest.raises(WorkerUnreachable):
        await house.requests.open(house.worker.card.address, house.request())


async def test_a_drain_waits_for_running_legs_and_takes_no_new_ones(house: House) -> None:
    await house.cards.get()
    stream = await house.requests.open(house.worker.card.address, house.request())
    drain = asyncio.create_task(house.worker.drain(60.0))
    card = await house.cards.get()
    assert card is not None
    assert card.draining
    with pytest.raises(ShuttingDown):
        await house.requests.open(house.worker.card.address, house.request(request_id="late"))
    assert (drain.done(), house.worker.running_legs) == (False, 1)
    house.engine.streams[0].chunks.put_nowait(EngineChunk((5,), FinishReason.LENGTH))
    assert [chunk.token_ids async for chunk in stream] == [(5,)]
    assert await drain
    assert await house.cards.get() is None
    assert house.engine.stops == 1


async def test_a_silent_engine_is_reported_as_such_and_gets_no_new_legs(house: House) -> None:
    """Those that run go on, and somebody who looks does not take it for a worker that leaves."""
    tell = house.engine.on_state
    assert tell is not None
    joined = await house.cards.get()
    stream = await house.requests.open(house.worker.card.address, house.request())
    tell(EngineState(answers=False, why="answered 500"))
    silent = await house.cards.get()
    assert joined is not None
    assert silent is not None
    assert (silent.engine_silent, silent.draining, silent.takes_new_requests) == (True, False, False)
    with pytest.raises(ShuttingDown, match="the engine of worker 6 does not answer"):
        await house.requests.open(house.worker.card.address, house.request(request_id="late"))
    house.engine.streams[0].chunks.put_nowait(EngineChunk((5,), FinishReason.LENGTH))
    assert [chunk.token_ids async for chunk in stream] == [(5,)]
    tell(EngineState())
    assert await house.cards.get() == joined
    await house.requests.open(house.worker.card.address, house.request(request_id="later"))
    await house.worker.stop()


async def test_a_worker_that_leaves_drains_whether_its_engine_answers_or_not(house: House) -> None:
    tell = house.engine.on_state
    assert tell is not None
    await house.cards.get()
    await house.worker.begin_drain()
    tell(EngineState(answers=False))
    tell(EngineState(answers=True, knows_cache=False, lookahead_tokens=3))
    states = [await house.cards.get(), await house.cards.get()]
    assert [(card.draining, card.engine_silent) for card in states if card is not None] == [(True, False)] * 2
    assert [card.cache_is_partial for card in states if card is not None] == [False, True]
    assert [card.lookahead_tokens for card in states if card is not None] == [0, 3]
    await house.worker.stop()


async def test_a_drain_has_a_limit(house: House) -> None:
    stream = await house.requests.open(house.worker.card.address, house.request())
    assert not await house.worker.drain(0.0)
    with pytest.raises(StreamBroken):
        await anext(aiter(stream))


@pytest.mark.parametrize("ending", ["cancel", "broken", "exhausted"])
async def test_a_leg_counts_once_however_it_ends(house: House, ending: str) -> None:
    stream = await house.requests.open(house.worker.card.address, house.request())
    assert house.worker.running_legs == 1
    chunks = house.engine.streams[0].chunks
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
    assert house.worker.running_legs == 0
    await house.worker.stop()


async def test_what_is_not_served_here_is_refused_by_name(house: House) -> None:
    for request, param in ((house.request(model="other"), "model"), (house.request(dp_rank=1), "dp_rank")):
        with pytest.raises(InvalidRequest) as refused:
            await house.worker.submit(request)
        assert refused.value.param == param
    assert house.engine.streams == []
    await house.worker.stop()


async def test_a_death_has_no_goodbye(house: House) -> None:
    await house.cards.get()
    house.engine.tell(STORED)
    house.worker.die("power")
    await asyncio.sleep(0)
    assert house.batches.empty()
    assert house.cards.empty()
    assert await house.events.recover_snapshot(RANK) is None
    with pytest.raises(WorkerUnreachable):
        await house.requests.open(house.worker.card.address, house.request())


async def test_heartbeats_tell_the_latest_load_again() -> None:
    """An engine at rest reports nothing more: a router that missed the last one thinks it busy for ever."""
    house = House(heartbeat_s=0.001)
    await house.start()
    busy, idle = LoadReport(RANK, 9, 10), LoadReport(RANK, 0, 10)
    house.engine.report(busy)
    house.engine.report(idle)
    await until(lambda: house.loads.count(idle) >= 3)
    assert house.loads[-1] == idle
    await house.worker.stop()


@pytest.mark.parametrize("kv_events", [True, False])
async def test_heartbeats_repeat_one_load_a_rank_whoever_reported_it_until_the_worker_stops(
    kv_events: bool,
) -> None:
    house = House(heartbeat_s=0.001)
    house.worker.card = replace(house.worker.card, publishes_kv_events=kv_events)
    await house.start()
    house.engine.report(LoadReport(RANK, 9, 10))
    house.worker.publisher.publish_load(active_blocks=0, total_blocks=10)
    await until(lambda: len(house.loads) >= 5)
    assert house.loads[1:] == [LoadReport(RANK, 0, 10)] * (len(house.loads) - 1)
    await house.worker.stop()
    n_loads = len(house.loads)
    house.engine.report(LoadReport(RANK, 9, 10))
    house.worker.publisher.heartbeat([])
    assert len(house.loads) == n_loads


async def test_heartbeats_tell_how_far_the_ids_have_come() -> None:
    house = House(heartbeat_s=0.001)
    await house.start()
    batch = await house.batches.get()
    assert (batch.rank, batch.first_event_id, batch.events) == (RANK, 0, ())
    await house.worker.stop()


async def test_a_task_that_breaks_is_reported_without_the_words_of_strangers(
    caplog: pytest.LogCaptureFixture, make_fail: MakeFail
) -> None:
    words = "what a client wrote"
    heartbeats = make_fail(KvPublisher, "heartbeat", ValueError(words))
    house = House(heartbeat_s=0.0)
    await house.start()
    await until(lambda: bool(heartbeats))
    await asyncio.sleep(0)
    await house.worker.stop()
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert (line["event"], line["worker"]) == ("internal_error", "6")
    assert line["exception"].endswith("ValueError\n")
    assert words not in str(line)


async def test_a_start_that_fails_leaves_nothing_behind() -> None:
    house = House()
    house.requests.serve(house.worker.card.address, house.worker)
    with pytest.raises(ConfigError):
        await house.start()
    assert house.cards.empty()
    assert house.engine.stops == 1
    assert await house.events.recover_snapshot(RANK) is None


def environ(folder: Path, **variables: str) -> dict[str, str]:
    return {
        "DYN_TOPOLOGY_ENABLED": "true",
        "DYN_TOPOLOGY_MOUNT_PATH": str(folder),
        "DYN_KV_TRANSFER_DOMAIN": "zone",
        "DYN_TOPOLOGY_POLL_S": "0.001",
        **variables,
    }


async def test_the_card_says_where_the_worker_is_and_says_so_again(tmp_path: Path) -> None:
    (tmp_path / "zone").write_text("a")
    house = House(environ=environ(tmp_path))
    await house.start()
    card = await house.cards.get()
    assert card is not None
    assert card.runtime_config == ModelRuntimeConfig(
        topology_domains={"zone": "a"},
        kv_transfer_domain="zone",
        kv_transfer_enforcement=Enforcement.REQUIRED,
    )
    (tmp_path / "zone").write_text("b")
    moved = await house.cards.get()
    assert moved is not None
    while moved.runtime_config.topology_domains != {"zone": "b"}:  # a write may be seen half done
        moved = await house.cards.get()
        assert moved is not None
    assert (moved.incarnation, moved.runtime_config.kv_transfer_domain) == (EPOCH, "zone")
    await house.worker.stop()


async def test_without_its_place_a_worker_does_not_start(tmp_path: Path) -> None:
    house = House(environ=environ(tmp_path, DYN_TOPOLOGY_TIMEOUT_S="0"))
    with pytest.raises(TopologyUnavailable):
        await house.start()
    assert house.engine.on_events is None
    assert house.cards.empty()


async def test_kv_events_of_a_rank_that_is_not_here_are_let_go_and_reported_once(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    on_events = house.engine.on_events
    assert on_events is not None
    for strange in (3, 70_000, 2**31 - 1):
        on_events(DpRank(strange), (STORED,))
    house.engine.tell(STORED)
    assert (await house.batches.get()).rank == RANK
    assert house.batches.empty()
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert (line["event"], line["detail"]) == (
        "config_warning",
        "KV events of dp_rank 3 are dropped: this worker has dp_rank 0",
    )
    await house.worker.stop()


async def test_odd_settings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "zone").write_text("a")
    house = House(environ=environ(tmp_path, DYN_KV_TRANSFER_PREFERRED_WEIGHT="0.5"))
    with caplog.at_level(logging.WARNING):
        await house.start()
    assert events_of(caplog.records) == ["config_warning"]
    await house.worker.stop()
