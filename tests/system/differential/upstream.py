"""A scripted engine on a real socket: it answers as vLLM 0.32 does, or with what a call makes of that."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus

from tests.system.differential.vllm_answers import PAGES, Answer, Asked, Script, answer_of, as_it_is
from tests.testing.asyncio_servers import port_of, serving_streams
from tests.testing.scripted_engine import page

METRICS = page("vllm-0.32.0-metrics.txt")


@dataclass
class Upstream:
    """The engine. ``script`` makes the next answers of what vLLM would answer; ``asked`` are the calls that
    it got, without the questions that a router has of its own.
    """

    script: Script = as_it_is
    asked: list[Asked] = field(default_factory=list)
    address: tuple[str, int] = ("", 0)

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the calls of one connection."""
        try:
            while True:
                asked = await _asked(reader)
                answer = self._answer(asked)
                writer.write(_head(answer, has_body=asked.method != "HEAD"))
                if asked.method != "HEAD":
                    for piece in answer.pieces:
                        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if answer.is_stream else piece)
                    if answer.is_stream:
                        writer.write(b"0\r\n\r\n")
                await writer.drain()
                if asked.headers.get("connection", "").lower() == "close":
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _answer(self, asked: Asked) -> Answer:
        if asked.path == "/metrics":
            return Answer((METRICS,), headers=(("content-type", "text/plain; version=0.0.4"),))
        if asked.path in PAGES and asked.method == "GET":
            return answer_of(asked)
        self.asked.append(asked)
        return self.script(answer_of(asked))


def _head(answer: Answer, *, has_body: bool) -> bytes:
    status = HTTPStatus(answer.status)
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"date: {formatdate(usegmt=True)}",
        "server: uvicorn",
        "vary: Origin",
    ]
    lines += [f"{name}: {value}" for name, value in answer.headers]
    if answer.is_stream:
        lines.append("transfer-encoding: chunked")
    elif has_body or answer.pieces:
        lines.append(f"content-length: {len(answer.body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1")


async def _asked(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return Asked(method, target, headers, body)


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    """An engine that listens."""
    engine = Upstream()
    async with serving_streams(engine.serve, limit=1 << 20) as server:
        engine.address = ("127.0.0.1", port_of(server))
        yield engine
