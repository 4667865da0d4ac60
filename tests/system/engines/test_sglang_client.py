"""The ``openai`` client asks a real SGLang engine through kvrouter and directly: the same answers."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest_asyncio

from tests.system.engines.calls import stopped
from tests.system.engines.client_law import CASES, ClientLaw
from tests.system.engines.sglang_server import SglangServer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(engine_folder: Path) -> AsyncIterator[SglangServer]:
    """One engine."""
    async with stopped({1: SglangServer(engine_folder, "sglang", core=0)}) as one:
        await one[1].start(flags=("--tool-call-parser", "hermes"))
        yield one[1]


class TestSglang(ClientLaw):
    """SGLang keeps the law."""

    messages: ClassVar[list[Any]] = [
        {"role": "system", "content": "You route requests."},
        {"role": "user", "content": [{"type": "text", "text": "Where is my cache?"}]},
    ]
    cases: ClassVar[Mapping[str, dict[str, Any]]] = {**CASES, "several": {"n": 2}}  # it draws by no seed
