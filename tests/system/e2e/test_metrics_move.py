"""Every metric family moves when what it tells of happens, as ``/metrics`` shows it."""

import asyncio
import threading
from array import array

import pytest

from kvrouter.app.telemetry_hooks import SyncGauges, refusals_on
from kvrouter.core.events import KvBatch
from kvrouter.core.ids import DpRank, EventId, RouterId, WorkerId
from kvrouter.core.workers import LoadReport
from kvrouter.kernel.ledger.replicas import Counts
from kvrouter.router import event_ingest
from kvrouter.router.event_cache_view import EventCacheView
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.replica_sync import ReplicaSync, SyncCounts
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Telemetry
from tests.oracles.sync import MemorySyncTransport
from tests.testing.constants import SetConstants
from tests.testing.mock_fleet import PATIENT_S, fleet_file, uniform_fleet, zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, leave_recovery_unanswered, mock_server, user, words
from tests.testing.scripted_engine import scripted_engine
from tests.testing.waits import until

ASSERTED_HERE = {
    "kvrouter_pair_capacity_ratio",
    "kvrouter_requests_total",
    "kvrouter_requests_active",
    "kvrouter_errors_total",
    "kvrouter_cancellations_total",
    "kvrouter_retries_total",
    "kvrouter_resumes_total",
    "kvrouter_prompt_tokens_total",
    "kvrouter_completion_tokens_total",
    "kvrouter_cached_tokens_total",
    "kvrouter_cache_reports_total",
    "kvrouter_cache_reported_prompt_tokens_total",
    "kvrouter_overlap_tokens_total",
    "kvrouter_time_to_first_token_seconds",
    "kvrouter_time_to_first_token_by_cache_hit_seconds",
    "kvrouter_time_to_first_token_by_domain_seconds",
    "kvrouter_request_prompt_tokens",
    "kvrouter_request_completion_tokens",
    "kvrouter_inter_token_latency_seconds",
    "kvrouter_request_duration_seconds",
    "kvrouter_decision_duration_seconds",
    "kvrouter_tokenization_duration_seconds",
    "kvrouter_decisions_total",
    "kvrouter_refusals_total",
    "kvrouter_handoffs_total",
    "kvrouter_fallbacks_total",
    "kvrouter_domain_waits_total",
    "kvrouter_queue_depth",
    "kvrouter_queue_wait_seconds",
    "kvrouter_queue_refusals_total",
    "kvrouter_feed_state",
    "kvrouter_feed_events_total",
    "kvrouter_feed_staleness_seconds",
    "kvrouter_event_lag_seconds",
    "kvrouter_kv_events_missing",
    "kvrouter_index_predictions_total",
    "kvrouter_index_blocks",
    "kvrouter_index_bytes",
    "kvrouter_ledger_active_blocks",
    "kvrouter_ledger_prefill_tokens",
    "kvrouter_ledger_leases",
    "kvrouter_worker_up",
    "kvrouter_worker_info",
    "kvrouter_worker_kv_transfer_info",
    "kvrouter_worker_requests_total",
    "kvrouter_worker_failures_total",
    "kvrouter_worker_prompt_tokens_total",
    "kvrouter_worker_cached_tokens_total",
    "kvrouter_worker_completion_tokens_total",
    "kvrouter_worker_draining",
    "kvrouter_worker_cordoned",
    "kvrouter_worker_engine_silent",
    "kvrouter_worker_blocks",
    "kvrouter_worker_running_requests",
    "kvrouter_worker_waiting_requests",
    "kvrouter_discovery_up",
    "kvrouter_planes_refused_total",
    "kvrouter_replicas",
    "kvrouter_replicas_behind",
    "kvrouter_replica_leases",
    "kvrouter_replica_sync_events_total",
    "kvrouter_http_connections",
    "kvrouter_http_events_total",
    "kvrouter_http_upload_bytes",
    "kvrouter_bodies_refused_total",
    "kvrouter_prompts_refused_total",
    "kvrouter_tokenize_bytes",
    "kvrouter_model_routed_by_load",
    "kvrouter_engine_tokenize_total",
    "kvrouter_build_info",
}


