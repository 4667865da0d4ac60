"""What the fleet's page and the metrics show, over a real socket."""

import asyncio
import time
from math import inf

import msgspec
import pytest

from kvrouter.core.constraints import RouterMode
from kvrouter.core.events import KvBatch
from kvrouter.core.ids import DpRank, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.workers import KvTransfers, LoadReport, Role
from kvrouter.kernel.placement import speeds
from kvrouter.kernel.placement.link_speeds import TransferSample
from kvrouter.kernel.topology.link_table import Link, SharedLink
from kvrouter.router import transfer_speed
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.setting import installed_version
from tests.testing.constants import SetConstants
from tests.testing.frontend_harness import (
    handoff_script,
    metrics_of,
    running_frontend,
    text_answer,
    zoned_cards,
)
from tests.testing.log_events import event_of, events_of
from tests.testing.router_harness import MODEL, card


async def test_metrics_show_the_fleet_and_move_with_requests() -> None:
    async with running_frontend(*zoned_cards(), script=handoff_script) as frontend:
        before = await metrics_of(frontend)
        await frontend.chat()
        await frontend.chat(nvext={"routing_constraints": {"required_taints": ["gpu=h200"]}})
        frontend.harness.model.fleet.report(
            LoadReport(WorkerRank(WorkerId(2), DpRank(0)), 7, 1000, None, 3, 2)
        )
        after = await metrics_of(frontend)
        frontend.harness.discovery.drop(3)
        without = await metrics_of(frontend)
    assert after["kvrouter_requests_total", MODEL, "/v1/chat/completions", "200"] == 1
    assert after["kvrouter_requests_total", MODEL, "/v1/chat/completions", "503"] == 1
    assert after["kvrouter_handoffs_total", "a", "a"] == 1
    assert after["kvrouter_refusals_total", "taint_missing", "prefill"] >= 1
    assert before["kvrouter_worker_up", "b", MODEL, "decode", "3"] == 1
    assert before["kvrouter_worker_draining", "3"] == 0
    assert before["kvrouter_worker_blocks", "0", "total", "2"] == 1024
    assert after["kvrouter_worker_blocks", "0", "active", "2"] == 7
    assert after["kvrouter_worker_blocks", "0", "total", "2"] == 1000
    requests = [f"kvrouter_worker_{state}_requests" for state in ("running", "waiting")]
    assert [after[name, "0", "2"] for name in requests] == [3, 2]
    assert not any((name, "0", "2") in before for name in requests)
    assert before["kvrouter_ledger_active_blocks", "0", "2"] == 0
    assert before["kvrouter_ledger_leases", MODEL] == 0
    assert ("kvrouter_index_bytes", MODEL) in before
    states = {
        state: after["kvrouter_feed_state", "0", state, "2"] for state in ("live", "recovering", "none")
    }
    assert sum(states.values()) + after["kvrouter_feed_state", "0", "partial", "2"] == 1
    assert ("kvrouter_feed_staleness_seconds", "0", "2") in after
    assert not any("3" in key[1:] and key[0] == "kvrouter_worker_up" for key in without)


async def test_a_handoff_is_counted_once_when_decode_is_picked_again() -> None:
    config = KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN)
    cards = (*zoned_cards(), card(4, Role.DECODE, zone="a"), card(5, Role.DECODE, zone="a"))
    async with running_frontend(*cards, script=handoff_script, config=config) as frontend:
        for _ in range(6):
            await frontend.chat()
        assert frontend.harness.telemetry.handoffs.value("a", "a") == 6


async def test_gauges_show_bookings_of_running_requests() -> None:
    async with running_frontend(card(1)) as frontend:
        call = asyncio.create_task(frontend.complete([5] * 40))
        worker = await frontend.plane.wait_for(Leg.AGGREGATED)
        running = await metrics_of(frontend)
        text_answer("ok")(worker)
        await call
    assert running["kvrouter_ledger_active_blocks", "0", "1"] == 3
    assert running["kvrouter_ledger_prefill_tokens", "0", "1"] == 40
    assert running["kvrouter_ledger_leases", MODEL] == 1
    assert running["kvrouter_requests_active", MODEL] == 1


async def test_the_bytes_of_an_index_have_those_of_predicted_blocks() -> None:
    async with running_frontend(card(1, publishes_kv_events=False), script=text_answer("ok")) as frontend:
        await frontend.complete([5] * 40)
        metrics = await metrics_of(frontend)
        (model,) = (await frontend.http.get("/v1/fleet")).json()["models"]
    assert (model["cache_view"], model["index"]["blocks"]["gpu"]) == ("events", 0)
    assert model["index"]["bytes"] == metrics["kvrouter_index_bytes", MODEL] > 0


