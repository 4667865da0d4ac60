"""What tests of real engines ask through kvrouter, and how they read the answers."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from tests.engines.vllm_server import BLOCK_SIZE, MODEL, VllmServer
from tests.support.processes import Fleet, Frontend, Running, eventually


async def beside(kvrouter: Fleet, engine: VllmServer, worker_id: int, *flags: str) -> Running:
    """Start the worker of an engine."""
    return await kvrouter.worker("--url", engine.url, "--worker-id", str(worker_id), *flags, engine="vllm")


async def until_feeds(frontend: Frontend, wanted: Mapping[int, str]) -> None:
    """Wait until what the frontend knows of each of these workers is in this state."""

    async def all_there() -> bool:
        found = {
            worker["worker_id"]: {rank["feed"]["state"] for rank in worker["ranks"]}
            for worker in (await frontend.fleet())["workers"]
        }
        return all(found.get(worker_id) == {state} for worker_id, state in wanted.items())

    await eventually(all_there)


async def chat(frontend: Frontend, text: str, **body: object) -> httpx.Response:
    """A greedy chat of one message."""
    return await frontend.http.post("/v1/chat/completions", json=chat_body(text, **body))


def chat_body(text: str, **body: object) -> dict[str, object]:
    """The body of a greedy chat of one message."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 4,
        **body,
    }


async def complete(frontend: Frontend, prompt: list[int], **body: object) -> httpx.Response:
    """A greedy completion of token ids."""
    return await frontend.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 2, **body},
    )


def prompt_of(seed: int, n_tokens: int = 8 * BLOCK_SIZE) -> list[int]:
    """Token ids that no other seed begins with."""
    return [10 + (seed * 7919 + place * 31) % 1900 for place in range(n_tokens)]


def cached_tokens(answer: httpx.Response) -> int:
    """What the engine says that it had cached."""
    found = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(found, int)
    return found


def predicted_tokens(answer: httpx.Response, n_prompt_tokens: int) -> int:
    """What the router counted on: an engine computes at least the last token of a prompt again."""
    blocks = int(answer.headers["x-kvrouter-overlap-blocks"])
    return min(blocks, (n_prompt_tokens - 1) // BLOCK_SIZE) * BLOCK_SIZE


def worker_of(answer: httpx.Response) -> int:
    """The worker that answered."""
    return int(answer.headers["x-kvrouter-decode-worker"])


class Told:
    """A streamed answer, as it was told so far."""

    def __init__(self) -> None:
        self.text = ""
        self.finish: str | None = None
        self.error: dict[str, Any] | None = None
        self.ids: set[str] = set()
        self.usage: dict[str, Any] | None = None

    def take(self, line: str) -> None:
        """One line of the stream."""
        if not line.startswith("data: {"):
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.error = event["error"]
            return
        self.ids.add(event["id"])
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            words = choice.get("delta") or {}
            self.text += words.get("content") or choice.get("text") or ""
            self.finish = choice["finish_reason"] or self.finish


async def lines_of(
    http: httpx.AsyncClient, path: str, body: dict[str, object]
) -> AsyncIterator[tuple[httpx.Response, str]]:
    """The lines of a streamed answer."""
    async with http.stream("POST", path, json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            yield answer, line
