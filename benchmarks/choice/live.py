"""``python -m benchmarks.choice.live``: a link falls to a tenth and recovers while ``kvrouter up`` serves.

Two zones of two prefill and two decode mock engines, which run on the real clock, in a process of their own;
requests come over HTTP when a Poisson process says, whatever became of the others. KV within zone a travels
at a tenth in the second of three phases. Each policy is measured by itself, under the same arrivals.
"""

import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import click
import msgspec

from benchmarks.choice import live_page
from benchmarks.choice.live_page import FALLEN, PHASES, LiveRequest, LiveRun, LiveStudy, SaidOfLink
from benchmarks.http_replay.machine import this_commit, this_machine

HERE = Path(__file__).parent
TIME = "time, joint"
BLOCKS = "blocks"
POLICIES = {
    TIME: ("--router-cost", "time", "--router-pd-selection", "joint"),
    BLOCKS: ("--router-cost", "blocks", "--kv-transfer-weight", "30"),
}

FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
topology:
  levels: [zone]
  links:
    within: {zone: {latency_s: 0.0002, bandwidth_bytes_per_s: 5.0e+9}}
    across: {latency_s: 0.001, bandwidth_bytes_per_s: 2.5e+9}
workers:
- {name: prefill-a, role: prefill, replicas: 2, domains: {zone: a}}
- {name: decode-a, role: decode, replicas: 2, domains: {zone: a}}
- {name: prefill-b, role: prefill, replicas: 2, domains: {zone: b}}
- {name: decode-b, role: decode, replicas: 2, domains: {zone: b}}
"""
ZONES = {**dict.fromkeys(range(1, 5), "a"), **dict.fromkeys(range(5, 9), "b")}
"""Of workers by their numbers."""

EVENTS = """
events:
- {{at_s: {falls_s}, what: link, level: zone, between: [a, a], bandwidth_factor: 0.1}}
- {{at_s: {mends_s}, what: link, level: zone, between: [a, a], bandwidth_factor: 1}}
"""

PROMPT_TOKENS = (600, 3_000)
ANSWER_TOKENS = (60, 140)
TOKEN_IDS = range(256, 2256)
ANSWER_WITHIN_S = 120.0
READY_WITHIN_S = 60.0


class Planned(NamedTuple):
    """One request of the plan: when it is due, how long its prompt is, and all of its bytes."""

    due_s: float
    prompt_tokens: int
    content: bytes


def plan(seed: int, *, rate: float, lasts_s: float) -> list[Planned]:
    """Return Poisson arrivals of prompts that have nothing in common."""
    rng, due_s, planned = random.Random(seed), 0.0, []
    while (due_s := due_s + rng.expovariate(rate)) < lasts_s:
        prompt = rng.choices(TOKEN_IDS, k=rng.randint(*PROMPT_TOKENS))
        planned.append(Planned(due_s, len(prompt), _call(prompt, rng.randint(*ANSWER_TOKENS))))
    return planned


async def measured(
    policy: str, planned: Sequence[Planned], *, falls_s: float, mends_s: float, folder: Path
) -> LiveRun:
    """Serve under one policy, and send every request; seconds of the result count from when it is ready."""
    fleet, events = folder / "fleet.yaml", folder / "events.yaml"
    fleet.write_text(FLEET, encoding="utf-8")
    events.write_text(EVENTS.format(falls_s=falls_s, mends_s=mends_s), encoding="utf-8")
    flags = ("--fleet", str(fleet), "--events", str(events), "--http-port", "0", *POLICIES[policy])
    load_before = os.getloadavg()[0]
    async with serving(*flags) as server:
        requests = await send(planned, server)
    return LiveRun(
        policy=policy,
        flags=" ".join(POLICIES[policy]),
        load_before=round(load_before, 2),
        said=tuple(server.said),
        requests=tuple(requests),
    )


class Server:
    """``kvrouter up`` in a process, and what its log says of links, by seconds since it was ready."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.port = 0
        self.began_s = 0.0
        self.said: list[SaidOfLink] = []

    async def ready(self) -> None:
        """Wait for it. RuntimeError when it ends before."""
        lines: list[str] = []
        while not self.port:
            line = await self._line()
            lines.append(line)
            if not line:
                raise RuntimeError(f"kvrouter up ended before it was ready: {''.join(lines)}")
            if found := re.search(r"\bready\b.*\bport=(\d+)", line):
                self.port, self.began_s = int(found[1]), time.perf_counter()

    async def listen(self) -> None:
        """Note what it says, to its end."""
        while line := await self._line():
            if found := re.search(r"\b(mock_link_changed|link_slow|link_well)\b(.*)", line):
                at_s = time.perf_counter() - self.began_s
                self.said.append(SaidOfLink(round(at_s, 3), found[1], found[2].strip()))

    async def _line(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.readline()).decode()


