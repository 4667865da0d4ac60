"""What a page of another origin can make a browser send, to every route of both apps."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest
from pydantic import SecretStr

from kvrouter.core.requests import CallRoute
from kvrouter.settings.tree import FrontendSettings
from tests.frontend.unit.test_standalone_app import open_router, pair
from tests.testing.frontend_harness import error_of, running_frontend, text_answer
from tests.testing.router_harness import MODEL, card

PAGE = "http://evil.example"
OURS = "https://console.example"
PUBLIC = {
    "/v1/models",
    "/v1/models/{model}",
    "/health",
    "/ready",
    "/accepting",
    "/ping",
    "/load",
    "/version",
    "/openapi.json",
    "/docs",
    "/ui",
    "/ui/",
    "/ui/{name}",
}
"""The routes that change nothing and show nothing of the fleet. Whoever adds one here has thought about what
a page of another origin could read or change by it.
"""

CALLS = {route.value for route in CallRoute}
FOREIGN: list[Mapping[str, str]] = [
    {"origin": PAGE},
    {"origin": "null"},
    {"origin": PAGE, "sec-fetch-site": "cross-site"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    {"origin": "http://127.0.0.1:1"},
    {"sec-fetch-site": "cross-site"},
]
REBOUND = {"host": "rebind.evil.example:8000"}
PLAIN = {"content-type": "text/plain;charset=UTF-8"}


@asynccontextmanager
async def either_app(*, standalone: bool, settings: FrontendSettings) -> AsyncIterator[httpx.AsyncClient]:
    if standalone:
        async with open_router(*pair(), prefill_alone=True, settings=settings) as router:
            yield router.http
    else:
        async with running_frontend(card(1), script=text_answer("ok"), settings=settings) as frontend:
            yield frontend.http


async def routes_of(http: httpx.AsyncClient) -> list[tuple[str, str]]:
    """(method, path) of every route that an app has."""
    described = (await http.get("/openapi.json")).json()["paths"]
    return [(method.upper(), path) for path, methods in described.items() for method in methods]


def at(path: str) -> str:
    return path.replace("{model}", MODEL).replace("{name}", "app.js").replace("{request_id}", "r1")


@pytest.mark.parametrize("standalone", [False, True])
async def test_fleet_routes_refuse_pages_of_other_origins(
    standalone: bool,
) -> None:
    async with either_app(standalone=standalone, settings=FrontendSettings()) as http:
        guarded = [each for each in await routes_of(http) if each[1] not in PUBLIC | CALLS]
        assert ("POST", "/v1/cordons") in guarded
        assert (("POST", "/v1/route") in guarded) == standalone
        for method, path in guarded:
            for sent in (*FOREIGN, REBOUND):
                answer = await http.request(method, at(path), headers=sent)
                assert answer.status_code == 403, (method, path, sent)
                code = "unknown_host" if sent is REBOUND else "cross_site_refused"
                assert error_of(answer)["code"] == code
            if method == "POST":
                untyped = await http.post(at(path), content=b"{}")
                plain = await http.post(at(path), content=b"{}", headers=PLAIN)
                assert (untyped.status_code, plain.status_code) == (415, 415), path
                assert error_of(plain)["param"] == "content-type"
            mine = await http.request(method, at(path), json={} if method == "POST" else None)
            assert mine.status_code not in (403, 415), (method, path, mine.text)


@pytest.mark.parametrize("standalone", [False, True])
async def test_public_routes_and_calls_accept_any_origin_and_host(standalone: bool) -> None:
    async with either_app(standalone=standalone, settings=FrontendSettings()) as http:
        for method, path in await routes_of(http):
            if path not in PUBLIC | CALLS:
                continue
            for sent in (*FOREIGN, REBOUND):
                body = {"model": MODEL} if method == "POST" else None
                if path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
                    continue
                answer = await http.request(method, at(path), json=body, headers=sent)
                assert answer.status_code != 403, (method, path, sent)


async def test_a_page_cannot_send_a_call_without_a_preflight() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        body = f'{{"model":"{MODEL}","prompt":"a"}}'.encode()
        for sent in (PLAIN, {}, {"content-type": "application/x-www-form-urlencoded"}):
            refused = await frontend.http.post(
                "/v1/completions", content=body, headers={**FOREIGN[2], **sent}
            )
            assert error_of(refused)["code"] == "cross_site_refused"
            served = await frontend.http.post("/v1/completions", content=body, headers=sent)
            assert served.status_code == 200
        assert len(frontend.plane.opened) == 3


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin", "origin": OURS},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://router.example", "host": "router.example"},
        {"host": "localhost:8000"},
        {"host": "LOCALHOST."},
        {"host": "kvrouter.localhost"},
        {"host": "[::1]:8000"},
        {"host": "10.1.2.3"},
    ],
    ids=str,
)
async def test_clients_probes_and_the_own_page_may_read_the_fleet(sent: dict[str, str]) -> None:
    settings = FrontendSettings(allowed_hosts="Router.example, other.example")
    async with running_frontend(card(1), settings=settings) as frontend:
        for path in ("/v1/fleet", "/metrics", "/v1/cordons"):
            assert (await frontend.http.get(path, headers=sent)).status_code == 200


async def test_a_same_site_page_may_not_change_thresholds() -> None:
    async with running_frontend(card(1)) as frontend:
        body = {"model": MODEL}
        answer = await frontend.http.post(
            "/busy_threshold", json=body, headers={"sec-fetch-site": "same-site"}
        )
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("settings", "sent", "status"),
    [
        (FrontendSettings(cors_origins=OURS), {"origin": OURS, "sec-fetch-site": "cross-site"}, 200),
        (FrontendSettings(cors_origins=OURS), {"origin": PAGE, "sec-fetch-site": "cross-site"}, 403),
        (FrontendSettings(cors_origins="*"), {"origin": OURS}, 403),
        (FrontendSettings(cors_origins="*", admin_token=SecretStr("t")), {"origin": OURS}, 200),
        (FrontendSettings(admin_token=SecretStr("t")), {"origin": OURS}, 403),
        (FrontendSettings(admin_token=SecretStr("t")), REBOUND, 200),
        (FrontendSettings(http_host="0.0.0.0"), REBOUND, 200),
        (FrontendSettings(allowed_hosts="*"), REBOUND, 200),
        (FrontendSettings(allowed_hosts="router.example"), REBOUND, 403),
    ],
)
async def test_the_settings_admit_origins(
    settings: FrontendSettings, sent: dict[str, str], status: int
) -> None:
    async with running_frontend(card(1), settings=settings) as frontend:
        answer = await frontend.http.get("/v1/fleet", headers={"authorization": "Bearer t", **sent})
    assert answer.status_code == status


async def test_every_page_has_a_policy_and_nosniff() -> None:
    async with running_frontend(card(1)) as frontend:
        paths = [at(path) for method, path in await routes_of(frontend.http) if method == "GET"]
        for path in (*paths, "/nothing-here"):
            for sent in ({}, FOREIGN[0]):
                answer = await frontend.http.get(path, headers=sent)
                assert answer.headers.get_list("x-content-type-options") == ["nosniff"], path
                assert len(answer.headers.get_list("content-security-policy")) == 1, path
                policy = answer.headers["content-security-policy"]
                assert "frame-ancestors 'none'" in policy, path
                assert "unsafe" not in policy, path
