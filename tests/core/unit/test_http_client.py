"""What the one HTTP client does not do, and what is said of connections that fail."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import trustme
from aiohttp import web

from kvrouter.api.client import AskFailed, RouterClient
from kvrouter.core.http_client import HttpClient, connection_failure
from kvrouter.engines.openai.server import EngineServer
from kvrouter.transports.requests.port import WorkerUnreachable
from tests.testing.asyncio_servers import port_of, serving, serving_streams
from tests.testing.scripted_engine import ScriptedEngine

LIBRARY_NAMES = ("Error", "aiohttp", "Errno", "_ssl.c", "[", "127.0.0.1")


async def failure_of(url: str, limits: aiohttp.ClientTimeout | None = None) -> str:
    async with HttpClient() as client:
        with pytest.raises((aiohttp.ClientError, OSError)) as failed:
            async with await client.request("GET", url, limits=limits) as answer:
                await answer.read()
    text = connection_failure(failed.value)
    assert not any(name in text for name in LIBRARY_NAMES), text
    return text


@asynccontextmanager
async def talking(says: bytes) -> AsyncIterator[int]:
    """A program that is no HTTP server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(says)
        await writer.drain()

    async with serving_streams(answer) as server:
        yield port_of(server)


def nobodys_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


async def test_client_follows_no_redirect_keeps_no_cookie_uses_no_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []

    async def moved(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("cookie"))
        return web.Response(status=307, headers={"location": "/there", "set-cookie": "a=b; Path=/"})

    async def there(_: web.Request) -> web.StreamResponse:
        raise AssertionError("a redirect was followed")

    app = web.Application()
    app.router.add_route("*", "/", moved)
    app.router.add_route("*", "/there", there)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{nobodys_port()}")
    async with serving(app) as server, HttpClient() as client:
        for method in ("GET", "POST", "DELETE"):
            async with await client.request(method, f"http://127.0.0.1:{port_of(server)}/") as answer:
                assert answer.status == 307
    assert seen == [None, None, None]


async def test_a_redirecting_engine_is_reported_as_redirecting() -> None:
    engine = ScriptedEngine()
    await engine.start()
    engine.set_page("/version", "", status=308)
    server = EngineServer(engine.url)
    await server.open()
    try:
        with pytest.raises(WorkerUnreachable, match=r"answered 308: it redirects, .* give the URL"):
            await server.look("/version")
    finally:
        await server.close()
        await engine.stop()


async def test_a_port_without_a_listener_is_reported() -> None:
    assert "nothing listens" in await failure_of(f"http://127.0.0.1:{nobodys_port()}/")


async def test_an_unknown_host_name_is_reported() -> None:
    assert "not known here (DNS)" in await failure_of("http://there-is-no-such-host.invalid/")


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.example", "\u00e4" * 60])
async def test_a_host_name_that_no_resolver_takes_is_reported(host: str) -> None:
    assert "is the host name in it right" in await failure_of(f"http://{host}/")
    with pytest.raises(AskFailed, match="--url: must be http://host:port"):
        RouterClient(f"http://{host}:8000")


async def test_a_server_closing_before_its_answer_is_reported() -> None:
    async with talking(b"") as port:
        assert "closed the connection before it answered" in await failure_of(f"http://127.0.0.1:{port}/")


async def test_a_truncated_answer_is_reported() -> None:
    async with talking(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc") as port:
        assert "broke off" in await failure_of(f"http://127.0.0.1:{port}/")


async def test_a_non_http_answer_is_reported() -> None:
    async with talking(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        assert "is not HTTP: is the port right" in await failure_of(f"http://127.0.0.1:{port}/")


async def test_https_to_a_plain_http_port_is_reported() -> None:
    async with talking(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert "is the URL http:// and not https://?" in await failure_of(f"https://127.0.0.1:{port}/")


async def test_an_answer_timeout_is_reported() -> None:
    async def wait(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    app = web.Application()
    app.router.add_get("/", wait)
    async with serving(app, shutdown_timeout=0.01) as server:
        limits = aiohttp.ClientTimeout(total=0.05)
        assert await failure_of(f"http://127.0.0.1:{port_of(server)}/", limits) == "it did not answer in time"


async def test_an_untrusted_certificate_and_http_to_an_https_port_are_reported() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    async with serving(web.Application(), tls=context) as server:
        port = port_of(server)
        said = await failure_of(f"https://127.0.0.1:{port}/")
        assert "certificate is not trusted here" in said
        assert "set SSL_CERT_FILE" in said
        plain = await failure_of(f"http://127.0.0.1:{port}/")
        assert "closed the connection before it answered" in plain or "is not HTTP" in plain


@pytest.mark.parametrize("url", ["http://127.0.0.1:{}", "https://127.0.0.1:{}"])
def test_router_client_reports_a_port_without_a_listener(url: str) -> None:
    with pytest.raises(AskFailed, match="no answer: connection refused, nothing listens at its"):
        RouterClient(url.format(nobodys_port())).fleet()


def test_only_the_http_client_module_creates_sessions() -> None:
    """The linter holds it too; here it is seen that the linter is asked to."""
    source = Path(__file__).parents[3] / "src" / "kvrouter"
    makers = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "aiohttp.ClientSession(" in path.read_text()
    }
    assert makers == {"core/http_client.py"}
    rules = (source.parents[1] / "pyproject.toml").read_text()
    assert '"aiohttp.ClientSession".msg' in rules
