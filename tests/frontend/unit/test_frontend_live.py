"""What the web page asks again and again: the latest decisions, KV between domains, refusals."""

import asyncio
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from kvrouter.core.constraints import RouterMode
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.frontend.admin import DECISIONS_LISTED_MAX
from kvrouter.kernel.topology.link_table import Link, LinkTable
from kvrouter.router import kv_flows
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.constants import SetConstants
from tests.testing.frontend_harness import (
    FrontendHarness,
    error_of,
    handoff_script,
    running_frontend,
    text_answer,
    zoned_cards,
)
from tests.testing.router_harness import MODEL, card, decode_card, prefill_card
from tests.testing.scripted_transport import ScriptedStream
from tests.testing.waits import until

PROMPT = [7] * 40


async def asked(frontend: FrontendHarness, path: str) -> Any:
    response = await frontend.http.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def send(frontend: FrontendHarness, request_id: str, **more: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, **more}
    return await frontend.http.post("/v1/completions", json=body, headers={"x-request-id": request_id})


def sized(worker: WorkerCard) -> WorkerCard:
    config = replace(worker.runtime_config, kv_bytes_per_token=1000)
    return replace(worker, runtime_config=config)


async def test_the_latest_decisions_come_newest_first_with_their_costs() -> None:
    async with running_frontend(*zoned_cards(), script=handoff_script) as frontend:
        for request_id in ("a", "b", "c"):
            assert (await send(frontend, request_id)).status_code == 200
        two = (await asked(frontend, "/v1/decisions?limit=2"))["decisions"]
        every = (await asked(frontend, "/v1/decisions"))["decisions"]
        none = (await asked(frontend, "/v1/decisions?limit=0"))["decisions"]
    assert [row["request_id"] for row in two] == ["c", "b"]
    assert [row["request_id"] for row in every] == ["c", "b", "a"]
    assert none == []
    newest = two[0]
    assert (newest["model"], newest["mode"], newest["attempt"]) == (MODEL, "kv", 0)
    assert newest["prefill"]["worker_id"] == 1
    assert newest["decode"]["worker_id"] == 2
    assert newest["prefill"]["cost"] >= 0
    assert newest["constraint"]["value"] == "a"
    assert "table" not in newest


@pytest.mark.parametrize("limit", ["-1", "x", "", "1.5", str(DECISIONS_LISTED_MAX + 1), "9" * 30, "²"])
async def test_a_non_numeric_or_too_large_limit_is_refused(limit: str) -> None:
    async with running_frontend(card(1)) as frontend:
        response = await frontend.http.get("/v1/decisions", params={"limit": limit})
    assert response.status_code == 400
    assert error_of(response)["param"] == "limit"


async def test_the_candidates_of_past_requests_are_kept_though_nobody_asked_before() -> None:
    async with running_frontend(*zoned_cards(), script=handoff_script) as frontend:
        await send(frontend, "past")
        frontend.harness.discovery.drop(3)
        await until(lambda: len(frontend.harness.model.fleet) == 2)
        for n in range(3):
            await send(frontend, f"later-{n}")
        latest = (await asked(frontend, "/v1/decisions"))["decisions"]
        (past,) = (await asked(frontend, "/v1/decisions/past"))["attempts"]
        (later,) = (await asked(frontend, "/v1/decisions/later-2"))["attempts"]
    assert all(row["has_table"] for row in latest)
    rows = {row["worker_id"]: row for row in past["table"]["decode"]["candidates"]}
    assert rows.keys() == {2, 3}, "a worker that left later is among them"
    assert rows[2]["chosen"]
    assert (rows[2]["cost"], rows[2]["overlap_blocks"]) == (
        past["decode"]["cost"],
        past["decode"]["overlap_blocks"],
    )
    assert rows[2]["times"] == past["decode"]["times"]
    assert (rows[3]["reason"], rows[3]["domains"]) == ("domain_mismatch", {"zone": "b"})
    assert past["table"]["prefill"]["chosen"]["worker_id"] == past["prefill"]["worker_id"]
    assert [row["worker_id"] for row in later["table"]["decode"]["candidates"]] == [2]


@pytest.mark.parametrize("mode", [RouterMode.RANDOM, RouterMode.ROUND_ROBIN])
async def test_a_kept_table_shows_the_worker_that_was_chosen(mode: RouterMode) -> None:
    """By the draw of the booking, so that what was drawn is what the table says."""
    config = KvRouterConfig(router_mode=mode)
    async with running_frontend(
        *(card(n) for n in range(1, 6)), script=text_answer("ok"), config=config
    ) as frontend:
        for n in range(12):
            await send(frontend, f"r{n}")
        picked = set()
        for n in range(12):
            (attempt,) = (await asked(frontend, f"/v1/decisions/r{n}"))["attempts"]
            assert attempt["table"]["decode"]["chosen"]["worker_id"] == attempt["decode"]["worker_id"]
            picked.add(attempt["decode"]["worker_id"])
    assert len(picked) > 1