async def test_the_fleet_shows_workers_loads_domains_index_and_feeds() -> None:
    config = KvRouterConfig(kv_transfer_topology_level="rack")
    cards = (*zoned_cards(), card(4, Role.PREFILL, taints=("gpu=h100",)), card(5, Role.DECODE, dp_size=2))
    async with running_frontend(*cards, script=handoff_script, config=config) as frontend:
        frontend.harness.model.fleet.report(LoadReport(WorkerRank(WorkerId(5), DpRank(1)), 7, 1000, 3, 2, 1))
        fleet = (await frontend.http.get("/v1/fleet")).json()
    workers = {worker["worker_id"]: worker for worker in fleet["workers"]}
    assert list(workers) == [1, 2, 3, 4, 5]
    assert (fleet["draining"], fleet["running_requests"]) == (False, 0)
    (model,) = fleet["models"]
    assert (model["model"], model["block_size"], model["router_mode"]) == (MODEL, 16, "kv")
    assert (model["workers"], model["worker_ranks"], model["waiting_requests"]) == (5, 6, 0)
    assert model["kv_transfer_default"] == {"enforcement": "required", "domain": "rack"}
    assert model["index"]["blocks"]["gpu"] == 0
    assert model["index"]["bytes"] >= 0
    assert workers[1]["domains"] == {"zone": "a"}
    assert workers[1]["kv_transfer"] == {"enforcement": "required", "domain": "zone"}
    assert workers[4]["kv_transfer"] == {"enforcement": "required", "domain": "rack"}
    assert workers[2]["kv_transfer"] is None
    assert workers[1]["taints"] == ["dynamo.topology/zone=a"]
    assert workers[3]["taints"] == ["dynamo.topology/zone=b"]
    assert workers[4]["taints"] == ["gpu=h100"]
    assert (workers[2]["role"], workers[2]["alive"], workers[2]["draining"]) == ("decode", True, False)
    assert workers[2]["address"].endswith("2")
    first, second = workers[5]["ranks"]
    assert (first["dp_rank"], first["report"], first["total_blocks"]) == (0, None, 1024)
    assert second["report"] == {
        "active_blocks": 7,
        "active_prefill_tokens": 3,
        "running_requests": 2,
        "waiting_requests": 1,
    }
    assert (second["active_blocks"], second["prefill_tokens"], second["index_blocks"]) == (0, 0, 0)
    assert second["feed"]["state"] in {"live", "recovering"}


@pytest.mark.parametrize(
    "config",
    [KvRouterConfig(overlap_score_weight=0.0), KvRouterConfig(kv_events=False)],
    ids=["none", "predicted"],
)
async def test_the_fleet_without_events_has_no_feeds(config: KvRouterConfig) -> None:
    async with running_frontend(card(1), script=text_answer("ok"), config=config) as frontend:
        await frontend.chat()
        fleet = (await frontend.http.get("/v1/fleet")).json()
        metrics = await metrics_of(frontend)
    (rank,) = fleet["workers"][0]["ranks"]
    assert (rank["feed"], rank["index_blocks"]) == (None, None)
    assert (fleet["models"][0]["index"] is None) == (config.overlap_score_weight == 0.0)
    assert metrics["kvrouter_feed_state", "0", "none", "1"] == 1


