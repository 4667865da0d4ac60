"""Requests of one round of one arm: sent a few at a time, with what a client sees of each."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvrouter.cli.bench.workload import Prompts, Turn
from kvrouter.cli.timed_stream import COMPLETIONS, Clock, read_timed_stream
from kvrouter.core.errors import KvrouterError
from kvrouter.engines.openai.server import EngineServer

REQUEST_LIMIT_S = 120.0
"""A request that takes longer is an error."""


class Arm(NamedTuple):
    """One way to the engines: ``servers`` take requests in turn. ``fields`` are added to each request."""

    name: str
    via: str
    servers: tuple[EngineServer, ...]
    fields: Mapping[str, object]
    flag: str
    """What names it on the command line."""


class Answer(NamedTuple):
    """One answered request. ``cached_tokens`` is the engine's own count, None where it says none."""

    ttft_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


class ArmRound(NamedTuple):
    """One round of one arm; ``failures`` are the messages of requests without an answer."""

    answers: Sequence[Answer]
    failures: Sequence[str]
    wall_s: float


class Sender(NamedTuple):
    """Sends completions of ``model`` with answers of ``answer_tokens``."""

    model: str
    answer_tokens: int
    clock: Clock

    async def send(self, arm: Arm, number: int, prompt: str) -> Answer:
        """Send an arm's request ``number``. Raises KvrouterError, which names the URL."""
        server = arm.servers[number % len(arm.servers)]
        body = msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": self.answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **arm.fields,
            }
        )
        where = f"{server.url}{COMPLETIONS}"
        sent_s = self.clock()
        try:
            async with asyncio.timeout(REQUEST_LIMIT_S):
                stream = await read_timed_stream(server, body, self.clock)
        except TimeoutError as error:
            raise RequestFailed(f"{where}: no whole answer within {REQUEST_LIMIT_S:g} s") from error
        except KvrouterError as error:
            raise RequestFailed(f"{where}: {error.message}") from error
        usage = stream.usage
        if usage is None or not usage.prompt_tokens or not stream.times_s:
            raise RequestFailed(f"{where}: the answer has no tokens, or does not count them")
        return Answer(
            ttft_s=stream.times_s[0] - sent_s,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens or 0,
            cached_tokens=usage.cached_tokens,
        )


class RequestFailed(KvrouterError):
    """A request of a bench got no whole answer."""

    code = "request_failed"


async def run_round(
    sender: Sender,
    arm: Arm,
    turns: Sequence[Turn],
    prompts: Prompts,
    *,
    concurrency: int,
    on_request: Callable[[int], None],
) -> ArmRound:
    """Send all turns in their order, ``concurrency`` at a time, and each turn of a conversation after the one
    before it. ``on_request`` is called with the number of ended requests.
    """
    waiting = iter(enumerate(turns))
    ended = {turn: asyncio.Event() for turn in turns}
    answers: list[Answer] = []
    failures: list[str] = []

    async def client() -> None:
        for number, turn in waiting:
            prompt = prompts.text(turn)
            before = ended.get(turn._replace(turn=turn.turn - 1))
            if before is not None:
                await before.wait()
            try:
                answers.append(await sender.send(arm, number, prompt))
            except RequestFailed as error:
                failures.append(error.message)
            ended[turn].set()
            on_request(len(answers) + len(failures))

    began_s = sender.clock()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return ArmRound(answers, failures, sender.clock() - began_s)
