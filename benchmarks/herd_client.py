"""The open-loop client of the herd of processes: a request is sent when it is due, whatever others do."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.frontend.client import AnswerFailed
from benchmarks.herd_load import Arrival
from kvrouter.text.model import FIRST_WORD_ID, mock_words

_DONE = b"data: [DONE]"
_TEXT = b'"text":" '
_LAST_BYTES = 1000
"""Of an answer's end; the event that tells its finish is in it."""


@dataclass(slots=True)
class Sent:
    """What the client saw of one load."""

    first_tokens_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    """How long after it was due each request was sent: the client's own delay."""


def requests_of(arrivals: Sequence[Arrival], *, seed: int) -> list[bytes]:
    """Return the requests, with prompts that depend on the seed and share nothing."""
    chance = random.Random(seed)
    ids = range(FIRST_WORD_ID, FIRST_WORD_ID + len(mock_words()))
    return [_request(chance.choices(ids, k=each.isl_tokens), each.osl_tokens) for each in arrivals]


async def send(
    arrivals: Sequence[Arrival], requests: Sequence[bytes], ports: Sequence[int], *, warm_s: float
) -> Sent:
    """Send every request to the port that its lot picks; return once all are answered.

    Those that come before ``warm_s`` are not noted. Raises AnswerFailed when one is not answered whole.
    """
    sent = Sent()
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for arrival, request in zip(arrivals, requests, strict=True):
            due_s = began_s + arrival.at_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            late_s = time.perf_counter() - due_s
            noted = sent if arrival.at_s >= warm_s else Sent()
            noted.late_ms.append(1000.0 * late_s)
            group.create_task(_ask(ports[arrival.lot % len(ports)], request, noted))
    return sent


async def _ask(port: int, request: bytes, noted: Sent) -> None:
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise AnswerFailed(f"port {port}: {head!r}")
        has_begun, tail = False, b""
        while _DONE not in tail:
            data = await reader.read(65536)
            if not data:
                raise AnswerFailed(f"port {port}: the answer ended early, after {tail!r}")
            tail = tail[-_LAST_BYTES:] + data
            if not has_begun and _TEXT in tail:
                has_begun = True
                noted.first_tokens_ms.append(1000.0 * (time.perf_counter() - began_s))
        if b'"length"' not in tail:
            raise AnswerFailed(f"port {port}: the answer ended with {tail!r}")
    finally:
        writer.close()


def _request(prompt: list[int], max_tokens: int) -> bytes:
    body = json.dumps({"model": "mock", "prompt": prompt, "max_tokens": max_tokens, "stream": True})
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()
