"""One client beside others, at ``kvrouter up`` before two equal engines in real time: whether its answers
stream or come whole, and once it has left, the others go where they went.

The shares are printed; a busy machine moves them by some points. The bar of 5 points holds on a clock that a
test turns (``tests/kernel/unit/test_learned_costs.py``).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import pytest
from aiohttp import web

from tests.testing.asyncio_servers import port_of, serving
from tests.testing.processes import fleet
from tests.testing.scripted_engine import VLLM_PAGES, event_of, recorded

WORD_S, TOKEN_S = 40e-6, 0.015
"""What one word of a prompt takes, of one prompt at a time, and one token of an answer."""

HONEST_WORDS, HONEST_TOKENS, HONEST_PER_S = 400, 8, 20.0
ATTACKERS, ATTACKER_TOKENS = 2, 14
HONEST, HONEST_BETWEEN = 400, 100
"""So many calls are counted, and so many are between two counts: five seconds."""

MOVED_MAX = 0.1
"""A healthy worker's share was 0 instead of a half where whole answers taught their length as its speed."""


@dataclass
class Engine:
    """Counts the honest calls, which are those that stream eight tokens."""

    honest: int = 0
    _one_prompt: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def question(self, request: web.Request) -> web.Response:
        known = recorded(VLLM_PAGES).get(request.path)
        if known is None:
            raise web.HTTPNotFound
        return web.Response(body=b"".join(known.pieces), content_type=known.content_type)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        n_tokens, words = body["max_tokens"], body["prompt"].split()
        self.honest += n_tokens == HONEST_TOKENS
        async with self._one_prompt:
            await asyncio.sleep(WORD_S * len(words))
        if not body.get("stream"):
            await asyncio.sleep(TOKEN_S * n_tokens)
            choice = {"index": 0, "text": " a" * n_tokens, "finish_reason": "length"}
            usage = {"prompt_tokens": len(words), "completion_tokens": n_tokens}
            return web.json_response({"id": "c", "choices": [choice], "usage": usage})
        return await self._stream(request, n_tokens)

    async def _stream(self, request: web.Request, n_tokens: int) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with suppress(ConnectionResetError):  # the attacker leaves in the middle of its last calls
            await answer.prepare(request)
            for number in range(n_tokens):
                ends = "length" if number == n_tokens - 1 else None
                choice = {"index": 0, "text": " a", "finish_reason": ends}
                await answer.write(event_of({"choices": [choice]}))
                await asyncio.sleep(TOKEN_S)
            await answer.write(b"data: [DONE]\n\n")
        return answer


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 20)
    app.router.add_get("/{path:.*}", engine.question)
    app.router.add_post("/v1/completions", engine.completion)
    async with serving(app) as server:
        yield f"http://127.0.0.1:{port_of(server)}"


class Callers:
    """``first`` and ``second`` are the engines; the attacker keeps its calls at the first."""

    def __init__(self, http: httpx.AsyncClient, first: Engine, second: Engine) -> None:
        self._http, self._engines = http, (first, second)
        self._numbers = Random(7)
        self.statuses = Counter[int]()

    async def call(self, n_tokens: int, *, stream: bool, worker_id: int | None = None) -> None:
        words = [f"w{self._numbers.randrange(9999)}" for _ in range(HONEST_WORDS)]
        body = {"model": "tiny", "prompt": " ".join(words), "max_tokens": n_tokens, "stream": stream}
        pin = {} if worker_id is None else {"nvext": {"worker_id": worker_id}}
        answer = await self._http.post("/v1/completions", json=body | pin)
        self.statuses[answer.status_code] += 1

    async def share(self, n_calls: int, *, stream: bool | None) -> float:
        """Return what share of so many honest calls the first engine got, beside an attacker whose answers
        stream, come whole, or which is not there.
        """

        async def attack() -> None:
            while True:
                await self.call(ATTACKER_TOKENS, stream=bool(stream), worker_id=1)

        before = [engine.honest for engine in self._engines]
        n_attackers = 0 if stream is None else ATTACKERS
        attackers = [asyncio.create_task(attack()) for _ in range(n_attackers)]
        arrivals, rng = [], Random(3)
        for _ in range(n_calls):
            arrivals.append(asyncio.create_task(self.call(HONEST_TOKENS, stream=True)))
            await asyncio.sleep(rng.expovariate(HONEST_PER_S))
        await asyncio.gather(*arrivals)
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
        first, second = (engine.honest - was for engine, was in zip(self._engines, before, strict=True))
        assert first + second == n_calls
        return first / (first + second)


@pytest.mark.timed
async def test_a_single_client_hardly_changes_the_routing_of_others(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engines = Engine(), Engine()
        urls = [await stack.enter_async_context(served(engine)) for engine in engines]
        workers = "".join(
            f"- {{name: e{number}, engine: {{kind: vllm, url: '{url}', kv_events: false}}}}\n"
            for number, url in enumerate(urls)
        )
        file = tmp_path / "fleet.yaml"
        file.write_text(f"version: 1\nmodels: [{{name: tiny, tokenizer: mock}}]\nworkers:\n{workers}")
        router = await (await stack.enter_async_context(fleet())).door(
            "up", "--fleet", str(file), "--no-kv-events"
        )
        callers = Callers(router.http, *engines)
        await callers.share(HONEST_BETWEEN, stream=None)
        before = await callers.share(HONEST, stream=None)
        streamed = await callers.share(HONEST, stream=True)
        await callers.share(HONEST_BETWEEN, stream=None)
        unstreamed = await callers.share(HONEST, stream=False)
        await callers.share(HONEST_BETWEEN, stream=None)
        after = await callers.share(HONEST, stream=None)
        shares = {"before": before, "streamed": streamed, "unstreamed": unstreamed, "after": after}
        print(", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
        assert set(callers.statuses) == {200}
        assert abs(unstreamed - streamed) <= MOVED_MAX
        assert abs(after - before) <= MOVED_MAX
