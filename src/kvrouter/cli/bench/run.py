"""``kvrouter bench``: asks, sizes, sends in rounds, and reports."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console

from kvrouter.api.client import RouterClient, decode_answer
from kvrouter.api.fleet_schema import Fleet
from kvrouter.cli.bench.arms import BenchedFleet, arms_of, peers_of, reached_engines, read_fleet, slow_workers
from kvrouter.cli.bench.counters import CacheCounts, read_counts
from kvrouter.cli.bench.flags import BenchOptions
from kvrouter.cli.bench.load import Answer, Arm, ArmRound, RequestFailed, Sender, run_round
from kvrouter.cli.bench.report import ArmRounds, Measured, report_of, show_report
from kvrouter.cli.bench.workload import (
    TURNS,
    Prompts,
    Turn,
    WorkloadSize,
    longest_prompt,
    size_workload,
    turns_in_order,
)
from kvrouter.cli.output import echo, json_text
from kvrouter.cli.progress import Progress, working
from kvrouter.cli.timed_stream import Clock
from kvrouter.core.errors import ConfigError, KvrouterError
from kvrouter.engines.openai.server import EngineServer
from kvrouter.text.model import mock_words

ROUNDS_MAX = 100
"""What is kept of each answer is bounded by this and by the requests of a round."""

OVERRUN, OVERRUN_S = 3.0, 30.0
"""Rounds stop where they take so many times the seconds that they may take, and so many more."""

PROBE_WORDS = 64
"""Of the first prompt of each server, which says how many tokens a word has."""

PROBE_WAVES = 2
PROBE_SHARE = 0.1
"""So many requests for each that may be in flight say how fast engines compute prompts, in this share of the
time.
"""


class BenchFailed(KvrouterError):
    """Nothing could be compared."""

    code = "bench_failed"


def run_bench(options: BenchOptions, client: RouterClient, console: Console, *, api_key: str | None) -> int:
    """Compare, and print the report. Returns the exit code: 1 where no request through the router was
    answered.

    Raises ConfigError, which names the flag, AskFailed, BenchFailed.
    """
    options.output.check()
    peers = peers_of(options)
    fleet = read_fleet(client, options)
    with working("asking the engines") as progress:
        measured, found = asyncio.run(_compare(options, fleet, client.url, peers, api_key, progress))
    slow = slow_workers(decode_answer(client.fleet(), Fleet), fleet.model)
    report = report_of(measured, found, [*fleet.notes, *slow])
    options.output.show(lambda: json_text(report), lambda: show_report(report, console))
    return 0 if report.arms[0].requests > report.arms[0].errors else 1


async def _compare(
    options: BenchOptions,
    fleet: BenchedFleet,
    router_url: str,
    peers: Mapping[str, str],
    api_key: str | None,
    progress: Progress,
) -> tuple[Measured, Sequence[ArmRounds]]:
    fleet = await reached_engines(fleet, options, api_key)
    arms = arms_of(fleet, router_url, peers, api_key)
    return await _Bench(options, fleet, arms, progress, time.monotonic).run()


@dataclass(slots=True)
class _Bench:
    """One comparison."""

    options: BenchOptions
    fleet: BenchedFleet
    arms: tuple[Arm, ...]
    progress: Progress
    clock: Clock
    salt: int = field(default_factory=lambda: secrets.randbits(63))

    @property
    def sender(self) -> Sender:
        return Sender(self.fleet.model, self.options.answer_tokens, self.clock)

    @property
    def concurrency(self) -> int:
        return self.options.concurrency or self.fleet.engines

    async def run(self) -> tuple[Measured, Sequence[ArmRounds]]:
        """Send everything; return the conditions and what came back."""
        prompt_tokens = longest_prompt(
            self.fleet.caches, self.options.prompt_tokens, self.options.answer_tokens
        )
        async with AsyncExitStack() as stack:
            for server in {server for arm in self.arms for server in arm.servers}:
                await server.open()
                stack.push_async_callback(server.close)
            began_s = self.clock()
            first = await self._first_requests()
            request_s = await self._request_s(prompt_tokens, first)
            size = size_workload(
                self.fleet.caches,
                prompt_tokens,
                request_s=request_s,
                arms=len(self.arms),
                seconds=self.options.seconds,
                is_fixed=self.options.prompt_tokens is not None,
            )
            self._announce(size)
            rounds = await self._rounds(size, first.tokens_per_word, began_s)
        measured = Measured(
            model=self.fleet.model,
            url=self.options.url,
            engines=self.fleet.engines,
            caches=self.fleet.caches,
            concurrency=self.concurrency,
            answer_tokens=self.options.answer_tokens,
            size=size,
            running_before=self.fleet.running_requests,
            is_by_load=self.fleet.is_by_load,
        )
        return measured, rounds

    async def _first_requests(self) -> "_FirstAnswers":
        """Send a short prompt to each server of each arm: what fails, fails before anything else is sent."""
        answers: list[Answer] = []
        size = WorkloadSize(1, PROBE_WORDS)
        for at, arm in enumerate(self.arms):
            for number, server in enumerate(arm.servers):
                self.progress.show(f"a first request to {server.url}")
                prompts = Prompts(mock_words(), 1.0, size, 0, (self.salt, at, number))
                try:
                    answers.append(await self.sender.send(arm, number, prompts.text(Turn(0, TURNS - 1))))
                except RequestFailed as error:
                    raise ConfigError(f"{arm.flag}: {arm.name}: {error.message}", param=arm.flag) from error
        tokens = sum(answer.prompt_tokens for answer in answers)
        return _FirstAnswers(tokens / (PROBE_WORDS * len(answers)), min(each.ttft_s for each in answers))

    async def _request_s(self, prompt_tokens: int, first: "_FirstAnswers") -> float:
        """Return the time of a prompt of that length that no engine has cached, over how many run at once."""
        limit_s = self.options.seconds * PROBE_SHARE / PROBE_WAVES
        affordable = int(PROBE_WORDS * limit_s / max(first.ttft_s, 1e-6))
        probed_tokens = max(PROBE_WORDS, min(prompt_tokens, affordable))
        size = WorkloadSize(PROBE_WAVES * self.concurrency, probed_tokens)
        self.progress.show(f"{size.conversations} requests, to see how fast the engines are")
        turns = [Turn(number, TURNS - 1) for number in range(size.conversations)]
        prompts = Prompts(mock_words(), first.tokens_per_word, size, 0, (self.salt, len(self.arms)))
        probed = await run_round(
            self.sender, self.arms[0], turns, prompts, concurrency=self.concurrency, on_request=lambda _: None
        )
        if not probed.answers:
            raise ConfigError(f"--url: {probed.failures[0]}", param="url")
        return probed.wall_s / len(probed.answers) * prompt_tokens / probed_tokens

    async def _rounds(self, size: WorkloadSize, tokens_per_word: float, began_s: float) -> list[ArmRounds]:
        """Send rounds until another one would take too long; each has all arms, and begins with another."""
        has_counters = await read_counts(self._engines()) is not None
        found = [ArmRounds(arm.name, arm.via, [], []) for arm in self.arms]
        deadline_s = began_s + OVERRUN * self.options.seconds + OVERRUN_S
        for number in range(1, (self.options.rounds or ROUNDS_MAX) + 1):
            round_began_s = self.clock()
            try:
                async with asyncio.timeout(deadline_s - self.clock()):
                    results = await self._one_round(size, tokens_per_word, number, has_counters)
            except TimeoutError as error:
                if number > 1:
                    break
                raise BenchFailed(
                    f"--seconds: a round of {size.requests * len(self.arms)} requests was not over after "
                    f"{self.clock() - began_s:.0f} s: the engines became slower than they were at first"
                ) from error
            for arm, (arm_round, counts) in zip(found, results, strict=True):
                arm.rounds.append(arm_round)
                if counts is not None:
                    arm.counts.append(counts)
            took_s = self.clock() - round_began_s
            if self.clock() - began_s + took_s > self.options.seconds:
                break
        return found

    async def _one_round(
        self, size: WorkloadSize, tokens_per_word: float, number: int, has_counters: bool
    ) -> list[tuple[ArmRound, CacheCounts | None]]:
        turns = turns_in_order(size, number)
        results: dict[int, tuple[ArmRound, CacheCounts | None]] = {}
        n_arms = len(self.arms)
        for at in ((number - 1 + step) % n_arms for step in range(n_arms)):
            arm = self.arms[at]
            before = await read_counts(self._engines()) if has_counters else None
            sent = await run_round(
                self.sender,
                arm,
                turns,
                Prompts(mock_words(), tokens_per_word, size, number, (self.salt, at, number)),
                concurrency=self.concurrency,
                on_request=self._shows(f"round {number}, {arm.name}", len(turns)),
            )
            after = await read_counts(self._engines()) if before is not None else None
            results[at] = (sent, None if before is None or after is None else after.since(before))
            echo(f"round {number}, {arm.name}: {len(turns)} requests in {sent.wall_s:.1f} s", err=True)
        return [results[at] for at in range(n_arms)]

    def _shows(self, label: str, n_requests: int) -> Callable[[int], None]:
        return lambda n_ended: self.progress.show(f"{label}: {n_ended} of {n_requests} requests")

    def _engines(self) -> Sequence[EngineServer]:
        """The engines themselves; none where only the router reaches them."""
        return self.arms[1].servers if self.fleet.engine_urls else ()

    def _announce(self, size: WorkloadSize) -> None:
        """Say what will be sent, before it is."""
        others = self.fleet.running_requests
        if others:
            echo(f"{others} requests of others run here: their load is in all figures", err=True)
        echo(
            f"each round sends {size.requests:,} requests to each of {len(self.arms)} arms, "
            f"{self.concurrency} at a time: {size.conversations} conversations of {TURNS} turns, prompts up "
            f"to {size.prompt_tokens:,} tokens, {size.total_prompt_tokens:,} prompt tokens together; they "
            f"take {size.distinct_tokens:,} tokens of cache (Ctrl-C ends it)",
            err=True,
        )


class _FirstAnswers(NamedTuple):
    tokens_per_word: float
    ttft_s: float