async def test_a_refused_request_is_kept_with_the_reason_of_each_worker() -> None:
    constraints = {"required_taints": ["gpu"]}
    async with running_frontend(card(1, taints=("gpu",)), card(2), script=text_answer("ok")) as frontend:
        body = {"model": MODEL, "prompt": PROMPT, "nvext": {"routing_constraints": constraints}}
        frontend.harness.model.fleet.set_alive(WorkerId(1), alive=False)
        response = await frontend.http.post("/v1/completions", json=body, headers={"x-request-id": "no"})
        frontend.harness.model.fleet.set_alive(WorkerId(1), alive=True)
        await send(frontend, "yes")
        (kept,) = (await asked(frontend, "/v1/decisions/no"))["attempts"]
        latest = (await asked(frontend, "/v1/decisions"))["decisions"]
    error = error_of(response)
    assert (kept["error"]["code"], kept["error"]["message"]) == ("no_eligible_worker", error["message"])
    assert kept["error"]["refusals"] == error["refusals"] == {"not_alive": 1, "taint_missing": 1}
    assert (kept["prefill"], kept["decode"], kept["table"]["decode"]["chosen"]) == (None, None, None)
    reasons = {row["worker_id"]: row["reason"] for row in kept["table"]["decode"]["candidates"]}
    assert reasons == {1: "not_alive", 2: "taint_missing"}
    assert [row["request_id"] for row in latest] == ["yes"]


async def test_a_request_that_is_refused_after_an_attempt_has_both() -> None:
    def dying(worker: ScriptedStream) -> None:
        worker.die()

    async with running_frontend(card(1), script=dying) as frontend:
        assert (await send(frontend, "a")).status_code == 503
        first, second = (await asked(frontend, "/v1/decisions/a"))["attempts"]
    assert (first["attempt"], first["decode"]["worker_id"], first["error"]) == (0, 1, None)
    assert (second["attempt"], second["decode"], second["error"]["refusals"]) == (1, None, {"excluded": 1})


async def test_flows_count_handoffs_bytes_and_cost_by_domain_pair() -> None:
    cards = (sized(prefill_card(1)), decode_card(2), decode_card(3, zone="b"))
    async with running_frontend(*cards, script=handoff_script) as frontend:
        frontend.harness.model.links_changed(LinkTable(otherwise=Link(0.001, 1e9, 0.5)))
        for n in range(3):
            await send(frontend, f"r{n}")
        flows = await asked(frontend, "/v1/flows")
    (flow,) = flows["flows"]
    assert (flow["model"], flow["domain"]) == (MODEL, "zone")
    assert (flow["prefill_value"], flow["decode_value"]) == ("a", "a")
    assert (flow["handoffs"], flow["unsized_handoffs"], flow["recent_handoffs"]) == (3, 0, 3)
    assert flow["bytes"] == 3 * 40 * 1000
    assert flow["cost"] == pytest.approx(3 * 40 * 1000 * 0.5 / 1e9)
    assert flow["bytes_per_s"] == 3 * 40 * 1000 / flows["recent_s"]


async def test_the_rate_of_a_flow_covers_the_last_seconds() -> None:
    async with running_frontend(sized(prefill_card(1)), decode_card(2), script=handoff_script) as frontend:
        await send(frontend, "r")
        model = frontend.harness.model
        (now,) = model.flows.readings(now_s=model.clock())
        (later,) = model.flows.readings(now_s=asyncio.get_running_loop().time() + kv_flows.RECENT_S + 1)
    assert (now.recent_bytes, now.recent_handoffs) == (40_000, 1)
    assert (later.recent_bytes, later.recent_handoffs) == (0, 0)
    assert later.bytes == 40_000


async def test_unknown_bytes_and_unpriced_links_are_not_zero() -> None:
    async with running_frontend(*zoned_cards(), script=handoff_script) as frontend:
        await send(frontend, "r")
        (flow,) = (await asked(frontend, "/v1/flows"))["flows"]
    assert (flow["handoffs"], flow["unsized_handoffs"]) == (1, 1)
    assert flow["cost"] is None


async def test_pairs_over_the_limit_are_counted_together(
    set_constants: SetConstants,
) -> None:
    set_constants(kv_flows, PAIRS_MAX=0)
    async with running_frontend(sized(prefill_card(1)), decode_card(2), script=handoff_script) as frontend:
        for n in range(2):
            await send(frontend, f"r{n}")
        (flow,) = (await asked(frontend, "/v1/flows"))["flows"]
    assert (flow["prefill_value"], flow["decode_value"], flow["handoffs"]) == ("others", "others", 2)


async def test_refusals_are_listed_by_reason_and_by_answer() -> None:
    async with running_frontend(*zoned_cards(), script=handoff_script) as frontend:
        nowhere = {"routing_constraints": {"required_taints": ["gpu=h200"]}}
        assert (await send(frontend, "r", nvext=nowhere)).status_code == 503
        refusals = await asked(frontend, "/v1/refusals")
    assert {"reason": "taint_missing", "role": "prefill", "count": 1} in refusals["worker_ranks"]
    assert refusals["answers"] == [{"model": MODEL, "code": "no_eligible_worker", "count": 1}]
