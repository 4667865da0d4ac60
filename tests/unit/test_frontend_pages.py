"""Paths, methods, models, and what no page and no log tells, over a real socket."""

import logging

import pytest

from kvrouter.core.requests import GenerateRequest
from kvrouter.telemetry.logs import JsonFormatter
from tests.support.fleets import MODEL, card
from tests.support.front import CONTEXT_TOKENS, SECRET, error_of, open_house, says


@pytest.mark.parametrize("path", ["/", "/v1", "/health//", "/v1/models/x/", "/V1/models", "/v1/fleet/x"])
async def test_an_unknown_path_is_a_404(path: str) -> None:
    async with open_house(card(1)) as house:
        response = await house.http.get(path)
    assert response.status_code == 404
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/load", "/ping"])
async def test_a_slash_behind_a_path_changes_nothing(path: str) -> None:
    async with open_house(card(1)) as house:
        bare, slashed = await house.http.get(path), await house.http.get(f"{path}/")
    assert (slashed.status_code, slashed.content) == (200, bare.content)


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
async def test_a_wrong_method_is_a_405_that_says_the_right_ones(
    method: str, path: str, allow: set[str]
) -> None:
    async with open_house(card(1)) as house:
        response = await house.http.request(method, path)
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"
    assert set(response.headers["allow"].split(", ")) == allow


async def test_a_mistake_of_ours_does_not_tell_the_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_house(card(1)) as house:

        def fail(request: GenerateRequest) -> None:
            raise RuntimeError(f"a secret prompt: {request.token_ids}")

        monkeypatch.setattr(house.bench.service, "explain", fail)
        response = await house.http.post("/v1/route/explain", json=SECRET)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert "array(" not in response.text + "".join(lines)
    assert any("RuntimeError" in line for line in lines)


async def test_models_are_listed_as_openai_does() -> None:
    async with open_house(card(1)) as house:
        models = (await house.http.get("/v1/models")).json()
        one = (await house.http.get(f"/v1/models/{MODEL}")).json()
        unknown = await house.http.get("/v1/models/org/other")
    assert models == {"object": "list", "data": [one]}
    assert one["id"] == MODEL
    assert one["object"] == "model"
    assert one["max_model_len"] == CONTEXT_TOKENS
    assert unknown.status_code == 404
    assert error_of(unknown)["code"] == "model_not_found"


async def test_no_prompt_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_house(card(1), script=says("ok")) as house:
        await house.http.post("/v1/chat/completions", json=SECRET)
        await house.http.post("/v1/chat/completions", json={**SECRET, "n": 2})
        await house.http.post("/v1/chat/completions", content=b'{"a secret prompt')
        await house.http.post("/v1/route/explain", json=SECRET)
    assert "secret" not in caplog.text
    assert not any("secret" in str(vars(record)) for record in caplog.records)
