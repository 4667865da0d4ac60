"""Calls that name an adapter, or a model by another of its names: only engines that have it get them."""

import json

import httpx
import pytest
from msgspec import structs

from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.core.taints import adapter_taints
from kvrouter.core.workers import ModelRuntimeConfig, WorkerCard
from tests.testing.frontend_harness import FrontendHarness, error_of, running_frontend
from tests.testing.router_harness import MODEL, card
from tests.testing.scripted_transport import ScriptedStream

ADAPTER, OTHER_NAME = "french", "the-model"


def plain(worker_id: int) -> WorkerCard:
    return structs.replace(card(worker_id), takes_calls=True, names={OTHER_NAME: None})


def adapted(worker_id: int) -> WorkerCard:
    taints = ModelRuntimeConfig(taints=adapter_taints([ADAPTER]))
    return structs.replace(plain(worker_id), names={ADAPTER: ADAPTER}, runtime_config=taints)


def answers(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(raw=json.dumps({"choices": []}).encode(), finish=FinishReason.STOP))


async def ask(frontend: FrontendHarness, model: str) -> httpx.Response:
    messages = [{"role": "user", "content": "hello"}]
    return await frontend.http.post("/v1/chat/completions", json={"model": model, "messages": messages})


async def test_adapter_calls_go_only_to_workers_with_the_adapter() -> None:
    async with running_frontend(plain(1), adapted(2), plain(3), script=answers) as frontend:
        for _ in range(6):
            response = await ask(frontend, ADAPTER)
            assert response.status_code == 200
            assert response.headers["x-kvrouter-decode-worker"] == "2"
        requests = [stream.request for stream in frontend.plane.opened]
    assert {(request.model, request.lora_name) for request in requests} == {(MODEL, ADAPTER)}


@pytest.mark.parametrize("name", [MODEL, OTHER_NAME])
async def test_a_model_is_served_under_its_other_names(name: str) -> None:
    async with running_frontend(plain(1), script=answers) as frontend:
        assert (await ask(frontend, name)).status_code == 200
        (stream,) = frontend.plane.opened
    assert (stream.request.model, stream.request.lora_name) == (MODEL, None)


async def test_an_unregistered_name_is_unknown() -> None:
    async with running_frontend(plain(1), adapted(2), script=answers) as frontend:
        response = await ask(frontend, "german")
    assert response.status_code == 404
    assert error_of(response)["param"] == "model"


async def test_an_adapter_that_no_engine_has_is_unknown() -> None:
    async with running_frontend(plain(1), script=answers) as frontend:
        assert (await ask(frontend, ADAPTER)).status_code == 404


async def test_all_names_are_listed_with_their_models() -> None:
    async with running_frontend(plain(1), adapted(2), script=answers) as frontend:
        listed = (await frontend.http.get("/v1/models")).json()["data"]
        one = (await frontend.http.get(f"/v1/models/{ADAPTER}")).json()
    assert [(model["id"], model.get("parent")) for model in listed] == sorted(
        [(MODEL, None), (OTHER_NAME, None), (ADAPTER, MODEL)]
    )
    assert one == next(model for model in listed if model["id"] == ADAPTER)


async def test_adapter_names_are_no_model_label_in_metrics() -> None:
    async with running_frontend(adapted(2), script=answers) as frontend:
        await ask(frontend, ADAPTER)
        page = (await frontend.http.get("/metrics")).text
    assert f'model="{ADAPTER}"' not in page
