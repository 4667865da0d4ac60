"""What OpenAI's own client raises: its own exceptions, with our codes and fields."""

import asyncio
from collections.abc import Mapping

import pytest
from openai import APIStatusError, BadRequestError, InternalServerError, NotFoundError
from pydantic import SecretStr

from kvrouter.core.constraints import QueuePolicy
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.tree import FrontendSettings
from tests.testing.mock_fleet import uniform_fleet, zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, user, words
from tests.testing.waits import until


async def raised(here: MockServer, **fields: object) -> APIStatusError:
    with pytest.raises(APIStatusError) as caught:
        await here.openai.chat.completions.create(
            model=MODEL, messages=user(words(n=20)), max_tokens=4, extra_body=fields
        )
    return caught.value


async def test_a_client_error_names_its_field() -> None:
    async with mock_server(uniform_fleet()) as here:
        unknown = await raised(here, model="another")
        assert isinstance(unknown, NotFoundError)
        assert (unknown.code, unknown.param, unknown.type) == (
            "model_not_found",
            "model",
            "invalid_request_error",
        )
        cases: list[tuple[Mapping[str, object], str]] = [
            ({"n": 2}, "n"),
            ({"temperature": "hot"}, "temperature"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"messages": []}, "messages"),
            ({"max_tokens": 300_000}, "max_tokens"),
            ({"nvext": {"worker_id": 77}}, "nvext.worker_id"),
            (
                {"nvext": {"router_config_override": {"router_temperature": -1}}},
                "nvext.router_config_override.router_temperature",
            ),
        ]
        for fields, param in cases:
            error = await raised(here, **fields)
            assert isinstance(error, BadRequestError), fields
            assert error.param == param
        assert here.system.service.requests.running == 0


async def test_a_request_without_an_eligible_worker_gets_a_503() -> None:
    async with mock_server(zoned_fleet()) as here:
        error = await raised(here, nvext={"routing_constraints": {"required_taints": ["gpu=h200"]}})
        assert isinstance(error, InternalServerError)
        assert (error.status_code, error.code) == (503, "no_eligible_worker")
        assert int(error.response.headers["retry-after"]) >= 1
        assert isinstance(error.body, dict)
        assert sum(error.body["refusals"].values()) > 0
        assert "taint_missing" in error.body["refusals"]
        for worker_id in (2, 3):
            await here.kill(worker_id)
        error = await raised(here, nvext={"prefill_worker_id": 1})
        assert (error.status_code, error.code) == (503, "no_eligible_worker")
        assert isinstance(error.body, dict)
        assert error.body["domain"] == "zone"


async def test_thresholds_set_while_serving_make_all_workers_busy() -> None:
    async with mock_server(uniform_fleet(replicas=1, speedup=1.0)) as here:
        stream = await here.openai.chat.completions.create(
            model=MODEL, messages=user(words(n=64)), max_tokens=2000, stream=True
        )
        await anext(stream)
        body = {"model": MODEL, "active_decode_blocks_threshold": 0.0}
        assert (await here.http.post("/busy_threshold", json=body)).status_code == 200
        error = await raised(here)
        assert (error.status_code, error.code) == (503, "all_workers_busy")
        assert "retry-after" in error.response.headers
        await here.http.post("/busy_threshold", json={**body, "active_decode_blocks_threshold": None})
        await here.openai.chat.completions.create(model=MODEL, messages=user(words(n=9)), max_tokens=1)
        await stream.close()


async def test_a_busy_request_waits_for_its_turn() -> None:
    config = KvRouterConfig(active_decode_blocks_threshold=0.0, admission_queue_max=1, admission_wait_s=30.0)
    async with mock_server(uniform_fleet(replicas=1, speedup=1.0), router=config) as here:
        stream = await here.openai.chat.completions.create(
            model=MODEL, messages=user(words(n=64)), max_tokens=2000, stream=True
        )
        await anext(stream)
        (model,) = here.system.service.models()
        waiting = asyncio.create_task(
            here.openai.chat.completions.create(model=MODEL, messages=user(words(n=9)), max_tokens=1)
        )
        await until(lambda: len(model.placer.waiting) == 1)
        error = await raised(here)
        assert error.code == "all_workers_busy"
        assert (await here.metrics()).value("queue_depth", model=MODEL) == 1
        await stream.close()
        assert (await waiting).usage is not None
        metrics = await here.metrics()
        assert metrics.value("queue_depth", model=MODEL) == 0
        assert metrics.value("queue_wait_seconds_count", model=MODEL) == 1
        assert metrics.value("queue_refusals_total", model=MODEL, cause="full") == 1


async def test_shortest_waiting_prompt_is_answered_first() -> None:
    config = KvRouterConfig(
        active_decode_blocks_threshold=0.0,
        admission_queue_max=2,
        admission_wait_s=30.0,
        router_queue_policy=QueuePolicy.SHORTEST,
    )
    async with mock_server(uniform_fleet(replicas=1, speedup=1.0), router=config) as here:
        stream = await here.openai.completions.create(
            model=MODEL, prompt=words(n=64), max_tokens=2000, stream=True
        )
        await anext(stream)
        (model,) = here.system.service.models()
        answered: list[int] = []

        async def ask(n_words: int) -> None:
            await here.openai.completions.create(model=MODEL, prompt=words(n=n_words), max_tokens=2)
            answered.append(n_words)

        asked = []
        for n_words in (2000, 100):
            asked.append(asyncio.create_task(ask(n_words)))
            await until(lambda: len(model.placer.waiting) == len(asked))
        await stream.close()
        await asyncio.gather(*asked)
        assert answered == [100, 2000]


async def test_admin_routes_need_the_token_that_is_set() -> None:
    settings = FrontendSettings(admin_token=SecretStr("open sesame"))
    async with mock_server(uniform_fleet(), frontend=settings) as here:
        for path in ("/v1/fleet", "/busy_threshold", "/v1/decisions/r1"):
            assert (await here.http.get(path)).status_code == 401
        token = {"authorization": "Bearer open sesame"}
        assert (await here.http.get("/v1/fleet", headers=token)).status_code == 200
        await here.openai.chat.completions.create(model=MODEL, messages=user("hi"), max_tokens=1)


async def test_a_router_without_workers_is_unready_and_refuses() -> None:
    async with mock_server(uniform_fleet(replicas=1)) as here:
        await here.kill(1)
        assert (await here.http.get("/ready")).status_code == 503
        assert (await here.http.get("/health")).status_code == 200
        error = await raised(here)
        assert (error.status_code, error.code) == (503, "no_eligible_worker")
