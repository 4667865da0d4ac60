"""What a browser's page of another origin may send, and read of the answer."""

import httpx
import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.frontend.origins import Cors
from kvrouter.settings.tree import FrontendSettings
from tests.testing.mock_fleet import zoned_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, user

PAGE = "https://chat.example.com"
OTHER = "https://chat.example.com.evil.example"
CHAT = {"model": MODEL, "messages": user("hi"), "max_tokens": 2}


async def preflight(here: MockServer, origin: str, path: str = "/v1/chat/completions") -> httpx.Response:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return await here.http.options(path, headers=asked)


@pytest.mark.parametrize("origins", [PAGE, f"http://localhost:3000, {PAGE}", "*"])
async def test_an_allowed_origin_gets_cors_headers(origins: str) -> None:
    async with mock_server(zoned_fleet(), frontend=FrontendSettings(cors_origins=origins)) as here:
        admitted = "*" if origins == "*" else PAGE
        asked = await preflight(here, PAGE)
        assert asked.status_code == 204
        assert asked.headers["access-control-allow-origin"] == admitted
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        for body in (CHAT, {**CHAT, "stream": True}, {**CHAT, "max_tokens": -1}):  # whole, streamed, refused
            answer = await here.http.post("/v1/chat/completions", json=body, headers={"origin": PAGE})
            assert answer.headers["access-control-allow-origin"] == admitted
            assert "x-kvrouter-decode-worker" in answer.headers["access-control-expose-headers"]
        for path in ("/v1/models", "/nothing-here"):
            page = await here.http.get(path, headers={"origin": PAGE})
            assert page.headers["access-control-allow-origin"] == admitted


async def test_another_origin_gets_no_cors_headers() -> None:
    async with mock_server(zoned_fleet(), frontend=FrontendSettings(cors_origins=PAGE)) as here:
        for answer in (
            await preflight(here, OTHER),
            await preflight(here, "null"),
            await here.http.post("/v1/chat/completions", json=CHAT, headers={"origin": OTHER}),
            await here.http.post("/v1/chat/completions", json=CHAT),
        ):
            assert "access-control-allow-origin" not in answer.headers
            assert "access-control-allow-methods" not in answer.headers
            assert "origin" in answer.headers["vary"]  # for caches on the way


async def test_no_origin_gets_cors_headers_without_the_setting() -> None:
    async with mock_server(zoned_fleet()) as here:
        asked = await preflight(here, PAGE)
        assert asked.status_code == 204
        assert not [name for name in asked.headers if name.startswith("access-control")]


async def test_options_requests_list_a_paths_methods() -> None:
    async with mock_server(zoned_fleet()) as here:
        for path, methods in (
            ("/v1/chat/completions", "OPTIONS, POST"),
            ("/v1/responses", "OPTIONS, POST"),
            ("/health", "GET, HEAD, OPTIONS"),
            ("/busy_threshold", "GET, HEAD, OPTIONS, POST"),
        ):
            answer = await here.http.options(path)
            assert (answer.status_code, answer.headers["allow"], answer.content) == (204, methods, b"")
        assert (await here.http.options("/nothing-here")).status_code == 404
        head = await here.http.head("/health")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 0


@pytest.mark.parametrize(
    "wrong", ["chat.example.com", f"{PAGE}/", f"{PAGE}/page", "https://a b", "https://*.example.com"]
)
def test_an_invalid_cors_origin_is_a_config_error(wrong: str) -> None:
    with pytest.raises(ConfigError, match="cors-origins"):
        Cors(f"{PAGE},{wrong}")
