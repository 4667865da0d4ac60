"""An autoscaler takes a fleet from six workers to two and back under load: no client of it notices."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, count, cycle, repeat
from typing import Any

import httpx
import msgspec
import pytest

from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.missions import NAME, Mission, mission
from tests.system.cluster.operators import autoscaler, install_crds, operator
from tests.system.cluster.pods import BY_HAND
from tests.testing.mock_server import word_ids
from tests.testing.processes import eventually
from tests.testing.streaming_client import expected_text, expected_tokens
from tests.testing.waits import until

WORKERS = "worker"
MANY, FEW = 6, 2
BLOCK = 64
FIRST_TOKENS, MORE_TOKENS = 200, 40
"""Of the prompt that begins a conversation, and of what each later turn adds."""

CONVERSATION_MAX = 8_000
"""Tokens after which a conversation is over and the next begins: the model's context has 32,768."""

TURNS = (20, 200, 100)
"""Tokens of a conversation's answers."""

LONG = 2000
"""Tokens of an answer that takes twelve seconds."""

CONVERSATIONS, LONG_CALLERS = 6, 12
DRAIN_LIMIT_S = "0.3"
"""Less than the second in which a worker refuses what routers send that have not read its drain. Callers of
long answers begin a second apart: at any time most of these have more than that to go, and some of these run
where workers end, however the router spreads them.
"""

_words = count(1)


@pytest.fixture(autouse=True)
def crds(plane: ControlPlane) -> None:
    install_crds(plane)


class Caller:
    """Asks for answers of so many tokens one after the other, every second one streamed, until it is told to
    end. In a conversation each turn sends all turns before again.
    """

    def __init__(self, flight: Mission, answers: Iterator[int], *, converses: bool) -> None:
        self.turns = 0
        self.continued = 0
        """The last turn whose worker held all that was said and answered before."""

        self.wrong: list[str] = []
        self._flight = flight
        self._answers = answers
        self._converses = converses
        self._ends = False
        self._task = asyncio.create_task(self._go_on())

    async def end(self) -> None:
        self._ends = True
        await self._task

    async def _go_on(self) -> None:
        prompt: list[int] = []
        while not self._ends:
            held = len(prompt)
            prompt = prompt + word_ids(first=next(_words), n=MORE_TOKENS if prompt else FIRST_TOKENS)
            n_tokens = next(self._answers)
            cached = await self._ask(prompt, n_tokens)
            self.turns += 1
            if held and cached is not None and cached >= (held - 1) // BLOCK * BLOCK:
                self.continued = self.turns
            goes_on = self._converses and held < CONVERSATION_MAX
            prompt = prompt + expected_tokens(prompt, n_tokens) if goes_on else []

    async def _ask(self, prompt: Sequence[int], n_tokens: int) -> int | None:
        """Ask; return how many tokens were cached, None if the answer is wrong."""
        streams = self.turns % 2 == 0
        body = {
            "model": "mock",
            "prompt": prompt,
            "max_tokens": n_tokens,
            "temperature": 0,
            **({"stream": True, "stream_options": {"include_usage": True}} if streams else {}),
        }
        try:
            answer = (await self._flight.http.post("/v1/completions", json=body)).raise_for_status()
        except httpx.HTTPError as error:
            self.wrong.append(repr(error))
            return None
        lines = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n") if streams else [answer.text]
        events = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines if line]
        text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
        if text != expected_text(prompt, n_tokens):
            self.wrong.append(f"of {n_tokens} tokens: {answer.text[-500:]}")
            return None
        cached: int = events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


async def test_an_autoscaler_goes_from_six_workers_to_two_and_back_unnoticed(
    plane: ControlPlane, namespace: str
) -> None:
    async with (
        operator(plane, namespace, "one"),
        mission(plane, deployment(namespace)) as flight,
    ):
        await flight.until_is("Ready=True")
        await scaled(flight, MANY)
        conversations = [Caller(flight, cycle(TURNS), converses=True) for _ in range(CONVERSATIONS)]
        firsts = [LONG * number // LONG_CALLERS for number in range(1, LONG_CALLERS + 1)]
        others = [Caller(flight, chain((first,), repeat(LONG)), converses=False) for first in firsts]
        try:
            await until_continued(conversations)
            await eventually(partial(most_have_legs, flight))
            before = flight.pods(WORKERS)
            await scaled(flight, FEW)
            left = [pod for pod in before if pod not in flight.pods(WORKERS)]
            assert len(left) == MANY - FEW
            await until(lambda: all(pod.containers[0].has_succeeded for pod in left))
            await until_continued(conversations)
            await scaled(flight, MANY)
            await until_continued(conversations)
        finally:
            await asyncio.gather(*(caller.end() for caller in conversations + others))
        assert [wrong for caller in conversations + others for wrong in caller.wrong] == []
        assert (await flight.metrics()).total("resumes_total") > 0
        (frontend,) = flight.pods("frontend")
        assert_none_after_the_end(frontend.containers[0].log)


async def until_continued(callers: Sequence[Caller]) -> None:
    """Return once each caller had a turn that began after this, at a worker that has its conversation."""
    running = [caller.turns + 1 for caller in callers]
    await until(lambda: all(each.continued > turn for each, turn in zip(callers, running, strict=True)))


async def scaled(flight: Mission, number: int) -> None:
    """Let the autoscaler have so many workers; return once requests go to these and no others."""
    scaler = autoscaler(flight.namespace, f"{NAME}-{WORKERS}", number, number)
    await asyncio.to_thread(flight.plane.apply, scaler)

    async def is_so() -> bool:
        models = (await flight.http.get("/v1/models")).raise_for_status().json()["data"]
        return bool(models) and (await flight.places()).total() == number == len(flight.pods(WORKERS))

    await eventually(is_so)


async def most_have_legs(flight: Mission) -> bool:
    """Whether more workers than will stay have legs, so that answers run where workers end."""
    ranks = [rank for worker in await flight.fleet() for rank in worker["ranks"]]
    return sum(bool(rank["active_blocks"]) for rank in ranks) > FEW


def assert_none_after_the_end(log: str) -> None:
    """In a frontend's log no request is given to a worker once it has said that it leaves."""
    leave = set[str]()
    for line in log.splitlines():
        if (worker := re.search(r" worker_draining worker=(\d+) ", line)) is not None:
            leave.add(worker[1])
        elif (picked := re.search(r" decision .* decode_worker=(\d+)", line)) is not None:
            assert picked[1] not in leave, line
    assert 0 < len(leave) <= MANY - FEW


def deployment(namespace: str) -> dict[str, Any]:
    """A frontend that logs its decisions, and workers that end soon after they are told to."""
    debug = [{"name": "KVROUTER_LOG_LEVEL", "value": "debug"}]
    containers = {
        "frontend": {"name": "main", "env": debug},
        WORKERS: {"name": "main", "args": ["worker", "mock", "--drain-limit-s", DRAIN_LIMIT_S]},
    }
    components = [
        {
            "name": kind,
            "type": kind,
            "podTemplate": {"metadata": {"labels": BY_HAND}, "spec": {"containers": [container]}},
        }
        for kind, container in containers.items()
    ]
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"namespace": namespace, "name": NAME},
        "spec": {"components": components},
    }
