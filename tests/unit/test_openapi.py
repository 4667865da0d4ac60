"""GET /openapi.json and /docs: every route of both apps, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from kvrouter.frontend.openapi import ADMIN_PAGES, CALLS, PAGES, docs_html, openapi
from tests.support.mock_fleets import alike
from tests.support.served import served


async def test_what_is_described_is_what_is_there() -> None:
    async with served(alike(replicas=1)) as here:
        response = await here.http.get("/openapi.json")
        assert response.headers["content-type"] == "application/json"
        described = response.json()
        assert described["openapi"].startswith("3.1")
        for path, methods in described["paths"].items():
            asked = path.replace("{model}", "mock").replace("{request_id}", "r")
            allowed = (await here.http.options(asked)).headers["allow"].lower().split(", ")
            assert methods.keys() | {"options", "head"} == {*allowed, "options", "head"}, path
        assert {"/v1/chat/completions", "/v1/responses", "/v1/fleet", "/docs"} <= described["paths"].keys()
        assert "security" in described["paths"]["/v1/fleet"]["get"]
        assert "security" not in described["paths"]["/v1/models"]["get"]
        page = await here.http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        for path in described["paths"]:
            assert path in page.text
        assert "://" not in page.text.replace(described["externalDocs"]["url"], ""), "it loads nothing"


def test_every_route_has_its_words_once() -> None:
    assert not PAGES.keys() & ADMIN_PAGES.keys()
    assert not CALLS.keys() & (PAGES.keys() | ADMIN_PAGES.keys())


def test_the_standalone_routers_routes_have_words() -> None:
    source = (Path(__file__).parents[2] / "src/kvrouter/frontend/standalone.py").read_text("utf-8")
    assert '"/v1/prefill/{request_id:path}"' in source
    pages = [Route(path, _answer, methods=["POST"]) for path in (*PAGES, *ADMIN_PAGES)]
    described: Any = openapi(CALLS, pages, version="1")
    assert described["paths"].keys() == {*CALLS, *PAGES, *ADMIN_PAGES}
    assert json.dumps(described)


def test_a_route_without_words_is_a_mistake() -> None:
    with pytest.raises(KeyError, match="/new"):
        openapi((), [Route("/new", _answer)], version="1")


def test_words_are_text_on_the_page() -> None:
    assert "<b>" not in docs_html({"paths": {"/<b>": {"get": {"summary": "<b>"}}}})


async def _answer(_: object) -> None:
    return None
