"""What is refused before a handler sees it: in the form of the API that was called, readable for a browser's
page, under an id, and with a line in the log.
"""

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvrouter.settings.tree import FrontendSettings
from tests.testing.log_events import event_of
from tests.testing.mock_fleet import uniform_fleet
from tests.testing.mock_server import MockServer, mock_server

PAGE = "https://chat.example.com"
PATHS = ("/v1/chat/completions", "/v1/messages")
ASKED = f"host: here\r\norigin: {PAGE}\r\nx-request-id: mine\r\n"
SETTINGS = FrontendSettings(
    cors_origins=f"{PAGE},https://other.example.com",
    body_max_bytes=2000,
    header_max_bytes=8000,
)
IMPATIENT = SETTINGS.model_copy(update={"header_timeout_s": 1.0, "body_timeout_s": 1.0})
"""For what does not end: a busy machine may be slow to send what does."""

REFUSED: dict[str, tuple[str, bytes, int, str]] = {
    "wrong method": ("DELETE", b"", 405, "method_not_allowed"),
    "unknown coding": (
        "POST",
        b"content-encoding: br\r\ncontent-length: 1\r\n\r\nx",
        415,
        "unsupported_encoding",
    ),
    "no gzip": ("POST", b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\nx", 400, "invalid_request"),
    "inflates to more": (
        "POST",
        b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(gzip.compress(b" " * 9000))
        + gzip.compress(b" " * 9000),
        413,
        "request_too_large",
    ),
    "too long": ("POST", b"content-length: 2001\r\n\r\n", 413, "request_too_large"),
    "too long in chunks": (
        "POST",
        b"transfer-encoding: chunked\r\n\r\n7d1\r\n" + b"x" * 2001 + b"\r\n",
        413,
        "request_too_large",
    ),
    "many headers": ("POST", b"a: b\r\n" * 100 + b"\r\n", 431, "invalid_request"),
    "long headers": ("POST", b"a: " + b"b" * 9000 + b"\r\n\r\n", 431, "invalid_request"),
    "no end of headers": ("POST", b"a: b\r\n", 408, "invalid_request"),
    "no end of the body": ("POST", b"content-length: 9\r\n\r\nx", 408, "upload_too_slow"),
    "two hosts": ("POST", b"host: there\r\n\r\n", 400, "invalid_request"),
    "two framings": (
        "POST",
        b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        400,
        "invalid_request",
    ),
    "no header": ("POST", b"a: b\r\nnot a header\r\n\r\n", 400, "invalid_request"),
    "wrong chunk": ("POST", b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_request"),
}


async def answer_to(here: MockServer, sent: bytes) -> httpx.Response:
    host, port = here.system.address
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(sent)
    head = await reader.readuntil(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines if line)]
    length = int(dict(headers)["content-length"])
    body = await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()
    return httpx.Response(int(status.split(" ")[1]), headers=headers, content=body)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [
        record.__dict__["kvrouter_fields"] for record in caplog.records if event_of(record) == "request_ended"
    ]


def check_form(path: str, said: dict[str, object], code: str) -> None:
    error = said["error"]
    assert isinstance(error, dict)
    assert error["code"] == code
    if path.startswith("/v1/messages"):
        assert said["type"] == "error"
        assert error["type"] in (
            "invalid_request_error",
            "request_too_large",
            "overloaded_error",
            "not_found_error",
        )
    else:
        assert said.keys() == {"error"}


@pytest.mark.parametrize("what", REFUSED)
async def test_refusals_before_a_handler_have_the_routes_error_form(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvrouter")
    method, rest, status, code = REFUSED[what]
    settings = IMPATIENT if status == 408 else SETTINGS
    async with mock_server(uniform_fleet(replicas=1), frontend=settings) as here:
        for path in PATHS:
            begin = f"{method} {path} HTTP/1.1\r\n{ASKED}".encode()
            answer = await answer_to(here, begin + (rest or b"\r\n"))
            assert answer.status_code == status
            check_form(path, answer.json(), code)
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "retry-after" in answer.headers["access-control-expose-headers"]
            assert answer.headers["x-request-id"] == "mine"
            ended = lines(caplog)[-1]
            assert (ended["route"], ended["status"], ended["code"]) == (path, status, code)
            assert ended["request_id"] == "mine"
            duration_s = ended["duration_s"]
            assert isinstance(duration_s, float)
            # the limit counts from the turn in which the bytes came, the duration from within it
            assert (duration_s >= settings.body_timeout_s / 2) == (code == "upload_too_slow")
        assert len(lines(caplog)) == len(PATHS)
        metrics = await here.metrics()
        assert metrics.value("requests_total", route=PATHS[0], status=str(status)) == 1


async def test_requests_without_a_served_path_are_refused_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="kvrouter")
    async with mock_server(uniform_fleet(replicas=1), frontend=SETTINGS) as here:
        for sent, route, status in (
            (b"no request line\r\n\r\n", "unknown", 400),
            (b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 9000), "unknown", 431),
            (b"GET /nothing HTTP/1.1\r\nhost: h\r\n\r\n", "unknown", 404),
            (b"GET /v1/messages/batches HTTP/1.1\r\nhost: h\r\n\r\n", "unknown", 404),
            (b"DELETE /health HTTP/1.1\r\nhost: h\r\n\r\n", "/health", 405),
            (b"PUT /v1/decisions/a HTTP/1.1\r\nhost: h\r\n\r\n", "/v1/decisions/{request_id:path}", 405),
        ):
            answer = await answer_to(here, sent)
            assert answer.status_code == status
            assert answer.headers["x-request-id"]
            ended = lines(caplog)[-1]
            assert (ended["route"], ended["status"]) == (route, status)
            if b"/v1/messages/" in sent:
                check_form("/v1/messages/batches", answer.json(), "not_found")
        assert len(lines(caplog)) == 6


