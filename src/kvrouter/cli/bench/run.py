"""``kvrouter bench``: asks, sizes, sends in rounds, and reports."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from rich.console import Console

from kvrouter.api.client import RouterClient
from kvrouter.cli.bench.arms import (
    ROUND_ROBIN,
    WHERE_ENGINES_ARE,
    BenchedFleet,
    arms_of,
    peers_of,
    read_fleet,
    through_router,
)
from kvrouter.cli.bench.counters import read_counts
from kvrouter.cli.bench.flags import BenchOptions
from kvrouter.cli.bench.load import Arm, ArmRound, run_round, send_prompt
from kvrouter.cli.bench.report import FAILURE_CHARS, ArmRounds, report_of, show_report
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
from kvrouter.cli.timed_stream import Clock, CompletionFailed, TimedCompletion
from kvrouter.core.errors import INTERRUPTED, KvrouterError

OVERRUN, OVERRUN_S = 3.0, 30.0
"""Rounds are stopped once they have taken ``OVERRUN`` times --seconds, and ``OVERRUN_S`` more."""

PROBE_WORDS = 64
"""The words of the first prompt to each server, whose answer gives the tokens of a word."""

PROBE_WAVES, PROBE_SHARE = 2, 0.1
"""The engines' speed is measured with so many requests for each that may be in flight, within this share of
--seconds.
"""


class BenchFailed(KvrouterError):
    """Nothing could be compared."""

    code = "bench_failed"


def run_bench(options: BenchOptions, client: RouterClient, console: Console, *, api_key: str | None) -> int:
    """Compare, and print the report. Returns the exit code: 1 where no request through the router was
    answered. Interrupted, the report has the rounds that were over.

    Raises ConfigError, which names the flag, AskFailed, BenchFailed.
    """
    options.output.check()
    peers = peers_of(options, client.url)
    fleet = read_fleet(client, options)
    arms = arms_of(fleet, options, client.url, peers, api_key)
    is_whole = True
    with working("asking the engines") as progress:
        bench = Bench(options, fleet, arms, progress, time.monotonic)
        try:
            asyncio.run(bench.run())
        except KeyboardInterrupt:
            if not bench.found or not bench.found[0].rounds:
                raise
            is_whole = False
            bench.notes.append("interrupted: the round that was not over is not counted")
    report = report_of(bench.fleet, bench.size, bench.found, bench.notes)
    options.output.show(lambda: json_text(report), lambda: show_report(report, console))
    if not is_whole:
        return INTERRUPTED
    return 0 if report.arms[0].requests > report.arms[0].errors else 1


@dataclass(slots=True)
class Bench:
    """One comparison. ``found`` has the rounds that are over, ``notes`` what the user should know of them."""

    options: BenchOptions
    fleet: BenchedFleet
    arms: list[Arm]
    progress: Progress
    clock: Clock
    salt: int = field(default_factory=lambda: secrets.randbits(63))
    size: WorkloadSize = field(init=False)
    found: list[ArmRounds] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: Sequence[str] = ()
    """The failures of the arm that requests are sent to."""

    async def run(self) -> None:
        """Send everything. Raises ConfigError, BenchFailed."""
        caches = self.fleet.caches
        prompt_tokens = longest_prompt(caches, self.options.prompt_tokens)
        async with AsyncExitStack() as stack:
            for server in {server for arm in self.arms for server in arm.servers}:
                await server.open()
                stack.push_async_callback(server.close)
            began_s = self.clock()
            tokens_per_word, ttft_s = await self._first_requests()
            request_s = await self._request_s(prompt_tokens, tokens_per_word, ttft_s)
            self.size = size_workload(
                caches,
                prompt_tokens,
                request_s=request_s,
                arms=len(self.arms),
                seconds=self.options.seconds,
                is_fixed=self.options.prompt_tokens is not None,
            )
            self._announce()
            await self._rounds(tokens_per_word, began_s)

    async def _first_requests(self) -> tuple[float, float]:
        """Send a short prompt to each server of each arm: what fails, fails before anything else is sent.
        Where an engine fails whose URL the router reports, the router does round-robin itself. Returns the
        tokens of a word, and the shortest time to a first token.
        """
        answers: list[TimedCompletion] = []
        for at, arm in enumerate(self.arms):
            try:
                for number, server in enumerate(arm.servers):
                    self.progress.show(f"a first request to {server.url}")
                    salt = (self.salt, at, number)
                    prompt = Prompts(1.0, WorkloadSize(1, PROBE_WORDS), 0, salt)
                    answers.append(
                        await send_prompt(arm, number, prompt.text(Turn(0, TURNS - 1)), self.clock)
                    )
            except CompletionFailed as error:
                if arm.name != ROUND_ROBIN or self.options.engine_urls or not self.fleet.engine_urls:
                    raise BenchFailed(f"{arm.flag}: {arm.name}: {error.message}") from error
                why = f"{error.message} ({WHERE_ENGINES_ARE})"
                self.arms[at] = through_router(self.arms[0], why)
        tokens = sum(answer.prompt_tokens for answer in answers)
        ttft_s = min(answer.first_s - answer.sent_s for answer in answers)
        return tokens / (PROBE_WORDS * len(answers)), ttft_s

    async def _request_s(self, prompt_tokens: int, tokens_per_word: float, ttft_s: float) -> float:
        """Return the time of a prompt of that length that no engine has cached, over how many run at once:
        that of the faster wave, since a moment's stall is not the engines' speed.
        """
        limit_s = self.options.seconds * PROBE_SHARE / PROBE_WAVES
        affordable = int(PROBE_WORDS * limit_s / max(ttft_s, 1e-6))
        probed_tokens = max(PROBE_WORDS, min(prompt_tokens, affordable))
        n_wave = self.fleet.concurrency
        size = WorkloadSize(PROBE_WAVES * n_wave, probed_tokens)
        self.progress.show(f"{size.conversations} requests, to see how fast the engines are")
        prompts = Prompts(tokens_per_word, size, 0, (self.salt, len(self.arms)))
        waves_s: list[float] = []
        for wave in range(PROBE_WAVES):
            probed = await run_round(
                self.arms[0],
                [Turn(number, TURNS - 1) for number in range(wave * n_wave, (wave + 1) * n_wave)],
                prompts,
                self.clock,
                concurrency=n_wave,
                on_request=lambda _n_ended, _failures: None,
            )
            if not probed.answers:
                raise BenchFailed(f"--url: {probed.failures[0]}")
            waves_s.append(probed.wall_s / len(probed.answers))
        return min(waves_s) * prompt_tokens / probed_tokens

    async def _rounds(self, tokens_per_word: float, began_s: float) -> None:
        """Send rounds until another one would take too long; each has all arms, and begins with another."""
        self.found = [ArmRounds(arm.name, arm.via, []) for arm in self.arms]
        for number in range(1, self.options.rounds + 1):
            round_began_s = self.clock()
            left_s = began_s + OVERRUN * self.options.seconds + OVERRUN_S - round_began_s
            try:
                async with asyncio.timeout(left_s):
                    results = await self._one_round(tokens_per_word, number)
            except TimeoutError as error:
                stopped = self._stopped_text(number, self.clock() - round_began_s)
                if number == 1:
                    raise BenchFailed(f"--seconds: {stopped}") from error
                self.notes.append(stopped)
                break
            for arm, arm_round in zip(self.found, results, strict=True):
                arm.rounds.append(arm_round)
            took_s = self.clock() - round_began_s
            if self.clock() - began_s + took_s > self.options.seconds:
                break

    def _stopped_text(self, number: int, after_s: float) -> str:
        failed = ""
        if self.failures:
            failed = f"; {len(self.failures)} of these failed, the first: {self.failures[0][:FAILURE_CHARS]}"
        return (
            f"round {number} was stopped after {after_s:.0f} s and is not counted: it was at "
            f"{self.progress.text}{failed}"
        )

    async def _one_round(self, tokens_per_word: float, number: int) -> list[ArmRound]:
        """Send one round; the first one begins with round-robin, whose caches are then the emptier ones."""
        turns = turns_in_order(self.size, number)
        results: dict[int, ArmRound] = {}
        n_arms, counting = len(self.arms), self.arms[1].servers
        for at in ((number + step) % n_arms for step in range(n_arms)):
            arm = self.arms[at]
            before = await read_counts(counting, self.fleet.model)
            sent = await run_round(
                arm,
                turns,
                Prompts(tokens_per_word, self.size, number, (self.salt, at, number)),
                self.clock,
                concurrency=self.fleet.concurrency,
                on_request=self._shows(f"round {number}, {arm.name}", len(turns)),
            )
            after = await read_counts(counting, self.fleet.model)
            results[at] = sent._replace(counted=before and after and after.since(before))
            echo(f"round {number}, {arm.name}: {len(turns)} requests in {sent.wall_s:.1f} s", err=True)
        return [results[at] for at in range(n_arms)]

    def _shows(self, label: str, n_requests: int) -> Callable[[int, Sequence[str]], None]:
        def show(n_ended: int, failures: Sequence[str]) -> None:
            self.failures = failures
            self.progress.show(f"{label}: {n_ended} of {n_requests} requests")

        show(0, ())
        return show

    def _announce(self) -> None:
        """Say what will be sent, before it is."""
        size, caches = self.size, self.fleet.caches
        share = ""
        if caches.cache_tokens is not None:
            percent = 100 * size.distinct_tokens / (caches.number * caches.cache_tokens)
            share = f", up to {percent:.2g} % of all caches"
        echo(
            f"each round sends {size.requests:,} requests to each of {len(self.arms)} arms, "
            f"{self.fleet.concurrency} at a time: {size.conversations} conversations of {TURNS} turns, "
            f"prompts up to {size.prompt_tokens:,} tokens, {size.total_prompt_tokens:,} together\n"
            f"each arm of each round takes at least {size.distinct_tokens:,} tokens of cache{share}, anew; "
            f"rounds go on for {self.options.seconds:g} s, at most {self.options.rounds} (Ctrl-C ends it)",
            err=True,
        )