OF_A_STANDALONE_ROUTER = {
    "kvrouter_bookings",
    "kvrouter_bookings_lapsed_total",
    "kvrouter_prefills_active",
}
"""Asserted where that router's door is."""

OF_LOSSES = {
    "kvrouter_index_wrong_total",
    "kvrouter_kv_lost_total",
    "kvrouter_kv_pulled_tokens_total",
    "kvrouter_events_dropped_total",
}
"""Asserted where an index is made wrong, where KV is lost, where KV goes to a prefill worker, and where an
admitted worker lies.
"""

OF_THE_LOG = {"kvrouter_log_lines_lost_total"}
"""Asserted where nobody reads the log."""

OF_TRANSFERS = {
    "kvrouter_kv_transfers_total",
    "kvrouter_kv_transfer_bytes_total",
    "kvrouter_kv_transfer_seconds_total",
    "kvrouter_kv_transfers_failed_total",
    "kvrouter_kv_transfer_slow",
}
"""Asserted where engines tell what KV they fetched."""

OF_ENGINE_EVENTS = {"kvrouter_kv_events_skipped_total"}
"""Asserted where an engine's events are not passed on."""

OF_ENGINES_TO_COME = {"kvrouter_engines_awaited", "kvrouter_worker_several_engines"}
"""Asserted where an engine of a fleet file is not up yet, and where its URL leads to several."""

OF_ADMIN_CALLS = {"kvrouter_admin_errors_total"}
"""Asserted where every error is counted."""

OF_CIRCUITS = {"kvrouter_worker_circuit", "kvrouter_circuits_opened_total", "kvrouter_pairs_parted"}
"""Asserted where workers fail again and again."""

OF_CALLS_AS_WRITTEN = {
    "kvrouter_chats_unrendered_total",
    "kvrouter_engine_tokenize_total",
    "kvrouter_prompt_shape_answers_total",
    "kvrouter_retry_body_bytes",
    "kvrouter_retry_bodies_dropped_total",
}
"""Asserted where engines get calls as clients wrote them."""

OF_THE_COST_OF_TIME = {
    "kvrouter_ttft_predicted_seconds_total",
    "kvrouter_ttft_seen_seconds_total",
    "kvrouter_ttft_prediction_error_seconds",
    "kvrouter_rank_slowness",
    "kvrouter_rank_slow",
    "kvrouter_link_bandwidth_bytes_per_second",
    "kvrouter_link_latency_seconds",
    "kvrouter_link_slow",
    "kvrouter_link_seen_over_reported_ratio",
}
"""Asserted where the fleet is shown under that cost."""

OF_SERVICE_LEVELS = {"kvrouter_slo_refusals_total"}
"""Asserted where requests are refused because they would be late."""

OF_RECORDINGS = {
    "kvrouter_recording_active",
    "kvrouter_recording_records_total",
    "kvrouter_recording_dropped_total",
}
"""Asserted where traffic is recorded."""


def test_every_metric_is_covered_by_a_test_list() -> None:
    elsewhere = (
        OF_LOSSES | OF_TRANSFERS | OF_ENGINE_EVENTS | OF_ENGINES_TO_COME | OF_CIRCUITS | OF_CALLS_AS_WRITTEN
    )
    elsewhere |= OF_ADMIN_CALLS | OF_THE_LOG | OF_RECORDINGS | OF_THE_COST_OF_TIME | OF_SERVICE_LEVELS
    asserted = ASSERTED_HERE | OF_A_STANDALONE_ROUTER | elsewhere
    assert {spec.name for spec in Telemetry.SPECS} == asserted


async def chat(
    here: MockServer, *, n: int = 100, first: int = 0, max_tokens: int = 8, **nvext: object
) -> int:
    body = {
        "model": MODEL,
        "messages": user(words(first=first, n=n)),
        "max_tokens": max_tokens,
        "nvext": nvext,
    }
    return (await here.http.post("/v1/chat/completions", json=body)).status_code


