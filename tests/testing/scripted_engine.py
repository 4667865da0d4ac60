"""A scripted engine's HTTP server: recorded pages, and answers that come, break off or never begin."""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from enum import Enum, auto
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.testing.asyncio_servers import port_of, serving, stop_listening

PAGES = Path(__file__).parents[1] / "data" / "engine-pages"

EVENT_STREAM = "text/event-stream; charset=utf-8"
JSON = "application/json"

VLLM_PAGES = {
    "/v1/models": "vllm-0.32.0-models.json",
    "/metrics": "vllm-0.32.0-metrics.txt",
    "/kv_event_sources": "vllm-0.32.0-kv_event_sources.json",
    "/version": "vllm-0.32.0-version.json",
}
SGLANG_PAGES = {
    "/v1/models": "sglang-0.5.23-models.json",
    "/server_info": "sglang-0.5.23-server_info.json",
    "/v1/loads": "sglang-0.5.23-loads.json",
}


def page(name: str) -> bytes:
    """A recorded page."""
    return (PAGES / name).read_bytes()


def recorded(pages: Mapping[str, str]) -> dict[str, "ScriptedAnswer"]:
    """The recorded pages of an engine, by their paths."""
    return {path: ScriptedAnswer((page(name),), content_type=JSON) for path, name in pages.items()}


class AnswerEnd(Enum):
    """How an answer ends."""

    WHOLE = auto()
    CUT = auto()
    """The connection is lost in the middle of the body."""
    HELD = auto()
    """It stays open until the client leaves, or :meth:`ScriptedEngine.release`."""
    NO_HEADERS = auto()
    """As held, and not even the headers come."""
    REFUSED = auto()
    """The connection is lost before the headers."""


@dataclass(frozen=True)
class ScriptedAnswer:
    """One answer; its pieces are written one after the other."""

    pieces: tuple[bytes, ...] = ()
    status: int = 200
    content_type: str = EVENT_STREAM
    ends: AnswerEnd = AnswerEnd.WHOLE
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def error(cls, status: int, name: str) -> "ScriptedAnswer":
        """A recorded error."""
        return cls((page(name),), status=status, content_type=JSON)


