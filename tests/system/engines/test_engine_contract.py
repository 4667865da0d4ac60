"""Real engines keep the laws that every engine keeps."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvrouter.core.requests import FinishReason
from tests.system.engines.sglang_server import SglangServer
from tests.system.engines.vllm_server import VllmServer
from tests.testing.attached_engines import AttachedEngine, attach_sglang, attach_vllm, served
from tests.testing.engine_laws import (
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
from tests.testing.engine_requests import completion_request

CONTEXT_TOKENS = 1024
VLLM_BLOCKS = 64
SGLANG_TOKENS = 2048

Server = VllmServer | SglangServer


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "sglang"])
async def engine(request: pytest.FixtureRequest, engine_folder: Path) -> AsyncIterator[Server]:
    """One engine for all of the laws: they need none that is as it was started."""
    made: Server
    if request.param == "vllm":
        made = VllmServer(engine_folder, "vllm-1", core=0)
    else:
        made = SglangServer(engine_folder, "sglang-1", core=0)
    try:
        if isinstance(made, VllmServer):
            await made.start(n_blocks=VLLM_BLOCKS, context_length=CONTEXT_TOKENS)
        else:
            await made.start(n_tokens=SGLANG_TOKENS, context_length=CONTEXT_TOKENS)
        yield made
    finally:
        await made.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def at(engine: Server) -> AsyncIterator[AttachedEngine]:
    """Attached again for every law."""
    attach = attach_vllm if isinstance(engine, VllmServer) else attach_sglang
    async with served(engine.url, attach) as found:
        yield found


class TestEngine(AnswerLaws, RefusalLaws, CacheLaws, SaltLaws, EndingLaws, CallLaws, CallEndingLaws):
    """All laws of one engine."""


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_echo_request_with_max_tokens_zero_is_answered(at: AttachedEngine, stream: bool) -> None:
    chunks = await answer(at, completion_request(new_prompt(20), stream=stream, max_tokens=0, echo=True))
    assert b'"text":"' in b"".join(chunk.raw for chunk in chunks)
    assert chunks[-1].finish is FinishReason.LENGTH
