"""Paths, methods, models, and what no page and no log tells, over a real socket."""

import json
import logging
from pathlib import Path

import pytest
from msgspec import structs

from kvrouter.core.requests import GenerateRequest
from kvrouter.settings.setting import installed_version
from kvrouter.telemetry import configure_logging
from tests.testing.frontend_harness import (
    CONTEXT_TOKENS,
    SECRET,
    error_of,
    metrics_of,
    running_frontend,
    text_answer,
)
from tests.testing.log_streams import LogStream
from tests.testing.router_harness import MODEL, card


@pytest.mark.parametrize("path", ["/", "/v1", "//", "/V1/models", "/v1/fleet/x"])
async def test_an_unknown_path_is_a_404(path: str) -> None:
    async with running_frontend(card(1)) as frontend:
        response = await frontend.http.get(path)
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
async def test_a_wrong_method_is_a_405_with_the_allowed_ones(method: str, path: str, allow: set[str]) -> None:
    async with running_frontend(card(1)) as frontend:
        response = await frontend.http.request(method, path)
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"
    assert set(response.headers["allow"].split(", ")) == allow


async def test_an_internal_error_does_not_reveal_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogStream()
    configure_logging("info", log_format="json", stream=log)
    async with running_frontend(card(1)) as frontend:

        def fail(request: GenerateRequest) -> None:
            raise RuntimeError(f"a secret prompt: {request.token_ids}")

        monkeypatch.setattr(frontend.harness.model, "explain", fail)
        response = await frontend.http.post("/v1/route/explain", json=SECRET)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "array(" not in response.text + log.getvalue()
    assert "RuntimeError" in log.getvalue()


async def test_models_are_listed_as_openai_does() -> None:
    async with running_frontend(card(1)) as frontend:
        models = (await frontend.http.get("/v1/models")).json()
        one = (await frontend.http.get(f"/v1/models/{MODEL}")).json()
        unknown = await frontend.http.get("/v1/models/org/other")
    assert models == {"object": "list", "data": [one]}
    assert one["id"] == MODEL
    assert one["object"] == "model"
    assert one["max_model_len"] == CONTEXT_TOKENS
    assert unknown.status_code == 404
    assert error_of(unknown)["code"] == "model_not_found"


async def test_no_prompt_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        await frontend.http.post("/v1/chat/completions", json=SECRET)
        await frontend.http.post("/v1/chat/completions", json={**SECRET, "n": 2})
        await frontend.http.post("/v1/chat/completions", content=b'{"a secret prompt')
        await frontend.http.post("/v1/route/explain", json=SECRET)
    assert "secret" not in caplog.text
    assert not any("secret" in str(vars(record)) for record in caplog.records)


async def test_models_have_the_fields_of_vllms_models() -> None:
    recorded = json.loads(
        (Path(__file__).parents[2] / "data/engine-pages/vllm-0.32.0-models.json").read_text()
    )
    async with running_frontend(card(1)) as frontend:
        [listed] = (await frontend.http.get("/v1/models")).json()["data"]
        assert (await frontend.http.get(f"/v1/models/{MODEL}")).json() == listed
    [theirs] = recorded["data"]
    assert listed.keys() == theirs.keys()
    assert (listed["root"], listed["parent"], listed["owned_by"]) == (MODEL, None, "kvrouter")
    [ours], [permission] = listed["permission"], theirs["permission"]
    own = ("id", "created")
    assert {name: ours[name] for name in ours if name not in own} == {
        name: permission[name] for name in permission if name not in own
    }


async def test_engine_server_pages_are_answered() -> None:
    engine = structs.replace(card(1), engine="vllm 0.32.0")
    async with running_frontend(engine, structs.replace(card(2), engine="vllm 0.32.0")) as frontend:
        assert (await frontend.http.get("/load")).json() == {"server_load": 0}
        assert (await frontend.http.get("/version")).json() == {"version": "0.32.0"}
        for method in ("GET", "POST"):
            ping = await frontend.http.request(method, "/ping")
            assert (ping.status_code, ping.content) == (200, b"")
        await frontend.harness.service.requests.drain(0.0)
        assert (await frontend.http.get("/ping")).status_code == 503
    async with running_frontend(engine, structs.replace(card(2), engine="vllm 0.33.0")) as frontend:
        assert (await frontend.http.get("/version")).json() == {"version": installed_version()}
    async with running_frontend(card(1)) as frontend:
        assert (await frontend.http.get("/version")).json() == {"version": installed_version()}


async def test_a_trailing_slash_changes_nothing() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        for path in (
            "/v1/models",
            f"/v1/models/{MODEL}",
            "/health",
            "/metrics",
            "/v1/fleet",
            "/v1/decisions",
        ):
            plain, slashed = await frontend.http.get(path), await frontend.http.get(f"{path}/")
            assert (plain.status_code, slashed.status_code) == (200, 200), path
        body = {"model": MODEL, "prompt": "a"}
        answer = await frontend.http.post("/v1/completions/", json=body, headers={"x-request-id": "r/"})
        assert answer.status_code == 200
        assert (await frontend.http.get("/v1/decisions/r/")).json()["request_id"] == "r/"
        refused = await frontend.http.post(
            "/busy_threshold/", json=body, headers={"origin": "http://evil.example"}
        )
        assert refused.status_code == 403
        assert (await frontend.http.get("/ui/")).status_code == 307
        assert (await frontend.http.get("/nothing/")).status_code == 404
        served = {key[1:] for key in await metrics_of(frontend) if key[0] == "kvrouter_requests_total"}
    assert not [labels for labels in served if any(label.endswith("s/") for label in labels)]
