"""A real vLLM keeps the laws that every engine keeps."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvrouter.core.requests import FinishReason
from tests.support.engine_attached import AttachedEngine, attach_vllm, served
from tests.support.engine_laws import (
    AnswerLaws,
    CacheLaws,
    CallEndingLaws,
    CallLaws,
    EndingLaws,
    RefusalLaws,
    SaltLaws,
    answer,
    new_prompt,
)
from tests.support.engine_legs import written
from tests.system.engines.vllm_server import VllmServer

CONTEXT_TOKENS = 1024
N_BLOCKS = 64

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(engine_folder: Path) -> AsyncIterator[VllmServer]:
    """One engine for all of the laws: they need none that is as it was started."""
    engine = VllmServer(engine_folder, "vllm-1", core=0)
    try:
        await engine.start(n_blocks=N_BLOCKS, context_length=CONTEXT_TOKENS)
        yield engine
    finally:
        await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def at(vllm: VllmServer) -> AsyncIterator[AttachedEngine]:
    """Attached again for every law."""
    async with served(vllm.url, attach_vllm) as found:
        yield found


class TestVllm(AnswerLaws, RefusalLaws, CacheLaws, SaltLaws, EndingLaws, CallLaws, CallEndingLaws):
    """All laws of one engine."""


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_is_only_echoed_comes_back(at: AttachedEngine, stream: bool) -> None:
    chunks = await answer(at, written(new_prompt(20), stream=stream, max_tokens=0, echo=True))
    assert b'"text":"' in b"".join(chunk.raw for chunk in chunks)
    assert chunks[-1].finish is FinishReason.LENGTH
