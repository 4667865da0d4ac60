"""Clients of a fleet of processes, and what the mock model must answer them."""

import asyncio
from array import array
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import count
from typing import Self

import httpx
import msgspec

from kvrouter.core.requests import Sampling
from kvrouter.engines.mock_engine.tokens import TokenModel
from kvrouter.text.model import FIRST_WORD_ID, mock_words
from tests.testing.mock_server import word_ids
from tests.testing.processes import Frontend

ANSWERED_WITHIN_S = 120.0
"""Only a test that fails waits as long as this."""

_numbers = count(1)


def expected_tokens(prompt: Iterable[int], n_tokens: int) -> list[int]:
    """What every engine of the mock model answers to ``prompt``, undisturbed."""
    ids = range(FIRST_WORD_ID, FIRST_WORD_ID + len(mock_words()))
    model = TokenModel(model_seed=0, token_ids=ids, eos_token_id=0, eos_every=None)
    state = model.state(array("I", prompt), Sampling(max_tokens=n_tokens))
    drawn, _ = model.draw(state, n_tokens, eos_from=None)
    return list(drawn)


def expected_text(prompt: Iterable[int], n_tokens: int) -> str:
    """The text of :func:`expected_tokens`."""
    words = mock_words()
    return "".join(f" {words[token - FIRST_WORD_ID]}" for token in expected_tokens(prompt, n_tokens))


class StreamingClient:
    """One streamed answer, read next to the test."""

    def __init__(
        self, frontend: Frontend, *, prompt: list[int] | None = None, max_tokens: int, model: str = "mock"
    ) -> None:
        number = next(_numbers)
        self.request_id = f"client-{number}"
        self.prompt = prompt if prompt is not None else word_ids(first=number, n=1024)
        self.max_tokens = max_tokens
        self.text = ""
        self.pieces = 0
        self.error: str | None = None
        """The error that the answer ended with, or how its connection broke."""
        self.piece_times_s: list[float] = []
        self.last_workers: dict[str, int] = {}
        """What :meth:`workers` returned last."""
        self._model = model
        self._frontend = frontend
        self._more = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete and right."""
        return self.error is None and self.text == expected_text(self.prompt, self.max_tokens)

    @property
    def is_right_so_far(self) -> bool:
        """Whether what came is how the answer begins."""
        return self.error is None and expected_text(self.prompt, self.max_tokens).startswith(self.text)

    async def leave(self) -> None:
        """Close the connection in mid-answer, or after it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    async def until(self, pieces: int) -> None:
        """Return once the answer has this many pieces; fails when it ends before."""
        async with asyncio.timeout(ANSWERED_WITHIN_S):
            while self.pieces < pieces:
                assert not self.has_ended, f"it ended after {self.pieces} pieces: {self.error}"
                self._more.clear()
                await self._more.wait()

    async def end(self) -> Self:
        """Return once the answer has ended, well or not."""
        async with asyncio.timeout(ANSWERED_WITHIN_S):
            await self._task
        return self

    async def workers(self) -> dict[str, int]:
        """Which workers its last attempt was given, by leg; empty while it has none."""
        reply = await self._frontend.http.get(f"/v1/decisions/{self.request_id}")
        if reply.status_code == 404:
            return {}
        attempt = reply.raise_for_status().json()["attempts"][-1]
        legs = ("prefill", "decode")
        self.last_workers = {leg: attempt[leg]["worker_id"] for leg in legs if attempt.get(leg)}
        return self.last_workers

    async def sent_again_after_s(self, since_unix_s: float) -> float:
        """How long after this moment the frontend first sent the request elsewhere, by its log.

        It may also have picked another decode worker before it sent anything to the first.
        """
        elsewhere = (
            rf"(?:retry|resume) request_id={self.request_id} ",
            rf"decision request_id={self.request_id} .*again=true",
        )
        said = rf"(?m)^(\S+)Z \S+ +(?:{'|'.join(elsewhere)})"
        found = await self._frontend.found_in_log(said)
        return datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp() - since_unix_s

    async def _read(self) -> None:
        body = {
            "model": self._model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        headers = {"x-request-id": self.request_id}
        try:
            async with self._frontend.http.stream(
                "POST", "/v1/completions", json=body, headers=headers, timeout=ANSWERED_WITHIN_S
            ) as response:
                if response.status_code != 200:
                    self.error = (await response.aread()).decode()
                    return
                async for line in response.aiter_lines():
                    self._take(line)
        except httpx.HTTPError as error:
            self.error = type(error).__name__
        finally:
            self._more.set()

    def _take(self, line: str) -> None:
        if not line or line == "data: [DONE]":
            return
        event = msgspec.json.decode(line.removeprefix("data: "))
        if "error" in event:
            assert self.error is None, "more than one error"
            self.error = event["error"]["message"]
            return
        for choice in event["choices"]:
            if choice["text"]:
                self.text += choice["text"]
                self.pieces += 1
                self.piece_times_s.append(asyncio.get_running_loop().time())
                self._more.set()
