"""The front door's rows: ours alone, or next to peers, round by round in turn.

Each server is a process of its own. Ours and gateways stand before two engines in two more processes, which
tick alike; a peer whose requests only its own workers understand stands before its own mock engines.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from benchmarks.frontend.client import ask_in_turn, first_tokens_us, stream_side_by_side, wait_ready
from benchmarks.frontend.processes import Server, gateway, module, our_frontend
from benchmarks.measure import quantile
from benchmarks.results import Line, measured
from benchmarks.rows import FRONT_DOOR
from tests.testing.processes import free_ports

UPSTREAMS = 2
ROUNDS = 5
LOADS = {32: (0.02, 300), 256: (0.05, 150)}
"""Open streams → the seconds after which each brings its next token, and how many tokens it brings."""

TICK_S = 0.02
"""Of the engines that whole requests and first tokens come from."""

PROMPTS_WORDS = (32, 2000)
REQUESTS = 50
FIRST_TOKENS = 30
DIRECT = "direct"
WANTED_OF_GATEWAY = 0.6
WANTED_OF_FRONTEND = 0.33
REQUEST_ROW = f"{FRONT_DOOR}, one request after the other"
FIRST_ROW = f"{FRONT_DOOR}, first token"

Samples = list[float]
Rounds = dict[str, list[Samples]]
"""Each server's samples, round by round."""


@dataclass(frozen=True, slots=True)
class GatewayCommand:
    """How a gateway that passes bytes on is started, before its upstreams."""

    name: str
    program: tuple[str, ...]


class PeerFrontend(Protocol):
    """A frontend that brings its own mock engines, and reads tokens as ours does."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    def start(self, tick_s: float, streams: int) -> AbstractContextManager[Server]:
        """Run it before engines that bring ``streams`` streams a token about every ``tick_s`` seconds."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Who stands next to ours."""

    gateways: tuple[GatewayCommand, ...] = ()
    frontends: tuple[PeerFrontend, ...] = ()

    def wanted_of(self, name: str) -> float:
        """Return what our part of its CPU is to be."""
        is_frontend = name in {each.name for each in self.frontends}
        return WANTED_OF_FRONTEND if is_frontend else WANTED_OF_GATEWAY


NO_PEERS = Peers()


def measure_front_door(python: Path, peers: Peers = NO_PEERS) -> list[Line]:
    """Measure ours, with each peer next to it. Raises ``AnswerFailed`` when a server answers wrongly."""
    lines: list[Line] = []
    for streams, (tick_s, tokens) in LOADS.items():
        with ExitStack() as stack:
            servers = start_all(stack, python, peers, tick_s, streams)
            lines += asyncio.run(measure_streams(servers, streams, tick_s, tokens, peers))
    with ExitStack() as stack:
        servers = start_all(stack, python, peers, TICK_S, 1)
        direct = Server(DIRECT, 0, stack.enter_context(_upstream(TICK_S)))
        lines += asyncio.run(measure_requests(servers, direct, peers))
    return lines


