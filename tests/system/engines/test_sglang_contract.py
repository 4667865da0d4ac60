"""A real SGLang keeps the laws that every engine keeps."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.engine_attached import AttachedEngine, attach_sglang, served
from tests.support.engine_laws import (
    AnswerLaws,
    CacheLaws,
    CallEndingLaws,
    CallLaws,
    EndingLaws,
    RefusalLaws,
    SaltLaws,
)
from tests.system.engines.sglang_server import SglangServer

CONTEXT_TOKENS = 1024
ROOM_TOKENS = 2048

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sglang(engine_folder: Path) -> AsyncIterator[SglangServer]:
    """One engine for all of the laws: they need none that is as it was started."""
    engine = SglangServer(engine_folder, "sglang-1", core=0)
    try:
        await engine.start(n_tokens=ROOM_TOKENS, context_length=CONTEXT_TOKENS)
        yield engine
    finally:
        await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def at(sglang: SglangServer) -> AsyncIterator[AttachedEngine]:
    """Attached again for every law."""
    async with served(sglang.url, attach_sglang) as found:
        yield found


class TestSglang(AnswerLaws, RefusalLaws, CacheLaws, SaltLaws, EndingLaws, CallLaws, CallEndingLaws):
    """All laws of one engine."""
