"""Bodies of a few kilobytes that become dozens of megabytes, before an engine that takes calls."""

import asyncio
import gzip
import json
import resource
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import httpx
import pytest
from aiohttp import web

from tests.system.hostile.meter import MIB, Meter
from tests.testing.asyncio_servers import port_of, serving
from tests.testing.processes import READY_WITHIN_S, fleet
from tests.testing.scripted_engine import EVENT_STREAM, JSON, VLLM_PAGES, page, sse

BOMBS = 20
BOMB_BYTES = 66_000_000
MEMORY_MAX_BYTES = 150 * MIB
ADDRESS_SPACE_BYTES = 1536 * MIB
STREAMS = 12
TIMEOUT_S = 120.0
GZIP = {"content-encoding": "gzip", "content-type": JSON}


class Engine:
    """Answers as vLLM does: the streams of :data:`STREAMS` clients until it is released, others at once."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.received: list[int] = []

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            name = VLLM_PAGES.get(request.path)
            return (
                web.Response(status=404) if name is None else web.Response(body=page(name), content_type=JSON)
            )
        body = await request.read()
        self.received.append(len(body))
        said = {"id": "c", "object": "text_completion", "created": 1, "model": "tiny"}
        word = {"index": 0, "text": "word", "logprobs": None, "finish_reason": None}
        end = {**word, "text": "", "finish_reason": "stop"}
        if b'"stream":true' not in body[:64].replace(b" ", b""):
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            return web.json_response({**said, "choices": [{**word, "finish_reason": "stop"}], "usage": usage})
        stream = web.StreamResponse(headers={"content-type": EVENT_STREAM})
        await stream.prepare(request)
        while not self.released.is_set():
            await stream.write(sse({**said, "choices": [word]}).removesuffix(b"data: [DONE]\n\n"))
            await asyncio.sleep(0.05)
        await stream.write(sse({**said, "choices": [end]}))
        return stream


@asynccontextmanager
async def running(
    folder: Path, *, address_space: int | None = None
) -> AsyncIterator[tuple[Engine, str, int]]:
    """``kvrouter up`` before such an engine: the engine, the router's URL and its process."""
    engine = Engine()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", engine.serve)
    file = folder / "fleet.yaml"
    command = (sys.executable, "-m", "kvrouter.cli", "up", "--fleet", str(file), "--http-port", "0")
    async with serving(app) as server, fleet() as here:
        engine_url = f"http://127.0.0.1:{port_of(server)}"
        file.write_text(
            "version: 1\nmodels: [{name: tiny, tokenizer: mock}]\nworkers:\n"
            f"- {{name: a, engine: {{kind: vllm, url: '{engine_url}', kv_events: false}}}}\n"
        )
        process = await asyncio.create_subprocess_exec(
            *command, "--no-kv-events", env=here.environ, stdout=DEVNULL, stderr=PIPE
        )
        if address_space is not None:
            resource.prlimit(process.pid, resource.RLIMIT_AS, (address_space, address_space))
        assert process.stderr is not None
        reading: asyncio.Task[bytes] | None = None
        try:
            line = b""
            async with asyncio.timeout(READY_WITHIN_S):
                while b" ready " not in line:
                    line = await process.stderr.readline()
                    assert line, "it ended before it was ready"
            reading = asyncio.create_task(process.stderr.read())
            url = f"http://127.0.0.1:{int(line.rpartition(b'port=')[2])}"
            yield engine, url, process.pid
            assert process.returncode is None, "the router ended"
        finally:
            engine.released.set()
            if process.returncode is None:
                process.kill()
            await process.wait()
            if reading is not None:
                assert b"Traceback" not in await reading


def bomb(path: str, n_bytes: int = BOMB_BYTES) -> bytes:
    text = "a" * n_bytes
    chat = {"messages": [{"role": "user", "content": text}]}
    call = chat if "chat" in path or "messages" in path else {"prompt": text, "input": text[:8]}
    return gzip.compress(json.dumps({"model": "tiny", "max_tokens": 1, **call}).encode(), 9)


async def stream_of(http: httpx.AsyncClient, first: asyncio.Event) -> str:
    call = {"stream": True, "model": "tiny", "prompt": "a", "max_tokens": 9}
    text = ""
    async with http.stream("POST", "/v1/completions", json=call) as answer:
        async for piece in answer.aiter_text():
            text += piece
            first.set()
    return text


async def longest_turn_s(meter: Meter, http: httpx.AsyncClient) -> float:
    """Ask for ``/health`` again and again until this is cancelled; return the most CPU time of the event loop
    that passed in one of the waits.
    """
    longest_s = 0.0
    try:
        while True:
            before_s = meter.loop_cpu_s()
            await http.get("/health")
            longest_s = max(longest_s, meter.loop_cpu_s() - before_s)
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        return longest_s


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("n_bytes", [BOMB_BYTES, 20_000_000])
async def test_compressed_bombs_do_not_disturb_other_requests(
    tmp_path: Path, path: str, n_bytes: int
) -> None:
    packed = bomb(path, n_bytes)
    async with (
        running(tmp_path, address_space=ADDRESS_SPACE_BYTES) as (engine, url, pid),
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=200)) as http,
    ):
        started = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(stream_of(http, first)) for first in started]
        await asyncio.gather(*(first.wait() for first in started))
        meter = Meter(pid)
        meter.forget_peak()
        before_bytes = meter.resident_bytes()
        asking = asyncio.create_task(longest_turn_s(meter, http))
        answers = await asyncio.gather(*(http.post(path, content=packed, headers=GZIP) for _ in range(BOMBS)))
        asking.cancel()
        grown_bytes = meter.peak_bytes() - before_bytes
        found = Counter(answer.status_code for answer in answers)
        print(f"{path} {n_bytes}: {found}, +{grown_bytes / 1e6:.0f} MB, loop {1e3 * await asking:.0f} ms")
        assert set(found) <= {200, 413, 503}
        assert n_bytes < BOMB_BYTES or found[413] == BOMBS
        assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 503)
        assert grown_bytes < MEMORY_MAX_BYTES
        small = await http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1})
        assert small.status_code == 200
        engine.released.set()
        assert all(text.endswith("data: [DONE]\n\n") for text in await asyncio.gather(*streams))


async def test_large_valid_compressed_bodies_pass(tmp_path: Path) -> None:
    """A chat of 400,000 tokens, and a form with an image of 20 MB, that their clients compressed."""
    words = " ".join(["token"] * 400_000)
    chat = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": words}]}
    image = Random(1).randbytes(20_000_000)
    boundary = b'--b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n'
    form = boundary % (b"model", b"") + b"tiny\r\n"
    form += boundary % (b"file", b'; filename="image.png"') + image + b"\r\n--b--\r\n"
    kind = {"content-encoding": "gzip", "content-type": "multipart/form-data; boundary=b"}
    async with (
        running(tmp_path) as (engine, url, _),
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http,
    ):
        packed = gzip.compress(json.dumps(chat).encode())
        answer = await http.post("/v1/chat/completions", content=packed, headers=GZIP)
        assert answer.status_code == 200, answer.text
        packed = gzip.compress(form, 1)
        answer = await http.post("/v1/audio/transcriptions", content=packed, headers=kind)
        assert answer.status_code == 200, answer.text
        assert engine.received[-1] == len(form)
