"""Explanations and kept decisions, over a real socket."""

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvrouter.api.client import decode_answer
from kvrouter.api.decision_schema import Explanation
from kvrouter.cli.explain.report import draw
from kvrouter.core.constraints import PdSelection
from kvrouter.core.timing import Timing
from kvrouter.core.workers import Enforcement, Role
from kvrouter.router.model_router import ATTEMPTS_MAX
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.frontend_harness import (
    SECRET,
    error_of,
    handoff_script,
    running_frontend,
    text_answer,
    zoned_cards,
)
from tests.testing.router_harness import MODEL, card
from tests.testing.scripted_transport import ScriptedStream


async def test_an_explanation_has_a_row_for_every_candidate_and_changes_nothing() -> None:
    async with running_frontend(*zoned_cards(), script=handoff_script) as frontend:
        response = await frontend.http.post("/v1/route/explain", json=SECRET, headers={"x-request-id": "why"})
        explained = response.json()
        assert frontend.plane.opened == []
        assert frontend.harness.booked() == 0
        assert (await frontend.http.get("/v1/decisions/why")).status_code == 404
        completion = await frontend.http.post("/v1/route/explain", json={"model": MODEL, "prompt": [1] * 40})
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
    silent = replace(card(3), engine_silent=True)
    async with running_frontend(card(1), card(2, draining=True), silent) as frontend:
        explained = (await frontend.http.post("/v1/route/explain", json=SECRET)).json()
    assert explained["prefill"] is None
    assert explained["constraint"] is None
    assert explained["decode"]["chosen"] == {"worker_id": 1, "dp_rank": 0}
    reasons = [row["reason"] for row in explained["decode"]["candidates"]]
    assert reasons == [None, "draining", "engine_silent"]


async def test_an_explanation_of_a_refusal_has_each_reason() -> None:
    body = {
        **SECRET,
        "nvext": {
            "routing_constraints": {"required_taints": ["dynamo.topology/zone=c"]},
            "router_config_override": {"router_mode": "random"},
        },
    }
    async with running_frontend(card(1, zone="a"), card(2, draining=True)) as frontend:
        response = await frontend.http.post("/v1/route/explain", json=body)
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
    async with running_frontend(*cards) as frontend:
        explained = (await frontend.http.post("/v1/route/explain", json=SECRET)).json()
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
async def test_a_wrong_field_of_an_explanation_is_named(
    body: dict[str, object], status: int, param: str
) -> None:
    async with running_frontend(card(1)) as frontend:
        response = await frontend.http.post("/v1/route/explain", json=body)
    assert response.status_code == status
    assert error_of(response)["param"] == param


async def test_decisions_are_kept_for_every_attempt_of_a_request() -> None:
    def script(worker: ScriptedStream) -> None:
        if worker.request.attempt == 0:
            worker.die()
        else:
            text_answer("ok")(worker)

    async with running_frontend(card(1), card(2), script=script) as frontend:
        response = await frontend.http.post(
            "/v1/chat/completions", json=SECRET, headers={"x-request-id": "team/a:1"}
        )
        kept = (await frontend.http.get("/v1/decisions/team/a:1")).json()
        unknown = await frontend.http.get("/v1/decisions/none")
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


async def test_a_repeated_request_id_keeps_its_last_decisions() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        for _ in range(ATTEMPTS_MAX + 2):
            await frontend.http.post("/v1/chat/completions", json=SECRET, headers={"x-request-id": "same"})
        kept = (await frontend.http.get("/v1/decisions/same")).json()
    assert len(kept["attempts"]) == ATTEMPTS_MAX


async def test_an_explanation_by_time_has_the_milliseconds_of_each_candidate() -> None:
    config = KvRouterConfig(router_cost="time")
    async with running_frontend(card(1), card(2), config=config, script=text_answer("ok")) as frontend:
        body = {"model": MODEL, "prompt": [1] * 400}
        explained = (await frontend.http.post("/v1/route/explain", json=body)).json()
        headers = {"x-request-id": "timed"}
        assert (await frontend.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        (attempt,) = (await frontend.http.get("/v1/decisions/timed")).json()["attempts"]
    for row in explained["decode"]["candidates"]:
        times = row["times"]
        own = ("queue_ms", "prefill_ms", "memory_ms", "transfer_ms")
        others = ("decode_ms", "others_ms", "turnover_ms")
        assert times["expected_ms"] == pytest.approx(sum(times[part] for part in own), abs=0.01)
        assert row["cost"] * 1e3 == pytest.approx(sum(times[part] for part in (*own, *others)), abs=0.01)
        assert times["prefill_ms"] == pytest.approx(Timing().prefill_ms(400), abs=0.01)
        assert row["prefill_blocks"] == 25.0
    assert attempt["decode"]["times"] == explained["decode"]["candidates"][0]["times"]


async def test_an_explanation_of_pairs_has_pair_costs_and_losers() -> None:
    config = KvRouterConfig(router_cost="time", router_pd_selection=PdSelection.JOINT)
    cards = (card(1, Role.PREFILL), card(2, Role.PREFILL), card(3, Role.DECODE), card(4, Role.DECODE))
    async with running_frontend(*cards, config=config, script=handoff_script) as frontend:
        body = {"model": MODEL, "prompt": [1] * 400}
        answer = await frontend.http.post("/v1/route/explain", json=body)
        explained = answer.json()
        fleet = (await frontend.http.get("/v1/fleet")).json()
        console = Console(record=True, width=400)
        draw(decode_answer(answer.content, Explanation), console)
        frontend.harness.discovery.put(replace(cards[2], draining=True))
        frontend.harness.discovery.put(replace(cards[3], decode_only=True))
        pair = (await frontend.http.post("/v1/route/explain", json=body)).json()
        headers = {"x-request-id": "pair"}
        assert (await frontend.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        (attempt,) = (await frontend.http.get("/v1/decisions/pair")).json()["attempts"]
    assert fleet["models"][0]["router_pd_selection"] == "joint"
    local = explained["local_prefill"]
    assert local["chosen"] in ({"worker_id": 3, "dp_rank": 0}, {"worker_id": 4, "dp_rank": 0})
    assert explained["prefill"]["chosen"] is explained["decode"]["chosen"] is None
    for group in ("prefill", "decode"):
        for row in explained[group]["candidates"]:
            assert row["partner"] is not None
            assert row["pair_cost"] > local["candidates"][0]["pair_cost"]
    shown = console.export_text()
    assert "Prefill on the decode worker: " in shown
    assert "itself" in shown
    assert [row["reason"] for row in pair["decode"]["candidates"]] == ["draining", None]
    (alone,) = pair["local_prefill"]["candidates"]
    assert alone["reason"] == "draining"
    (sender,) = (row for row in pair["prefill"]["candidates"] if row["chosen"])
    (receiver,) = (row for row in pair["decode"]["candidates"] if row["chosen"])
    assert sender["partner"] == {"worker_id": 4, "dp_rank": 0}
    assert receiver["partner"] == pair["prefill"]["chosen"]
    assert sender["pair_cost"] == pytest.approx(sender["cost"] + receiver["cost"])
    assert receiver["pair_cost"] == pytest.approx(sender["pair_cost"])
    assert attempt["pair_cost"] == pytest.approx(attempt["prefill"]["cost"] + attempt["decode"]["cost"])
