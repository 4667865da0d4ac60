"""The bench of real frontends before one fleet: its client, its samples, its table; no process is started."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.frontend.client import AnswerFailed
from benchmarks.herd_client import requests_of, send
from benchmarks.herd_fleet import Outcome
from benchmarks.herd_load import Arrival
from benchmarks.herd_processes import LOAD, ONE, VARIANTS, Shown, busiest_over_mean, table_of
from benchmarks.herd_workers import BLOCK_SIZE, FLEET, N_WORKERS, Loads
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.settings.problems import read_document
from tests.testing.asyncio_servers import port_of, serving_streams

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
WHOLE = (
    b'data: {"choices":[{"text":" word","finish_reason":null}]}\n\n'
    b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
    b"data: [DONE]\n\n"
)


class Server:
    """Answers every request with the same bytes, and keeps how many tokens it was asked for."""

    def __init__(self, answer: bytes) -> None:
        self.asked_tokens: list[int] = []
        self.port = 0
        self._answer = answer

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Server"]:
        async with serving_streams(self._serve) as server:
            self.port = port_of(server)
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.asked_tokens.append(json.loads(await reader.readexactly(length))["max_tokens"])
        writer.write(self._answer)
        await writer.drain()


def test_prompts_have_the_asked_length_and_differ_by_seed() -> None:
    arrivals = LOAD.arrivals(1)[:50]
    first, again, other = (
        [json.loads(request.partition(b"\r\n\r\n")[2]) for request in requests_of(arrivals, seed=seed)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert all(mine["prompt"] != theirs["prompt"] for mine, theirs in zip(first, other, strict=True))
    assert [(len(each["prompt"]), each["max_tokens"]) for each in first] == [
        (arrival.isl_tokens, arrival.osl_tokens) for arrival in arrivals
    ]


async def test_the_lot_picks_the_port_and_warm_up_requests_are_not_recorded() -> None:
    arrivals = [Arrival(0.001 * at, isl_tokens=3, osl_tokens=4 + at, lot=at) for at in range(6)]
    async with Server(HEAD + WHOLE).serving() as even, Server(HEAD + WHOLE).serving() as odd:
        sent = await send(arrivals, requests_of(arrivals, seed=1), [even.port, odd.port], warm_s=0.002)
    assert sorted(even.asked_tokens) == [4, 6, 8]
    assert sorted(odd.asked_tokens) == [5, 7, 9]
    assert len(sent.first_tokens_ms) == len(sent.late_ms) == 4
    assert min(sent.late_ms) >= 0.0


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"HTTP/1.1 503 Service Unavailable\r\n\r\n", id="refused"),
        pytest.param(HEAD + WHOLE.partition(b"data: [DONE]")[0], id="cut off"),
        pytest.param(HEAD + WHOLE.replace(b'"length"', b'"error"'), id="ended by something else"),
    ],
)
async def test_an_incomplete_answer_ends_the_bench(answer: bytes) -> None:
    arrivals = [Arrival(0.0, isl_tokens=3, osl_tokens=4, lot=0)]
    async with Server(answer).serving() as server:
        with pytest.raises(ExceptionGroup) as failed:
            await send(arrivals, requests_of(arrivals, seed=1), [server.port], warm_s=0.0)
    assert failed.group_contains(AnswerFailed)


def test_load_is_each_workers_last_report() -> None:
    loads = Loads()
    for worker, active_blocks, prefill_tokens in ((1, 9, 9), (2, 10, 0), (1, 4, 2 * BLOCK_SIZE)):
        rank = WorkerRank(WorkerId(worker), DpRank(0))
        loads.hear(LoadReport(rank, active_blocks, 100, active_prefill_tokens=prefill_tokens))
    assert sorted(loads.blocks()) == [6.0, 10.0]
    assert busiest_over_mean(loads.blocks()) == N_WORKERS * 10.0 / 16.0


def test_the_fleet_file_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    fleet = load_fleet(read_document(file)).fleet
    assert [group.replicas for group in fleet.workers] == [N_WORKERS]
    assert fleet.models[0].block_size == BLOCK_SIZE


def test_every_number_of_routers_is_compared_with_one() -> None:
    shown = {
        variant: [Shown(Outcome([1.0 + variant.n_frontends], [5.0]), [0.1], 0.5, 0.2)] for variant in VARIANTS
    }
    lines = table_of(LOAD, shown)
    ratios = {line.variant: (line.ratio, line.wanted_ratio) for line in lines if line.unit == "busiest/mean"}
    assert ratios == {
        "2 routers, without sync": (1.5, None),
        "2 routers, with sync": (1.5, 1.1),
        "4 routers, without sync": (2.5, None),
        "4 routers, with sync": (2.5, 1.1),
    }
    assert {line.ours.p50 for line in lines if line.row.startswith("busiest router")} == {0.5}
    assert sum(line.variant == ONE.name for line in lines) == 3
