"""A link falls to a tenth under load, and recovers: what an operator of ``kvrouter up --events`` sees over
HTTP and in the log.
"""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest

from tests.testing.mock_server import MODEL, TIMEOUT_S, Metrics, word_ids
from tests.testing.waits import LIMIT_S, until

FLEET = """
version: 1
models: [{name: mock, block_size: 64}]
topology:
  levels: [zone]
  links:
    within: {zone: {latency_s: 0.0002, bandwidth_bytes_per_s: 2.5e+9}}
    across: {latency_s: 0.001, bandwidth_bytes_per_s: 1.25e+9}
workers:
- {name: prefill-a, role: prefill, replicas: 2, domains: {zone: a}, engine: {kv_bytes_per_token: 131072}}
- {name: decode-a, role: decode, replicas: 2, domains: {zone: a}, prompt_tokens: {max: 64}}
- {name: prefill-b, role: prefill, replicas: 2, domains: {zone: b}, engine: {kv_bytes_per_token: 131072}}
- {name: decode-b, role: decode, replicas: 2, domains: {zone: b}, prompt_tokens: {max: 64}}
"""
"""KV of 1,000 tokens takes 52 ms within a zone, and twice as long between two. No decode worker prefills for
itself, so all KV moves.
"""

PREFILL_A, DECODE_A = {"1", "2"}, {"3", "4"}

EVENTS = """
events:
- {at_s: 8, what: link, level: zone, between: [a, a], bandwidth_factor: 0.1}
- {at_s: 20, what: link, level: zone, between: [a, a], bandwidth_factor: 1}
"""
LINK = "zone=a to zone=a"
PER_S = 12.0
SHIFTED_S = 5.0
"""Of the requests that are sent so long after the fall, few may use the link."""


class Asked(NamedTuple):
    """A request that was answered: when it was sent, and the workers that its answer names."""

    sent_s: float
    prefill: str | None
    decode: str

    @property
    def moved(self) -> bool:
        """Whether its KV went from one worker to another."""
        return self.prefill not in (None, self.decode)

    @property
    def over_the_link(self) -> bool:
        """Whether it went within zone a."""
        return self.moved and self.prefill in PREFILL_A and self.decode in DECODE_A


def share_of_the_link(requests: Iterable[Asked]) -> float:
    """Of the transfers, how many went over the link."""
    moved = [request for request in requests if request.moved]
    assert len(moved) >= 10, "too few to say anything"
    return sum(request.over_the_link for request in moved) / len(moved)


class Up:
    """``kvrouter up`` as a process, and what it says, by the second at which that was read."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        self._reading = asyncio.create_task(self._read())

    @property
    def url(self) -> str:
        """Where it listens."""
        (port,) = (found[1] for _, line in self.lines if (found := re.search(r" ready .*port=(\d+)", line)))
        return f"http://127.0.0.1:{port}"

    def said(self, event: str, having: str = "") -> list[float]:
        """When it said this, in lines that have this text."""
        return [at_s for at_s, line in self.lines if f" {event} " in line and having in line]

    async def stop(self) -> None:
        """Let it end, and read all that it says."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self.process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            self.lines.append((asyncio.get_running_loop().time(), line))


@asynccontextmanager
async def running(folder: Path, *flags: str) -> AsyncIterator[Up]:
    (folder / "fleet.yaml").write_text(FLEET, encoding="utf-8")
    (folder / "events.yaml").write_text(EVENTS, encoding="utf-8")
    files = ("--fleet", str(folder / "fleet.yaml"), "--events", str(folder / "events.yaml"))
    command = (sys.executable, "-m", "kvrouter.cli", "up", "--http-port", "0", *files, *flags)
    up = Up(await asyncio.create_subprocess_exec(*command, stderr=PIPE))
    try:
        await until(lambda: bool(up.said("ready")))
        yield up
    finally:
        await up.stop()


