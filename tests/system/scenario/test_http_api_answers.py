"""The answers of our own HTTP routes, byte for byte: a field that moves, changes or is gone is seen."""

import random
from math import inf
from pathlib import Path
from shutil import copytree

import msgspec
import pytest
from pydantic import SecretStr

from kvrouter.cli.worker.worker_process import WorkerHealth, health_pages
from kvrouter.core.events import KvBatch
from kvrouter.core.ids import DpRank, Epoch, EventId, RouterId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, FinishReason, KvLoss, Leg
from kvrouter.core.taints import adapter_taints
from kvrouter.core.workers import Enforcement, KvTransfers, LoadReport, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.placement import speeds
from kvrouter.kernel.placement.link_speeds import TransferSample
from kvrouter.kernel.topology.link_table import Link, SharedLink
from kvrouter.recording.files import RecordingFolder
from kvrouter.recording.recorder import Recorder
from kvrouter.recording.salt import Salt
from kvrouter.router import prompt_shapes
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.router.traffic import TrafficRecorder
from kvrouter.settings.planes import PlaneSettings
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.tree import AdminAccess, FrontendSettings
from kvrouter.text.source import MOCK_FOLDER
from tests.app.unit.test_fleet_engines import up
from tests.frontend.unit.test_standalone_app import TOKENS, open_router, pair, prefills
from tests.oracles.sync import MemorySyncTransport
from tests.router.unit.test_routed_by_load import before
from tests.testing.calls import MakeFail
from tests.testing.constants import SetConstants
from tests.testing.frontend_harness import FrontendHarness, handoff_script, running_frontend, text_answer
from tests.testing.golden_http import GoldenAnswers, check
from tests.testing.processes import free_ports
from tests.testing.router_harness import MODEL, card, decode_card, prefill_card
from tests.testing.scripted_engine import JSON, ScriptedAnswer, page, scripted_engine
from tests.testing.scripted_transport import ScriptedStream

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": MODEL, "prompt": [5] * 40}


@pytest.fixture(autouse=True)
def _same_choices() -> None:
    """Of workers that are alike a router picks one by chance: by the same chance in every run."""
    random.seed(37)


def rank(worker_id: int, dp_rank: int = 0) -> WorkerRank:
    return WorkerRank(WorkerId(worker_id), DpRank(dp_rank))


def two_zones() -> list[WorkerCard]:
    """Pairs in two zones, one that is refused, and a model whose calls go to its engines as they are."""
    said = msgspec.structs.replace(
        decode_card(2),
        engine="vllm 0.32.0",
        engine_url="http://engine-2:8000",
        pod="decode-2",
        node="node-a",
        version="0.1.0",
    )
    ranks = card(3, Role.DECODE, zone="b", dp_size=2, taints=("gpu=h200",))
    preferred = card(4, Role.PREFILL, zone="b", enforcement=Enforcement.PREFERRED, weight=0.5, bootstrap=True)
    refused = msgspec.structs.replace(card(5), block_size=32, pod="other-blocks")
    passed = msgspec.structs.replace(
        card(6, model="passed", publishes_kv_events=False),
        takes_calls=True,
        names={"french": "french", "the-model": None},
        runtime_config=ModelRuntimeConfig(
            taints=adapter_taints(["french"]), prompt_tokens_min=8, prompt_tokens_max=4000
        ),
    )
    return [prefill_card(1), said, ranks, preferred, refused, passed]


def losing(stream: ScriptedStream) -> None:
    """The KV of one request never arrives; every other handoff is well."""
    if stream.request.leg is Leg.DECODE and stream.request.request_id == "lost":
        stream.feed(EngineChunk(finish=FinishReason.ERROR, error="no way", kv_lost=KvLoss.UNREACHABLE))
    else:
        handoff_script(stream)


async def chat(here: FrontendHarness, request_id: str, **fields: object) -> int:
    headers = {"x-request-id": request_id}
    return (
        await here.http.post("/v1/chat/completions", json={**CHAT, **fields}, headers=headers)
    ).status_code


