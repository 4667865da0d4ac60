"""Every route that is not a stream, over a real socket: what it says, and who may ask."""

import asyncio
import logging

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from kvrouter.config import FrontendSettings, KvRouterConfig
from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, FinishReason, GenerateRequest, Leg
from kvrouter.core.workers import Enforcement, LoadReport, Role, WorkerCard
from kvrouter.service.decisions import ATTEMPTS_MAX
from kvrouter.telemetry.logs import JsonFormatter
from tests.support.fleets import MODEL, card
from tests.support.front import CONTEXT_TOKENS, House, open_house, says
from tests.support.planes import ScriptedStream

GUARDED = [
    ("GET", "/busy_threshold"),
    ("POST", "/busy_threshold"),
    ("POST", "/v1/route/explain"),
    ("GET", "/v1/decisions/r1"),
    ("GET", "/v1/fleet"),
]
WRONG_TOKENS = ("Bearer wrong", "Bearer", "Basic s3cret", "s3cret", "Bearer s3cret2", "Bearer \xe9")
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "a secret prompt"}]}


def error_of(response: httpx.Response) -> dict[str, object]:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error, dict)
    return error


def handing_over(worker: ScriptedStream) -> None:
    """A prefill worker that hands over, a decode worker that says ok."""
    if worker.request.leg is Leg.PREFILL:
        worker.feed(EngineChunk(token_ids=(1,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 1}))
    else:
        says("ok")(worker)


def pairs() -> list[WorkerCard]:
    return [
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED),
        card(2, Role.DECODE, zone="a"),
        card(3, Role.DECODE, zone="b"),
    ]


# Errors and methods


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/health/", "/v1/models/", "/v1/chat/completions/", "/V1/models", "/v1/fleet/x"]
)
async def test_an_unknown_path_is_a_404(path: str) -> None:
    async with open_house(card(1)) as house:
        response = await house.http.get(path)
    assert response.status_code == 404
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("PUT", "/v1/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/busy_threshold", {"GET", "HEAD", "POST"}),
        ("GET", "/v1/route/explain", {"POST"}),
    ],
)
async def test_a_wrong_method_is_a_405_that_says_the_right_ones(
    method: str, path: str, allow: set[str]
) -> None:
    async with open_house(card(1)) as house:
        response = await house.http.request(method, path)
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"
    assert set(response.headers["allow"].split(", ")) == allow


async def test_a_mistake_of_ours_does_not_tell_the_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_house(card(1)) as house:

        def fail(request: GenerateRequest) -> None:
            raise RuntimeError(f"a secret prompt: {request.token_ids}")

        monkeypatch.setattr(house.bench.service, "explain", fail)
        response = await house.http.post("/v1/route/explain", json=BODY)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert "array(" not in response.text + "".join(lines)
    assert any("RuntimeError" in line for line in lines)


# Models, health, metrics


async def test_models_are_listed_as_openai_does() -> None:
    async with open_house(card(1)) as house:
        models = (await house.http.get("/v1/models")).json()
        one = (await house.http.get(f"/v1/models/{MODEL}")).json()
        unknown = await house.http.get("/v1/models/org/other")
    assert models == {"object": "list", "data": [one]}
    assert one["id"] == MODEL
    assert one["object"] == "model"
    assert one["max_model_len"] == CONTEXT_TOKENS
    assert unknown.status_code == 404
    assert error_of(unknown)["code"] == "model_not_found"


async def metrics_of(house: House) -> dict[tuple[str, ...], float]:
    """Samples by name and sorted label values."""
    response = await house.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_metrics_show_the_fleet_and_move_with_requests() -> None:
    async with open_house(*pairs(), script=handing_over) as house:
        before = await metrics_of(house)
        await house.chat()
        await house.chat(nvext={"routing_constraints": {"required_taints": ["gpu=h200"]}})
        house.bench.model.fleet.report(LoadReport(WorkerRank(WorkerId(2), DpRank(0)), 7, 1000))
        after = await metrics_of(house)
        house.bench.discovery.drop(3)
        without = await metrics_of(house)
    assert after["kvrouter_requests_total", MODEL, "/v1/chat/completions", "200"] == 1
    assert after["kvrouter_requests_total", MODEL, "/v1/chat/completions", "503"] == 1
    assert after["kvrouter_handoffs_total", "a", "a"] == 1
    assert after["kvrouter_refusals_total", "taint_missing", "prefill"] >= 1
    assert before["kvrouter_worker_up", "b", MODEL, "decode", "3"] == 1
    assert before["kvrouter_worker_draining", "3"] == 0
    assert before["kvrouter_worker_blocks", "0", "total", "2"] == 1024
    assert after["kvrouter_worker_blocks", "0", "active", "2"] == 7
    assert after["kvrouter_worker_blocks", "0", "total", "2"] == 1000
    assert before["kvrouter_ledger_active_blocks", "0", "2"] == 0
    assert before["kvrouter_ledger_leases", MODEL] == 0
    assert ("kvrouter_index_bytes", MODEL) in before
    states = {
        state: after["kvrouter_feed_state", "0", state, "2"] for state in ("live", "recovering", "none")
    }
    assert sum(states.values()) + after["kvrouter_feed_state", "0", "partial", "2"] == 1
    assert ("kvrouter_feed_staleness_seconds", "0", "2") in after
    assert not any("3" in key[1:] and key[0] == "kvrouter_worker_up" for key in without)


