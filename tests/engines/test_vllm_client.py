"""The ``openai`` client asks a real vLLM engine through kvrouter and directly: the same answers."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engines.calls import stopped
from tests.engines.client_law import ClientLaw
from tests.engines.vllm_server import VllmServer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(engine_folder: Path) -> AsyncIterator[VllmServer]:
    """One engine."""
    async with stopped({1: VllmServer(engine_folder, "vllm", core=0)}) as one:
        await one[1].start(flags=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"))
        yield one[1]


class TestVllm(ClientLaw):
    """vLLM keeps the law."""
