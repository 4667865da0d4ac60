"""What tests of real engines ask through kvrouter, and how they read the answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.system.engines.real_engine import MODEL, RealEngine
from tests.system.engines.vllm_server import BLOCK_SIZE
from tests.testing.processes import Fleet, Frontend, Running, eventually

EngineT = TypeVar("EngineT", bound=RealEngine)


def two_of(kind: type[EngineT], folder: Path) -> dict[int, EngineT]:
    """Two engines by worker id, each with a core of its own, not started yet."""
    return {number: kind(folder, f"{kind.kind}-{number}", core=number - 1) for number in (1, 2)}


@asynccontextmanager
async def stopped(engines: dict[int, EngineT]) -> AsyncIterator[dict[int, EngineT]]:
    """Engines that are stopped at the end, if they were started."""
    try:
        yield engines
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines.values()))


async def attached(
    kvrouter: Fleet, engines: Mapping[int, RealEngine], *flags: str, frontend_flags: Sequence[str] = ()
) -> Frontend:
    """Start the workers of these engines, by worker id, and a frontend; return once it knows their caches."""
    for worker_id, engine in engines.items():
        await companion(kvrouter, engine, worker_id, *flags)
    frontend = await kvrouter.frontend(*frontend_flags)
    await until_feeds(frontend, dict.fromkeys(engines, "live"))
    return frontend


async def companion(kvrouter: Fleet, engine: RealEngine, worker_id: int, *flags: str) -> Running:
    """Start the worker of an engine."""
    return await kvrouter.worker(
        "--url", engine.url, "--worker-id", str(worker_id), *flags, engine=engine.kind
    )


async def until_feeds(frontend: Frontend, wanted: Mapping[int, str]) -> None:
    """Wait until what the frontend knows of each of these workers is in this state."""

    async def all_there() -> bool:
        known = (await frontend.fleet())["workers"]
        found = {worker["worker_id"]: {rank["feed"]["state"] for rank in worker["ranks"]} for worker in known}
        if await frontend.models_without_tokenizer(known):
            return False
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


def predicted_tokens(answer: httpx.Response, n_prompt_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """What the router counted on: an engine computes at least the last token of a prompt again."""
    blocks = int(answer.headers["x-kvrouter-overlap-blocks"])
    return min(blocks, (n_prompt_tokens - 1) // block_size) * block_size


async def index_is_settled(frontend: Frontend) -> None:
    """Wait until the index does not change any more: nobody tells that the last event has come."""
    seen: list[int] = []

    async def stands_still() -> bool:
        ranks = [rank for worker in (await frontend.fleet())["workers"] for rank in worker["ranks"]]
        seen.append(sum(rank["index_blocks"] for rank in ranks))
        return len(seen) > 5 and len(set(seen[-5:])) == 1

    await eventually(stands_still)


def worker_of(answer: httpx.Response) -> int:
    """The worker that answered."""
    return int(answer.headers["x-kvrouter-decode-worker"])


class Recorded:
    """A streamed answer, as it was reported so far."""

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
