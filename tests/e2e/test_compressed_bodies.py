"""Bodies that clients send compressed."""

import asyncio
import gzip
import json
import zlib

import httpx
import pytest

from kvrouter.config import FrontendSettings
from kvrouter.frontend import compressed
from kvrouter.frontend.app import HttpApp
from kvrouter.frontend.compressed import ON_LOOP_BYTES, CompressedBodies, inflated
from kvrouter.frontend.http import BodyLimit
from tests.support.mock_fleets import alike
from tests.support.served import MODEL, Served, served, user, words
from tests.support.waits import until

CHAT = {"model": MODEL, "messages": user(words(n=64)), "max_tokens": 3}


async def post(
    here: Served, body: bytes, *, encoding: str = "gzip", path: str = "/v1/chat/completions"
) -> httpx.Response:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    return await here.http.post(path, content=body, headers=headers)


def packed(value: object) -> bytes:
    return gzip.compress(json.dumps(value).encode())


async def test_a_compressed_call_is_answered_as_any_other() -> None:
    long = {**CHAT, "metadata": {str(n): str(hash(str(n))) for n in range(5000)}}
    assert len(json.dumps(long)) > ON_LOOP_BYTES
    async with served(alike(replicas=1)) as here:
        plain = (await here.http.post("/v1/chat/completions", json=CHAT)).json()
        for body, encoding in ((CHAT, "gzip"), (CHAT, "GZIP"), (CHAT, "x-gzip"), (long, "gzip")):
            answer = await post(here, packed(body), encoding=encoding)
            assert answer.status_code == 200
            assert answer.json()["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        identity = await post(here, json.dumps(CHAT).encode(), encoding="identity")
        assert identity.status_code == 200
        explained = await post(here, packed(CHAT), path="/v1/route/explain")
        assert explained.json()["isl_tokens"] == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "encoding", "status", "code"),
    [
        (b"no gzip at all", "gzip", 400, "invalid_request"),
        (packed(CHAT)[:-9], "gzip", 400, "invalid_request"),
        (packed(CHAT) + packed(CHAT), "gzip", 400, "invalid_request"),
        (b"", "gzip", 400, "invalid_request"),
        (zlib.compress(json.dumps(CHAT).encode()), "deflate", 415, "unsupported_encoding"),
        (b"x", "br", 415, "unsupported_encoding"),
        (packed(CHAT), "gzip, gzip", 415, "unsupported_encoding"),
        (gzip.compress(b" " * 3_000_000), "gzip", 413, "request_too_large"),
    ],
)
async def test_what_is_no_whole_gzip_is_refused(body: bytes, encoding: str, status: int, code: str) -> None:
    async with served(alike(replicas=1), frontend=FrontendSettings(body_max_bytes=2_000_000)) as here:
        refused = await post(here, body, encoding=encoding)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert (await post(here, packed(CHAT))).status_code == 200


async def test_what_inflated_bodies_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held, go_on = asyncio.Event(), asyncio.Event()
    original = HttpApp._handle

    async def waiting(self: HttpApp, request, responder) -> None:  # type: ignore[no-untyped-def]
        if len(request.body) > 400_000:
            held.set()
            await go_on.wait()
        await original(self, request, responder)

    monkeypatch.setattr(HttpApp, "_handle", waiting)
    big, small = (packed({**CHAT, "user": "x" * n}) for n in (450_000, 300_000))
    settings = FrontendSettings(uploads_max_bytes=600_000, body_max_bytes=500_000)
    async with served(alike(replicas=1), frontend=settings) as here:
        app = here.system.server._handler
        assert isinstance(app, HttpApp)
        first = asyncio.create_task(post(here, big))
        await held.wait()
        assert app._compressed.bytes > 450_000
        refused = await post(here, small)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "uploads_full")
        assert refused.headers["retry-after"]
        go_on.set()
        assert (await first).status_code == 200
        assert app._compressed.bytes == 0
        assert (await post(here, small)).status_code == 200


async def test_a_call_that_is_read_holds_nothing() -> None:
    async with served(alike(replicas=1, speedup=1.0)) as here:
        app = here.system.server._handler
        assert isinstance(app, HttpApp)
        headers = {"content-encoding": "gzip"}
        body = packed({**CHAT, "stream": True, "max_tokens": 2000})
        async with here.http.stream("POST", "/v1/chat/completions", content=body, headers=headers) as answer:
            await anext(answer.aiter_lines())
            assert app._compressed.bytes == 0
        await until(lambda: not here.system.service.running)


def test_the_event_loop_inflates_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small body that becomes a large one the loop makes no more than the beginning."""
    made: list[int] = []

    def noted(data: bytes, limit: BodyLimit) -> bytes:
        made.append(limit.max_bytes)
        return inflated(data, limit)

    async def inflate() -> bytes:
        bodies = CompressedBodies(1 << 30)
        try:
            return await bodies._inflated(gzip.compress(b"0" * 5_000_000), BodyLimit(1 << 23, ""))
        finally:
            bodies.close()

    monkeypatch.setattr(compressed, "inflated", noted)
    assert len(asyncio.run(inflate())) == 5_000_000
    assert made == [ON_LOOP_BYTES, 1 << 23]