async def test_every_answer_moves_its_metrics() -> None:
    async with mock_server(zoned_fleet()) as here:
        before = await here.metrics()
        assert before.value("build_info") == 1
        assert before.value("worker_up", role="decode", domain="a") == 2
        assert before.value("index_blocks") == 0
        for worker in here.system.fleet.workers.values():
            for rank in worker.card.ranks():  # as its next heartbeat would: nothing was carried so far
                here.system.fleet.events.publish_load(LoadReport(rank, 0, 16_384))
        for _ in range(2):
            assert await chat(here) == 200
            await here.until_quiet()
        after = await here.metrics()
        assert after.value("requests_total", route="/v1/chat/completions", model=MODEL, status="200") == 2
        assert after.value("requests_active", model=MODEL) == 0
        assert after.value("prompt_tokens_total") > 200
        assert after.value("completion_tokens_total") == 16
        assert after.value("cached_tokens_total") == after.value("overlap_tokens_total") >= 96
        assert after.value("cache_reports_total", route="tokens", reported="yes") == 2
        assert after.value("cache_reported_prompt_tokens_total") == after.value("prompt_tokens_total")
        assert after.value("index_predictions_total", prediction="right") >= 1
        assert after.value("index_predictions_total", prediction="too_many") == 0
        for histogram in ("time_to_first_token", "request_duration"):
            assert after.value(f"{histogram}_seconds_count", model=MODEL) == 2
            assert after.value(f"{histogram}_seconds_sum", model=MODEL) > 0
        hits = ("none", "over_half")
        by_hit = [
            after.value("time_to_first_token_by_cache_hit_seconds_count", cache_hit=hit) for hit in hits
        ]
        assert by_hit == [1, 1]
        for tokens in ("prompt", "completion"):
            assert after.value(f"request_{tokens}_tokens_count", model=MODEL) == 2
            counted = after.value(f"{tokens}_tokens_total", model=MODEL)
            assert after.value(f"request_{tokens}_tokens_sum", model=MODEL) == counted
            assert after.value(f"worker_{tokens}_tokens_total", model=MODEL) == counted
        assert after.value("worker_cached_tokens_total") == after.value("cached_tokens_total")
        for leg in ("prefill", "decode"):
            assert after.value("worker_requests_total", model=MODEL, leg=leg) == 2
        assert after.value("worker_info", engine="mock", zone="a", worker="1") == 1
        assert after.value("worker_info") == 6
        assert after.value("pair_capacity_ratio", model=MODEL) == 1
        transfer = {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "required"}
        assert after.value("worker_kv_transfer_info", topology_domains="zone=a", **transfer) == 3
        assert after.value("tokenization_duration_seconds_count", model=MODEL) == 2
        assert after.value("decision_duration_seconds_count", mode="kv") == 2
        assert after.value("decisions_total", mode="kv", shape="bootstrap") == 2
        ttft = "time_to_first_token_by_domain_seconds_count"
        pairs_seen = [after.value(ttft, prefill_domain=zone, decode_domain=zone) for zone in "ab"]
        assert sum(pairs_seen) == 2
        handed = [after.value("handoffs_total", prefill_domain=zone, decode_domain=zone) for zone in "ab"]
        assert sum(handed) == after.value("handoffs_total") == 2
        assert after.value("kv_transfers_total") == 2
        assert after.value("kv_transfer_bytes_total") > 1e6
        assert after.value("kv_transfer_seconds_total") > 0
        assert after.value("kv_transfers_failed_total") == after.value("kv_transfer_slow") == 0
        assert after.value("feed_events_total", outcome="blocks_stored") > 0
        assert after.value("index_blocks", medium="gpu") > 0
        assert after.value("index_bytes") > 0
        assert after.value("feed_state", state="live") == 6
        assert after.value("event_lag_seconds") > 0
        assert after.value("worker_blocks", which="total") == 6 * 16_384
        assert after.value("http_connections") >= 1
        assert after.value("http_upload_bytes") == 0
        assert after.value("http_events_total", event="request") >= 4


