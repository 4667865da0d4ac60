"""GET /openapi.json and /docs: every route, and nothing else."""

from typing import Any

import msgspec
from jsonschema import validate

from kvrouter.frontend.openapi import TYPES, docs_html, openapi
from kvrouter.frontend.page_route import Page, PageRequest, Route
from tests.testing.mock_fleet import uniform_fleet, zoned_fleet
from tests.testing.mock_server import MODEL, mock_server, user, words


async def test_openapi_describes_exactly_the_routes() -> None:
    async with mock_server(uniform_fleet(replicas=1)) as here:
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


def test_types_named_only_by_a_route_have_schemas() -> None:
    class New(msgspec.Struct):
        """A new answer."""

        size: int

    described: Any = openapi((), [Route("/new", _answer, "What is new", answer=New)], version="1")
    assert described["paths"]["/new"]["get"]["summary"] == "What is new"
    assert described["components"]["schemas"].keys() - {"New"} >= {kind.__name__ for kind in TYPES}
    assert described["components"]["schemas"]["New"]["required"] == ["size"]


def test_summaries_are_escaped_on_the_page() -> None:
    assert "<b>" not in docs_html({"paths": {"/<b>": {"get": {"summary": "<b>"}}}})


async def _answer(_: PageRequest) -> Page:
    return Page()


async def test_answers_match_the_described_schemas() -> None:
    async with mock_server(zoned_fleet()) as here:
        body = {"model": MODEL, "messages": user(words(n=64)), "max_tokens": 3}
        request_id = (await here.http.post("/v1/chat/completions", json=body)).headers["x-request-id"]
        described = (await here.http.get("/openapi.json")).json()
        cordon = {"level": "worker", "name": 3}
        asked = [
            ("get", "/v1/decisions/{request_id}", None),
            ("post", "/v1/route/explain", body),
            ("post", "/v1/cordons", cordon),
            ("post", "/busy_threshold", {"model": MODEL}),
            *(("get", path, None) for path, methods in described["paths"].items() if "get" in methods),
        ]
        checked = 0
        for method, path, sent in asked:
            where = (
                path.replace("{model}", MODEL).replace("{request_id}", request_id).replace("{name}", "app.js")
            )
            answer = await here.http.request(method, where, json=sent, follow_redirects=True)
            said = described["paths"][path][method]["responses"]["200"]
            assert answer.status_code == 200, path
            if "content" in said:
                schema = {
                    **said["content"]["application/json"]["schema"],
                    "components": described["components"],
                }
                validate(answer.json(), schema)
                checked += 1
        refused = await here.http.post("/v1/cordons", json={})
        validate(
            refused.json(), {"$ref": "#/components/schemas/ErrorBody", "components": described["components"]}
        )
        assert checked >= 18
        assert {"CordonBody", "BusyBody"} <= described["components"]["schemas"].keys()
        assert "CordonBody" in str(described["paths"]["/v1/cordons"]["post"]["requestBody"])


async def test_every_json_answer_has_a_schema() -> None:
    """A page of ours has a schema, unless it answers with text, or with nothing."""
    no_json = {"/ping", "/metrics", "/openapi.json", "/docs", "/ui", "/ui/", "/ui/{name}"}
    async with mock_server(uniform_fleet(replicas=1)) as here:
        described = (await here.http.get("/openapi.json")).json()
    answers = {
        path: operation["responses"]["200"]
        for path, methods in described["paths"].items()
        for operation in methods.values()
    }
    pages = {path for path, said in answers.items() if said["description"] != "As an engine answers"}
    assert {path for path in pages if "content" not in answers[path]} == no_json
