"""One worker from its start to its end, on memory planes, beside an engine that does what the test says."""

import asyncio
import logging
from array import array
from pathlib import Path

import pytest

from kvrouter.core.columns import pack_hashes
from kvrouter.core.errors import ConfigError, InvalidRequest, KvrouterError, ShuttingDown, TopologyUnavailable
from kvrouter.core.events import Held, KvBatch, KvEvent, Stored
from kvrouter.core.ids import DpRank, Epoch, ModelName, RequestId, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg, Sampling
from kvrouter.core.workers import Enforcement, LoadReport, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.engines.port import EventsSink, LoadSink
from kvrouter.planes.discovery.memory import MemoryDiscovery
from kvrouter.planes.events.memory import MemoryEventPlane
from kvrouter.planes.requests.memory import MemoryRequestPlane, memory_address
from kvrouter.planes.requests.port import StreamBroken, WorkerUnreachable
from kvrouter.worker import Worker, parse_topology_env

WORKER, EPOCH = WorkerId(6), Epoch(123)
RANK = WorkerRank(WORKER, DpRank(0))
COLUMN = pack_hashes([1])
STORED = Stored(None, COLUMN, COLUMN)


class Stream:
    """Gives what the test puts; None ends it."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[EngineChunk | Exception] = asyncio.Queue(8)
        self.cancelled: str | None = None

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> EngineChunk:
        chunk = await self.chunks.get()
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    def cancel(self, reason: str) -> None:
        self.cancelled = reason


class Engine:
    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.stops = 0
        self.on_events: EventsSink | None = None
        self.on_load: LoadSink | None = None

    async def start(self, on_events: EventsSink, on_load: LoadSink) -> None:
        self.on_events, self.on_load = on_events, on_load

    async def submit(self, request: EngineRequest) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def snapshot(self, dp_rank: DpRank) -> tuple[KvEvent, ...]:
        return (STORED,)

    async def stop(self) -> None:
        self.stops += 1

    def tell(self, *events: KvEvent) -> None:
        assert self.on_events is not None
        self.on_events(DpRank(0), events)

    def report(self, load: LoadReport) -> None:
        assert self.on_load is not None
        self.on_load(load)


class House:
    """One worker and its planes, and what a router would see."""

    def __init__(self, *, heartbeat_s: float = 60.0, environ: dict[str, str] | None = None) -> None:
        self.engine = Engine()
        self.discovery, self.events, self.requests = (
            MemoryDiscovery(),
            MemoryEventPlane(),
            MemoryRequestPlane(),
        )
        self.cards: asyncio.Queue[WorkerCard | None] = asyncio.Queue(8)
        self.batches: asyncio.Queue[KvBatch] = asyncio.Queue(8)
        self.loads: list[LoadReport] = []
        self.events.subscribe(self.batches.put_nowait, self.loads.append)
        card = WorkerCard(
            worker_id=WORKER,
            incarnation=EPOCH,
            model=ModelName("m"),
            role=Role.BOTH,
            block_size=1,
            context_length=64,
            address=memory_address(WORKER, EPOCH),
        )
        self.worker = Worker(
            self.engine,
            card,
            discovery=self.discovery,
            events=self.events,
            requests=self.requests,
            recovery=self.events,
            topology=None if environ is None else parse_topology_env(environ),
            heartbeat_s=heartbeat_s,
        )

    async def start(self) -> None:
        await self.discovery.watch(self.cards.put_nowait, lambda _id, _epoch: self.cards.put_nowait(None))
        await self.worker.start()

    def request(self, *, model: str = "m", dp_rank: int = 0, request_id: str = "r") -> EngineRequest:
        return EngineRequest(
            request_id=RequestId(request_id),
            attempt=0,
            leg=Leg.AGGREGATED,
            model=ModelName(model),
            token_ids=array("I", [1, 2]),
            sampling=Sampling(max_tokens=2),
            dp_rank=DpRank(dp_rank),
        )


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


async def test_heartbeats_tell_how_far_the_ids_have_come() -> None:
    house = House(heartbeat_s=0.001)
    await house.start()
    batch = await house.batches.get()
    assert (batch.rank, batch.first_event_id, batch.events) == (RANK, 0, ())
    await house.worker.stop()


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


async def test_odd_settings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "zone").write_text("a")
    house = House(environ=environ(tmp_path, DYN_KV_TRANSFER_PREFERRED_WEIGHT="0.5"))
    with caplog.at_level(logging.WARNING):
        await house.start()
    assert [record.getMessage() for record in caplog.records] == ["config_warning"]
    await house.worker.stop()
