"""Bytes that servers have misread, and what ours makes of them: ``tests/data/http-corpus``.

Each file is sent on a connection of its own, and a plain request after it. ``expected.json`` lists what was
served, and the status that ended the connection. A new file without an entry fails.
"""

import asyncio
import json
import re
from pathlib import Path

import pytest

from kvrouter.frontend.http.connection import ServerConnection
from kvrouter.frontend.http.limits import Limits
from kvrouter.frontend.http.response import BadRequest, Event, Request
from tests.testing.http_server import LOOPS, Run, echo, runner, running_server

FOLDER = Path(__file__).parents[2] / "data" / "http-corpus"
EXPECTED: dict[str, list[str | int]] = json.loads((FOLDER / "expected.json").read_text())
LIMITS = Limits(
    header_bytes=2048,
    body_bytes=4096,
    pipelined_requests=1,
    sweep_s=0.02,
    linger_s=0.2,
    handler_grace_s=0.1,
    probe_s=0.02,
)
NEXT = b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n"


def outcome(data: bytes, step: int) -> list[str | int]:
    """What becomes of the bytes, in pieces of ``step``; each request is answered at once."""
    conn = ServerConnection(LIMITS, now_s=0.0)
    out: list[str | int] = []

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Request):
                out.append(f"{event.method} {event.head.target.decode('latin-1')}")
                take(conn.request_done(0.0))
            elif isinstance(event, BadRequest):
                out.append(event.status)

    for at in range(0, len(data), step):
        take(conn.receive(data[at : at + step], 0.0))
    return out


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 100_000])
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_inputs_that_other_parsers_misread_have_the_expected_events(name: str, step: int) -> None:
    data = (FOLDER / f"{name}.http").read_bytes()
    assert outcome(data + NEXT, step) == EXPECTED[name]


def test_every_corpus_file_has_an_expectation() -> None:
    assert {path.stem for path in FOLDER.glob("*.http")} == set(EXPECTED)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_server_gives_the_expected_statuses_for_corpus_inputs(loop: str) -> None:
    run: Run = runner(loop)

    async def answers(port: int, data: bytes) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data + NEXT.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        received = await reader.read()
        writer.close()
        return [int(status) for status in re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", received)]

    async def scenario() -> None:
        async with running_server(echo, LIMITS) as served:
            for name, expected in EXPECTED.items():
                data = (FOLDER / f"{name}.http").read_bytes()
                wanted = [each if isinstance(each, int) else 200 for each in expected]
                assert await answers(served.port, data) == wanted, name

    run(scenario())