class Load:
    """Requests at a steady rate, whatever became of the others, through OpenAI's own client."""

    sending: asyncio.Task[None]

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.answered: list[Asked] = []
        self._client = client
        self._asked = 0

    async def ask(self, **nvext: object) -> None:
        """Send one request, whose prompt no other has; anything but a whole answer is raised."""
        self._asked += 1
        sent_s = asyncio.get_running_loop().time()
        raw = await self._client.completions.with_raw_response.create(
            model=MODEL,
            prompt=word_ids(first=self._asked, n=600 + 97 * self._asked % 1400),
            max_tokens=150,
            extra_body={"nvext": nvext} if nvext else None,
        )
        assert raw.status_code == 200
        prefill = raw.headers.get("x-kvrouter-prefill-worker")
        self.answered.append(Asked(sent_s, prefill, raw.headers["x-kvrouter-decode-worker"]))

    async def go_on(self, group: asyncio.TaskGroup) -> None:
        """Send requests until this is cancelled."""
        while True:
            group.create_task(self.ask())
            await asyncio.sleep(1.0 / PER_S)


@asynccontextmanager
async def loaded(url: str) -> AsyncIterator[Load]:
    """Under load until that is stopped or the end; then all requests are answered."""
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        load = Load(client)
        async with asyncio.TaskGroup() as group:
            load.sending = group.create_task(load.go_on(group))
            yield load
            load.sending.cancel()


async def until_metric_is_as_said(http: httpx.AsyncClient, up: Up) -> None:
    """Return once the metric says of the link what the log said last: on a busy machine that may change."""
    while True:
        metrics = Metrics((await http.get("/metrics")).text)
        is_slow = up.said("link_slow", LINK)[-1:] > up.said("link_well", LINK)[-1:]
        if metrics.value("link_slow", link=LINK) == float(is_slow):
            return
        await asyncio.sleep(0.05)


@pytest.mark.timed
async def test_traffic_leaves_a_slowed_link_and_the_log_shows_its_state(
    tmp_path: Path,
) -> None:
    flags = ("--router-cost", "time", "--router-pd-selection", "joint")
    async with running(tmp_path, *flags) as up:
        async with (
            httpx.AsyncClient(base_url=up.url, timeout=TIMEOUT_S) as http,
            loaded(up.url) as load,
            asyncio.timeout(2 * LIMIT_S),
        ):
            await until(lambda: bool(up.said("mock_link_changed")))
            await until(lambda: up.said("link_slow", LINK)[-1:] > up.said("mock_link_changed"))
            await until_metric_is_as_said(http, up)
            await until(lambda: len(up.said("mock_link_changed")) == 2)
            mended_s = up.said("mock_link_changed")[-1]
            load.sending.cancel()  # beside other requests a busy machine pauses too often to time transfers
            while not any(at_s > mended_s for at_s in up.said("link_well", LINK)):
                # traffic has left the link: somebody must try it, and pins teach nothing
                await load.ask(routing_constraints={"required_taints": ["dynamo.topology/zone=a"]})
            await until_metric_is_as_said(http, up)
        await up.stop()

    fell_s, _ = up.said("mock_link_changed", 'link="zone a – a"')
    slow, well = (
        [at_s for at_s in up.said(event, LINK) if fell_s < at_s < mended_s]
        for event in ("link_slow", "link_well")
    )
    # once, unless a starved machine has a transfer come that seemed to be stuck
    assert len(slow) == len(well) + 1 <= 2
    assert max(slow) > max(well, default=fell_s)
    before = share_of_the_link(request for request in load.answered if request.sent_s < fell_s)
    after = share_of_the_link(
        request for request in load.answered if fell_s + SHIFTED_S <= request.sent_s < mended_s
    )
    assert before > 0.2
    assert after < before / 10  # the wait for those before alone, with no pace learned, leaves a quarter
    (ended,) = (line for _, line in up.lines if " mock_ended " in line)
    assert f"KV from a to a: {sum(request.over_the_link for request in load.answered)} transfers" in ended