async def test_a_handoff_is_counted_once_wherever_decode_is_picked_again() -> None:
    config = KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN)
    cards = (*pairs(), card(4, Role.DECODE, zone="a"), card(5, Role.DECODE, zone="a"))
    async with open_house(*cards, script=handing_over, config=config) as house:
        for _ in range(6):
            await house.chat()
        assert house.bench.telemetry.handoffs.value("a", "a") == 6


async def test_gauges_show_what_is_booked_while_it_runs() -> None:
    async with open_house(card(1)) as house:
        call = asyncio.create_task(house.complete([5] * 40))
        worker = await house.plane.wait_for(Leg.AGGREGATED)
        running = await metrics_of(house)
        says("ok")(worker)
        await call
    assert running["kvrouter_ledger_active_blocks", "0", "1"] == 3
    assert running["kvrouter_ledger_prefill_tokens", "0", "1"] == 40
    assert running["kvrouter_ledger_leases", MODEL] == 1
    assert running["kvrouter_requests_active", MODEL] == 1


# The admin token


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_admin_routes_ask_for_the_token_that_is_set(method: str, path: str) -> None:
    settings = FrontendSettings(admin_token=SecretStr("s3cret"))
    async with open_house(card(1), settings=settings) as house:
        for header in (None, *WRONG_TOKENS):
            headers = {} if header is None else {b"authorization": header.encode("latin-1")}
            response = await house.http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "unauthorized"
            assert response.headers["www-authenticate"].startswith("Bearer")
        right = await house.http.request(method, path, headers={"authorization": "Bearer s3cret"})
        free = await house.http.get("/v1/models")
    assert right.status_code != 401
    assert free.status_code == 200


# Busy thresholds


async def test_busy_thresholds_are_got_and_set() -> None:
    config = KvRouterConfig(active_decode_blocks_threshold=0.5)
    async with open_house(card(1), config=config) as house:

        async def post(**fields: object) -> dict[str, object]:
            response = await house.http.post("/busy_threshold", json={"model": MODEL, **fields})
            assert response.status_code == 200
            answer = response.json()
            assert isinstance(answer, dict)
            return answer

        def thresholds(blocks: float | None, tokens: int | None) -> dict[str, object]:
            return {
                "model": MODEL,
                "active_decode_blocks_threshold": blocks,
                "active_prefill_tokens_threshold": tokens,
            }

        assert await post() == thresholds(0.5, None)
        assert await post(active_prefill_tokens_threshold=100) == thresholds(0.5, 100)
        assert await post(active_decode_blocks_threshold=None) == thresholds(None, 100)
        assert await post(active_decode_blocks_threshold=1) == thresholds(1.0, 100)
        listed = (await house.http.get("/busy_threshold")).json()
    assert listed == {"thresholds": [thresholds(1.0, 100)]}


async def test_a_threshold_holds_for_the_next_request() -> None:
    async with open_house(card(1), script=says("ok")) as house:
        field = "active_decode_blocks_threshold"
        await house.http.post("/busy_threshold", json={"model": MODEL, field: 0.5})
        house.bench.model.fleet.report(LoadReport(WorkerRank(WorkerId(1), DpRank(0)), 600, 1000))
        busy = await house.chat()
        await house.http.post(
            "/busy_threshold", json={"model": MODEL, "active_decode_blocks_threshold": None}
        )
        free = await house.chat()
    assert (busy.status_code, error_of(busy)["code"]) == (503, "all_workers_busy")
    assert error_of(busy)["refusals"] == {"busy": 1}
    assert free.status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "model"),
        ({"model": "other"}, 404, "model"),
        ({"model": MODEL, "active_decode_blocks_threshold": 1.5}, 400, "active_decode_blocks_threshold"),
        ({"model": MODEL, "active_decode_blocks_threshold": "a"}, 400, "active_decode_blocks_threshold"),
        ({"model": MODEL, "active_prefill_tokens_threshold": -1}, 400, "active_prefill_tokens_threshold"),
        ({"model": MODEL, "active_prefill_tokens_threshold": 1.5}, 400, "active_prefill_tokens_threshold"),
        ({"model": MODEL, "threshold": 1}, 400, "threshold"),
    ],
)
async def test_a_wrong_threshold_is_named(fields: dict[str, object], status: int, param: str) -> None:
    async with open_house(card(1)) as house:
        response = await house.http.post("/busy_threshold", json=fields)
    assert response.status_code == status
    assert error_of(response)["param"] == param


