"""vLLM is upgraded under load: two prefill and two decode engines, which hand KV over by NIXL, are restarted
one after the other behind kvrouter, from the version before to the installed one.

``UPGRADE_S`` is how long the load lasts besides the restarts: a sixth of it before them, after each, and at
the end. The engines have no core of their own each: their threads wait (``vllm_server.WAITING``).
"""

import asyncio
import os
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
from tests.system.upgrade.load import CALL_LIMIT_S, Answers, Load, Messages, answers_alone, calls_of
from tests.testing.processes import Fleet, Frontend, eventually, fleet

LASTS_S = float(os.environ.get("UPGRADE_S", "600"))
ROLES = {1: "prefill", 11: "decode", 2: "prefill", 12: "decode"}
"""By worker id, in the order of their upgrade: prefill and decode in step, so that pairs stay."""

STAGES = len(ROLES) + 2
REFUSED = "NIXL compatibility hash mismatch"
"""Stands in a decode engine's log, in two lines or more, for each handshake that it refuses."""

JOINED_WITHIN_S = 300.0
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass
class Outcome:
    """What became of the calls during an upgrade."""

    failed: list[str]
    wrong: list[str]
    refused: int
    """Lines of the engines' logs on refused handshakes."""

    paired: int
    """Answers that two engines gave."""

    least_capacity: float
    """The least share of the capacity of pairs that the router told."""


async def test_an_upgrade_fails_no_call_and_pairs_only_engines_that_talk(tmp_path: Path) -> None:
    outcome = await _upgrade(tmp_path)
    assert outcome.failed == []
    assert outcome.wrong == []
    assert outcome.refused == 0
    assert outcome.paired > 0
    assert outcome.least_capacity < 1


async def test_an_upgrade_with_formats_hidden_meets_refused_handshakes(tmp_path: Path) -> None:
    """The comparison: ``version=any`` lets the router pair engines of both versions."""
    outcome = await _upgrade(tmp_path, "--kv-format", "version=any")
    assert outcome.wrong == []
    assert outcome.refused > 0


async def _upgrade(folder: Path, *prefill_flags: str) -> Outcome:
    async with fleet() as kvrouter, _previous_engines(folder) as engines:
        calls = await calls_of(list(engines.values()))
        frontend = await _attached(kvrouter, engines, prefill_flags)
        async with Load(frontend, calls) as load:
            capacities = [await _stage(frontend, load, f"all {PREVIOUS_VLLM}")]
            for worker_id, role in ROLES.items():
                await engines[worker_id].terminate()
                await _start(engines[worker_id], role)
                await eventually(partial(_has_version, frontend, VLLM, worker_id), limit_s=JOINED_WITHIN_S)
                capacities.append(await _stage(frontend, load, f"{role} {worker_id} is {VLLM}"))
            capacities.append(await _stage(frontend, load, f"all {VLLM}"))
        before = {messages: text for answers in calls.values() for messages, text in answers.items()}
        after = await _answers_now(list(engines.values()), calls)
        differ = sum(before[messages] != after[messages] for messages in before)
        wrong = [f"{messages}: {text!r}" for messages, text in load.others if after[messages] != text]
        print(f"\n{differ} of {len(before)} calls are answered otherwise by {VLLM}", flush=True)
        await _print_counts(frontend)
        refused = sum(engine.log.read_text(errors="replace").count(REFUSED) for engine in engines.values())
        paired = sum(answer.is_paired for answer in load.answered)
        print(
            f"{len(load.answered)} answered, {paired} by pairs, {len(load.failed)} failed, "
            f"{len(wrong)} wrong, {refused} lines on refused handshakes",
            flush=True,
        )
        return Outcome(load.failed, wrong, refused, paired, min(capacities))


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
    """Its cache holds a few of the calls, so that most are prefilled again."""
    await engine.start(
        kv_transfer=nixl(KV_ROLES[role]), n_blocks=36, context_length=1024, is_previous=is_previous
    )


async def _attached(
    kvrouter: Fleet, engines: Mapping[int, VllmServer], prefill_flags: tuple[str, ...]
) -> Frontend:
    for worker_id, role in ROLES.items():
        flags = prefill_flags if role == "prefill" else ()
        await companion(kvrouter, engines[worker_id], worker_id, "--role", role, *flags)
    frontend = await kvrouter.frontend()
    await until_feeds(frontend, dict.fromkeys(engines, "live"))
    assert await _has_version(frontend, PREVIOUS_VLLM, *engines), "make test-upgrade installs it"
    return frontend


async def _has_version(frontend: Frontend, version: str, *worker_ids: int) -> bool:
    """Whether these workers are there, each before an engine of the version."""
    workers = (await frontend.fleet())["workers"]
    found = {each["worker_id"] for each in workers if each["engine"].endswith(version)}
    return found.issuperset(worker_ids)


async def _stage(frontend: Frontend, load: Load, name: str) -> float:
    """Let the load go on, and print what it met. Return the share of the capacity of pairs."""
    (model,) = (await frontend.fleet())["models"]
    began_s, n_failed = time.monotonic(), len(load.failed)
    await asyncio.sleep(LASTS_S / STAGES)
    await eventually(partial(load.has_streamed, began_s), limit_s=CALL_LIMIT_S)
    answers = [answer for answer in load.answered if answer.ended_s >= began_s]
    ttft_s = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    print(
        f"\n{name}: pair_capacity {model['pair_capacity']}, {len(answers)} answered, "
        f"{sum(answer.is_paired for answer in answers)} by pairs, {len(load.failed) - n_failed} failed, "
        f"TTFT {statistics.median(ttft_s):.2f} s in the middle, {max(ttft_s):.2f} s at most",
        flush=True,
    )
    capacity: float = model["pair_capacity"]
    return capacity


async def _print_counts(frontend: Frontend) -> None:
    metrics = await frontend.metrics()
    for name in ("retries_total", "kv_lost_total", "resumes_total"):
        for labels, value in metrics.of(name):
            print(f"kvrouter_{name} {labels} {value:.0f}", flush=True)
