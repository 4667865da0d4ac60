"""The files of the page at ``/ui``: how they are served, and what they may not contain."""

import re
from pathlib import Path

import pytest
from pydantic import SecretStr

import kvrouter
from kvrouter.core.errors import Reason
from kvrouter.settings.tree import AdminAccess, FrontendSettings
from tests.testing.frontend_harness import error_of, running_frontend
from tests.testing.router_harness import card

FOLDER = Path(kvrouter.__file__).parent / "frontend" / "ui"
FILES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def text_of(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")


@pytest.mark.parametrize("name", FILES)
async def test_each_file_is_served_with_its_type_and_a_policy(name: str) -> None:
    async with running_frontend(card(1)) as frontend:
        response = await frontend.http.get(f"/ui/{name}")
        again = await frontend.http.get(
            f"/ui/{name}", headers={"if-none-match": f'"x", W/{response.headers["etag"]}'}
        )
        other = await frontend.http.get(f"/ui/{name}", headers={"if-none-match": '"x"'})
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == TYPES[name.rpartition(".")[2]]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; ")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == response.headers["etag"]
    assert other.status_code == 200


@pytest.mark.parametrize(
    "settings",
    [FrontendSettings(admin_token=SecretStr("s3cret")), FrontendSettings(admin_routes=AdminAccess.CLOSED)],
    ids=["token", "closed"],
)
async def test_only_the_pages_data_needs_the_token(settings: FrontendSettings) -> None:
    async with running_frontend(card(1), settings=settings) as frontend:
        page = await frontend.http.get("/ui")
        data = [
            await frontend.http.get(f"/v1/{path}") for path in ("fleet", "flows", "refusals", "decisions")
        ]
    assert page.status_code == 200
    assert page.text == text_of("index.html")
    assert [answer.status_code for answer in data] == [401] * 4


async def test_a_trailing_slash_redirects_to_the_page() -> None:
    async with running_frontend(card(1)) as frontend:
        response = await frontend.http.get("/ui/")
        followed = await frontend.http.get("/ui/", follow_redirects=True)
    assert response.headers["location"] == "../ui"
    assert str(followed.url).endswith("/ui")
    assert followed.status_code == 200


@pytest.mark.parametrize(
    "path", ["/ui/none.js", "/ui/..%2fadmin.py", "/ui/%2e%2e/admin.py", "/ui/a/b", "/ui/.."]
)
async def test_other_files_are_not_served(path: str) -> None:
    async with running_frontend(card(1)) as frontend:
        response = await frontend.http.get(path)
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"


async def test_the_page_takes_only_get_and_head() -> None:
    async with running_frontend(card(1)) as frontend:
        for method in ("POST", "PUT", "DELETE"):
            assert (await frontend.http.request(method, "/ui")).status_code == 405


def test_the_page_has_no_inline_script_or_style_or_absolute_address() -> None:
    page = text_of("index.html")
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", page) == []
    for name in FILES:
        text = text_of(name).replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?://|url\(|@import|innerHTML|outerHTML|insertAdjacent|eval\(", text) == [], (
            name
        )


def test_every_page_file_is_referenced_and_exists() -> None:
    page = text_of("index.html")
    named = set(re.findall(r'(?:src|href)="ui/([\w.-]+)"', page))
    for name in [name for name in FILES if name.endswith(".js")]:
        named |= set(re.findall(r'from "\./([\w.-]+)"', text_of(name)))
    assert named | {"index.html"} == set(FILES)


def test_every_element_that_a_script_looks_for_is_on_the_page() -> None:
    page = text_of("index.html")
    ids = set(re.findall(r'\bid="([\w-]+)"', page))
    for name in [name for name in FILES if name.endswith(".js")]:
        wanted = set(re.findall(r'getElementById\("([\w-]+)"\)', text_of(name)))
        assert wanted - ids == set(), name


def test_figures_come_before_the_fleet_and_parts_without_content_are_hidden() -> None:
    page = text_of("index.html")
    parts = re.findall(r'<section id="(\w+)"([^>]*)>', page)
    assert [name for name, _ in parts][:3] == ["engines", "serving", "fleet"]
    hidden = {name for name, attributes in parts if attributes.endswith(" hidden")}
    assert hidden == {"engines", "flows", "links", "refusals"}
    entries = re.findall(r'<a href="#(\w+)"( hidden)?>', page)
    assert {name for name, is_hidden in entries if is_hidden} == hidden - {"engines"}
    assert {name for name, _ in entries} == {name for name, _ in parts} - {"engines"}


def test_the_page_knows_every_reason_for_a_refusal() -> None:
    known = set(re.findall(r"^  (\w+): \"", text_of("candidates.js"), re.M))
    assert {reason.value for reason in Reason} - known == set()


def test_the_page_only_requests_readable_routes() -> None:
    """Its one POST is the question where a prompt would go."""
    asked = {
        path
        for name in FILES
        if name.endswith(".js")
        for path in re.findall(r"ask\([\"`](v1/[\w/]+)", text_of(name))
    }
    assert asked == {
        "v1/fleet",
        "v1/decisions",
        "v1/decisions/",
        "v1/flows",
        "v1/refusals",
        "v1/route/explain",
    }