# Explanations and kept decisions


async def test_an_explanation_has_a_row_for_every_candidate_and_changes_nothing() -> None:
    async with open_house(*pairs(), script=handing_over) as house:
        response = await house.http.post("/v1/route/explain", json=BODY, headers={"x-request-id": "why"})
        explained = response.json()
        assert house.plane.opened == []
        assert house.bench.booked() == 0
        assert (await house.http.get("/v1/decisions/why")).status_code == 404
        completion = await house.http.post("/v1/route/explain", json={"model": MODEL, "prompt": [1] * 40})
    assert "secret" not in response.text
    assert explained["request_id"] == "why"
    assert (explained["model"], explained["mode"]) == (MODEL, "kv")
    assert explained["blocks"] == -(-explained["isl_tokens"] // 16)
    assert explained["constraint"] == {"enforcement": "required", "domain": "zone", "value": "a"}
    assert explained["fallback_used"] is False
    assert explained["error"] is None
    assert explained["prefill"]["chosen"] == {"worker_id": 1, "dp_rank": 0}
    assert explained["decode"]["chosen"] == {"worker_id": 2, "dp_rank": 0}
    rows = {row["worker_id"]: row for row in explained["decode"]["candidates"]}
    assert set(rows) == {2, 3}
    assert (rows[2]["eligible"], rows[2]["reason"], rows[2]["chosen"]) == (True, None, True)
    assert (rows[3]["eligible"], rows[3]["reason"], rows[3]["chosen"]) == (False, "domain_mismatch", False)
    assert rows[3]["domains"] == {"zone": "b"}
    costs = {"overlap_blocks", "prefill_blocks", "decode_blocks", "transfer_blocks", "multiplier", "cost"}
    assert costs <= rows[2].keys()
    assert (completion.json()["isl_tokens"], completion.json()["blocks"]) == (40, 3)


async def test_an_explanation_of_an_aggregated_fleet_has_no_prefill_leg() -> None:
    async with open_house(card(1), card(2, draining=True)) as house:
        explained = (await house.http.post("/v1/route/explain", json=BODY)).json()
    assert explained["prefill"] is None
    assert explained["constraint"] is None
    assert explained["decode"]["chosen"] == {"worker_id": 1, "dp_rank": 0}
    assert [row["reason"] for row in explained["decode"]["candidates"]] == [None, "draining"]


async def test_a_refusal_is_explained_too() -> None:
    body = {
        **BODY,
        "nvext": {
            "routing_constraints": {"required_taints": ["dynamo.topology/zone=c"]},
            "router_config_override": {"router_mode": "random"},
        },
    }
    async with open_house(card(1, zone="a"), card(2, draining=True)) as house:
        response = await house.http.post("/v1/route/explain", json=body)
    explained = response.json()
    assert response.status_code == 200
    assert explained["mode"] == "random"
    assert explained["error"]["code"] == "no_eligible_worker"
    assert explained["error"]["refusals"] == {"taint_missing": 1, "draining": 1}
    assert explained["prefill"] is None
    assert explained["decode"]["chosen"] is None
    assert [row["reason"] for row in explained["decode"]["candidates"]] == ["taint_missing", "draining"]


async def test_a_refused_pair_shows_both_legs() -> None:
    cards = (
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.REQUIRED),
        card(3, Role.DECODE, zone="b"),
    )
    async with open_house(*cards) as house:
        explained = (await house.http.post("/v1/route/explain", json=BODY)).json()
    assert explained["error"]["code"] == "no_eligible_worker"
    assert explained["error"]["refusals"] == {"domain_mismatch": 1}
    assert [row["reason"] for row in explained["prefill"]["candidates"]] == ["domain_mismatch"]
    assert [row["reason"] for row in explained["decode"]["candidates"]] == ["domain_mismatch"]
    assert explained["prefill"]["chosen"] is None


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "other", "prompt": "x"}, 404, "model"),
        ({"model": MODEL}, 400, "messages"),
        ({"model": MODEL, "prompt": "x", "messages": []}, 400, "prompt"),
        ({"model": MODEL, "prompt": "x", "n": 3}, 400, "n"),
        ({"model": MODEL, "prompt": "x", "nvext": {"worker_id": 5}}, 400, "nvext.worker_id"),
    ],
)
async def test_a_wrong_question_is_named(body: dict[str, object], status: int, param: str) -> None:
    async with open_house(card(1)) as house:
        response = await house.http.post("/v1/route/explain", json=body)
    assert response.status_code == status
    assert error_of(response)["param"] == param


