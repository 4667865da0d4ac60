"""vLLM is upgraded under load: two prefill and two decode engines, which hand KV over by NIXL, are restarted
one after the other behind kvrouter, from the version before to the installed one.

``UPGRADE_S`` is how long the load lasts besides the restarts: a sixth of it before them, after each, and at
the end. The engines have no core of their own each: their threads wait (``vllm_server.WAITING``).
"""

import asyncio
import os
import re
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.system.engines.calls import companion, stopped, until_feeds
from tests.system.engines.install import PREVIOUS_VLLM, VLLM
from tests.system.engines.vllm_server import VllmServer, nixl
from tests.system.upgrade.forecast import BLOCKS, print_forecast
from tests.system.upgrade.load import CALL_LIMIT_S, Answers, Load, Messages, answers_alone, calls_of
from tests.testing.processes import Fleet, Frontend, eventually, fleet

LASTS_S = float(os.environ.get("UPGRADE_S", "600"))
ROLES = {1: "prefill", 11: "decode", 2: "prefill", 12: "decode"}
"""By worker id, in the order of their upgrade: prefill and decode in step, so that pairs stay."""

STAGES = len(ROLES) + 2
FAILED_HANDSHAKE = "NIXL transfer failure: handshake_setup_failed"
"""Stands in a decode engine's log for each handshake that fails, whatever the reason."""

COUNTED = ("retries_total", "resumes_total", "kv_lost_total", "kv_transfers_failed_total")
"""What the router counts: legs that failed, KV that did not arrive, and vLLM's own count of handshakes,
transfers and notifications that failed.
"""

LOGGED = re.compile(r"^\S+ \w+ +(?:retry|resume|kv_lost) request_id=.*$", re.MULTILINE)
"""A line of the frontend's log about a leg or KV that was lost."""

JOINED_WITHIN_S = 300.0
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass
class Stage:
    """The time between two restarts: the share of the capacity of pairs that the router reports, how many of
    the calls in it one engine and two engines answered, and how much failed within it.
    """

    pair_capacity: float
    n_alone: int
    n_paired: int
    n_failures: float


@dataclass
class Outcome:
    """What became of the calls during an upgrade."""

    failed: list[str]
    wrong: list[str]
    failed_handshakes: int
    """By the engines' logs."""

    stages: list[Stage]
    losses: dict[int, list[str]]
    """By worker that was restarted, what the frontend logged of legs and KV that were lost meanwhile."""


async def test_an_upgrade_fails_no_call_and_pairs_only_engines_that_talk(tmp_path: Path) -> None:
    outcome = await _upgrade(tmp_path)
    assert outcome.failed == []
    assert outcome.wrong == []
    assert outcome.failed_handshakes == 0
    assert [stage.pair_capacity for stage in outcome.stages] == [1, 0.5, 1, 0.5, 1, 1]
    assert [stage.n_alone for stage in outcome.stages] == [0] * STAGES
    assert all(stage.n_paired for stage in outcome.stages)
    assert [stage.n_failures for stage in outcome.stages] == [0] * STAGES
    for worker_id, lines in outcome.losses.items():
        for of_request in _by_request(lines):
            assert re.search(rf"worker={worker_id}\b", of_request), (
                "only what the engine had that ended is lost"
            )


async def test_an_upgrade_with_formats_hidden_meets_refused_handshakes(tmp_path: Path) -> None:
    """The comparison: ``version=any`` lets the router pair engines of both versions."""
    outcome = await _upgrade(tmp_path, "--kv-format", "version=any")
    assert outcome.wrong == []
    assert outcome.failed_handshakes > 0


def _by_request(lines: Sequence[str]) -> list[str]:
    """The lines of each request, in one text: its retry after lost KV names only one worker of the pair."""
    texts: dict[str, str] = {}
    for line in lines:
        request_id = line.partition("request_id=")[2].split()[0]
        texts[request_id] = texts.get(request_id, "") + line
    return list(texts.values())


