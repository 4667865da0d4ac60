"""The front door's rows: ours alone, or beside gateways, round by round in turn."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frontend.backend import Backend
from benchmarks.frontend.client import AnswerFailed, ask_in_turn, stream_side_by_side
from benchmarks.frontend.processes import Server, free_port, gateway, our_server
from benchmarks.results import Line, measured
from benchmarks.rows import FRONT_DOOR

TICK_S = 0.02
STREAMS = 32
TOKENS = 300
PROMPT_WORDS = 2000
REQUESTS = 50
ROUNDS = 5
WANTED_OF_GATEWAY = 0.6
STREAM_ROW = f"{FRONT_DOOR}, {STREAMS} streams"
REQUEST_ROW = f"{FRONT_DOOR}, {PROMPT_WORDS:,}-word prompts"


@dataclass(frozen=True, slots=True)
class GatewayCommand:
    """How a gateway that passes bytes on is started, before two backends."""

    name: str
    program: tuple[str, ...]


def measure_front_door(python: Path, gateways: Sequence[GatewayCommand] = ()) -> list[Line]:
    """Measure ours, with each gateway beside it. Raises ``AnswerFailed`` when a server answers wrongly."""
    return asyncio.run(_measure(python, gateways))


async def _measure(python: Path, gateways: Sequence[GatewayCommand]) -> list[Line]:
    backends = [Backend(TICK_S), Backend(TICK_S)]
    with ExitStack() as stack:
        ports = []
        for backend in backends:
            ports.append(await backend.serve())
            stack.callback(backend.close)
        # In threads: a gateway asks its backends, which live on this loop, before it listens.
        servers = [
            await asyncio.to_thread(stack.enter_context, starting)
            for starting in (our_server(python, TICK_S), *(_start(each, ports) for each in gateways))
        ]
        tokens = await _in_turn(servers, _token_us)
        # Gateways do not tokenize: what a prompt costs them says nothing about what it costs here.
        requests = await _in_turn(servers[:1], _request_us)
    engines = Line(STREAM_ROW, "ticking engines alone", "µs", measured([[servers[0].engine_us]]))
    return [
        *_lines(STREAM_ROW, "CPU a token", tokens, WANTED_OF_GATEWAY),
        engines,
        *_lines(REQUEST_ROW, "CPU a request", requests, None),
    ]


def _start(command: GatewayCommand, backends: Sequence[int]) -> AbstractContextManager[Server]:
    port, urls = free_port(), [f"http://127.0.0.1:{backend}" for backend in backends]
    arguments = (
        *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", "cache_aware"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
    )
    return gateway(command.name, (*command.program, *arguments), port)


async def _in_turn(
    servers: Sequence[Server], measure: Callable[[Server, int], Awaitable[float]]
) -> dict[str, list[list[float]]]:
    """Return each server's rounds; the first one warms up and does not count."""
    rounds: dict[str, list[list[float]]] = {server.name: [] for server in servers}
    for number in range(ROUNDS + 1):
        for server in servers if number % 2 else reversed(servers):
            sample = await measure(server, number)
            if number:
                rounds[server.name].append([sample])
    return rounds


async def _token_us(server: Server, number: int) -> float:
    """CPU a token, everything included that 32 short requests cost."""
    before_us = server.cpu_us()
    seed = STREAMS * number
    texts = await stream_side_by_side(server.port, streams=STREAMS, tokens=TOKENS, seed=seed)
    if texts < STREAMS * TOKENS:
        raise AnswerFailed(f"{server.name}: {texts} texts of {STREAMS * TOKENS} tokens came")
    return (server.cpu_us() - before_us) / (STREAMS * TOKENS)


async def _request_us(server: Server, number: int) -> float:
    """CPU a request whose prompt nobody has sent before."""
    before_us = server.cpu_us()
    seed = 1_000_000 + REQUESTS * number
    await ask_in_turn(server.port, requests=REQUESTS, prompt_words=PROMPT_WORDS, seed=seed)
    return (server.cpu_us() - before_us) / REQUESTS


def _lines(
    row: str, variant: str, rounds: dict[str, list[list[float]]], wanted_ratio: float | None
) -> list[Line]:
    """Ours beside each other server; ours alone when there is none."""
    ours, *others = ((name, measured(each)) for name, each in rounds.items())
    if not others:
        return [Line(row, variant, "µs", ours[1])]
    return [
        Line(
            row,
            variant,
            "µs",
            ours[1],
            peer=name,
            theirs=theirs,
            ratio=ours[1].p50 / theirs.p50,
            wanted_ratio=wanted_ratio,
        )
        for name, theirs in others
    ]