def start_all(stack: ExitStack, python: Path, peers: Peers, tick_s: float, streams: int) -> list[Server]:
    """Start our frontend and the peers, each before engines that tick every ``tick_s``."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrouter-bench-")))
    folder.chmod(0o700)
    for worker in range(UPSTREAMS):
        arguments = (str(tick_s), str(worker), str(folder))
        stack.enter_context(module("benchmarks.frontend.worker", *arguments))
    upstreams = [stack.enter_context(_upstream(tick_s)) for _ in range(UPSTREAMS if peers.gateways else 0)]
    servers = [stack.enter_context(our_frontend(python, folder))]
    servers += [stack.enter_context(_start(each, upstreams)) for each in peers.gateways]
    servers += [stack.enter_context(each.start(tick_s, streams)) for each in peers.frontends]
    for server in servers:
        asyncio.run(wait_ready(server.port))
    return [replace(server, idle_us_per_s=server.watch_idle()) for server in servers]


def _upstream(tick_s: float) -> AbstractContextManager[int]:
    return module("benchmarks.frontend.upstream", str(tick_s))


def _start(command: GatewayCommand, upstreams: Sequence[int]) -> AbstractContextManager[Server]:
    port, urls = free_ports(1), [f"http://127.0.0.1:{upstream}" for upstream in upstreams]
    arguments = (
        *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", "cache_aware"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_ports(1))),
    )
    return gateway(command.name, (*command.program, *arguments), port)


async def measure_streams(
    servers: Sequence[Server], streams: int, tick_s: float, tokens: int, peers: Peers = NO_PEERS
) -> list[Line]:
    """Return the lines of so many streams side by side."""
    whole: Rounds = {}
    merged: Rounds = {}

    async def measure(server: Server, number: int) -> Samples:
        seed = streams * number
        cost = await stream_side_by_side(
            server.port, streams=streams, tokens=tokens, tick_s=tick_s, seed=seed, cpu_us=server.busy_clock()
        )
        if number:
            whole.setdefault(server.name, []).append([cost.whole_us])
            merged.setdefault(server.name, []).append([cost.tokens_per_event])
        return [cost.middle_us]

    middle = await in_turn(servers, measure)
    row = f"{FRONT_DOOR}, {streams} streams"
    return [
        *lines_with(row, "CPU a token", "µs", middle, peers.wanted_of),
        *lines_with(row, "CPU a token, with its part of the request", "µs", whole, peers.wanted_of),
        *lines_with(row, "tokens an event", "tokens", merged),
    ]


async def measure_requests(servers: Sequence[Server], direct: Server, peers: Peers = NO_PEERS) -> list[Line]:
    """Return the lines of whole requests and of first tokens, by the length of the prompt.

    What a frontend adds to a first token is what its engines, asked directly, do not take: a peer whose
    engines are its own has no such row.
    """
    lines: list[Line] = []
    own_engines = {each.name for each in peers.frontends}
    before_alike = [server for server in servers if server.name not in own_engines]
    for words in PROMPTS_WORDS:
        cpu = await in_turn(servers, partial(_request_us, words=words))
        lines += lines_with(REQUEST_ROW, f"CPU a request, {words:,} words", "µs", cpu)
    for words in PROMPTS_WORDS:
        waits = await in_turn([direct, *before_alike], partial(_first_tokens_us, words=words))
        alone = waits.pop(DIRECT)
        added = {
            name: [
                [wait_us - quantile(each, 0.5) for wait_us in samples]
                for samples, each in zip(rounds, alone, strict=True)
            ]
            for name, rounds in waits.items()
        }
        lines.append(Line(FIRST_ROW, f"direct, {words:,} words", "µs", measured(alone)))
        lines += lines_with(FIRST_ROW, f"added, {words:,} words", "µs", added)
    return lines


async def in_turn(servers: Sequence[Server], measure: Callable[[Server, int], Awaitable[Samples]]) -> Rounds:
    """Return each server's rounds; the first one warms up and does not count."""
    rounds: Rounds = {server.name: [] for server in servers}
    for number in range(ROUNDS + 1):
        for server in servers if number % 2 else reversed(servers):
            samples = await measure(server, number)
            if number:
                rounds[server.name].append(samples)
    return rounds


async def _request_us(server: Server, number: int, words: int) -> Samples:
    """CPU a request whose prompt nobody has sent before."""
    clock_us = server.busy_clock()
    before_us = clock_us()
    await ask_in_turn(server.port, requests=REQUESTS, prompt_words=words, seed=_seed(number, words))
    return [(clock_us() - before_us) / REQUESTS]


async def _first_tokens_us(server: Server, number: int, words: int) -> Samples:
    seed = _seed(number, words)
    return await first_tokens_us(server.port, requests=FIRST_TOKENS, prompt_words=words, seed=seed)


def _seed(number: int, words: int) -> int:
    return 1_000_000 * words + 1000 * number


def lines_with(
    row: str, variant: str, unit: str, rounds: Rounds, wanted_of: Callable[[str], float] | None = None
) -> list[Line]:
    """Ours next to each other server; ours alone when there is none."""
    ours, *others = ((name, measured(each)) for name, each in rounds.items())
    if not others:
        return [Line(row, variant, unit, ours[1])]
    return [
        Line(
            row,
            variant,
            unit,
            ours[1],
            peer=name,
            theirs=theirs,
            ratio=ours[1].p50 / theirs.p50,
            wanted_ratio=None if wanted_of is None else wanted_of(name),
        )
        for name, theirs in others
    ]
