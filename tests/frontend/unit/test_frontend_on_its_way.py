"""A model that may be on its way is answered 503, which clients try again; 404 is for one that nobody has."""

import httpx
import pytest
from msgspec.structs import replace

from kvrouter import KvRouter, KvRouterConfig
from kvrouter.core.errors import ModelNotReady, UnknownModel
from tests.testing.embedding_program import program
from tests.testing.frontend_harness import FrontendHarness, error_of, running_frontend, text_answer
from tests.testing.mock_fleet import BLOCK, uniform_fleet
from tests.testing.router_harness import MODEL, card

TWO = KvRouterConfig(router_min_initial_workers=2)
TOOL = {"type": "function", "function": {"name": "f"}}


def reported(response: httpx.Response) -> tuple[int, object, str | None]:
    return response.status_code, error_of(response)["code"], response.headers.get("retry-after")


ON_ITS_WAY = (503, "model_not_ready", "1")
NOBODYS = (404, "model_not_found", None)


async def all_ways(frontend: FrontendHarness, model: str) -> list[tuple[int, object, str | None]]:
    """How each route that names a model answers for it."""
    return [
        reported(await frontend.chat(model=model)),
        reported(await frontend.complete(model=model)),
        reported(await frontend.http.get(f"/v1/models/{model}")),
        reported(await frontend.http.post("/v1/route/explain", json={"model": model, "prompt": "hello"})),
    ]


async def test_before_the_first_worker_every_model_is_not_ready() -> None:
    async with running_frontend(settle_s=0.0) as frontend:
        accepting = await frontend.http.get("/accepting")
        before = await all_ways(frontend, MODEL)
        frontend.harness.discovery.put(card(1))
        after = await all_ways(frontend, "other")
    assert accepting.status_code == 200, "it asked, and knows as much as any other"
    assert before == [ON_ITS_WAY] * 4
    assert after == [NOBODYS] * 4


async def test_calls_that_only_engines_take_are_not_ready_without_workers() -> None:
    async with running_frontend() as frontend:
        tools = reported(await frontend.chat(tools=[TOOL]))
        broken = await frontend.http.post("/v1/chat/completions", content=b'{"model": "mock",')
        frontend.harness.discovery.put(card(1))
        known = await frontend.chat(tools=[TOOL])
    assert tools == ON_ITS_WAY
    assert (broken.status_code, known.status_code) == (400, 400)


async def test_a_model_is_not_ready_while_discovery_is_lost() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        on_store = frontend.harness.discovery.on_store
        assert on_store is not None
        on_store(False, "10.1.2.3 refused")
        other, served = await frontend.complete(model="other"), await frontend.complete()
        on_store(True, "")
        back = await frontend.complete(model="other")
    assert (reported(other), served.status_code, reported(back)) == (ON_ITS_WAY, 200, NOBODYS)
    assert "10.1.2.3" not in other.text


async def test_a_model_without_a_tokenizer_is_not_ready() -> None:
    async with running_frontend(card(1, model="other"), card(2)) as frontend:
        found = await all_ways(frontend, "other")
    assert found == [ON_ITS_WAY] * 4


async def test_a_models_names_stay_known_when_its_workers_leave() -> None:
    named = replace(card(1), takes_calls=True, names={"style": "style", "another": None})
    async with running_frontend(named, replace(card(2), takes_calls=True)) as frontend:
        frontend.harness.discovery.drop(2)
        frontend.harness.discovery.drop(1)
        found = [await frontend.complete(model=name) for name in ("style", "another", MODEL)]
        listed = await frontend.http.get("/v1/models/style")
    assert [reported(each) for each in found] == [(503, "no_eligible_worker", "1")] * 3
    assert reported(listed) == ON_ITS_WAY


async def test_only_startup_waits_for_the_configured_number_of_workers() -> None:
    async with running_frontend(card(1), config=TWO, settle_s=0.0, script=text_answer("ok")) as frontend:
        pages = "/accepting", "/ready"
        few = [await frontend.http.get(page) for page in pages]
        healthy = await frontend.http.get("/health")
        other, served = await frontend.complete(model="other"), await frontend.complete()
        frontend.harness.discovery.put(card(1, incarnation=2))
        same = await frontend.http.get("/accepting")
        frontend.harness.discovery.put(card(2))
        enough = [await frontend.http.get(page) for page in pages]
        frontend.harness.discovery.drop(2)
        frontend.harness.discovery.drop(1, 2)
        left = await frontend.http.get("/accepting")
        ok = await frontend.http.get("/health")
    assert [reported(each) for each in few] == [(503, "not_ready", "1")] * 2
    assert all("1 of 2 workers" in each.text for each in few)
    assert (healthy.status_code, healthy.json()["status"]) == (200, "starting"), "nobody restarts it for that"
    assert (reported(other), served.status_code) == (ON_ITS_WAY, 200)
    assert (same.status_code, left.status_code) == (503, 200)
    assert [each.status_code for each in enough] == [200, 200]
    assert ok.json()["status"] == "ok"


async def test_a_kv_router_raises_not_ready_or_unknown_model_alike() -> None:
    config = KvRouterConfig(router_min_initial_workers=3)
    async with program(uniform_fleet(replicas=2)) as here:
        async with KvRouter(here.endpoint, BLOCK, kv_router_config=config) as router:
            with pytest.raises(ModelNotReady, match="2 of 3 workers"):
                await router.best_worker([1], model="other")
        async with KvRouter(here.endpoint, BLOCK) as router:
            with pytest.raises(UnknownModel):
                await router.best_worker([1], model="other")
