"""Requests of one round of one arm: sent a few at a time, with what a client sees of each."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvrouter.cli.bench.counters import CacheCounts
from kvrouter.cli.bench.workload import Prompts, Turn
from kvrouter.cli.timed_stream import Clock, CompletionFailed, TimedCompletion, closed_loop, send_completion
from kvrouter.engines.openai.server import EngineServer

REQUEST_LIMIT_S = 120.0
"""A request that takes longer is an error."""


class Arm(NamedTuple):
    """One way to the engines: ``servers`` take requests in turn. Each request has ``fields``."""

    name: str
    via: str
    servers: tuple[EngineServer, ...]
    fields: Mapping[str, object]
    flag: str
    """What names it on the command line."""


class ArmRound(NamedTuple):
    """One round of one arm; ``failures`` are the messages of requests without an answer, ``counted`` is what
    counters on pages of metrics counted, None without them.
    """

    answers: Sequence[TimedCompletion]
    failures: Sequence[str]
    wall_s: float
    counted: CacheCounts | None = None


async def send_prompt(arm: Arm, number: int, prompt: str, clock: Clock) -> TimedCompletion:
    """Send an arm's request ``number``. Raises CompletionFailed, which names the URL."""
    server = arm.servers[number % len(arm.servers)]
    return await send_completion(
        server, {**arm.fields, "prompt": prompt}, limit_s=REQUEST_LIMIT_S, clock=clock
    )


async def run_round(
    arm: Arm,
    turns: Sequence[Turn],
    prompts: Prompts,
    clock: Clock,
    *,
    concurrency: int,
    on_request: Callable[[int, Sequence[str]], None],
) -> ArmRound:
    """Send all turns in their order, ``concurrency`` at a time, and each turn of a conversation after the one
    before it. ``on_request`` is called with the number of ended requests, and the messages of those that
    failed.
    """
    ended = {turn: asyncio.Event() for turn in turns}
    answers: list[TimedCompletion] = []
    failures: list[str] = []

    async def send(numbered: tuple[int, Turn]) -> None:
        number, turn = numbered
        prompt = prompts.text(turn)
        before = ended.get(turn._replace(turn=turn.turn - 1))
        if before is not None:
            await before.wait()
        try:
            answers.append(await send_prompt(arm, number, prompt, clock))
        except CompletionFailed as error:
            failures.append(error.message)
        ended[turn].set()
        on_request(len(answers) + len(failures), failures)

    began_s = clock()
    await closed_loop(enumerate(turns), send, concurrency=concurrency)
    return ArmRound(answers, failures, clock() - began_s)
