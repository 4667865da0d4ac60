"""The clients: streams side by side, whole answers one after the other, and the wait for a first token."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrouter.text.model import mock_words

_WORDS = mock_words()
_DONE = b"data: [DONE]"
TEXTS = (b'"content":" ', b'"content": " ')
"""How a text begins in the JSON of one server or another; every word of these answers begins with a space."""

_LAST_BYTES = 1000
"""Of a stream's end; the event that tells its finish is in it."""

STEADY_TICKS = 5
"""Ticks at either end of a run that do not belong to its middle."""

READY_WITHIN_S = 60.0


class AnswerFailed(Exception):
    """A server did not answer as it should."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """What streams side by side cost. ``middle_us`` is the CPU a token while all of them are open."""

    whole_us: float
    middle_us: float
    tokens_per_event: float


@dataclass(slots=True)
class _Run:
    """How far streams that run side by side have come."""

    streams: int
    begun: int = 0
    ended: int = 0
    events: int = 0


def prompt_of(seed: int, n_words: int) -> str:
    """Return ``n_words`` words that depend on ``seed`` alone."""
    return " ".join(random.Random(seed).choices(_WORDS, k=n_words))


async def stream_side_by_side(
    port: int, *, streams: int, tokens: int, tick_s: float, seed: int, cpu_us: Callable[[], float]
) -> Streamed:
    """Read ``streams`` answers of ``tokens`` tokens at once; return what they cost by the clock ``cpu_us``.

    Raises AnswerFailed when one is no answer, or when none of them was open long enough to be measured.
    """
    run = _Run(streams)
    before_us = cpu_us()
    reading = [asyncio.create_task(_stream(port, tokens, seed + number, run)) for number in range(streams)]
    measuring = asyncio.create_task(_middle(run, (tokens - 2 * STEADY_TICKS) * tick_s, tick_s, cpu_us))
    try:
        await asyncio.gather(*reading)
    except AnswerFailed:
        measuring.cancel()
        raise
    whole_us = (cpu_us() - before_us) / (streams * tokens)
    middle_us, middle_events = await measuring
    if not middle_events:
        raise AnswerFailed(f"port {port}: no stream was open while all of them were")
    # Tokens that came late may share an event: all of a stream's tokens came, in so many events.
    tokens_per_event = streams * tokens / run.events
    return Streamed(whole_us, middle_us / (middle_events * tokens_per_event), tokens_per_event)


async def ask_in_turn(port: int, *, requests: int, prompt_words: int, seed: int) -> None:
    """Ask for one token each, over one connection, with prompts that nobody has sent before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for number in range(requests):
            writer.write(chat_request(prompt_of(seed + number, prompt_words), max_tokens=1, stream=False))
            head = await reader.readuntil(b"\r\n\r\n")
            body = await _body(reader, head)
            if not head.startswith(b"HTTP/1.1 200"):
                raise AnswerFailed(f"port {port}: {head[:200]!r} {body[:500]!r}")
    finally:
        writer.close()


async def ask_side_by_side(
    port: int, *, connections: int, requests: int, prompt_words: int, seed: int
) -> float:
    """Ask as :func:`ask_in_turn` does over each of some connections at once; return requests a second."""
    began_s = time.perf_counter()
    await asyncio.gather(
        *(
            ask_in_turn(port, requests=requests, prompt_words=prompt_words, seed=seed + number * requests)
            for number in range(connections)
        )
    )
    return connections * requests / (time.perf_counter() - began_s)


async def first_tokens_us(port: int, *, requests: int, prompt_words: int, seed: int) -> list[float]:
    """Return how long each of some requests, one after the other, waited for its first text: microseconds."""
    waits_us = []
    for number in range(requests):
        request = chat_request(prompt_of(seed + number, prompt_words), max_tokens=2, stream=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            began_s = time.perf_counter()
            writer.write(request)
            data = b""
            while not any(text in data for text in TEXTS):
                data = await _more(reader, port, data)
            waits_us.append((time.perf_counter() - began_s) * 1e6)
            while _DONE not in data:
                data = await _more(reader, port, data)
        finally:
            writer.close()
    return waits_us


async def wait_ready(port: int, within_s: float = READY_WITHIN_S) -> None:
    """Return once the server answers a request. Raises AnswerFailed when it does not in time."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            await ask_in_turn(port, requests=1, prompt_words=8, seed=0)
        except (AnswerFailed, OSError, asyncio.IncompleteReadError):
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.2)
        else:
            return


async def _stream(port: int, tokens: int, seed: int, run: _Run) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(chat_request(prompt_of(seed, 32), max_tokens=tokens, stream=True))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise AnswerFailed(f"port {port}: {head[:200]!r}")
        run.begun += 1
        tail = b""
        while _DONE not in tail:
            data = await reader.read(65536)
            if not data:
                raise AnswerFailed(f"port {port}: the stream ended early, after {tail[-200:]!r}")
            run.events += sum(data.count(text) for text in TEXTS)
            tail = tail[-_LAST_BYTES:] + data
        if b'"length"' not in tail:
            raise AnswerFailed(f"port {port}: the stream ended with {tail[-400:]!r}")
        run.ended += 1
    finally:
        writer.close()


async def _middle(run: _Run, lasts_s: float, tick_s: float, cpu_us: Callable[[], float]) -> tuple[float, int]:
    """Return the CPU of the time when all streams are open, and the events that came in it."""
    while run.begun < run.streams:  # noqa: ASYNC110 - to the tick is good enough
        await asyncio.sleep(tick_s)
    await asyncio.sleep(STEADY_TICKS * tick_s)
    began_us, began_events = cpu_us(), run.events
    until_s = time.monotonic() + lasts_s
    used_us, events = 0.0, 0
    while not run.ended and time.monotonic() < until_s:
        used_us, events = cpu_us() - began_us, run.events - began_events
        await asyncio.sleep(STEADY_TICKS * tick_s)
    return used_us, events


async def _more(reader: asyncio.StreamReader, port: int, data: bytes) -> bytes:
    more = await reader.read(65536)
    if not more or (not data and not more.startswith(b"HTTP/1.1 200")):
        raise AnswerFailed(f"port {port}: {data[-200:]!r}{more[:300]!r}")
    return data + more


def chat_request(prompt: str, *, max_tokens: int, stream: bool) -> bytes:
    """Return a chat of one message as it is sent."""
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": "mock", "messages": messages, "max_tokens": max_tokens, "stream": stream})
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """Read one answer's body, of a length that is said before or in chunks."""
    headers = {
        name.strip().lower(): value.strip().lower()
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    }
    if b"content-length" in headers:
        return await reader.readexactly(int(headers[b"content-length"]))
    if headers.get(b"transfer-encoding") != b"chunked":
        raise AnswerFailed(f"an answer without a length: {head!r}")
    body = b""
    while True:
        size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
        chunk = await reader.readexactly(size + 2)
        if not size:
            return body
        body += chunk[:-2]
