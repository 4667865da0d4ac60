"""Real engines, shared by the tests of a module: they take half a minute to start."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from pytest_asyncio import is_async_test

from tests.system.engines.shaped_network import why_not
from tests.testing.processes import Fleet, fleet

pytest.register_assert_rewrite(
    "tests.system.engines.cache_law", "tests.system.engines.calibrate_law", "tests.system.engines.client_law"
)


NOT_SHAPED = why_not()
"""Why links cannot be made slow here: then the test that does so is not collected, and the end says so."""

collect_ignore = [] if NOT_SHAPED is None else ["test_vllm_slow_link.py"]


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all of a module on the loop of its engines and of ``kvrouter``: a client of theirs that a test
    connects on a loop of its own could not be closed at the end.
    """
    for item in items:
        if HERE in item.path.parents and is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the test that is not there."""
    if NOT_SHAPED is not None:
        terminalreporter.write_line(
            f"not collected: tests/system/engines/test_vllm_slow_link.py {NOT_SHAPED}"
        )


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines of a module write their logs."""
    return tmp_path_factory.mktemp("engines")


@pytest_asyncio.fixture(loop_scope="module")
async def kvrouter() -> AsyncIterator[Fleet]:
    """The processes of kvrouter, without NATS."""
    async with fleet() as processes:
        yield processes
