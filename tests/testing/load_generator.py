"""Many answers at once, from several frontends: each is compared with what the mock model must say."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from tests.testing.mock_server import word_ids
from tests.testing.processes import Frontend
from tests.testing.streaming_client import ANSWERED_WITHIN_S, expected_text

BEGINNINGS = 40
"""How many different beginnings prompts have, so that caches are worth something."""

BEGINNING_TOKENS = 256
ANSWER_TOKENS = 8
RETRY_S = 0.05
"""A client rests for so long after an error."""


@dataclass(frozen=True)
class Failure:
    """An answer that ended with an error; when it was asked for and had ended, by the loop's clock."""

    code: str
    message: str
    began_s: float
    ended_s: float


@dataclass
class LoadAnswers:
    """What clients got."""

    whole: int = 0
    wrong: int = 0
    failures: list[Failure] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    """Some of what was asked."""

    @property
    def total(self) -> int:
        return self.whole + self.wrong + len(self.failures)

    @property
    def errors(self) -> Counter[str]:
        return Counter(f"{each.code}: {each.message}" for each in self.failures)


class LoadGenerator:
    """Asks ``frontends`` in turn, ``at_once`` requests at a time; half of the answers are streamed."""

    def __init__(
        self,
        frontends: Sequence[Frontend],
        *,
        at_once: int = 32,
        seed: int = 0,
        model: str = "mock",
        answer_tokens: int = ANSWER_TOKENS,
    ) -> None:
        self.answers = LoadAnswers()
        self._frontends = frontends
        self._at_once = at_once
        self._random = random.Random(seed)
        self._model = model
        self._answer_tokens = answer_tokens
        self._left = 0
        self._number = 0
        self._failed = asyncio.Event()

    async def ask(self, n: int) -> None:
        """Ask ``n`` times and read every answer to its end."""
        self._left = n
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=ANSWERED_WITHIN_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(self._go_on(session) for _ in range(self._at_once)))

    def stop(self) -> None:
        """Begin no more requests."""
        self._left = 0

    async def until_failures(self, n: int) -> None:
        """Return once so many answers more than now have ended with an error."""
        n += len(self.answers.failures)
        async with asyncio.timeout(ANSWERED_WITHIN_S):
            while len(self.answers.failures) < n:
                self._failed.clear()
                await self._failed.wait()

    async def _go_on(self, session: aiohttp.ClientSession) -> None:
        while self._left > 0:
            self._left -= 1
            self._number += 1
            await self._one(session, self._frontends[self._number % len(self._frontends)], self._prompt())

    def _prompt(self) -> list[int]:
        beginning = word_ids(first=self._random.randrange(BEGINNINGS), n=BEGINNING_TOKENS)
        prompt = beginning + word_ids(first=self._random.randrange(10_000), n=self._random.randrange(1, 160))
        if self._random.random() < 0.01:
            self.answers.prompts.append(prompt)
        return prompt

    async def _one(self, session: aiohttp.ClientSession, frontend: Frontend, prompt: list[int]) -> None:
        streams = self._number % 2 == 0
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._answer_tokens,
            "temperature": 0,
            "stream": streams,
        }
        clock_s = asyncio.get_running_loop().time
        began_s = clock_s()
        try:
            async with session.post(f"{frontend.url}/v1/completions", json=body) as response:
                page = await response.read()
                text = _streamed(page) if streams and response.status == 200 else _reported(page)
        except (aiohttp.ClientError, TimeoutError, _StreamError) as error:
            code = error.code if isinstance(error, _StreamError) else type(error).__name__
            self.answers.failures.append(Failure(code, str(error), began_s, clock_s()))
            self._failed.set()
            await asyncio.sleep(RETRY_S)
            return
        if text == expected_text(prompt, self._answer_tokens):
            self.answers.whole += 1
        else:
            self.answers.wrong += 1


class _StreamError(Exception):
    """The frontend answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _reported(page: bytes) -> str:
    answer = msgspec.json.decode(page)
    if "error" in answer:
        raise _StreamError(answer["error"]["code"], answer["error"]["message"])
    return str(answer["choices"][0]["text"])


def _streamed(page: bytes) -> str:
    events = [line.removeprefix(b"data: ") for line in page.split(b"\n") if line.startswith(b"data: ")]
    *pieces, last = events
    text = "".join(_reported(event) for event in pieces if b'"choices":[{' in event)
    return text if last == b"[DONE]" else text + _reported(last)
