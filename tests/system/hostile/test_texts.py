"""Texts of megabytes: those that no context can hold are not tokenized, and the others hold a budget."""

import asyncio

import pytest

from kvrouter.text.tokenizer import SLOW
from tests.system.hostile.bystanders import Bystanders
from tests.system.hostile.meter import MIB, Meter
from tests.testing.processes import Frontend, fleet

LETTERS_BYTES = 20_000_000
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BUDGET_BYTES = 256 * MIB
CONTEXT_TOKENS = 1_000_000
"""Long enough that the budget bounds texts before the context does."""


def call(path: str, text: str) -> dict[str, object]:
    said = {"prompt": text} if path == COMPLETION else {"messages": [{"role": "user", "content": text}]}
    return {"model": "mock", "max_tokens": 1, **said}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_texts_too_long_for_the_context_are_not_tokenized(path: str) -> None:
    async with fleet({"KVROUTER_BODY_MAX_BYTES": str(64 * MIB)}) as here:
        await here.worker()
        frontend = await here.frontend()
        meter = Meter(frontend.pid)
        async with Bystanders(frontend):
            before_bytes, before_s = meter.resident_bytes(), meter.cpu_s()
            meter.forget_peak()
            reply = await frontend.http.post(path, json=call(path, "a" * LETTERS_BYTES))
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert meter.peak_bytes() - before_bytes < 3 * LETTERS_BYTES
            assert meter.cpu_s() - before_s < 5.0
        metrics = await frontend.metrics()
        assert metrics.total("prompts_refused_total", code="context_length_exceeded") == 1


async def test_concurrent_long_texts_stay_within_the_tokenize_budget() -> None:
    """Each of the texts is counted to fill the budget, and holds half of it: there are threads for two."""
    environ = {"KVROUTER_TOKENIZE_MAX_BYTES": str(BUDGET_BYTES), "KVROUTER_TOKENIZE_WAIT_S": "600"}
    async with fleet(environ) as here:
        await here.worker("--context-length", str(CONTEXT_TOKENS), "--total-kv-blocks", "100000")
        frontend = await here.frontend()
        meter = Meter(frontend.pid)
        text = "1 " * (BUDGET_BYTES // SLOW.bytes_per_byte // 2 - 100)
        before_bytes = meter.resident_bytes()
        async with Bystanders(frontend):
            meter.forget_peak()
            statuses = await asyncio.gather(*(status_of(frontend, text) for _ in range(6)))
            peak_bytes = meter.peak_bytes() - before_bytes
        assert statuses == [400] * 6, "each is tokenized, and is longer than what the answer leaves it"
        assert peak_bytes < BUDGET_BYTES * 0.7
        longer = "1 " * (BUDGET_BYTES // SLOW.bytes_per_byte // 2 + 1)
        reply = await frontend.http.post(COMPLETION, json=call(COMPLETION, longer))
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "prompt_over_budget")
        assert "KVROUTER_TOKENIZE_MAX_BYTES" in reply.text
        assert (await frontend.metrics()).total("tokenize_bytes") == 0


async def status_of(frontend: Frontend, text: str) -> int:
    body = {**call(COMPLETION, text), "max_tokens": CONTEXT_TOKENS}
    return (await frontend.http.post(COMPLETION, json=body)).status_code