@asynccontextmanager
async def serving(*flags: str) -> AsyncIterator[Server]:
    """Run ``kvrouter up``."""
    command = (sys.executable, "-m", "kvrouter.cli", "up", *flags)
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    server = Server(process)
    try:
        await asyncio.wait_for(server.ready(), READY_WITHIN_S)
        listening = asyncio.create_task(server.listen())
        yield server
        process.send_signal(signal.SIGTERM)
        await process.wait()
        await listening
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def send(planned: Sequence[Planned], server: Server) -> list[LiveRequest]:
    """Send every request when it is due; return what became of each, in the order of their arrivals."""
    asked = []
    async with asyncio.TaskGroup() as group:
        for request in planned:
            await asyncio.sleep(max(0.0, server.began_s + request.due_s - time.perf_counter()))
            asked.append(group.create_task(ask(request, server)))
    return [task.result() for task in asked]


async def ask(request: Planned, server: Server) -> LiveRequest:
    """Send one request and read its answer to the end."""
    sent_s = time.perf_counter()
    late_s = sent_s - server.began_s - request.due_s
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            route, first_s, status = await _stream(request, server.port)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        route, first_s, status = "", None, type(error).__name__
    return LiveRequest(
        at_s=round(request.due_s, 3),
        late_s=round(late_s, 4),
        prompt_tokens=request.prompt_tokens,
        route=route,
        ttft_s=None if first_s is None else round(first_s - sent_s, 4),
        failed="" if status == "200" else status,
    )


async def _stream(request: Planned, port: int) -> tuple[str, float | None, str]:
    """Return the zones that its KV went between, "" where it stayed; when its first token came, and its
    status.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request.content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status = head.split(" ", 2)[1]
        if status != "200":
            return "", None, status
        first_s, tail = None, b""
        while b"data: [DONE]" not in tail:
            data = await reader.read(65536)
            if not data:
                return _route(head), first_s, "ended early"
            if first_s is None and b"data: " in data:
                first_s = time.perf_counter()
            tail = tail[-200:] + data
        return _route(head), first_s, status
    finally:
        writer.close()


def _call(prompt: Sequence[int], answer_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": "mock",
            "prompt": prompt,
            "max_tokens": answer_tokens,
            "ignore_eos": True,
            "stream": True,
        },
        separators=(",", ":"),
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def _route(head: str) -> str:
    workers = dict(re.findall(r"(?im)^x-kvrouter-(prefill|decode)-worker: (\d+)", head))
    if "prefill" not in workers or workers["prefill"] == workers["decode"]:
        return ""
    return f"{ZONES[int(workers['prefill'])]} to {ZONES[int(workers['decode'])]}"


@click.command(help=__doc__)
@click.option("--rate", type=float, default=25.0, show_default=True, help="Requests a second.")
@click.option("--phase", "phase_s", type=float, default=30.0, show_default=True, help="Seconds of a phase.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--policy", "policies", type=click.Choice(list(POLICIES)), multiple=True, default=list(POLICIES)
)
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=HERE, show_default=True)
def main(rate: float, phase_s: float, seed: int, policies: Sequence[str], output: Path) -> None:
    """Measure, and write the data and the page."""
    planned = plan(seed, rate=rate, lasts_s=len(PHASES) * phase_s)
    commit, runs = this_commit(), []
    for policy in policies:
        with TemporaryDirectory() as folder:
            runs.append(
                asyncio.run(
                    measured(policy, planned, falls_s=phase_s, mends_s=2 * phase_s, folder=Path(folder))
                )
            )
    study = LiveStudy(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        machine=this_machine(),
        rate=rate,
        phase_s=phase_s,
        seed=seed,
        fallen=FALLEN,
        summaries=tuple(live_page.summary(run, phase_s) for run in runs),
        runs=tuple(runs),
    )
    results = output / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / "live.json").write_bytes(msgspec.json.encode(study) + b"\n")
    (output / "live.md").write_text(live_page.markdown(study), encoding="utf-8")
    click.echo(f"written to {os.path.relpath(output / 'live.md')}")


if __name__ == "__main__":
    main()