async def test_an_unfinished_upload_moves_its_metric() -> None:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        _, writer = await asyncio.open_connection(*here.system.address)
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n12345"
        writer.write(begun)
        await until(lambda: here.system.server.uploads.bytes == len(begun))
        assert (await here.metrics()).value("http_upload_bytes") == len(begun)
        writer.transport.abort()
        await until(lambda: here.system.server.uploads.bytes == 0)


async def test_bodies_over_their_bounds_move_their_metric() -> None:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        for body, bound in (("[" * 100, "depth"), ('{"prompt":[' + '"",' * 9_000 + '""]}', "items")):
            assert (await here.http.post("/v1/completions", content=body)).status_code == 400
            assert (await here.metrics()).value("bodies_refused_total", bound=bound) == 1


async def test_too_long_prompts_move_their_metrics() -> None:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        reply = await here.http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 3_000_000})
        assert reply.status_code == 400
        assert (await here.metrics()).value("prompts_refused_total", code="context_length_exceeded") == 1
        pool = here.system.fleet.encode_pool
        begun, go_on = threading.Event(), threading.Event()

        def wait(_: str) -> "array[int]":
            begun.set()
            assert go_on.wait(PATIENT_S)
            return array("I")

        encoding = asyncio.create_task(pool.encode(wait, "x" * 10_000, field="prompt"))
        assert await asyncio.to_thread(begun.wait, PATIENT_S)
        assert (await here.metrics()).value("tokenize_bytes") == pool.held_bytes > 10_000
        go_on.set()
        await encoding


async def test_a_model_routed_by_load_moves_its_metric() -> None:
    async with scripted_engine() as engine:
        line = f"{{name: v, engine: {{kind: vllm, url: '{engine.url}', kv_events: false}}}}"
        file = fleet_file(f"version: 1\nmodels: [{{name: tiny}}]\nworkers: [{line}]\n")
        async with mock_server(file) as here:
            assert (await here.metrics()).value("model_routed_by_load", model="tiny") == 1
    async with mock_server(uniform_fleet(replicas=1)) as here:
        assert (await here.metrics()).value("model_routed_by_load", model=MODEL) == 0


async def test_a_prompt_tokenized_by_its_engine_moves_its_metric() -> None:
    async with scripted_engine() as engine:
        engine.tokens_of = lambda _body: [1, 2, 3]
        line = f"{{name: v, engine: {{kind: vllm, url: '{engine.url}', kv_events: false}}}}"
        file = fleet_file(f"version: 1\nmodels: [{{name: tiny, tokenizer: engine}}]\nworkers: [{line}]\n")
        async with mock_server(file) as here:
            body = {"model": "tiny", "prompt": "hello"}
            assert (await here.http.post("/v1/route/explain", json=body)).json()["isl_tokens"] == 3
            counted = (await here.metrics()).value("engine_tokenize_total", model="tiny", outcome="answered")
            assert counted == 1


async def test_running_requests_move_the_ledger_metrics() -> None:
    """The last prompt is computed for seconds: the page is read meanwhile."""
    async with mock_server(uniform_fleet(replicas=1, speedup=0.1)) as here:
        streams = [
            await here.openai.completions.create(
                model=MODEL, prompt=words(first=n, n=64), max_tokens=2000, stream=True
            )
            for n in range(2)
        ]
        waiting = asyncio.create_task(chat(here, n=8000, first=9))
        await until(lambda: here.system.service.requests.running == 3)
        running = await here.metrics()
        assert running.value("requests_active", model=MODEL) == 3
        assert running.value("ledger_leases", model=MODEL) == 3
        assert running.value("ledger_active_blocks", worker="1", dp_rank="0") >= 8 + 500
        assert running.value("ledger_prefill_tokens", worker="1") > 8000
        assert running.value("worker_blocks", worker="1", which="active") > 0
        assert running.value("worker_running_requests", worker="1", dp_rank="0") >= 1
        for stream in streams:
            for _ in range(3):
                await anext(stream)
            await stream.close()
        assert await waiting == 200
        await here.until_quiet()
        ended = await here.metrics()
        assert ended.value("cancellations_total", model=MODEL) == 2
        assert ended.value("inter_token_latency_seconds_count", model=MODEL) > 0
        for gauge in ("ledger_leases", "ledger_active_blocks", "ledger_prefill_tokens", "requests_active"):
            assert ended.value(gauge) == 0


