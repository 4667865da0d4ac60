"""Calls that name an adapter, or a model by another of its names: only engines that have it get them."""

import json

import httpx
import pytest
from msgspec import structs

from kvrouter.core.constraints import adapter_taint
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.core.workers import ModelRuntimeConfig, WorkerCard
from tests.support.fleets import MODEL, card
from tests.support.front import House, error_of, open_house
from tests.support.scripted_transport import ScriptedStream

ADAPTER, OTHER_NAME = "french", "the-model"


def plain(worker_id: int) -> WorkerCard:
    return structs.replace(card(worker_id), takes_calls=True, names={OTHER_NAME: None})


def adapted(worker_id: int) -> WorkerCard:
    taints = ModelRuntimeConfig(taints=frozenset({adapter_taint(ADAPTER)}))
    return structs.replace(plain(worker_id), names={ADAPTER: ADAPTER}, runtime_config=taints)


def answers(stream: ScriptedStream) -> None:
    stream.feed(EngineChunk(raw=json.dumps({"choices": []}).encode(), finish=FinishReason.STOP))


async def ask(house: House, model: str) -> httpx.Response:
    messages = [{"role": "user", "content": "hello"}]
    return await house.http.post("/v1/chat/completions", json={"model": model, "messages": messages})


async def test_an_adapter_is_asked_for_where_it_is() -> None:
    async with open_house(plain(1), adapted(2), plain(3), script=answers) as house:
        for _ in range(6):
            response = await ask(house, ADAPTER)
            assert response.status_code == 200
            assert response.headers["x-kvrouter-decode-worker"] == "2"
        requests = [stream.request for stream in house.plane.opened]
    assert {(request.model, request.lora_name) for request in requests} == {(MODEL, ADAPTER)}


@pytest.mark.parametrize("name", [MODEL, OTHER_NAME])
async def test_a_model_has_more_names_than_one(name: str) -> None:
    async with open_house(plain(1), script=answers) as house:
        assert (await ask(house, name)).status_code == 200
        (stream,) = house.plane.opened
    assert (stream.request.model, stream.request.lora_name) == (MODEL, None)


async def test_an_unregistered_name_is_unknown() -> None:
    async with open_house(plain(1), adapted(2), script=answers) as house:
        response = await ask(house, "german")
    assert response.status_code == 404
    assert error_of(response)["param"] == "model"


async def test_an_adapter_whose_engine_left_is_unknown() -> None:
    async with open_house(plain(1), script=answers) as house:
        assert (await ask(house, ADAPTER)).status_code == 404


async def test_all_names_are_listed_with_their_models() -> None:
    async with open_house(plain(1), adapted(2), script=answers) as house:
        listed = (await house.http.get("/v1/models")).json()["data"]
        one = (await house.http.get(f"/v1/models/{ADAPTER}")).json()
    assert [(model["id"], model.get("parent")) for model in listed] == sorted(
        [(MODEL, None), (OTHER_NAME, None), (ADAPTER, MODEL)]
    )
    assert one == next(model for model in listed if model["id"] == ADAPTER)


async def test_names_count_one_model_in_the_metrics() -> None:
    async with open_house(adapted(2), script=answers) as house:
        await ask(house, ADAPTER)
        page = (await house.http.get("/metrics")).text
    assert f'model="{ADAPTER}"' not in page
