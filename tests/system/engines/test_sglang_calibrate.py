"""``kvrouter calibrate --url`` measures a real SGLang engine, by its metrics."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.system.engines.calibrate_law import CalibrateLaw
from tests.system.engines.calls import stopped
from tests.system.engines.sglang_server import SglangServer


@pytest.fixture
def says() -> str:
    """What is said of the engine's own times."""
    return "queue and service are separate in 3 requests that ran alone"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(engine_folder: Path) -> AsyncIterator[SglangServer]:
    """One engine."""
    async with stopped({1: SglangServer(engine_folder, "sglang", core=0)}) as one:
        await one[1].start(flags=("--enable-metrics",))
        yield one[1]


class TestSglang(CalibrateLaw):
    """SGLang keeps the law."""