@asynccontextmanager
async def half_sent(here: MockServer, path: str, n_bytes: int) -> AsyncIterator[asyncio.StreamReader]:
    host, port = here.system.address
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\n{ASKED}content-length: {n_bytes + 1}\r\n\r\n"
    writer.write(head.encode() + b"x" * n_bytes)
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("path", PATHS)
async def test_a_browser_page_can_read_an_uploads_full_refusal(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvrouter")
    settings = FrontendSettings(cors_origins=PAGE, body_max_bytes=100_000, uploads_max_bytes=100_000)
    async with (
        mock_server(uniform_fleet(replicas=1), frontend=settings) as here,
        half_sent(here, path, 60_000),
        half_sent(here, path, 90_000) as reader,
    ):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert f"access-control-allow-origin: {PAGE}\r\n".encode() in head
        assert b"retry-after: 1\r\n" in head
        check_form(path, json.loads(body), "uploads_full")
        assert [(line["route"], line["status"]) for line in lines(caplog)] == [(path, 503)]


@pytest.mark.parametrize(
    ("origins", "shown"), [("*", "*"), (PAGE, PAGE), (f"{PAGE},https://b.example", None), (None, None)]
)
async def test_a_refused_connection_names_only_a_sole_allowed_origin(
    origins: str | None, shown: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it is read, so it says nothing of its page."""
    caplog.set_level(logging.INFO, logger="kvrouter")
    settings = FrontendSettings(cors_origins=origins, connections_max=1)
    async with mock_server(uniform_fleet(replicas=1), frontend=settings) as here:
        assert (await here.http.get("/health")).status_code == 200
        answer = await answer_to(here, b"")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_connections")
        assert answer.headers.get("access-control-allow-origin") == shown
        assert not lines(caplog), "no request came"


async def test_a_forbidden_origin_gets_no_cors_headers() -> None:
    async with mock_server(
        uniform_fleet(replicas=1), frontend=SETTINGS.model_copy(update={"cors_origins": PAGE})
    ) as here:
        sent = b"POST /v1/messages HTTP/1.1\r\nhost: h\r\norigin: https://evil.example\r\nhost: h\r\n\r\n"
        answer = await answer_to(here, sent)
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["vary"] == "origin"
