"""Three streams of greedy calls, the same ones over and over, whose right answers are known."""

import asyncio
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import httpx

from tests.system.engines.calls import Recorded, lines_of
from tests.system.engines.real_engine import MODEL, RealEngine
from tests.testing.processes import Frontend

CHAT_STREAMS = STREAMED, WHOLE = "streamed", "whole"
CONVERSATION = "conversation"
CHATS = 8
"""Different chats of a stream: with the conversations more than the engines' caches hold, so that most are
prefilled again."""

CONVERSATIONS = 2
TURNS = 3
ANSWER_TOKENS = 16
REST_S = 1.0
"""A caller's rest between two calls: the load is light."""

CALL_LIMIT_S = 300.0
"""Far above the slowest answer of a busy machine."""

Messages = str
"""A call's messages as JSON."""

Answers = Mapping[Messages, str]


class Answer(NamedTuple):
    """A right answer: when it ended, whether two engines gave it, and when a stream's first token came."""

    ended_s: float
    is_paired: bool
    ttft_s: float | None


async def answers_alone(engine: RealEngine, asked: Sequence[Messages]) -> dict[Messages, str]:
    """Return what one engine answers by itself."""
    answers = {}
    for messages in asked:
        answer = await engine.ask("/v1/chat/completions", **_body(messages))
        answers[messages] = answer["choices"][0]["message"]["content"]
    return answers


async def calls_of(engines: Sequence[RealEngine]) -> dict[str, dict[Messages, str]]:
    """Return the calls of each stream, with what an engine of its own answers to each. These answers are the
    earlier turns of conversations.
    """
    answers = await asyncio.gather(
        *(
            answers_alone(engine, _chats(stream))
            for engine, stream in zip(engines, CHAT_STREAMS, strict=False)
        ),
        _conversations(engines[len(CHAT_STREAMS)]),
    )
    return dict(zip((*CHAT_STREAMS, CONVERSATION), answers, strict=True))


def _chats(stream: str) -> list[Messages]:
    return [_messages([_user(f"{stream} story {number}. " * 20)]) for number in range(CHATS)]


async def _conversations(engine: RealEngine) -> dict[Messages, str]:
    answers: dict[Messages, str] = {}
    for number in range(CONVERSATIONS):
        turns: list[dict[str, str]] = []
        for turn in range(TURNS):
            turns.append(_user(f"turn {turn} of conversation {number}. " * 8))
            asked = _messages(turns)
            answers |= await answers_alone(engine, [asked])
            turns.append({"role": "assistant", "content": answers[asked]})
    return answers


class Load:
    """One caller for each stream of calls, from its beginning until its end as a context."""

    def __init__(self, frontend: Frontend, calls: Mapping[str, Answers]) -> None:
        self.failed: list[str] = []
        self.answered: list[Answer] = []
        self.others: list[tuple[Messages, str]] = []
        """Whole answers that differ from those that the calls came with."""

        self._frontend = frontend
        frontend.http.timeout = httpx.Timeout(CALL_LIMIT_S)
        self._ends = asyncio.Event()
        self._calls = calls
        self._callers: list[asyncio.Task[None]] = []

    async def has_streamed(self, since_s: float) -> bool:
        """Whether a stream that ended since then is whole."""
        return any(each.ttft_s is not None and each.ended_s >= since_s for each in self.answered)

    async def __aenter__(self) -> "Load":
        self._callers = [
            asyncio.create_task(self._call_on(stream, answers)) for stream, answers in self._calls.items()
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let running calls end."""
        self._ends.set()
        await asyncio.gather(*self._callers)

    async def _call_on(self, stream: str, answers: Answers) -> None:
        for number, (messages, right) in enumerate(itertools.cycle(answers.items())):
            if self._ends.is_set():
                return
            is_streamed = stream == STREAMED or (stream == CONVERSATION and number % 2 == 0)
            try:
                async with asyncio.timeout(CALL_LIMIT_S):
                    text = await (self._streamed if is_streamed else self._whole)(messages)
            except (TimeoutError, httpx.HTTPError, CallFailed) as error:
                self.failed.append(f"{stream} call {number}: {error!r}")
            else:
                if text != right:
                    self.others.append((messages, text))
            await asyncio.sleep(REST_S)

    async def _whole(self, messages: Messages) -> str:
        answer = await self._frontend.http.post("/v1/chat/completions", json=_body(messages))
        if answer.status_code != 200:
            raise CallFailed(f"{answer.status_code} {answer.text[-300:]}")
        (choice,) = answer.json()["choices"]
        return self._ended(answer, choice["message"]["content"], choice["finish_reason"])

    async def _streamed(self, messages: Messages) -> str:
        got, ttft_s, began_s = Recorded(), None, time.monotonic()
        async for answer, line in lines_of(self._frontend.http, "/v1/chat/completions", _body(messages)):
            if answer.status_code != 200:
                raise CallFailed(f"{answer.status_code} {line[-300:]}")
            got.take(line)
            if got.error is not None:
                raise CallFailed(f"{got.error}")
            if got.text and ttft_s is None:
                ttft_s = time.monotonic() - began_s
        return self._ended(answer, got.text, got.finish, ttft_s)

    def _ended(
        self, answer: httpx.Response, text: str, finish: str | None, ttft_s: float | None = None
    ) -> str:
        if finish != "length":
            raise CallFailed(f"it ended with {finish} after {text!r}")
        is_paired = "x-kvrouter-prefill-worker" in answer.headers
        self.answered.append(Answer(time.monotonic(), is_paired, ttft_s))
        return text


class CallFailed(Exception):
    """A call has no whole answer."""


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _messages(turns: list[dict[str, str]]) -> Messages:
    return json.dumps(turns)


def _body(messages: Messages) -> dict[str, object]:
    return {
        "model": MODEL,
        "messages": json.loads(messages),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
