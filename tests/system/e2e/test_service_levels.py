"""Requests with an objective at a real server, whose only engine is far slower than it is thought to be.

Nothing ends while a test looks: once the step of the engine is late, what is predicted depends on what was
sent alone.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest

from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.tree import FrontendSettings
from tests.testing.mock_fleet import uniform_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, word_ids
from tests.testing.processes import eventually
from tests.testing.waits import until

SLOW = 1e-4
"""A prefill takes half an hour."""

TOKENS = 8192
"""A prompt of this length is predicted to take 0.17 s."""

LIMIT_MS = 300
TENANTS = '{"gold": {"strict_priority": 1}, "*": {}}'


def body(number: int, **fields: object) -> dict[str, object]:
    prompt = word_ids(first=number, n=TOKENS)
    return {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": True, **fields}


@asynccontextmanager
async def slow_server(
    router: KvRouterConfig | None = None, frontend: FrontendSettings | None = None
) -> AsyncIterator[tuple[MockServer, list[asyncio.Task[httpx.Response]]]]:
    """A server, and the requests that wait for its engine, which the end of the test ends."""
    waiting: list[asyncio.Task[httpx.Response]] = []
    async with mock_server(uniform_fleet(replicas=1, speedup=SLOW), router=router, frontend=frontend) as here:
        yield here, waiting
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def ask(
    here: MockServer,
    waiting: list[asyncio.Task[httpx.Response]],
    number: int,
    headers: Mapping[str, str],
    **fields: object,
) -> httpx.Response | None:
    """Return the refusal; None if the request was placed, and waits."""
    before = sum(len(model.ledger) for model in here.system.service.models())
    task = asyncio.create_task(
        here.http.post("/v1/completions", json=body(number, **fields), headers=headers)
    )
    waiting.append(task)

    def is_known() -> bool:
        booked = sum(len(model.ledger) for model in here.system.service.models())
        return task.done() or booked > before

    await until(is_known)
    return task.result() if task.done() else None


async def until_late(here: MockServer) -> None:
    """Wait until the step that runs is so late that half of it is predicted to be left, whatever the time."""

    async def is_late() -> bool:
        explained = (await here.http.post("/v1/route/explain", json=body(100))).json()
        (row,) = explained["decode"]["candidates"]
        return bool(row["times"]["queue_ms"] == pytest.approx(row["times"]["prefill_ms"] / 2, abs=1e-3))

    await eventually(is_late)


async def test_a_late_request_is_refused_at_once_and_a_critical_one_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = KvRouterConfig(slo_ttft_ms=LIMIT_MS)
    async with slow_server(config, FrontendSettings(tenant_priorities=TENANTS)) as (here, waiting):
        assert await ask(here, waiting, 0, {"x-tenant-id": "gold"}) is None
        await until_late(here)
        with caplog.at_level(logging.WARNING, "kvrouter.router"):
            refused = await ask(here, waiting, 1, {"x-dynamo-request-strict-priority": "9"})
        assert refused is not None
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (
            429,
            "slo_unreachable",
            "rate_limit_error",
        )
        assert (error["refusals"], error["role"]) == ({"too_late": 1}, "decode")
        assert int(refused.headers["retry-after"]) >= 1
        kept = await here.http.get(f"/v1/decisions/{refused.headers['x-request-id']}")
        (attempt,) = kept.json()["attempts"]
        assert (attempt["error"]["code"], attempt["decode"]) == ("slo_unreachable", None)
        (row,) = attempt["table"]["decode"]["candidates"]
        assert (attempt["table"]["decode"]["chosen"], row["reason"]) == (None, "too_late")
        assert [record.getMessage() for record in caplog.records if "slo_unreachable" in record.getMessage()]
        metrics = await here.metrics()
        assert metrics.value("slo_refusals_total", model=MODEL, **{"class": "other"}) == 1
        assert metrics.value("refusals_total", reason="too_late", role="decode") == 1
        assert await ask(here, waiting, 2, {"x-tenant-id": "gold"}) is None, "critical: refused last"
        late = await ask(here, waiting, 3, {"x-tenant-id": "gold"})
        assert late is not None
        assert late.status_code == 429
        metrics = await here.metrics()
        assert metrics.value("slo_refusals_total", model=MODEL, **{"class": "critical"}) == 1


async def test_an_own_objective_counts_instead_of_the_settings() -> None:
    async with slow_server(KvRouterConfig(slo_ttft_ms=LIMIT_MS)) as (here, waiting):
        for number in range(3):
            patient = {"nvext": {"slo_ttft_ms": 60_000}}
            assert await ask(here, waiting, number, {}, **patient) is None
        assert await ask(here, waiting, 3, {}) is not None
        refused = await ask(here, waiting, 3, {"x-slo-ttft-ms": "1"})
        assert refused is not None
        assert refused.status_code == 429
        assert "retry-after" not in refused.headers, "the prompt alone takes longer"
        assert refused.headers["x-should-retry"] == "false"


async def test_an_idle_worker_that_was_not_measured_takes_one_request_too_late() -> None:
    late = {"x-slo-ttft-ms": "1"}
    async with slow_server() as (here, waiting):
        explained = await here.http.post("/v1/route/explain", json=body(0), headers=late)
        assert explained.json()["error"] is None, "the answer that the request gets"
        assert await ask(here, waiting, 0, late) is None, "else it could never show its speed"
        assert await ask(here, waiting, 1, late) is not None


@pytest.mark.parametrize("config", [KvRouterConfig(), KvRouterConfig(router_cost="blocks", slo_ttft_ms=1)])
async def test_nothing_is_refused_without_an_objective_or_a_prediction(config: KvRouterConfig) -> None:
    async with slow_server(config) as (here, waiting):
        for number in range(3):
            assert await ask(here, waiting, number, {}) is None


async def test_explain_says_that_a_request_would_be_late() -> None:
    async with slow_server() as (here, waiting):
        assert await ask(here, waiting, 0, {}) is None
        await until_late(here)
        for _ in range(2):
            answer = await here.http.post("/v1/route/explain", json=body(1), headers={"x-slo-ttft-ms": "200"})
            explained = answer.json()
            assert answer.status_code == 200
            assert explained["error"]["code"] == "slo_unreachable"
            (row,) = explained["decode"]["candidates"]
            assert (row["eligible"], row["reason"], row["chosen"]) == (False, "too_late", False)
            assert row["times"]["expected_ms"] > 200
        in_time = await here.http.post("/v1/route/explain", json=body(1), headers={"x-slo-ttft-ms": "9000"})
        assert in_time.json()["error"] is None