@dataclass
class ReceivedCall:
    """A call as the engine got it; ``left`` once its client closed the connection before the end. ``port`` is
    its client's end of the connection.
    """

    path: str
    headers: Mapping[str, str]
    raw: bytes
    port: int
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class ScriptedEngine:
    """``pages`` answers questions, ``answers`` the calls, in order; ``asked`` counts the questions. With
    ``tokens_of`` it tokenizes the bodies of ``/tokenize``, or answers otherwise; its clock is
    ``clock_ahead_s`` ahead.
    """

    def __init__(self, pages: Mapping[str, str] = VLLM_PAGES) -> None:
        self.pages = recorded(pages)
        self.answers: deque[ScriptedAnswer] = deque()
        self.calls: list[ReceivedCall] = []
        self.asked: Counter[str] = Counter()
        self.question_headers: list[Mapping[str, str]] = []
        self.tokens_of: Callable[[Any], Sequence[int] | ScriptedAnswer] | None = None
        self.clock_ahead_s = 0.0
        self._released = asyncio.Event()
        self._called = asyncio.Condition()
        self._door = AsyncExitStack()
        self._listener: asyncio.Server | None = None
        self._keeps_connections = True
        self._held: web.StreamResponse | None = None
        self._held_at: asyncio.Transport | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listen; again where it listened before."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/{path:.*}", self._question)
        app.router.add_post("/{path:.*}", self._call)
        door = serving(app, self._port, shutdown_timeout=0, keepalive_timeout=600)
        self._listener = await self._door.enter_async_context(door)
        self._port = port_of(self._listener)

    async def write(self, piece: bytes) -> None:
        """Add a piece to the last answer that is held."""
        assert self._held is not None
        await self._held.write(piece)

    def cut(self) -> None:
        """Lose the connection of the last answer that is held."""
        assert self._held_at is not None
        self._held_at.close()

    async def refuse(self) -> None:
        """Refuse connections, and keep none behind an answer; answers that run go on."""
        assert self._listener is not None
        await stop_listening(self._listener)
        self._keeps_connections = False

    async def stop(self) -> None:
        """Nobody listens any more; idempotent."""
        self._released.set()
        await self._door.aclose()
        self._released.clear()

    def release(self) -> None:
        """Let every held answer end."""
        self._released.set()

    async def called(self, n: int = 1) -> ReceivedCall:
        """Wait for the ``n``-th call, counted from 1."""
        async with self._called:
            await self._called.wait_for(lambda: len(self.calls) >= n)
        return self.calls[n - 1]

    def set_page(self, path: str, body: bytes | str, status: int = 200) -> None:
        """Answer a question in this way from now on."""
        data = body if isinstance(body, bytes) else body.encode()
        self.pages[path] = ScriptedAnswer((data,), status=status, content_type=JSON)

    def set_json(self, path: str, value: object) -> None:
        """Answer a question with this."""
        self.set_page(path, json.dumps(value))

    def json(self, path: str) -> Any:
        """What a question is answered with."""
        return json.loads(self.pages[path].pieces[0])

    def replace(self, path: str, old: str, new: str) -> None:
        """Change a page in every place where it says ``old``."""
        before = self.pages[path].pieces[0].decode()
        assert old in before, f"{path} does not say {old!r}"
        self.set_page(path, before.replace(old, new))

    async def _question(self, request: web.Request) -> web.StreamResponse:
        self.question_headers.append(dict(request.headers))
        answer = self.pages.get(request.path)
        if answer is None:
            answer = ScriptedAnswer((b'{"detail":"Not Found"}',), status=404, content_type=JSON)
        self.asked[request.path] += 1
        return await self._send(request, answer)

    async def _call(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert request.transport is not None
        port = request.transport.get_extra_info("peername")[1]
        call = ReceivedCall(request.path, headers, await request.read(), port)
        async with self._called:
            self.calls.append(call)
            self._called.notify_all()
        try:
            if self.tokens_of is not None and request.path == "/tokenize":
                tokens = self.tokens_of(call.body)
                if isinstance(tokens, ScriptedAnswer):
                    return await self._send(request, tokens)
                body = json.dumps({"count": len(tokens), "tokens": list(tokens)}).encode()
                return await self._send(request, ScriptedAnswer((body,), content_type=JSON))
            return await self._send(request, self.answers.popleft())
        except (asyncio.CancelledError, ConnectionError):
            call.left.set()
            raise

    async def _send(self, request: web.Request, answer: ScriptedAnswer) -> web.StreamResponse:
        if answer.ends is AnswerEnd.NO_HEADERS:
            await self._released.wait()
        if answer.ends is AnswerEnd.REFUSED:
            return self._lost(request)
        date = formatdate(time.time() + self.clock_ahead_s, usegmt=True)
        headers = {"content-type": answer.content_type, "date": date, **answer.headers}
        response = web.StreamResponse(status=answer.status, headers=headers)
        if not self._keeps_connections:
            response.force_close()
        await response.prepare(request)
        for piece in answer.pieces:
            await response.write(piece)
        if answer.ends is AnswerEnd.HELD:
            self._held, self._held_at = response, request.transport
            await self._released.wait()
        if answer.ends is AnswerEnd.CUT:
            return self._lost(request, response)
        await response.write_eof()
        return response

    def _lost(self, request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()  # what was written goes out first
        return response or web.StreamResponse()


@asynccontextmanager
async def scripted_engine(
    pages: Mapping[str, str] = VLLM_PAGES, *answers: ScriptedAnswer
) -> AsyncIterator[ScriptedEngine]:
    """A scripted engine that listens."""
    engine = ScriptedEngine(pages)
    engine.answers.extend(answers)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def sse(*events: object) -> bytes:
    """Events as engines write them, compact, and the word that they are over."""
    return b"".join(event_of(event) for event in (*events, "[DONE]"))


def event_of(event: object) -> bytes:
    """One event; a text stands for itself."""
    data = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"), ensure_ascii=False)
    return b"data: " + data.encode() + b"\n\n"


EMPTY_CHAT = (
    event_of(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    ),
    event_of({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}}),
    b"data: [DONE]\n\n",
)
"""How vLLM 0.31 ends a streamed chat whose KV never came."""