def needs(taint: str) -> dict[str, object]:
    return {"nvext": {"routing_constraints": {"required_taints": [taint]}}}


async def test_http_answers_of_a_fleet_of_pairs_are_unchanged() -> None:
    async with running_frontend(
        *two_zones(),
        script=losing,
        config=KvRouterConfig(
            router_cost="blocks", kv_transfer_topology_level="rack", router_prefill_level="zone"
        ),
        place={"zone": "a"},
        sync=ReplicaSync(MemorySyncTransport(), RouterId("first")),
    ) as frontend:
        g = GoldenAnswers(frontend.address)
        answers = [await g.ask("GET", path) for path in ("/v1/decisions", "/v1/flows", "/v1/refusals")]
        assert await chat(frontend, "well", nvext={"worker_id": 2, "prefill_worker_id": 1}) == 200
        assert await chat(frontend, "lost", nvext={"prefill_worker_id": 1}) == 502
        assert await chat(frontend, "refused", **needs("gpu=none")) == 503
        frontend.harness.events.batch(KvBatch(rank(2), Epoch(1), EventId(0), (), published_s=1.0))
        frontend.harness.events.load(LoadReport(rank(3, 1), 7, 1000, 3, 2, 1))
        frontend.harness.discovery.put(msgspec.structs.replace(decode_card(2), engine_silent=True))
        answers += [
            await g.ask("GET", "/v1/fleet"),
            await g.ask("GET", "/v1/decisions"),
            await g.ask("GET", "/v1/decisions?limit=1"),
            await g.ask("GET", "/v1/decisions/well"),
            await g.ask("GET", "/v1/decisions/lost"),
            await g.ask("GET", "/v1/decisions/refused"),
            await g.ask("GET", "/v1/flows"),
            await g.ask("GET", "/v1/refusals"),
            await g.ask("POST", "/v1/route/explain", CHAT, x_request_id="asked"),
            await g.ask("POST", "/v1/route/explain", {**CHAT, **needs("gpu=none")}, x_request_id="asked"),
            await g.ask(
                "POST", "/v1/route/explain", {"model": "passed", "prompt": "x"}, x_request_id="asked"
            ),
            await g.ask("POST", "/v1/chat/completions", {**CHAT, **needs("gpu=none")}, x_request_id="asked"),
        ]
        frontend.harness.discovery.put(msgspec.structs.replace(decode_card(2), draining=True))
        lost = frontend.harness.discovery.on_store
        assert lost is not None
        lost(False, "no route to it")
        answers.append(await g.ask("GET", "/v1/fleet"))
    check("pairs", answers)


