"""An SGLang server empties its cache only while nothing runs there: tests wait for that."""

import asyncio

import httpx
import pytest

from tests.testing.attached_engines import CONTEXT_TOKENS, config
from tests.testing.scripted_engine import ScriptedAnswer, scripted_engine
from tests.testing.sglang_cache import flush_cache
from tests.testing.small_engine import small_engine
from tests.testing.small_engine_protocols import SglangProtocol

PROMPT = list(range(10, 74))


async def test_a_cache_is_emptied_once_the_last_request_has_ended() -> None:
    async with (
        small_engine(SglangProtocol(CONTEXT_TOKENS), config(decode_ms=20.0)) as engine,
        httpx.AsyncClient(base_url=engine.url, timeout=60.0) as http,
    ):
        body = {"rid": "first", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 20}}
        async with http.stream("POST", "/generate", json={**body, "stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            assert (await http.post("/flush_cache")).status_code == 400
            flushing = asyncio.create_task(flush_cache(http))
            async for _ in lines:
                pass
        await flushing
        again = await http.post("/generate", json={**body, "rid": "second"})
        assert again.raise_for_status().json()["meta_info"]["cached_tokens"] == 0
        cached = await http.post("/generate", json={**body, "rid": "third"})
        assert cached.raise_for_status().json()["meta_info"]["cached_tokens"] > 0


async def test_failed_cache_flush_raises_the_http_error() -> None:
    async with scripted_engine() as engine, httpx.AsyncClient(base_url=engine.url, timeout=60.0) as http:
        engine.answers.append(ScriptedAnswer(status=500))
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            await flush_cache(http)
