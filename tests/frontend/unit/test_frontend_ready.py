"""``/ready`` is the decision's own answer: a fleet that refuses everything takes no traffic."""

from collections.abc import Sequence

import pytest

from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import Enforcement, LoadReport, Role, WorkerCard
from kvrouter.kernel.topology.policy import MismatchPolicy
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.frontend_harness import FrontendHarness, error_of, running_frontend
from tests.testing.router_harness import card


async def is_ready(frontend: FrontendHarness) -> bool:
    """Whether it is ready, which its own answer to a request must bear out."""
    ready = await frontend.http.get("/ready")
    explained = await frontend.http.post("/v1/route/explain", json={"model": "mock", "prompt": [1]})
    assert ready.status_code in {200, 503}
    if explained.status_code == 200:
        refused = explained.json()["error"]
        assert (refused is None or refused["code"] == "all_workers_busy") == (ready.status_code == 200)
    return ready.status_code == 200


async def test_ready_only_while_a_worker_can_answer() -> None:
    async with running_frontend() as frontend:
        nobody = await frontend.http.get("/ready")
        frontend.harness.discovery.put(card(1, Role.PREFILL))
        no_decode = await frontend.http.get("/ready")
        frontend.harness.discovery.put(card(2, Role.DECODE))
        ready = await frontend.http.get("/ready")
        healthy = await frontend.http.get("/health")
        await frontend.harness.service.requests.drain(0.0)
        draining = await frontend.http.get("/ready")
        still = await frontend.http.get("/health")
    assert [each.status_code for each in (nobody, no_decode, ready, draining)] == [503, 503, 200, 503]
    assert (error_of(nobody)["code"], nobody.headers["retry-after"]) == ("not_ready", "1")
    assert str(error_of(no_decode)["message"]).startswith("mock: no decode worker may take this request")
    assert error_of(draining)["code"] == "shutting_down"
    assert (healthy.status_code, healthy.json()["status"]) == (200, "ok")
    assert (still.status_code, still.json()["status"]) == (200, "draining")


async def test_a_frontend_accepts_without_workers_until_it_drains() -> None:
    async with running_frontend(card(1, Role.PREFILL), settle_s=0.0) as frontend:
        accepting = await frontend.http.get("/accepting")
        asked = await frontend.complete()
        await frontend.harness.service.requests.drain(0.0)
        draining = await frontend.http.get("/accepting")
    assert (accepting.status_code, accepting.json()) == (200, {"status": "accepting"})
    assert (asked.status_code, error_of(asked)["code"]) == (503, "no_eligible_worker")
    assert (draining.status_code, error_of(draining)["code"]) == (503, "shutting_down")


async def test_a_started_frontend_accepts_once_it_learned_the_fleet() -> None:
    async with running_frontend(settle_s=3600.0) as frontend:
        learning = await frontend.http.get("/accepting")
        frontend.harness.discovery.put(card(1))
        knows = await frontend.http.get("/accepting")
        frontend.harness.discovery.drop(1, card(1).incarnation)
        nobody_left = await frontend.http.get("/accepting")
    assert (learning.status_code, error_of(learning)["code"]) == (503, "not_ready")
    assert (knows.status_code, nobody_left.status_code) == (200, 200)


async def test_a_frontend_accepts_after_losing_discovery_but_not_before_reaching_it() -> None:
    async with running_frontend(settle_s=0.0) as frontend:
        on_store = frontend.harness.discovery.on_store
        assert on_store is not None
        on_store(False, "403 Forbidden")
        blind = await frontend.http.get("/accepting")
        on_store(True, "")
        sees = await frontend.http.get("/accepting")
        frontend.harness.discovery.put(card(1))
        on_store(False, "gone")
        frozen = await frontend.http.get("/accepting")
    assert [each.status_code for each in (blind, sees, frozen)] == [503, 200, 200]
    assert "403 Forbidden" in str(error_of(blind)["message"])


def pair(enforcement: Enforcement | None, *, decode_zone: str | None) -> list[WorkerCard]:
    return [card(1, Role.PREFILL, zone="a", enforcement=enforcement), card(2, Role.DECODE, zone=decode_zone)]


ROUTER_ASKS_RACK = KvRouterConfig(kv_transfer_topology_level="rack")
ROUTER_PREFERS_RACK = KvRouterConfig(
    kv_transfer_topology_level="rack", kv_transfer_mismatch_policy=MismatchPolicy.FALLBACK
)


@pytest.mark.parametrize(
    ("cards", "config", "ready"),
    [
        (pair(Enforcement.REQUIRED, decode_zone="a"), None, True),
        (pair(Enforcement.REQUIRED, decode_zone="b"), None, False),
        (pair(Enforcement.REQUIRED, decode_zone=None), None, False),
        (pair(Enforcement.FALLBACK, decode_zone="b"), None, True),
        (pair(None, decode_zone="b"), None, True),
        (pair(None, decode_zone="a"), ROUTER_ASKS_RACK, False),
        (pair(None, decode_zone="a"), ROUTER_PREFERS_RACK, True),
        ([card(1), card(2)], ROUTER_ASKS_RACK, True),
        ([card(1, draining=True)], None, False),
        ([card(1, Role.PREFILL, draining=True), card(2, Role.DECODE)], None, True),
    ],
)
async def test_readiness_matches_the_routing_of_a_plain_request(
    cards: Sequence[WorkerCard], config: KvRouterConfig | None, ready: bool
) -> None:
    async with running_frontend(*cards, config=config) as frontend:
        assert await is_ready(frontend) == ready
        assert frontend.harness.booked() == 0


async def test_dead_workers_make_a_frontend_unready_and_busy_ones_do_not() -> None:
    config = KvRouterConfig(active_decode_blocks_threshold=0.5)
    async with running_frontend(*pair(Enforcement.REQUIRED, decode_zone="a"), config=config) as frontend:
        frontend.harness.load(LoadReport(WorkerRank(WorkerId(2), DpRank(0)), 1024, 1024))
        assert await is_ready(frontend)
        frontend.harness.model.fleet.set_alive(WorkerId(2), False)
        assert not await is_ready(frontend)


async def test_a_single_servable_model_makes_a_frontend_ready() -> None:
    async with running_frontend(card(1, draining=True), card(2, model="other")) as frontend:
        assert not await is_ready(frontend), "nobody here can tokenize for the other model"
        frontend.harness.discovery.put(card(3))
        assert await is_ready(frontend)


async def test_a_model_without_workers_is_not_listed_and_its_calls_may_retry() -> None:
    async with running_frontend(card(1)) as frontend:
        frontend.harness.discovery.drop(1)
        models = (await frontend.http.get("/v1/models")).json()
        answer = await frontend.http.post("/v1/completions", json={"model": "mock", "prompt": "hello"})
    assert models["data"] == []
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "no_eligible_worker"
