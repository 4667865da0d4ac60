"""An engine's HTTP server in a process of its own, to be frozen: it answers every completion with a word."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from tests.testing.asyncio_servers import port_of, serving
from tests.testing.scripted_engine import EVENT_STREAM, JSON, VLLM_PAGES, page, sse

_TOKENS = 3


@dataclass
class EngineProcess:
    """The process, and where it listens."""

    process: Process
    url: str


@asynccontextmanager
async def engine_process() -> AsyncIterator[EngineProcess]:
    """Start it, and kill it in the end, frozen or not."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.testing.engine_process"), stdout=PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(90):
            port = int(await process.stdout.readline())
        yield EngineProcess(process, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        await process.wait()


async def _question(request: web.Request) -> web.Response:
    name = VLLM_PAGES.get(request.path)
    if name is None:
        return web.Response(status=404, text='{"detail":"Not Found"}', content_type=JSON)
    return web.Response(body=page(name), content_type=JSON)


async def _call(request: web.Request) -> web.Response:
    body = await request.json()
    reported = {"id": "cmpl-theirs", "object": "text_completion", "created": 7, "model": "tiny"}
    choice = {"index": 0, "text": "word", "logprobs": None, "token_ids": [5, 6, 7], "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": _TOKENS, "total_tokens": _TOKENS + 1}
    if not body.get("stream"):
        return web.json_response({**reported, "choices": [choice], "usage": usage})
    events = sse({**reported, "choices": [choice]}, {**reported, "choices": [], "usage": usage})
    return web.Response(body=events, headers={"content-type": EVENT_STREAM})


async def _serve() -> None:
    app = web.Application()
    app.router.add_get("/{path:.*}", _question)
    app.router.add_post("/{path:.*}", _call)
    async with serving(app) as server:
        print(port_of(server), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