@pytest.mark.parametrize("enforcement", ["required", "fallback"])
async def test_refusals_fallbacks_and_domain_waits_move_their_metrics(enforcement: str) -> None:
    config = KvRouterConfig(router_domain_wait_s=0.01)
    async with mock_server(zoned_fleet(enforcement=enforcement), router=config) as here:
        taint = {"required_taints": ["gpu=h200"]}
        assert await chat(here, routing_constraints=taint) == 503
        for worker_id in (2, 3):
            await here.kill(worker_id)
        status = await chat(here, prefill_worker_id=1)
        metrics = await here.metrics()
        assert metrics.value("refusals_total", reason="taint_missing") >= 2
        assert metrics.value("errors_total", model=MODEL, code="no_eligible_worker") >= 1
        assert metrics.value("worker_up", role="decode", domain="a") == 0
        assert metrics.value("worker_up", role="decode", domain="b") == 2
        if enforcement == "required":
            assert status == 503
            assert metrics.value("refusals_total", reason="domain_mismatch", role="decode") >= 2
            assert metrics.value("domain_waits_total", outcome="refused") == 1
        else:
            assert status == 200
            assert metrics.value("fallbacks_total", domain="zone") == 1
            assert metrics.value("handoffs_total", prefill_domain="a", decode_domain="b") == 1


async def test_queued_requests_move_the_queue_metrics() -> None:
    config = KvRouterConfig(active_decode_blocks_threshold=0.0, admission_queue_max=1, admission_wait_s=4.0)
    async with mock_server(uniform_fleet(replicas=1, speedup=1.0), router=config) as here:
        stream = await here.openai.completions.create(
            model=MODEL, prompt=words(n=64), max_tokens=2000, stream=True
        )
        await anext(stream)
        (model,) = here.system.service.models()
        waiting = asyncio.create_task(chat(here))
        await until(lambda: len(model.placer.waiting) == 1)
        assert (await here.metrics()).value("queue_depth", model=MODEL) == 1
        assert await chat(here) == 503
        assert await waiting == 503
        refused = await here.metrics()
        assert refused.value("queue_depth", model=MODEL) == 0
        assert refused.value("queue_refusals_total", model=MODEL, cause="full") == 1
        assert refused.value("queue_refusals_total", model=MODEL, cause="timeout") == 1
        assert refused.value("refusals_total", reason="busy") >= 2
        waiting = asyncio.create_task(chat(here, max_tokens=1))
        await until(lambda: len(model.placer.waiting) == 1)
        await stream.close()
        assert await waiting == 200
        assert (await here.metrics()).value("queue_wait_seconds_count", model=MODEL) == 1


async def test_a_recovering_feed_moves_the_staleness_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's events name ids that it cannot give again: its blocks do not count until it is known."""
    async with mock_server(uniform_fleet(replicas=2)) as here:
        await chat(here)
        leave_recovery_unanswered(monkeypatch, here)
        worker = here.system.fleet.workers[WorkerId(1)]
        (rank,) = worker.card.ranks()
        assert (await here.metrics()).value("feed_staleness_seconds") == 0
        lost = KvBatch(rank, worker.card.incarnation, EventId(1_000_000), (), 0.0)
        here.system.fleet.events.publish(lost)
        stale = await here.metrics()
        assert stale.value("feed_state", worker="1", state="recovering") == 1
        assert stale.value("feed_events_total", model=MODEL, outcome="gaps") == 1
        assert (await here.metrics()).value("feed_staleness_seconds", worker="1") > 0
        assert stale.value("feed_staleness_seconds", worker="2") == 0


