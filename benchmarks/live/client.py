"""The open-loop client: each request is sent when it is due, whatever became of the others."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.frontend.client import AnswerFailed
from benchmarks.live.prompts import prompt_tokens
from kvrouter.sim.traces.trace_request import TraceRequest

_DONE = b"data: [DONE]"
_LAST_BYTES = 1000
"""Of an answer's end; the event that tells its finish is in it."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: when it is due, from the start, and all of its bytes."""

    due_s: float
    content: bytes


def plan(rows: Sequence[TraceRequest], *, model: str, speedup: float) -> list[Planned]:
    """Return the rows as requests, which arrive ``speedup`` times as fast as in the trace. They have the ids
    that a replay gives them.
    """
    return [Planned(row.at_s / speedup, request_bytes(row, prompt_tokens(row), model=model)) for row in rows]


def request_bytes(row: TraceRequest, prompt: Sequence[int], *, model: str) -> bytes:
    """Return one call with a prompt of tokens, which asks for a stream of exactly ``row.output_tokens``."""
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": row.output_tokens,
            "ignore_eos": True,
            "stream": True,
        },
        separators=(",", ":"),
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"x-request-id: r{row.number}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


async def send(
    requests: Sequence[Planned], port: int, *, on_answer: Callable[[], None] = lambda: None
) -> list[float]:
    """Send every request when it is due, and return once all are answered: by how many seconds each was
    late. Raises AnswerFailed when one is not answered whole.
    """
    late_s: list[float] = []
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for request in requests:
            due_s = began_s + request.due_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            late_s.append(time.perf_counter() - due_s)
            group.create_task(ask(port, request.content, on_answer))
    return late_s


async def ask(port: int, content: bytes, on_answer: Callable[[], None] = lambda: None) -> None:
    """Send one request and read its answer to the end. Raises AnswerFailed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise AnswerFailed(f"port {port}: {head!r}")
        tail = b""
        while _DONE not in tail:
            data = await reader.read(65536)
            if not data:
                raise AnswerFailed(f"port {port}: the answer ended early, after {tail!r}")
            tail = tail[-_LAST_BYTES:] + data
        if b'"length"' not in tail:
            raise AnswerFailed(f"port {port}: the answer ended with {tail!r}")
        on_answer()
    finally:
        writer.close()