@pytest.mark.parametrize(
    ("config", "cost", "reason"),
    [
        (KvRouterConfig(), "time", "default"),
        (KvRouterConfig(overlap_score_weight=1.0), "blocks", "overlap_score_weight is stated"),
    ],
)
async def test_the_fleet_and_the_log_say_which_cost_is_used_and_why(
    config: KvRouterConfig, cost: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running_frontend(card(1), config=config) as frontend:
        (model,) = (await frontend.http.get("/v1/fleet")).json()["models"]
    assert (model["router_cost"], model["router_cost_reason"]) == (cost, reason)
    (line,) = (each for each in caplog.records if event_of(each) == "router_cost")
    fields = getattr(line, "kvrouter_fields", {})
    assert (fields["mode"], fields["router_cost"], fields["reason"]) == ("kv", cost, reason)


# What engines tell of themselves


async def test_the_fleet_shows_engine_versions_and_silent_engines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    reported = msgspec.structs.replace(card(1), engine="vllm 0.32.0")
    async with running_frontend(reported, card(2)) as frontend:

        async def shown() -> list[tuple[object, ...]]:
            fleet = (await frontend.http.get("/v1/fleet")).json()
            fields = ("engine", "engine_silent", "draining")
            return [tuple(worker[name] for name in fields) for worker in fleet["workers"]]

        assert await shown() == [("vllm 0.32.0", False, False), (None, False, False)]
        frontend.harness.discovery.put(msgspec.structs.replace(reported, engine_silent=True))
        assert await shown() == [("vllm 0.32.0", True, False), (None, False, False)]
        metrics = await metrics_of(frontend)
    gauges = ("kvrouter_worker_engine_silent", "kvrouter_worker_draining")
    assert [metrics[name, worker] for name in gauges for worker in "12"] == [1, 0, 0, 0]
    (line,) = (each for each in caplog.records if event_of(each) == "worker_changed")
    assert getattr(line, "kvrouter_fields", {})["reason"] == "its engine does not answer"


async def test_the_fleet_shows_each_ranks_cache_prediction_errors() -> None:
    async with running_frontend(card(1), card(2), script=text_answer("ok", cached=32)) as frontend:
        before = (await frontend.http.get("/v1/fleet")).json()
        for _ in range(4):
            await frontend.complete([5] * 40, nvext={"worker_id": 1})
        fleet = (await frontend.http.get("/v1/fleet")).json()
        metrics = await metrics_of(frontend)
    assert [worker["ranks"][0]["predictions"] for worker in before["workers"]] == [None, None]
    shown = {"answers": 4, "wrong": 4, "wrong_share": 1.0, "mean_error_blocks": -2.0}
    (predictions, unknown) = (worker["ranks"][0]["predictions"] for worker in fleet["workers"])
    assert 0.0 <= predictions.pop("span_s") < 10.0
    assert (predictions, unknown) == (shown, None)
    assert metrics["kvrouter_index_predictions_total", "0", MODEL, "too_few", "1"] == 4


async def test_the_fleet_shows_each_ranks_speed_and_time_predictions(
    caplog: pytest.LogCaptureFixture, set_constants: SetConstants
) -> None:
    # the first request of a rank is counted however long a busy machine takes for it
    set_constants(speeds, SLOW=inf)
    config = KvRouterConfig(router_cost="time")
    async with running_frontend(
        card(1, taints=("own",)), card(2), config=config, script=text_answer("ok")
    ) as frontend:
        before = (await frontend.http.get("/v1/fleet")).json()
        for _ in range(3):
            await frontend.complete([5] * 40, nvext={"routing_constraints": {"required_taints": ["own"]}})
        await frontend.complete([5] * 40, nvext={"worker_id": 2})
        fleet = (await frontend.http.get("/v1/fleet")).json()
        metrics = await metrics_of(frontend)
        events = next(iter(frontend.harness.service.models())).instrumentation.placement
        events.rank_speed_changed(WorkerRank(WorkerId(1), DpRank(0)), is_slow=True, slowness=2.5)
    assert before["models"][0]["router_cost"] == "time"
    assert [worker["ranks"][0]["speed"] for worker in before["workers"]] == [None, None]
    shown, other = (worker["ranks"][0]["speed"] for worker in fleet["workers"])
    assert (other, shown["requests"], shown["slow"], shown["relative"]) == (None, 3, False, 1.0)
    assert shown["predicted_ttft_s"] > 0.0
    labels = ("0", MODEL, "1")
    seen = [metrics[f"kvrouter_ttft_{kind}_seconds_total", *labels] for kind in ("predicted", "seen")]
    assert min(seen) > 0.0
    assert metrics["kvrouter_ttft_prediction_error_seconds_count", MODEL] == 3
    assert metrics["kvrouter_rank_slow", "0", "1"] == 0
    assert metrics["kvrouter_rank_slowness", "0", "1"] == pytest.approx(shown["relative"], abs=1e-3)
    (line,) = (each for each in caplog.records if event_of(each) == "rank_slow")
    assert getattr(line, "kvrouter_fields", {})["slowness"] == 2.5


async def test_the_fleet_shows_its_links_as_learned(caplog: pytest.LogCaptureFixture) -> None:
    links = '{"across": {"latency_s": 0.001, "bandwidth_bytes_per_s": 1000000000}}'
    config = KvRouterConfig(router_cost="time", router_links=links)
    async with running_frontend(card(1), card(2), config=config, script=text_answer("ok")) as frontend:
        await frontend.complete([5] * 40)
        before = (await frontend.http.get("/v1/fleet")).json()["models"][0]["links"]
        model = next(iter(frontend.harness.service.models()))
        link = SharedLink((("zone", "a"),), "b")
        learned = model.placer.transfers.learned
        for at_s in range(40):
            learned.note(TransferSample(link, Link(1e-3, 1e9), at_s - 1.0, float(at_s), 0.1, 1.0))
            learned.refresh((), now_s=float(at_s))
        sums, rank = model.placer.transfers.engine_sums, WorkerRank(WorkerId(1), DpRank(0))
        for n in range(2):  # a first report may be of long ago
            report = LoadReport(rank, 7, 1000, kv_transfers=KvTransfers(10 * n, 10**9 * n, 1.0 * n))
            frontend.harness.events.load(report)
        for _ in range(10):
            sums.observed(Slot(0), kv_bytes=1e8, seconds=0.3, now_s=model.clock())
        shown = (await frontend.http.get("/v1/fleet")).json()["models"][0]["links"]
        metrics = await metrics_of(frontend)
    assert before == {"alike": True, "engines": None, "learned": []}
    engines = shown["engines"]
    assert engines["ratio"] == pytest.approx(3.0, rel=1e-2)
    assert engines["bandwidth_bytes_per_s"] == pytest.approx(1e9, rel=1e-2)
    assert not engines["agree"]
    assert metrics["kvrouter_link_seen_over_reported_ratio", MODEL] == pytest.approx(3.0, rel=1e-2)
    assert shown["alike"]
    (kind,) = shown["learned"]
    assert kind["link"] == "between two values of zone"
    assert (kind["slowness"], kind["bandwidth_bytes_per_s"], kind["slow"]) == (10.0, 100_000_000, True)
    assert kind["slowness_interval"] == [10.0, 10.0]
    labels = kind["link"], MODEL
    assert metrics["kvrouter_link_bandwidth_bytes_per_second", *labels] == pytest.approx(1e8)
    assert metrics["kvrouter_link_latency_seconds", *labels] == 1e-3
    assert metrics["kvrouter_link_slow", *labels] == 1.0
    (line,) = (each for each in caplog.records if event_of(each) == "link_slow")
    assert getattr(line, "kvrouter_fields", {})["link"] == kind["link"]


async def test_uncertain_predictions_are_not_compared() -> None:
    """A rank whose feed recovers, and one whose worker itself does not know all that its engine holds."""
    async with running_frontend(card(1), card(2), card(3), script=text_answer("ok", cached=32)) as frontend:
        frontend.harness.discovery.put(msgspec.structs.replace(card(1), cache_is_partial=True))
        lost = KvBatch(WorkerRank(WorkerId(2), DpRank(0)), Epoch(1), EventId(9), ())
        frontend.harness.events.silent.add(lost.rank)
        frontend.harness.events.batch(lost)
        for worker_id in (1, 2, 3):
            await frontend.complete([5] * 40, nvext={"worker_id": worker_id})
        fleet = (await frontend.http.get("/v1/fleet")).json()
    ranks = [worker["ranks"][0] for worker in fleet["workers"]]
    assert [rank["feed"]["state"] == "live" for rank in ranks] == [False, False, True]
    assert [rank["predictions"] is None for rank in ranks] == [True, True, False]


async def test_the_fleet_shows_each_ranks_kv_transfers_and_speed(
    set_constants: SetConstants, caplog: pytest.LogCaptureFixture
) -> None:
    set_constants(transfer_speed, WINDOW_S=0.0)
    caplog.set_level("INFO")
    rank, gb = WorkerRank(WorkerId(1), DpRank(0)), 1_000_000_000
    async with running_frontend(card(1), card(2)) as frontend:

        async def reported(
            transfers: int, n_bytes: int, seconds: float, failed: int = 0
        ) -> dict[str, object]:
            reported = KvTransfers(transfers, n_bytes, seconds, failed)
            frontend.harness.events.load(LoadReport(rank, 7, 1000, kv_transfers=reported))
            fleet = (await frontend.http.get("/v1/fleet")).json()
            assert fleet["workers"][1]["ranks"][0]["kv_transfers"] is None
            shown = fleet["workers"][0]["ranks"][0]["kv_transfers"]
            assert isinstance(shown, dict)
            return shown

        nothing = {"transfers": 100, "failed": 1, "bytes": 7, "seconds": 3.0}
        speeds = {"gb_per_s": None, "shown_gb_per_s": None, "slow": False}
        assert await reported(100, 7, 3.0, 1) == {**nothing, **speeds}
        await reported(110, 10 * gb + 7, 4.0, 1)
        fast = await reported(120, 20 * gb + 7, 5.0, 2)
        assert (fast["gb_per_s"], fast["shown_gb_per_s"], fast["slow"]) == (10.0, 10.0, False)
        await reported(10, 10 * gb, 20.0)
        slow = await reported(20, 20 * gb, 40.0)
        assert (slow["bytes"], slow["gb_per_s"], slow["slow"]) == (20 * gb, round(40 / 42, 3), True)
        metrics = await metrics_of(frontend)
        await reported(30, 30 * gb, 41.0)
        assert (await reported(40, 40 * gb, 42.0))["slow"] is False
        well = await metrics_of(frontend)
    labels = ("0", MODEL, "1")
    assert metrics["kvrouter_kv_transfers_total", *labels] == 40
    assert metrics["kvrouter_kv_transfer_bytes_total", *labels] == 40 * gb
    assert metrics["kvrouter_kv_transfer_seconds_total", *labels] == 42.0
    assert metrics["kvrouter_kv_transfers_failed_total", *labels] == 1
    assert metrics["kvrouter_kv_transfer_slow", "0", "1"] == 1
    assert ("kvrouter_kv_transfer_slow", "0", "2") not in metrics
    assert well["kvrouter_kv_transfer_slow", "0", "1"] == 0
    assert [e for e in events_of(caplog.records) if e.startswith("kv_")] == [
        "kv_transfer_slow",
        "kv_transfer_well",
    ]


async def test_engine_reports_are_removed_with_their_worker() -> None:
    rank = WorkerRank(WorkerId(1), DpRank(0))
    async with running_frontend(card(1), script=text_answer("ok", cached=32)) as frontend:
        await frontend.complete([5] * 40)
        report = LoadReport(rank, 7, 1000, kv_transfers=KvTransfers(1, 1, 1.0))
        frontend.harness.events.load(msgspec.structs.replace(report, kv_events_skipped={"orphan": 1}))
        frontend.harness.telemetry.index_wrong.inc(MODEL, "1", "0")
        frontend.harness.discovery.put(card(1, incarnation=2))
        (worker,) = (await frontend.http.get("/v1/fleet")).json()["workers"]
        metrics = await metrics_of(frontend)
    (shown,) = worker["ranks"]
    assert [shown[field] for field in ("predictions", "kv_transfers", "kv_events_skipped")] == [None] * 3
    reported = (
        "kvrouter_index_predictions",
        "kvrouter_index_wrong",
        "kvrouter_kv_transfer",
        "kvrouter_kv_events_skipped",
    )
    assert [key for key in metrics if key[0].startswith(reported)] == []


async def test_the_fleet_shows_versions_engines_and_refused_workers() -> None:
    said = msgspec.structs.replace(
        card(1), version="0.1.0", engine="vllm 0.32.0", engine_url="http://engine:8000", takes_calls=True
    )
    other_blocks = msgspec.structs.replace(card(3), block_size=32, pod="pod-3")
    async with running_frontend(said, card(2), other_blocks) as frontend:
        asked_s = time.time()
        fleet = (await frontend.http.get("/v1/fleet")).json()
        frontend.harness.discovery.drop(3)
        without = (await frontend.http.get("/v1/fleet")).json()
    assert (fleet["version"], fleet["recording"], fleet["replicas"]) == (installed_version(), None, None)
    assert fleet["time_s"] == pytest.approx(asked_s, abs=30.0)
    assert fleet["models"][0]["cache_view"] == "events"
    fields = ("version", "engine_url", "takes_calls", "block_size", "context_length")
    assert [[worker[field] for field in fields] for worker in fleet["workers"]] == [
        ["0.1.0", "http://engine:8000", True, 16, 4096],
        [None, None, False, 16, 4096],
    ]
    (refused,) = fleet["refused_workers"]
    assert [refused[field] for field in ("worker_id", "model", "pod", "block_size", "field")] == [
        3,
        MODEL,
        "pod-3",
        32,
        "block_size",
    ]
    assert "has blocks of 32 tokens" in refused["why"]
    assert without["refused_workers"] == []


async def test_the_fleet_shows_each_workers_clock_offset() -> None:
    async with running_frontend(card(1), card(2)) as frontend:
        rank = WorkerRank(WorkerId(1), DpRank(0))
        frontend.harness.events.batch(KvBatch(rank, Epoch(1), EventId(0), (), published_s=time.time() + 60.0))
        fleet = (await frontend.http.get("/v1/fleet")).json()
    ahead, unheard = (worker["ranks"][0]["feed"]["clock_ahead_s"] for worker in fleet["workers"])
    assert ahead == pytest.approx(60.0, abs=30.0)
    assert unheard is None