async def test_the_decisions_of_a_request_are_kept_attempt_by_attempt() -> None:
    def script(worker: ScriptedStream) -> None:
        if worker.request.attempt == 0:
            worker.die()
        else:
            says("ok")(worker)

    async with open_house(card(1), card(2), script=script) as house:
        response = await house.http.post(
            "/v1/chat/completions", json=BODY, headers={"x-request-id": "team/a:1"}
        )
        kept = (await house.http.get("/v1/decisions/team/a:1")).json()
        unknown = await house.http.get("/v1/decisions/none")
    assert response.status_code == 200
    assert kept["request_id"] == "team/a:1"
    assert [attempt["attempt"] for attempt in kept["attempts"]] == [0, 1]
    workers = [attempt["decode"]["worker_id"] for attempt in kept["attempts"]]
    assert sorted(workers) == [1, 2]
    assert response.headers["x-kvrouter-decode-worker"] == str(workers[1])
    assert kept["attempts"][0]["prefill"] is None
    assert kept["attempts"][0]["mode"] == "kv"
    assert kept["attempts"][0]["decided_at"] > 1e9
    assert unknown.status_code == 404
    assert error_of(unknown)["code"] == "decision_not_found"


async def test_an_id_that_is_sent_again_and_again_keeps_its_last_decisions() -> None:
    async with open_house(card(1), script=says("ok")) as house:
        for _ in range(ATTEMPTS_MAX + 2):
            await house.http.post("/v1/chat/completions", json=BODY, headers={"x-request-id": "same"})
        kept = (await house.http.get("/v1/decisions/same")).json()
    assert len(kept["attempts"]) == ATTEMPTS_MAX


# The fleet


async def test_the_fleet_shows_workers_loads_domains_index_and_feeds() -> None:
    config = KvRouterConfig(kv_transfer_topology_level="rack")
    cards = (*pairs(), card(4, Role.PREFILL, taints=("gpu=h100",)), card(5, Role.DECODE, dp_size=2))
    async with open_house(*cards, script=handing_over, config=config) as house:
        house.bench.model.fleet.report(LoadReport(WorkerRank(WorkerId(5), DpRank(1)), 7, 1000, 3))
        fleet = (await house.http.get("/v1/fleet")).json()
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
    assert workers[4]["taints"] == ["gpu=h100"]
    assert (workers[2]["role"], workers[2]["alive"], workers[2]["draining"]) == ("decode", True, False)
    assert workers[2]["address"].endswith("2")
    first, second = workers[5]["ranks"]
    assert (first["dp_rank"], first["report"], first["total_blocks"]) == (0, None, 1024)
    assert second["report"] == {"active_blocks": 7, "active_prefill_tokens": 3}
    assert (second["active_blocks"], second["prefill_tokens"], second["index_blocks"]) == (0, 0, 0)
    assert second["feed"]["state"] in {"live", "recovering"}


@pytest.mark.parametrize(
    "config",
    [KvRouterConfig(overlap_score_weight=0.0), KvRouterConfig(kv_events=False)],
    ids=["none", "predicted"],
)
async def test_the_fleet_without_events_has_no_feeds(config: KvRouterConfig) -> None:
    async with open_house(card(1), script=says("ok"), config=config) as house:
        await house.chat()
        fleet = (await house.http.get("/v1/fleet")).json()
        metrics = await metrics_of(house)
    (rank,) = fleet["workers"][0]["ranks"]
    assert (rank["feed"], rank["index_blocks"]) == (None, None)
    assert (fleet["models"][0]["index"] is None) == (config.overlap_score_weight == 0.0)
    assert metrics["kvrouter_feed_state", "0", "none", "1"] == 1


async def test_no_prompt_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_house(card(1), script=says("ok")) as house:
        await house.http.post("/v1/chat/completions", json=BODY)
        await house.http.post("/v1/chat/completions", json={**BODY, "n": 2})
        await house.http.post("/v1/chat/completions", content=b'{"a secret prompt')
        await house.http.post("/v1/route/explain", json=BODY)
    assert "secret" not in caplog.text
    assert not any("secret" in str(vars(record)) for record in caplog.records)
