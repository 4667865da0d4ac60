"""Who may ask the admin routes, and the busy thresholds that they set, over a real socket."""

import pytest
from pydantic import SecretStr

from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.settings.tree import AdminAccess, FrontendSettings
from tests.testing.frontend_harness import error_of, running_frontend, text_answer
from tests.testing.router_harness import MODEL, card

GUARDED = [
    ("GET", "/busy_threshold"),
    ("POST", "/busy_threshold"),
    ("POST", "/v1/route/explain"),
    ("GET", "/v1/decisions/r1"),
    ("GET", "/v1/decisions"),
    ("GET", "/v1/fleet"),
    ("GET", "/v1/cordons"),
    ("POST", "/v1/cordons"),
    ("DELETE", "/v1/cordons"),
    ("GET", "/v1/flows"),
    ("GET", "/v1/refusals"),
]
WRONG_TOKENS = ("Bearer wrong", "Bearer", "Basic s3cret", "s3cret", "Bearer s3cret2", "Bearer \xe9")


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_admin_routes_require_the_set_token(method: str, path: str) -> None:
    settings = FrontendSettings(admin_token=SecretStr("s3cret"))
    async with running_frontend(card(1), settings=settings) as frontend:
        for header in (None, *WRONG_TOKENS):
            headers = {} if header is None else {b"authorization": header.encode("latin-1")}
            response = await frontend.http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "unauthorized"
            assert response.headers["www-authenticate"].startswith("Bearer")
        right = await frontend.http.request(method, path, headers={"authorization": "Bearer s3cret"})
        free = await frontend.http.get("/v1/models")
    assert right.status_code != 401
    assert free.status_code == 200


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_closed_admin_routes_refuse_everything_without_a_set_token(method: str, path: str) -> None:
    settings = FrontendSettings(admin_routes=AdminAccess.CLOSED)
    async with running_frontend(card(1), settings=settings) as frontend:
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer s3cret"}):
            response = await frontend.http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert "the admin routes are closed" in str(error_of(response)["message"])
        free = await frontend.http.get("/v1/models")
    assert free.status_code == 200


async def test_busy_thresholds_are_read_and_set() -> None:
    config = KvRouterConfig(active_decode_blocks_threshold=0.5)
    async with running_frontend(card(1), config=config) as frontend:

        async def post(**fields: object) -> dict[str, object]:
            response = await frontend.http.post("/busy_threshold", json={"model": MODEL, **fields})
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
        listed = (await frontend.http.get("/busy_threshold")).json()
    assert listed == {"thresholds": [thresholds(1.0, 100)]}


async def test_a_set_busy_threshold_applies_to_the_next_request() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        field = "active_decode_blocks_threshold"
        await frontend.http.post("/busy_threshold", json={"model": MODEL, field: 0.5})
        frontend.harness.model.fleet.report(LoadReport(WorkerRank(WorkerId(1), DpRank(0)), 600, 1000))
        busy = await frontend.chat()
        await frontend.http.post(
            "/busy_threshold", json={"model": MODEL, "active_decode_blocks_threshold": None}
        )
        free = await frontend.chat()
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
async def test_an_invalid_busy_threshold_is_named(fields: dict[str, object], status: int, param: str) -> None:
    async with running_frontend(card(1)) as frontend:
        response = await frontend.http.post("/busy_threshold", json=fields)
    assert response.status_code == status
    assert error_of(response)["param"] == param
