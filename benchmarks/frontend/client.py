"""The clients: streams side by side, and whole answers one after the other."""

import asyncio
import json
import random

from kvrouter.text.words import mock_words

_WORDS = mock_words()
_DONE = b"data: [DONE]"


class AnswerFailed(Exception):
    """A server did not answer as it should."""


def prompt_of(seed: int, n_words: int) -> str:
    """Return ``n_words`` words that depend on ``seed`` alone."""
    return " ".join(random.Random(seed).choices(_WORDS, k=n_words))


async def stream_side_by_side(port: int, *, streams: int, tokens: int, seed: int) -> int:
    """Read ``streams`` answers of ``tokens`` tokens at once; return how many events with text came."""
    counts = await asyncio.gather(*(_stream(port, tokens, seed + number) for number in range(streams)))
    return sum(counts)


async def ask_in_turn(port: int, *, requests: int, prompt_words: int, seed: int) -> None:
    """Ask for one token each, over one connection, with prompts that nobody has sent before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for number in range(requests):
            writer.write(_request(prompt_of(seed + number, prompt_words), max_tokens=1, stream=False))
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_body_bytes(head))
            if not head.startswith(b"HTTP/1.1 200"):
                raise AnswerFailed(f"port {port}: {head[:200]!r} {body[:500]!r}")
    finally:
        writer.close()


async def _stream(port: int, tokens: int, seed: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_request(prompt_of(seed, 32), max_tokens=tokens, stream=True))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise AnswerFailed(f"port {port}: {head[:200]!r}")
        events, tail = 0, b""
        while _DONE not in tail:
            data = await reader.read(65536)
            if not data:
                raise AnswerFailed(f"port {port}: the stream ended early, after {tail[-200:]!r}")
            events += data.count(b'"content":"') + data.count(b'"content": "')
            tail = tail[-len(_DONE) :] + data
        return events
    finally:
        writer.close()


def _request(prompt: str, *, max_tokens: int, stream: bool) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": "mock", "messages": messages, "max_tokens": max_tokens, "stream": stream})
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def _body_bytes(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise AnswerFailed(f"an answer without a length: {head!r}")