async def test_a_worker_that_never_publishes_moves_the_missing_metric(set_constants: SetConstants) -> None:
    """Both answer the router's questions, and none has sent anything; then one begins."""
    set_constants(event_ingest, SILENT_AFTER_S=0.1)
    async with mock_server(uniform_fleet(replicas=2)) as here:
        (model,) = here.system.service.models()
        assert isinstance(model.cache, EventCacheView)
        ingest = model.cache.ingest
        await until(lambda: all(reading.is_missing for _, reading in ingest.feed_readings()))
        silent = await here.metrics()
        assert [silent.value("kv_events_missing", worker=worker) for worker in "12"] == [1, 1]
        page = (await here.http.get("/v1/fleet")).json()
        assert [worker["ranks"][0]["feed"]["kv_events_missing"] for worker in page["workers"]] == [True, True]
        set_constants(event_ingest, SILENT_AFTER_S=PATIENT_S)
        worker = here.system.fleet.workers[WorkerId(2)]
        worker.publisher.heartbeat([DpRank(0)])
        heard = await here.metrics()
        assert [heard.value("kv_events_missing", worker=worker) for worker in "12"] == [1, 0]


async def test_lost_workers_move_their_metrics() -> None:
    engine = f"{{handoff: bootstrap, kv_wait_expiry_s: {PATIENT_S}}}"
    text = f"""
version: 1
models: [{{name: mock, block_size: 16}}]
workers:
  - {{name: prefill, role: prefill, engine: {engine}}}
  - {{name: decode, role: decode, replicas: 3, engine: {engine}}}
speedup: 40
"""
    async with mock_server(fleet_file(text)) as here:
        await here.resume()
        lost = await here.metrics()
        assert lost.value("resumes_total", model=MODEL) == 1
        assert lost.value("worker_failures_total", reason="lost") == 0, "it left, and its counters with it"
        left = [worker for number, worker in here.system.fleet.workers.items() if number != 1]
        await left[0].engine.stop()  # its worker answers, and takes nothing
        retries = 0.0
        for n in range(64):  # which of two alike workers a request goes to is a matter of its random id
            assert await chat(here, first=n) == 200
            retries = (await here.metrics()).value("retries_total", model=MODEL)
            if retries:
                break
        assert retries >= 1
        assert (await here.metrics()).value("worker_failures_total", reason="lost") >= 1
        await left[1].begin_drain()
        worker = str(left[1].card.worker_id)
        assert (await here.metrics()).value("worker_draining", worker=worker) == 1
        assert (await here.metrics()).value("worker_cordoned", worker=worker) == 0
        await here.http.post("/v1/cordons", json={"level": "worker", "name": worker, "force": True})
        assert (await here.metrics()).value("worker_cordoned", worker=worker) == 1


async def test_lost_discovery_and_refused_peers_move_their_metrics() -> None:
    async with mock_server(fleet_file("version: 1\nmodels: [{name: mock}]\nworkers: [{name: w}]\n")) as here:
        assert (await here.metrics()).value("discovery_up") == 1
        ServiceInstrumentation(here.system.telemetry).discovery(is_reachable=False, why="gone")
        refusals_on("tcp", here.system.telemetry)("a wrong token")
        page = await here.metrics()
        assert page.value("discovery_up") == 0
        assert page.value("planes_refused_total", plane="tcp") == 1


class CountingSync(ReplicaSync):
    """What there is to tell is what the test says."""

    reported = SyncCounts(
        Counts(
            replicas=2, behind=1, leases=7, gaps=3, duplicates=0, lost=0, over_limit=0, unheard=5, unusable=6
        ),
        untold=0,
        dropped=0,
        unsent=0,
    )

    def counts(self) -> SyncCounts:
        return self.reported


def test_other_replicas_move_the_replica_metrics() -> None:
    telemetry = Telemetry()
    sync = CountingSync(MemorySyncTransport(), RouterId("me"))
    gauges = SyncGauges(telemetry, sync)
    gauges.refresh()
    gauges.refresh()
    assert telemetry.replicas.value() == 2
    assert telemetry.replicas_behind.value() == 1
    assert telemetry.replica_leases.value() == 7
    assert telemetry.replica_sync.value("gap") == 3
    assert telemetry.replica_sync.value("unheard") == 5
    assert telemetry.replica_sync.value("unusable") == 6