async def _upgrade(folder: Path, *prefill_flags: str) -> Outcome:
    async with fleet() as kvrouter, _previous_engines(folder) as engines:
        calls = await calls_of(list(engines.values()))
        recording = folder / "recording"
        frontend = await _attached(kvrouter, engines, recording, prefill_flags)
        losses: dict[int, list[str]] = {}
        async with Load(frontend, calls) as load:
            stages = [await _stage(frontend, load, f"all {PREVIOUS_VLLM}")]
            for worker_id, role in ROLES.items():
                await engines[worker_id].terminate()
                await _start(engines[worker_id], role)
                await eventually(partial(_has_version, frontend, VLLM, worker_id), limit_s=JOINED_WITHIN_S)
                stages.append(await _stage(frontend, load, f"{role} {worker_id} is {VLLM}"))
                logged = LOGGED.findall(frontend.lines())
                losses[worker_id] = logged[sum(map(len, losses.values())) :]
                print(*losses[worker_id], sep="\n", flush=True)
            stages.append(await _stage(frontend, load, f"all {VLLM}"))
        before = {messages: text for answers in calls.values() for messages, text in answers.items()}
        after = await _answers_now(list(engines.values()), calls)
        differ = sum(before[messages] != after[messages] for messages in before)
        wrong = [f"{messages}: {text!r}" for messages, text in load.others if after[messages] != text]
        print(f"\n{differ} of {len(before)} calls are answered otherwise by {VLLM}", flush=True)
        for what, n in (await _counts(frontend)).items():
            print(f"{what}: {n:.0f}", flush=True)
        print(*load.failed, sep="\n", flush=True)
        logs = [engine.log.read_text(errors="replace") for engine in engines.values()]
        failed_handshakes = sum(log.count(FAILED_HANDSHAKE) for log in logs)
        paired = sum(answer.is_paired for answer in load.answered)
        print(
            f"{len(load.answered)} answered, {paired} by pairs, {len(load.failed)} failed, "
            f"{len(wrong)} wrong, {failed_handshakes} failed handshakes",
            flush=True,
        )
        await frontend.stop()
        if not prefill_flags:
            await print_forecast(recording, engines[1])
        return Outcome(load.failed, wrong, failed_handshakes, stages, losses)


async def _answers_now(engines: Sequence[VllmServer], calls: Mapping[str, Answers]) -> dict[Messages, str]:
    answers: dict[Messages, str] = {}
    pairs = zip(engines, calls.values(), strict=False)
    for part in await asyncio.gather(*(answers_alone(engine, list(asked)) for engine, asked in pairs)):
        answers |= part
    return answers


@asynccontextmanager
async def _previous_engines(folder: Path) -> AsyncIterator[dict[int, VllmServer]]:
    """The engines by worker id."""
    engines = {
        worker_id: VllmServer(folder, f"{role}-{worker_id}", core=None) for worker_id, role in ROLES.items()
    }
    async with stopped(engines):
        for pair in (list(ROLES)[:2], list(ROLES)[2:]):
            await asyncio.gather(*(_start(engines[each], ROLES[each], is_previous=True) for each in pair))
        yield engines


async def _start(engine: VllmServer, role: str, *, is_previous: bool = False) -> None:
    await engine.start(
        kv_transfer=nixl(KV_ROLES[role]), n_blocks=BLOCKS, context_length=1024, is_previous=is_previous
    )


async def _attached(
    kvrouter: Fleet, engines: Mapping[int, VllmServer], recording: Path, prefill_flags: tuple[str, ...]
) -> Frontend:
    for worker_id, role in ROLES.items():
        flags = prefill_flags if role == "prefill" else ()
        await companion(kvrouter, engines[worker_id], worker_id, "--role", role, *flags)
    frontend = await kvrouter.frontend("--record", str(recording))
    await until_feeds(frontend, dict.fromkeys(engines, "live"))
    assert await _has_version(frontend, PREVIOUS_VLLM, *engines), "make test-upgrade installs it"
    return frontend


async def _has_version(frontend: Frontend, version: str, *worker_ids: int) -> bool:
    """Whether these workers are there, each before an engine of the version."""
    workers = (await frontend.fleet())["workers"]
    found = {each["worker_id"] for each in workers if each["engine"].endswith(version)}
    return found.issuperset(worker_ids)


async def _stage(frontend: Frontend, load: Load, name: str) -> Stage:
    """Let the load go on, and print what it met."""
    (model,) = (await frontend.fleet())["models"]
    began_s, n_failed, before = time.monotonic(), len(load.failed), await _counts(frontend)
    await asyncio.sleep(LASTS_S / STAGES)
    await eventually(partial(load.has_streamed, began_s), limit_s=CALL_LIMIT_S)
    answers = [answer for answer in load.answered if answer.began_s >= began_s]
    n_paired = sum(answer.is_paired for answer in answers)
    ttft_s = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    after = await _counts(frontend)
    failures = {what: after[what] - before.get(what, 0.0) for what in after}
    failed = {what: n for what, n in failures.items() if n}
    print(
        f"\n{name}: pair_capacity {model['pair_capacity']}, {len(answers)} answered, "
        f"{n_paired} by pairs, {len(load.failed) - n_failed} calls and {failed} failed, TTFT "
        f"mean {statistics.mean(ttft_s):.3f} s, median {statistics.median(ttft_s):.3f} s, "
        f"longest {max(ttft_s):.2f} s",
        flush=True,
    )
    return Stage(model["pair_capacity"], len(answers) - n_paired, n_paired, sum(failures.values()))


async def _counts(frontend: Frontend) -> dict[str, float]:
    """What has failed so far, by metric and labels."""
    metrics = await frontend.metrics()
    return {f"{name} {labels}": value for name in COUNTED for labels, value in metrics.of(name)}
