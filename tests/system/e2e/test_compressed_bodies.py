"""Bodies that clients send compressed."""

import asyncio
import gzip
import json
import tracemalloc
import zlib
from random import Random
from typing import cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import BodyTooLarge
from kvrouter.frontend import compressed
from kvrouter.frontend.compressed import ON_LOOP_BYTES, CompressedBodies, inflated, inflated_bytes
from kvrouter.frontend.http import BodyLimit
from kvrouter.frontend.http_app import HttpApp
from kvrouter.settings.tree import FrontendSettings
from tests.testing.calls import WatchCalls
from tests.testing.constants import SetConstants
from tests.testing.mock_fleet import uniform_fleet
from tests.testing.mock_server import MODEL, MockServer, mock_server, user, words
from tests.testing.waits import until

CHAT = {"model": MODEL, "messages": user(words(n=64)), "max_tokens": 3}


async def post(
    here: MockServer, body: bytes, *, encoding: str = "gzip", path: str = "/v1/chat/completions"
) -> httpx.Response:
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    return await here.http.post(path, content=body, headers=headers)


def packed(value: object) -> bytes:
    return gzip.compress(json.dumps(value).encode())


async def test_a_compressed_call_is_answered_as_any_other() -> None:
    long = {**CHAT, "metadata": {str(n): str(hash(str(n))) for n in range(5000)}}
    assert len(json.dumps(long)) > ON_LOOP_BYTES
    async with mock_server(uniform_fleet(replicas=1)) as here:
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
async def test_an_invalid_or_incomplete_gzip_body_is_refused(
    body: bytes, encoding: str, status: int, code: str
) -> None:
    async with mock_server(
        uniform_fleet(replicas=1), frontend=FrontendSettings(body_max_bytes=2_000_000)
    ) as here:
        refused = await post(here, body, encoding=encoding)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert (await post(here, packed(CHAT))).status_code == 200


async def test_memory_of_inflated_bodies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held, go_on = asyncio.Event(), asyncio.Event()
    original = HttpApp._handle

    async def waiting(self: HttpApp, request, responder) -> None:  # type: ignore[no-untyped-def]
        if len(request.body) > 400_000:
            held.set()
            await go_on.wait()
        await original(self, request, responder)

    monkeypatch.setattr(HttpApp, "_handle", waiting)
    big, small = (packed({**CHAT, "user": "x" * n}) for n in (450_000, 300_000))
    limits = FrontendSettings(uploads_max_bytes=600_000, body_max_bytes=500_000)
    async with mock_server(uniform_fleet(replicas=1), frontend=limits) as here:
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


async def test_a_parsed_call_holds_no_inflated_body() -> None:
    async with mock_server(uniform_fleet(replicas=1, speedup=1.0)) as here:
        app = here.system.server._handler
        assert isinstance(app, HttpApp)
        headers = {"content-encoding": "gzip"}
        body = packed({**CHAT, "stream": True, "max_tokens": 2000})
        async with here.http.stream("POST", "/v1/chat/completions", content=body, headers=headers) as answer:
            await anext(answer.aiter_lines())
            assert app._compressed.bytes == 0
        await until(lambda: not here.system.service.requests.running)


def test_the_event_loop_inflates_only_the_beginning_of_a_body(watch_calls: WatchCalls) -> None:
    """Of a small body that becomes a large one the loop makes no more than the beginning."""

    async def inflate() -> bytes:
        bodies = CompressedBodies(1 << 30)
        try:
            body, _ = await bodies._inflated(gzip.compress(b"0" * 5_000_000), BodyLimit(1 << 23, ""))
            return body
        finally:
            bodies.close()

    calls = watch_calls(compressed, "inflated")
    assert len(asyncio.run(inflate())) == 5_000_000
    assert [cast("BodyLimit", call.arguments[1]).max_bytes for call in calls] == [ON_LOOP_BYTES, 1 << 23]


@given(length=st.integers(0, 3_000_000), limit=st.integers(1, 2_000_000), letters=st.sampled_from([1, 256]))
@settings(max_examples=25, deadline=None)
def test_the_counted_length_equals_the_inflated_length(length: int, limit: int, letters: int) -> None:
    body = Random(length).randbytes(length) if letters > 1 else b"0" * length
    packed_body, most = gzip.compress(body, 1), BodyLimit(limit, "")
    if length > limit:
        for read in (inflated, inflated_bytes):
            with pytest.raises(BodyTooLarge):
                read(packed_body, most)
    else:
        assert inflated_bytes(packed_body, most) == len(inflated(packed_body, most)) == length


def test_counting_an_inflated_length_uses_little_memory() -> None:
    bomb = gzip.compress(b"0" * 40_000_000)
    tracemalloc.start()
    try:
        assert inflated_bytes(bomb, BodyLimit(1 << 26, "")) == 40_000_000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


async def test_the_growth_of_compressed_bodies_is_bounded_until_answered(
    set_constants: SetConstants,
) -> None:
    set_constants(compressed, EXTRA_BYTES_MAX=400_000)
    big, bigger = ({**CHAT, "stream": True, "max_tokens": 2000, "user": "x" * n} for n in (300_000, 900_000))
    many = {**CHAT, "metadata": {str(n): Random(n).randbytes(32).hex() for n in range(5000)}}
    async with mock_server(uniform_fleet(replicas=1, speedup=1.0)) as here:
        app = here.system.server._handler
        assert isinstance(app, HttpApp)
        refused = await post(here, packed(bigger))
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        headers = {"content-encoding": "gzip"}
        url = "/v1/chat/completions"
        async with here.http.stream("POST", url, content=packed(big), headers=headers) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            assert app._compressed.extra_bytes > 200_000
            refused = await post(here, packed(big))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "uploads_full")
            assert refused.headers["retry-after"]
            assert len(json.dumps(many)) > 350_000
            assert (await post(here, packed(many))).status_code == 200
        await until(lambda: app._compressed.extra_bytes == 0)
        assert (await post(here, packed({**big, "stream": False, "max_tokens": 1}))).status_code == 200