async def test_http_answers_on_cordons_and_thresholds_are_unchanged() -> None:
    async with running_frontend(card(1, zone="a"), card(2, zone="b"), script=text_answer("ok")) as frontend:
        g = GoldenAnswers(frontend.address)
        zone = {"level": "zone", "name": "a", "reason": "rack 4", "by": "ann"}
        answers = [
            await g.ask("GET", "/v1/cordons"),
            await g.ask("POST", "/v1/cordons", zone),
            await g.ask("POST", "/v1/cordons", {"level": "zone", "name": "a"}),
            await g.ask("POST", "/v1/cordons", {"level": "worker", "name": 2}),
            await g.ask("POST", "/v1/cordons", {"level": "worker", "name": 2, "force": True}),
            await g.ask("GET", "/v1/cordons"),
            await g.ask("GET", "/v1/fleet"),
            await g.ask("GET", "/ready"),
            await g.ask("DELETE", "/v1/cordons?level=worker&name=2"),
            await g.ask("DELETE", "/v1/cordons?level=worker&name=2"),
            await g.ask("DELETE", "/v1/cordons?level=zone&name=a&name=b"),
            await g.ask("DELETE", "/v1/cordons"),
            await g.ask("DELETE", "/v1/cordons?level=zone"),
            await g.ask("DELETE", "/v1/cordons?level=&name="),
            await g.ask("DELETE", "/v1/cordons?level=zone&name=a+%C3%A4%20b"),
            await g.ask("DELETE", "/v1/cordons?level=zone&name=a;force=1"),
            await g.ask("DELETE", "/v1/cordons?level=zone&name=a&force=true"),
            await g.ask("POST", "/v1/cordons", {"level": "zone"}),
            await g.ask("POST", "/v1/cordons", {"level": "rack", "name": "a"}),
            await g.ask("POST", "/v1/cordons", {**zone, "why": "x"}),
            await g.ask("POST", "/v1/cordons", {**zone, "force": "yes"}),
            await g.ask("POST", "/v1/cordons", b"{"),
            await g.ask("POST", "/v1/cordons", b""),
            await g.ask("GET", "/busy_threshold"),
            await g.ask("POST", "/busy_threshold", {"model": MODEL, "active_decode_blocks_threshold": 0.5}),
            await g.ask("POST", "/busy_threshold", {"model": MODEL, "active_prefill_tokens_threshold": 100}),
            await g.ask("POST", "/busy_threshold", {"model": MODEL}),
            await g.ask("GET", "/busy_threshold"),
            await g.ask("POST", "/busy_threshold", {"model": MODEL, "active_decode_blocks_threshold": None}),
            await g.ask("POST", "/busy_threshold", {"model": MODEL, "active_decode_blocks_threshold": 1.5}),
            await g.ask("POST", "/busy_threshold", {"model": "none"}),
            await g.ask("POST", "/busy_threshold", {}),
            await g.ask("POST", "/busy_threshold", b"[]"),
        ]
    check("cordons", answers)


TIMED = (
    "expected_ms",
    "queue_ms",
    "prefill_ms",
    "memory_ms",
    "decode_ms",
    "others_ms",
    "turnover_ms",
    "transfer_ms",
    "price_ms",
    "cost",
    "pair_cost",
    "slowness",
    "decode_slowness",
    "relative",
    "predicted_ttft_s",
    "seen_ttft_s",
    "ratio",
    "bandwidth_bytes_per_s",
    "seen_bytes_per_s",
    "gb_per_s",
    "shown_gb_per_s",
)


async def test_http_answers_of_a_fleet_by_cost_of_time_are_unchanged(
    tmp_path: Path, set_constants: SetConstants
) -> None:
    # the first request of a rank is counted however long a busy machine takes for it
    set_constants(speeds, SLOW=inf)
    folder = RecordingFolder(
        tmp_path, recording="0000000a", file_bytes=1 << 20, total_bytes=1 << 24, started_s=0.0
    )
    recorder = Recorder(
        folder,
        Salt.drawn(),
        recording="0000000a",
        version="1",
        began_s=0.0,
        started_s=0.0,
        on_lost=lambda why, error: pytest.fail(f"{why}: {error}"),
        on_stopped=lambda error: pytest.fail(repr(error)),
    )
    recorder.start()
    async with running_frontend(
        card(1, taints=("own",)),
        card(2, zone="b"),
        config=KvRouterConfig(router_cost="time"),
        script=text_answer("ok", cached=16),
        traffic=TrafficRecorder(recorder),
    ) as frontend:
        model = frontend.harness.model
        for _ in range(3):
            await frontend.complete([5] * 40, **needs("own"))
        learned, link = model.placer.transfers.learned, SharedLink((("zone", "a"),), "b")
        for at_s in range(40):
            learned.note(TransferSample(link, Link(1e-3, 1e9), at_s - 1.0, float(at_s), 0.1, 1.0))
            learned.refresh((), now_s=float(at_s))
        for n in range(2):
            fetched = KvTransfers(10 * n, 10**9 * n, 1.0 * n, n)
            skipped = {"orphan": n + 1}
            report = LoadReport(rank(1), 7, 1000, kv_transfers=fetched, kv_events_skipped=skipped)
            frontend.harness.events.load(report)
        for _ in range(10):
            model.placer.transfers.engine_sums.observed(
                Slot(0), kv_bytes=1e8, seconds=0.3, now_s=model.clock()
            )
        for _ in range(prompt_shapes.ANSWERS_MIN):
            model.engine_reports.shapes.note(
                "chat user",
                predicted_tokens=16,
                cached_tokens=320,
                isl_tokens=400,
                prompt_tokens=400,
                now_s=model.clock(),
            )
        g = GoldenAnswers(frontend.address, TIMED)
        answers = [
            await g.ask("GET", "/v1/fleet"),
            await g.ask("POST", "/v1/route/explain", {**COMPLETION, **needs("own")}, x_request_id="asked"),
            await g.ask("GET", "/v1/decisions?limit=1"),
        ]
    recorder.close()
    check("cost-of-time", answers)


