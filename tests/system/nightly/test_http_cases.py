"""A million HTTP cases against a real frontend: streams of requests, whole, cut, mutated and nested."""

import asyncio
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.system.hostile.meter import MIB, Meter
from tests.testing.processes import Frontend, fleet

CASES = int(os.environ.get("NIGHTLY_HTTP_CASES", "1000000"))
AT_ONCE = 16
SEED = 20261122
GROWTH_MAX_BYTES = 48 * MIB
ANSWERED_WITHIN_S = 60.0
CORPUS = Path(__file__).parents[2] / "data" / "http-corpus"
ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[!-9;-~]+: [^\r\n]*\r\n)*)\r\n")


@dataclass(frozen=True)
class Case:
    """``answers`` is how many there must be; None where the bytes need not be requests at all."""

    parts: tuple[bytes, ...]
    answers: int | None


class Cases:
    """Draws cases, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._corpus = [path.read_bytes() for path in sorted(CORPUS.glob("*.http"))]
        self._corpus = [data for data in self._corpus if len(data) < 4096]

    def next(self) -> Case:
        """Half are requests as they should be, whose bodies look like requests; half are anything."""
        draw = self._draw
        if draw.random() < 0.5:
            n = draw.randrange(1, 5)
            return Case(self._cut(b"".join(self._request() for _ in range(n))), n)
        data = b"".join(draw.choice(self._corpus) for _ in range(draw.randrange(1, 3)))
        return Case(self._cut(self._mutated(data)), None)

    def _request(self) -> bytes:
        draw = self._draw
        if draw.random() < 0.3:
            return b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        body = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n" * draw.randrange(3) + b"0\r\n\r\n"
        path = draw.choice([b"/v1/completions", b"/v1/chat/completions", b"/nothing", b"/v1/route/explain"])
        head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        if draw.random() < 0.5:
            return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in self._cut(body))
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"

    def _mutated(self, data: bytes) -> bytes:
        draw = self._draw
        mutated = bytearray(data)
        for _ in range(draw.randrange(4)):
            at = draw.randrange(len(mutated) + 1)
            match draw.randrange(4):
                case 0:
                    mutated[at:at] = bytes([draw.randrange(256)])
                case 1:
                    del mutated[at : at + draw.randrange(1, 8)]
                case 2 if at < len(mutated):
                    mutated[at] ^= 1 << draw.randrange(8)
                case _:
                    other = draw.choice(self._corpus)
                    begin = draw.randrange(len(other) + 1)
                    mutated[at:at] = other[begin : begin + draw.randrange(40)]
        return bytes(mutated)

    def _cut(self, data: bytes) -> tuple[bytes, ...]:
        at = sorted(self._draw.randrange(len(data) + 1) for _ in range(self._draw.randrange(4)))
        ends = [*at, len(data)]
        return tuple(data[a:b] for a, b in zip([0, *at], ends, strict=True) if a < b)


async def test_a_million_http_cases_leave_no_memory_or_files_behind(
    record_property: Callable[[str, object], None],
) -> None:
    cases = Cases(SEED)
    statuses: Counter[int] = Counter()
    async with fleet() as here:
        frontend = await here.frontend()
        meter = Meter(frontend.pid)
        await _run(frontend, cases, min(CASES, 20_000), statuses)
        before_bytes, before_files = meter.resident_bytes(), meter.n_files()
        await _run(frontend, cases, CASES - min(CASES, 20_000), statuses)
        assert (await frontend.http.get("/health")).status_code == 200
        grown = meter.resident_bytes() - before_bytes
        record_property("grown_bytes", grown)
        print(f"{CASES} cases, answers by status {dict(sorted(statuses.items()))}, grown by {grown} bytes")
        assert grown < GROWTH_MAX_BYTES
        assert meter.n_files() <= before_files + AT_ONCE
        assert statuses[500] == 0


async def _run(frontend: Frontend, cases: Cases, n: int, statuses: Counter[int]) -> None:
    left = n

    async def go_on() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await _one(int(frontend.ready["port"]), cases.next(), statuses)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(go_on())


async def _one(port: int, case: Case, statuses: Counter[int]) -> None:
    async with asyncio.timeout(ANSWERED_WITHIN_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for part in case.parts:
                writer.write(part)
                await asyncio.sleep(0)
            writer.write_eof()
            page = await reader.read(-1)
        except OSError:
            assert case.answers is None, case  # what is no request may be cut off
            return
        finally:
            writer.close()
    found = _statuses(page, case)
    statuses.update(found)
    if case.answers is not None:
        assert len(found) == case.answers, (case, page)


def _statuses(page: bytes, case: Case) -> list[int]:
    """The answers in ``page``; each of them must be whole, and nothing may stand between them."""
    found: list[int] = []
    at = 0
    while at < len(page):
        answer = ANSWER.match(page, at)
        assert answer is not None, (case, page[at : at + 200])
        status = int(answer[1])
        at = answer.end()
        if status < 200:
            continue
        length = re.search(rb"(?i)content-length: (\d+)", answer[2])
        assert length is not None, (case, answer[2])
        is_head = case.answers is None and page[at : at + 1] != b"{"
        at += 0 if is_head else int(length[1])
        assert at <= len(page), (case, page)
        found.append(status)
    return found
