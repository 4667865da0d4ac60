"""``python -m benchmarks.recording_cost``: the processor time of a frontend, recording and
not recording.

One frontend and one mock worker, processes of their own. The frontend is started with `--record`, and a
switch of this benchmark's own (`benchmarks/recording_switch.py`) stops recording and goes on: one process is
compared with itself, as two differ by some percent for no reason that matters here. A round has four slices,
recording and not in turn, of new prompts of 8,192 tokens in blocks of 16. A figure is all of the process's
processor time in a slice, user and system, of all its threads, until what it recorded is written, over its
prompts. The noise is what the two slices of a round that do not record have between them. What the recorder's
thread costs while nothing comes, four looks a second, is in both.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import click
import httpx
import msgspec

from benchmarks.http_replay.machine import Commit, Machine, this_commit, this_machine
from benchmarks.results import RESULTS
from benchmarks.streamed_tokens import Ratio, ratio_of
from kvrouter.sim.traces.read import open_trace
from tests.support.processes import Frontend, eventually, fleet
from tests.support.served import word_ids

PROMPT_TOKENS = 8_192
BLOCK_TOKENS = 16
ANSWER_TOKENS = (1, 64)
"""Lengths of the answers, which are streamed: the shorter an answer, the larger the part of recording."""

PROMPTS = 32
"""In each slice."""

AT_ONCE = 4
SETTLE_S = 0.4
"""Longer than the recorder leaves what it was given: it looks every 0.25 s, and writes at once."""


class RecordingCost(msgspec.Struct, frozen=True):
    """Answers of one length. Figures are milliseconds of processor time a prompt, slice by slice."""

    answer_tokens: int
    records: tuple[float, ...]
    plain: tuple[float, ...]
    ratio: Ratio
    """Recording against not."""
    noise: Ratio
    """Not recording against not recording."""


class RecordingCosts(msgspec.Struct, frozen=True):
    """One run."""

    name: str
    measured_at: str
    commit: Commit
    machine: Machine
    load_average: tuple[float, float, float]
    prompt_tokens: int
    block_tokens: int
    prompts_a_round: int
    costs: tuple[RecordingCost, ...]


class Load:
    """Sends prompts that nobody sent before."""

    def __init__(self, model: str) -> None:
        self._model = model.encode()
        self._rest = b"".join(b",%d" % token for token in word_ids(n=PROMPT_TOKENS - 2))
        self._n_sent = 0

    async def send(self, frontend: Frontend, *, answer_tokens: int) -> None:
        """Send a slice's prompts; some are under way at once."""

        async def some(n_prompts: int) -> None:
            for _ in range(n_prompts):
                await _ask(frontend.http, self._body(answer_tokens))

        await asyncio.gather(*(some(PROMPTS // AT_ONCE) for _ in range(AT_ONCE)))

    def _body(self, answer_tokens: int) -> bytes:
        self._n_sent += 1
        # blocks are named with all before them, so two words of their own make every block a new one
        own = word_ids(first=self._n_sent, n=1) + word_ids(first=self._n_sent // 90, n=1)
        ids = b",".join(b"%d" % token for token in own) + self._rest
        return b'{"model":"%s","max_tokens":%d,"stream":true,"prompt":[%s]}' % (
            self._model,
            answer_tokens,
            ids,
        )


async def _ask(http: httpx.AsyncClient, body: bytes) -> None:
    async with http.stream(
        "POST", "/v1/completions", content=body, headers={"content-type": "application/json"}
    ) as answer:
        content = await answer.aread()
    if answer.status_code != 200:
        raise SystemExit(f"it was answered {answer.status_code}: {content[:500].decode(errors='replace')}")


def used_s(pid: int) -> float:
    """Return the processor time that a process has used, all of its threads, to the nanosecond."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9  # as clock_getcpuclockid(3) has it on Linux


async def _milliseconds(load: Load, frontend: Frontend, *, answer_tokens: int) -> float:
    began_s = used_s(frontend.pid)
    await load.send(frontend, answer_tokens=answer_tokens)
    await asyncio.sleep(SETTLE_S)
    return (used_s(frontend.pid) - began_s) / PROMPTS * 1e3


async def measure(rounds: int) -> list[RecordingCost]:
    """Measure every length of answers, round after round."""
    with tempfile.TemporaryDirectory(prefix="kvrouter-recording-") as folder:
        async with fleet({}) as here:
            await here.worker(
                *("--model", "mock", "--block-size", str(BLOCK_TOKENS), "--context-length", "16384"),
                *("--total-kv-blocks", "65536", "--speedup", "1000"),
            )
            frontend = await here.frontend("--record", folder, module="benchmarks.recording_switch")
            await eventually(lambda: frontend.serves(1))
            load = Load("mock")
            costs = [await _cost(load, frontend, tokens, rounds) for tokens in ANSWER_TOKENS]
        wanted = len(ANSWER_TOKENS) * (2 * rounds + 1) * PROMPTS
        n_recorded = await asyncio.to_thread(_n_recorded, Path(folder))
        if n_recorded != wanted:
            raise SystemExit(f"{n_recorded} requests are recorded of {wanted}")
    return costs


def _n_recorded(folder: Path) -> int:
    return sum(1 for _ in open_trace(folder))


async def _cost(load: Load, frontend: Frontend, answer_tokens: int, rounds: int) -> RecordingCost:
    records: list[float] = []
    plain: list[float] = []
    await _milliseconds(load, frontend, answer_tokens=answer_tokens)  # to be warm
    for number in range(rounds):
        for _ in range(2):
            records.append(await _milliseconds(load, frontend, answer_tokens=answer_tokens))
            frontend.process.send_signal(signal.SIGUSR1)
            plain.append(await _milliseconds(load, frontend, answer_tokens=answer_tokens))
            frontend.process.send_signal(signal.SIGUSR1)
        shown = f"records {records[-2]:.3f} {records[-1]:.3f}, does not {plain[-2]:.3f} {plain[-1]:.3f}"
        print(f"{answer_tokens} tokens, round {number + 1} of {rounds}: ms a prompt: {shown}", flush=True)
    return RecordingCost(
        answer_tokens=answer_tokens,
        records=tuple(records),
        plain=tuple(plain),
        ratio=ratio_of(records, plain),
        noise=ratio_of(plain[::2], plain[1::2]),
    )


def show(costs: Sequence[RecordingCost]) -> None:
    """Print the ratios."""
    for cost in costs:
        for name, ratio in (("recording", cost.ratio), ("noise", cost.noise)):
            print(
                f"answers of {cost.answer_tokens} tokens: {name}: {100 * (ratio.mean - 1):+.2f} % "
                f"({100 * (ratio.low - 1):+.2f} to {100 * (ratio.high - 1):+.2f})"
            )
        more_us = 1e3 * (median(cost.records) - median(cost.plain))
        print(f"  medians: {median(cost.plain):.3f} ms a prompt without, {more_us:+.0f} µs with")


@click.command()
@click.option("--rounds", type=click.IntRange(min=2), default=12, show_default=True)
@click.option("--keep", is_flag=True, help="Write the result to benchmarks/results.")
def main(rounds: int, *, keep: bool) -> None:
    """Measure, print the ratios, and write the result file where that is asked for."""
    load_average = os.getloadavg()
    costs = asyncio.run(measure(rounds))
    show(costs)
    if not keep:
        return
    commit = this_commit()
    result = RecordingCosts(
        name="recording-cost",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        machine=this_machine(),
        load_average=load_average,
        prompt_tokens=PROMPT_TOKENS,
        block_tokens=BLOCK_TOKENS,
        prompts_a_round=PROMPTS,
        costs=tuple(costs),
    )
    path = RESULTS / f"recording-cost-{commit.id}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    print(path)


if __name__ == "__main__":
    main()
