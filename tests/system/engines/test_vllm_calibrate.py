"""``kvrouter calibrate --url`` measures a real vLLM engine, by its metrics and by what its answers say."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.system.engines.calibrate_law import CalibrateLaw
from tests.system.engines.calls import stopped
from tests.system.engines.vllm_server import VllmServer

SAYS = {
    (): "queue and service are separate in 3 requests that ran alone",
    ("--enable-per-request-metrics",): "queue and service are separate in all requests",
}
"""By flags."""


@pytest.fixture(scope="module", params=SAYS, ids=["metrics", "times in answers"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """With what the engine is started."""
    found: tuple[str, ...] = request.param
    return found


@pytest.fixture
def says(flags: tuple[str, ...]) -> str:
    """What is said of the engine's own times."""
    return SAYS[flags]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(engine_folder: Path, flags: tuple[str, ...]) -> AsyncIterator[VllmServer]:
    """One engine."""
    async with stopped({1: VllmServer(engine_folder, "vllm", core=0)}) as one:
        await one[1].start(flags=flags)
        yield one[1]


class TestVllm(CalibrateLaw):
    """vLLM keeps the law."""
