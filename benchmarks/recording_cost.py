"""``python -m benchmarks.recording_cost``: the processor time of a frontend, recording and
not recording.

Three frontends, each with a mock worker of its own, all processes of their own: one records (`--record`), one
does not, and neither does the third, which shows what the machine's noise alone makes of a ratio. Prompts of
8,192 tokens in blocks of 16 go to the three in turn, so that all alike meet whatever else the machine does.
A figure is all of a process's processor time in a round, user and system, of all its threads, until what it
recorded is written, over its prompts.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
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
from tests.support.processes import Fleet, Frontend, eventually, fleet
from tests.support.served import word_ids

PROMPT_TOKENS = 8_192
BLOCK_TOKENS = 16
ANSWER_TOKENS = (1, 64)
"""Lengths of the answers, which are streamed: the shorter an answer, the larger the part of recording."""

PROMPTS = 48
"""For each frontend in each round."""

AT_ONCE = 4
SETTLE_S = 0.7
"""Longer than the recorder leaves what it was given: it looks every 0.25 s, and writes at once."""

SIDES = ("records", "does not", "does not either")


class RecordingCost(msgspec.Struct, frozen=True):
    """Answers of one length. Figures are milliseconds of processor time a prompt, by round."""

    answer_tokens: int
    records: tuple[float, ...]
    plain: tuple[float, ...]
    plain_again: tuple[float, ...]
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

    async def send(self, frontends: Sequence[Frontend], *, answer_tokens: int) -> None:
        """Send a round's prompts to each frontend, in turn; some are under way at once."""

        async def some(n_prompts: int) -> None:
            for _ in range(n_prompts):
                for frontend in frontends:
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


async def _milliseconds(load: Load, frontends: Sequence[Frontend], *, answer_tokens: int) -> list[float]:
    """Return what a prompt of a round took each frontend."""
    began_s = [used_s(frontend.pid) for frontend in frontends]
    await load.send(frontends, answer_tokens=answer_tokens)
    await asyncio.sleep(SETTLE_S)
    ends_s = [used_s(frontend.pid) for frontend in frontends]
    return [(end - begin) / PROMPTS * 1e3 for begin, end in zip(began_s, ends_s, strict=True)]


async def measure(rounds: int) -> list[RecordingCost]:
    """Measure every length of answers, round after round."""
    with tempfile.TemporaryDirectory(prefix="kvrouter-recording-") as folder:
        async with AsyncExitStack() as fleets:
            frontends = [
                await _served(
                    await fleets.enter_async_context(fleet({})), folder if side == SIDES[0] else None
                )
                for side in SIDES
            ]
            load = Load("mock")
            costs = [await _cost(load, frontends, tokens, rounds) for tokens in ANSWER_TOKENS]
        wanted = len(ANSWER_TOKENS) * (rounds + 1) * PROMPTS
        n_recorded = await asyncio.to_thread(_n_recorded, Path(folder))
        if n_recorded != wanted:
            raise SystemExit(f"{n_recorded} requests are recorded of {wanted}")
    return costs


async def _served(here: Fleet, folder: str | None) -> Frontend:
    await here.worker(
        *("--model", "mock", "--block-size", str(BLOCK_TOKENS), "--context-length", "16384"),
        *("--total-kv-blocks", "65536", "--speedup", "1000"),
    )
    frontend = await here.frontend(*(() if folder is None else ("--record", folder)))
    await eventually(lambda: frontend.serves(1))
    return frontend


def _n_recorded(folder: Path) -> int:
    return sum(1 for _ in open_trace(folder))


async def _cost(load: Load, frontends: Sequence[Frontend], answer_tokens: int, rounds: int) -> RecordingCost:
    figures: list[list[float]] = []
    await _milliseconds(load, frontends, answer_tokens=answer_tokens)  # to be warm
    for number in range(rounds):
        # who is asked first changes, because whoever is asked next may wait for it
        order = [(at + number) % len(frontends) for at in range(len(frontends))]
        spent = await _milliseconds(load, [frontends[at] for at in order], answer_tokens=answer_tokens)
        by_side = dict(zip(order, spent, strict=True))
        figures.append([by_side[at] for at in range(len(frontends))])
        shown = ", ".join(f"{side} {ms:.3f}" for side, ms in zip(SIDES, figures[-1], strict=True))
        print(f"{answer_tokens} tokens, round {number + 1} of {rounds}: ms a prompt: {shown}", flush=True)
    records, plain, again = zip(*figures, strict=True)
    return RecordingCost(
        answer_tokens=answer_tokens,
        records=records,
        plain=plain,
        plain_again=again,
        ratio=ratio_of(records, plain),
        noise=ratio_of(again, plain),
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