async def test_http_answers_of_passed_through_calls_are_unchanged(tmp_path: Path) -> None:
    folder = copytree(MOCK_FOLDER, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].nowhere.at_all }}")
    call = {"model": "tiny", "prompt": "x" * 400, "max_tokens": 3}
    async with scripted_engine() as engine, up(before(engine, tokenizer=folder)) as here:
        engine.answers += [
            ScriptedAnswer((page("vllm-0.32.0-completion.json"),), content_type=JSON),
            ScriptedAnswer((page("vllm-0.32.0-chat.sse"),)),
        ]
        assert (await here.http.post("/v1/completions", json=call)).status_code == 200
        chat = {"model": "tiny", "messages": CHAT["messages"], "stream": True}
        assert (await here.http.post("/v1/chat/completions", json=chat)).status_code == 200
        g = GoldenAnswers(here.system.address, (*TIMED, "requests"), ("report", "kv_events_skipped"))
        answers = [await g.ask("GET", path) for path in ("/v1/models", "/version", "/ready", "/v1/fleet")]
        answers.append(await g.ask("POST", "/v1/route/explain", call, x_request_id="asked"))
    check("passed", answers)


async def test_http_answers_of_pages_and_edge_cases_are_unchanged() -> None:
    async with running_frontend(*two_zones(), script=handoff_script) as frontend:
        g = GoldenAnswers(frontend.address)
        pages = ("/health", "/ready", "/accepting", "/ping", "/load", "/version", "/v1/models")
        answers = [await g.ask("GET", path) for path in pages]
        answers += [await g.ask("HEAD", path) for path in (*pages, "/v1/fleet", "/metrics", "/ui", "/docs")]
        answers += [
            await g.ask("OPTIONS", path) for path in (*pages, "/v1/cordons", "/busy_threshold", "/none")
        ]
        answers += [
            await g.ask("GET", path)
            for path in (
                "/v1/models/mock",
                "/v1/models/french",
                "/v1/models/the-model",
                "/v1/models/none",
                "/v1/models/a%2Fb",
                "/v1/models/a/b",
                "/v1/models/",
                "/v1/models/%C3%A4",
                "/v1/models/%ff",
                "/",
                "/none",
                "/v1/fleet/x",
                "/V1/models",
                "//health",
                "/health/",
                "/health//",
                "/health?x=1",
                "/health%2F",
                "/heal%74h",
                "/v1/decisions/none",
                "/v1/decisions/none/",
                "/v1/decisions/a/b",
                "/v1/decisions/",
                "/v1/decisions?limit=0",
                "/v1/decisions?limit=",
                "/v1/decisions?limit=201",
                "/v1/decisions?limit=-1",
                "/v1/decisions?limit=1x",
                "/v1/decisions?limit=9999999",
                "/v1/decisions?limit=none&limit=2",
                "/v1/decisions?limit=2&limit=none",
                "/v1/decisions?LIMIT=none",
                "/v1/decisions?limit=%32",
                "/v1/decisions?limit=%D9%A3",
                "/v1/decisions?x=1&&",
                "/ui/none.js",
                "/ui/a/b",
                "/ui/..%2fadmin.py",
                "/v1/chat/completions",
                "/v1/route",
                "/v1/route/explain",
                "/v1/messages",
                "/v1/messages/x",
            )
        ]
        answers += [
            await g.ask("GET", path, shows_body=False)
            for path in ("/metrics", "/openapi.json", "/docs", "/ui", "/ui/", "/ui/app.js", "/ui/icon.svg")
        ]
        answers += [
            await g.ask("GET", "/metrics", shows_body=False, accept="application/openmetrics-text"),
            await g.ask("POST", "/ping"),
            await g.ask("PUT", "/ping"),
            await g.ask("POST", "/v1/models"),
            await g.ask("POST", "/health", {}),
            await g.ask("DELETE", "/busy_threshold"),
            await g.ask("PATCH", "/v1/cordons", {}),
            await g.ask("POST", "/ui/app.js"),
            await g.ask("POST", "/v1/decisions/x"),
            await g.ask("GET", "/v1/fleet", origin="http://evil.example"),
            await g.ask("GET", "/v1/fleet", sec_fetch_site="cross-site"),
            await g.ask("GET", "/v1/fleet", host="evil.example"),
            await g.ask("GET", "/health", origin="http://evil.example"),
            await g.ask("GET", "/health", content_encoding="br"),
            await g.ask("POST", "/v1/route/explain", {}),
            await g.ask("POST", "/v1/route/explain", {"model": "none", "prompt": "x"}),
            await g.ask("POST", "/v1/route/explain", {"model": MODEL}),
            await g.ask("POST", "/v1/route/explain", b"{"),
            await g.ask("POST", "/v1/route/explain", b"\xff"),
            await g.ask("POST", "/v1/route/explain", {**CHAT, "nvext": {"worker_id": 99}}),
            await g.ask("POST", "/v1/route/explain/", CHAT | {"messages": 1}),
        ]
    check("pages", answers)


