"""How TensorRT-LLM's server answers: its pages, and events that it hands out once."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.testing.scripted_engine import JSON, ScriptedEngine

TRTLLM_PAGES = {
    "/health": "trtllm-1.3.0-version.json",
    "/version": "trtllm-1.3.0-version.json",
    "/v1/models": "trtllm-1.3.0-models.json",
    "/metrics": "trtllm-1.3.0-metrics.json",
    "/prometheus/metrics": "trtllm-1.3.0-prometheus.txt",
}
"""Nobody reads what ``/health`` says: any body will do."""

EVENTS = "/kv_cache_events"


def created() -> dict[str, object]:
    """The first event of every start."""
    return {"type": "created", "num_blocks_per_cache_level": [200, 0]}


def stored(*blocks: tuple[int, list[int]], parent: int | None = None) -> dict[str, object]:
    """Blocks by name, with their tokens."""
    return {
        "type": "stored",
        "parent_hash": parent,
        "blocks": [
            {
                "type": "stored_block",
                "block_hash": name,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens
                ],
                "cache_level": 0,
                "priority": 35,
                "mm_keys": [],
            }
            for name, tokens in blocks
        ],
    }


def removed(*names: int) -> dict[str, object]:
    """Blocks that are gone."""
    return {"type": "removed", "block_hashes": list(names)}


def native(event_id: int, data: object, **fields: object) -> dict[str, object]:
    """One event as the engine tells it."""
    return {"event_id": event_id, "data": data, "window_size": 4096, **fields}


class ScriptedTrtllm(ScriptedEngine):
    """Answers polls by what is in ``events``, a list for each, and then by an empty one; other calls as any
    scripted engine. Text stands for itself.
    """

    def __init__(self, pages: Mapping[str, str] = TRTLLM_PAGES) -> None:
        super().__init__(pages)
        self.events: deque[Any] = deque()
        self.n_polls = 0
        self.events_status = 200
        self.can_answer = asyncio.Event()
        self.can_answer.set()

    async def _call(self, request: web.Request) -> web.StreamResponse:
        if request.path != EVENTS:
            return await super()._call(request)
        await self.can_answer.wait()
        self.n_polls += 1
        reported = self.events.popleft() if self.events else []
        body = reported if isinstance(reported, str) else json.dumps(reported)
        return web.Response(text=body, status=self.events_status, content_type=JSON)


@asynccontextmanager
async def scripted_trtllm(*polls: Any) -> AsyncIterator[ScriptedTrtllm]:
    """A scripted engine that listens."""
    engine = ScriptedTrtllm()
    engine.events.extend(polls)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
