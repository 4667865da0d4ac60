"""An engine's HTTP server whose clock moves only as it says: what a client measures of it is exact."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from aiohttp import web

from tests.testing.asyncio_servers import port_of, serving
from tests.testing.scripted_engine import event_of

MODEL = "timed"
TOKENS_PER_WORD = 2
QUEUE_S, PREFILL_S, WAY_S, TOKEN_S = 0.05, 0.25, 0.2, 0.125


class Fault(Enum):
    """What is wrong with the answers."""

    NONE = auto()
    REFUSED = auto()
    IN_STREAM = auto()
    NO_USAGE = auto()
    BROKEN_OFF = auto()
    SILENT = auto()


@dataclass
class TimedEngine:
    """``others`` requests of other clients end with each of ours, and ``others_running`` do not end;
    ``calls`` are the bodies that came. Metrics that ``lag`` count a request only on the second page after its
    end, and an answer ``says_times`` of its own. The call of the number ``held_back`` is answered at once.
    """

    has_metrics: bool = True
    says_times: bool = False
    lag: bool = False
    others: int = 0
    others_running: int = 0
    held_back: int | None = None
    queue_s: float = QUEUE_S
    fault: Fault = Fault.NONE
    now_s: float = 1_000.0
    calls: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self._read = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._running = 0
        self._ended = 0
        self._counted = 0

    def clock(self) -> float:
        """The client's clock, in any thread. That it reads it says that it got what was written."""
        self._loop.call_soon_threadsafe(self._read.set)
        return self.now_s

    async def models(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 4_096}]})

    async def metrics(self, request: web.Request) -> web.Response:
        if not self.has_metrics:
            raise web.HTTPNotFound
        if not self.lag:
            self._counted = self._ended
        n, self._counted = self._counted, self._ended
        lines = [
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="2000"} 1',
            f"vllm:num_requests_running {self._running + self.others_running}",
            f"vllm:request_queue_time_seconds_sum {self.queue_s * n}",
            f"vllm:request_queue_time_seconds_count {n}",
            f"vllm:request_prefill_time_seconds_sum {PREFILL_S * n}",
            f"vllm:request_prefill_time_seconds_count {n}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        if self.fault is Fault.REFUSED:
            return web.json_response({"error": {"message": "no such parameter"}}, status=400)
        if self.fault is Fault.SILENT:
            await asyncio.Event().wait()
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.now_s += WAY_S + self.queue_s + PREFILL_S
        n_tokens = body["max_tokens"]
        token_s = TOKEN_S
        if self.held_back == len(self.calls):
            self.now_s += TOKEN_S * (n_tokens - 1)
            token_s = 0.0
        for number in range(n_tokens):
            self.now_s += token_s if number else 0.0
            is_last = number == n_tokens - 1 and self.fault is not Fault.BROKEN_OFF
            finish = "length" if is_last else None
            self._read.clear()
            await response.write(event_of({"choices": [{"index": 0, "text": " x", "finish_reason": finish}]}))
            await self._read.wait()
        self._running -= 1
        self._ended += 1 + self.others
        await response.write(self._end(body))
        return response

    def _end(self, body: Mapping[str, Any]) -> bytes:
        if self.fault is Fault.IN_STREAM:
            return event_of({"error": {"message": "out of memory", "code": 500}})
        if self.fault is Fault.BROKEN_OFF:
            return b""
        words = len(body["prompt"].split())
        usage = {"prompt_tokens": TOKENS_PER_WORD * words, "completion_tokens": body["max_tokens"]}
        end = event_of("[DONE]")
        times = {"queue_time_ms": 1e3 * self.queue_s, "time_to_first_token_ms": 1e3 * PREFILL_S}
        last = {"choices": [], "usage": usage, **({"metrics": times} if self.says_times else {})}
        return end if self.fault is Fault.NO_USAGE else event_of(last) + end


@asynccontextmanager
async def timed_engine(engine: TimedEngine) -> AsyncIterator[TimedEngine]:
    """The engine, listening."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_post("/v1/completions", engine.completions)
    async with serving(app, shutdown_timeout=0) as server:
        engine.url = f"http://127.0.0.1:{port_of(server)}"
        yield engine