async def test_http_answers_without_workers_and_while_draining_are_unchanged() -> None:
    async with running_frontend(settle_s=0.0) as frontend:
        g = GoldenAnswers(frontend.address)
        paths = ("/health", "/ready", "/accepting", "/ping", "/load", "/version", "/v1/models", "/v1/fleet")
        answers = [await g.ask("GET", path) for path in paths]
        answers += [await g.ask("POST", "/v1/route/explain", CHAT), await g.ask("GET", "/busy_threshold")]
        await frontend.harness.service.requests.drain(0.0)
        answers += [await g.ask("GET", path) for path in ("/health", "/ready", "/accepting", "/ping")]
    async with running_frontend() as frontend:
        g = GoldenAnswers(frontend.address)
        answers += [await g.ask("GET", path) for path in ("/ready", "/accepting")]
    check("no-workers", answers)


async def test_http_answer_of_an_internal_error_is_unchanged(make_fail: MakeFail) -> None:
    async with running_frontend(card(1)) as frontend:
        make_fail(frontend.harness.model, "explain", RuntimeError("hello"))
        answers = [await GoldenAnswers(frontend.address).ask("POST", "/v1/route/explain", CHAT)]
    check("mistake", answers)


async def test_http_answers_on_access_rights_are_unchanged() -> None:
    token = FrontendSettings(admin_token=SecretStr("s3cret"), cors_origins="https://console.example")
    closed = FrontendSettings(admin_routes=AdminAccess.CLOSED)
    answers = []
    async with running_frontend(card(1), settings=token) as frontend:
        g = GoldenAnswers(frontend.address)
        answers += [
            await g.ask("GET", "/v1/flows"),
            await g.ask("GET", "/v1/flows", authorization="Bearer wrong"),
            await g.ask("GET", "/v1/flows", authorization="Basic s3cret"),
            await g.ask("GET", "/v1/flows", authorization="bearer  s3cret"),
            await g.ask("HEAD", "/v1/flows", authorization="Bearer s3cret"),
            await g.ask("GET", "/v1/flows", authorization="Bearer s3cret", origin="https://console.example"),
            await g.ask("GET", "/health", origin="https://console.example"),
            await g.ask("GET", "/health", origin="https://other.example"),
            await g.ask(
                "OPTIONS",
                "/v1/flows",
                origin="https://console.example",
                access_control_request_method="GET",
                access_control_request_headers="authorization",
            ),
            await g.ask("PUT", "/v1/flows", origin="https://console.example"),
        ]
    async with running_frontend(card(1), settings=closed) as frontend:
        g = GoldenAnswers(frontend.address)
        answers += [await g.ask("GET", path) for path in ("/v1/flows", "/busy_threshold", "/v1/decisions/x")]
    check("access", answers)


