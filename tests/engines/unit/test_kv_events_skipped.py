"""What a worker does not pass on of its engine's KV events: counted, reported in its log, and to routers."""

import asyncio
from collections import Counter
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.engines.kv_events.engine_events import EngineTraits, Skipped
from kvrouter.engines.kv_events.event_stream import EngineEventStream
from kvrouter.engines.openai.engine import ServedEngine, ZmqEvents
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.vllm.attach import VllmClient
from kvrouter.engines.vllm.events import decode
from kvrouter.engines.vllm.introspect import RankInfo, VllmInfo
from kvrouter.worker import worker as worker_module
from tests.testing.engine_publisher import Publisher, stored_event, vllm_batch
from tests.testing.frontend_harness import metrics_of, running_frontend
from tests.testing.log_events import event_of
from tests.testing.router_harness import MODEL, card
from tests.testing.scripted_engine import scripted_engine
from tests.testing.waits import until
from tests.testing.worker_harness import RANK, WorkerHarness

R0, R1 = DpRank(0), DpRank(1)
OWN = WorkerRank(WorkerId(1), R0)


def published(seq: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
    return b"kv", seq.to_bytes(8, "big"), payload


def test_skips_count_for_their_rank_or_else_for_the_rank_of_the_socket() -> None:
    follower = EngineEventStream(decode, EngineTraits(block_size=32, dp_rank=R1), can_replay=False)
    orphans = stored_event(2, parent=1), stored_event(3, parent=2)
    follower.on_published(published(0, vllm_batch(*orphans, dp_rank=0)))
    follower.on_published(published(1, vllm_batch(stored_event(5, block_size=16), dp_rank=1)))
    assert follower.skipped(R0) == {Skipped.ORPHAN: 2}
    assert follower.skipped(R1) == {Skipped.OTHER_BLOCK_SIZE: 1}
    follower.on_published((b"kv", b"?", b""))
    follower.on_published(published(2, b"\xc1"))
    follower.on_published(published(5, vllm_batch(dp_rank=1)))
    assert follower.skipped(R0) == {Skipped.ORPHAN: 2}
    assert follower.skipped(R1) == {Skipped.OTHER_BLOCK_SIZE: 1, Skipped.UNREADABLE: 2, Skipped.MISSED: 2}
    assert follower.skipped(DpRank(2)) == {}


def test_skip_counts_are_returned_as_a_copy() -> None:
    follower = EngineEventStream(decode, EngineTraits(block_size=32), can_replay=False)
    follower.skipped(R0)[Skipped.ORPHAN] += 1
    assert follower.skipped(R0) == Counter()


async def test_load_reports_of_an_engine_have_its_skip_counts() -> None:
    info = VllmInfo(
        version="0.32.0",
        models=("tiny",),
        adapters=(),
        root="tiny-model",
        context_length=2048,
        prefix_caching=True,
        ranks={R0: RankInfo(32, 200)},
        events={},
        started_s=None,
    )
    publisher, loads = Publisher(), list[LoadReport]()
    publisher.start()
    async with asyncio.timeout(60), scripted_engine() as scripted:
        server = EngineServer(scripted.url)
        await server.open()
        engine = ServedEngine(
            server,
            VllmClient(WorkerId(7), info, model="tiny"),
            ZmqEvents({R0: publisher.at}, decode, 32),
            look_each_s=0.005,
        )
        await engine.start(lambda *_: None, loads.append)
        try:
            await until(lambda: bool(loads))
            assert loads[0].kv_events_skipped == {}
            await publisher.subscribed.wait()
            await publisher.publish(vllm_batch(stored_event(1), stored_event(3, parent=2)))
            await until(lambda: loads[-1].kv_events_skipped == {"orphan": 1})
        finally:
            await engine.stop()
            publisher.stop()


async def test_worker_logs_each_skip_reason_once_and_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness = WorkerHarness()
    await harness.start()

    def reported(**skipped: int) -> list[str]:
        caplog.clear()
        harness.engine.report(LoadReport(RANK, 1, 10, kv_events_skipped=skipped))
        records = [record for record in caplog.records if event_of(record) == "kv_events_skipped"]
        return [vars(record)["kvrouter_fields"]["reason"] for record in records]

    assert reported() == []
    assert reported(orphan=2) == ["orphan 2"]
    assert reported(orphan=3) == []
    assert reported(orphan=3, missed=1) == ["orphan 3, missed 1"]
    assert reported(orphan=3, missed=1) == []
    later = harness.worker._skipped_throttle._clock() + worker_module.SKIPPED_AGAIN_S
    monkeypatch.setattr(harness.worker._skipped_throttle, "_clock", lambda: later)
    assert reported(orphan=3, missed=2) == ["orphan 3, missed 2"]
    assert [load.kv_events_skipped for load in harness.loads][-1] == {"orphan": 3, "missed": 2}
    await harness.worker.stop()


async def test_router_counts_each_skipped_event_once_and_shows_it() -> None:
    async with running_frontend(card(1)) as harness:

        async def shown(skipped: Mapping[str, int] | None) -> object:
            if skipped is not None:
                report = LoadReport(OWN, 7, 1000)
                harness.harness.events.load(replace(report, kv_events_skipped=skipped))
            (worker,) = (await harness.http.get("/v1/fleet")).json()["workers"]
            return worker["ranks"][0]["kv_events_skipped"]

        assert await shown(None) is None
        assert await shown({}) == {}
        assert await shown({"orphan": 2}) == {"orphan": 2}
        assert await shown({"orphan": 5, "missed": 1}) == {"orphan": 5, "missed": 1}
        assert await shown({"orphan": 5, "missed": 1}) == {"orphan": 5, "missed": 1}
        assert await shown({"orphan": 1, "missed": 2}) == {"orphan": 1, "missed": 2}  # its engine restarted
        metrics = await metrics_of(harness)
    name, labels = "kvrouter_kv_events_skipped_total", ("0", MODEL)
    assert metrics[name, *labels, "orphan", "1"] == 6
    assert metrics[name, *labels, "missed", "1"] == 2
