"""Paths match as Starlette, which FastAPI and so the engines' servers are built on, matches them."""

from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import QueryParams
from starlette.routing import compile_path

from kvrouter.frontend.http import Request
from kvrouter.frontend.http.response import RequestHead
from kvrouter.frontend.page_route import Page, PageRequest, Route

TEMPLATES = (
    "/ui",
    "/ui/",
    "/ui/{name}",
    "/v1/models/{model:path}",
    "/v1/route/{request_id:path}",
    "/v1/route/{request_id:path}/free",
    "/a.b/{first}/{second:path}/c+d",
)
PARTS = st.sampled_from(
    ("", "ui", "v1", "models", "route", "free", "a.b", "axb", "c+d", "ä", "%", "{name}", ".")
)
PATHS = st.lists(PARTS, max_size=6).map("/".join) | st.text(
    st.characters(exclude_characters="\n"), max_size=20
).map("/".__add__)


async def nothing(_: PageRequest) -> Page:
    return Page()


@given(st.sampled_from(TEMPLATES), PATHS)
def test_paths_match_with_starlettes_parameters(template: str, path: str) -> None:
    route = Route(template, nothing, "A page")
    pattern, _, convertors = compile_path(template)
    found = pattern.match(path)
    assert route.match(path) == (None if found is None else found.groupdict())
    assert route.parameters == [*convertors]


@given(st.sampled_from(("/health\n", "\n/health", "/hea\nlth")))
def test_a_path_with_a_line_end_does_not_match(path: str) -> None:
    assert Route("/health", nothing, "A page").match(path) is None


def asked(query: str, body: bytes = b"") -> tuple[Request, PageRequest]:
    head = RequestHead(
        method="GET",
        target=b"/",
        path="/",
        query=query,
        headers=(),
        http_version="1.1",
        keep_alive=True,
        expects_continue=False,
    )
    request = Request(head, body)
    return request, PageRequest(request, {})


@given(st.text(st.sampled_from("ab=&;+%2F0"), max_size=12))
def test_queries_have_starlettes_parameters(query: str) -> None:
    assert asked(query)[1].query == dict(QueryParams(query))


def test_taking_a_pages_body_releases_the_requests_body() -> None:
    request, page_request = asked("", b"abc")
    assert (page_request.take_body(), request.body) == (b"abc", b"")