async def test_http_answers_of_a_standalone_router_are_unchanged() -> None:
    blocks = KvRouterConfig(router_cost="blocks")
    async with (
        open_router(*pair(), config=blocks) as router,
        open_router(*pair(), prefill_alone=True, script=prefills, config=blocks) as prefiller,
    ):
        g = GoldenAnswers(router.router.server.addresses[0])
        mine = {**TOKENS, "request_id": "mine"}
        answers = [
            await g.ask("POST", "/v1/route?book=false", TOKENS, x_request_id="asked"),
            await g.ask("POST", "/v1/route", mine),
            await g.ask("POST", "/v1/route", mine),
            await g.ask("POST", "/v1/route/mine/prefill_complete"),
            await g.ask("POST", "/v1/route/mine/output_blocks", {"blocks": 2}),
            await g.ask("POST", "/v1/route/mine/output_blocks", {"blocks": 0}),
            await g.ask("POST", "/v1/route/mine/output_blocks", b"{"),
            await g.ask("POST", "/v1/route/mine/renew"),
            await g.ask("GET", "/v1/decisions/mine"),
            await g.ask("GET", "/v1/decisions"),
            await g.ask("POST", "/v1/route/mine/free"),
            await g.ask("POST", "/v1/route/mine/free"),
            await g.ask("DELETE", "/v1/route/none"),
            await g.ask("DELETE", "/v1/route/a/b/free"),
            await g.ask("DELETE", "/v1/route/a%20b"),
            await g.ask("GET", "/v1/route/mine"),
            await g.ask("PUT", "/v1/route/mine/renew"),
            await g.ask("POST", "/v1/route/none/renew"),
            await g.ask("POST", "/v1/route/none/renew/"),
            await g.ask("POST", "/v1/route?book=maybe", TOKENS, x_request_id="asked"),
            await g.ask("POST", "/v1/route", {"model": MODEL}),
            await g.ask("POST", "/v1/route", {**TOKENS, **needs("gpu=none")}, x_request_id="asked"),
            await g.ask("POST", "/v1/route/explain", {"model": MODEL, "prompt": [1]}, x_request_id="asked"),
            await g.ask("GET", "/health"),
            await g.ask("GET", "/v1/fleet"),
            await g.ask("DELETE", "/v1/prefill/x"),
        ]
        g = GoldenAnswers(prefiller.router.server.addresses[0])
        answers += [
            await g.ask("POST", "/v1/prefill", mine),
            await g.ask("GET", "/v1/decisions/mine"),
            await g.ask("DELETE", "/v1/prefill/mine"),
            await g.ask("DELETE", "/v1/prefill/mine"),
            await g.ask("POST", "/v1/prefill?x=1", mine),
            await g.ask("GET", "/v1/prefill/mine"),
        ]
    check("standalone", answers)


async def test_http_answers_of_worker_probes_are_unchanged() -> None:
    answers = []
    port = free_ports(1)
    healths = list(WorkerHealth)
    async with health_pages(PlaneSettings(health_port=port), lambda: healths[0]):
        while healths:
            answers += [
                await GoldenAnswers(("127.0.0.1", port)).ask("GET", path)
                for path in ("/health", "/accepting")
            ]
            healths.pop(0)
    check("worker-probes", answers)
