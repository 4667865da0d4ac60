"""How every test runs: Hypothesis profiles, and the fixtures that any test may take.

No profile depends on a clock, so that a slow machine fails nothing. By default the examples are the same each
time, so that chance fails nothing either; the nightly profile draws new ones, and many more.
"""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvrouter.cli import progress
from kvrouter.telemetry.logs import close_log
from tests.testing.calls import make_fail, watch_calls
from tests.testing.constants import SetConstants, set_constants
from tests.testing.nats_server import own_nats, shared_nats
from tests.testing.timings import pytest_runtest_protocol
from tests.testing.waits import LIMIT_S

__all__ = [
    "as_logging_was",
    "make_fail",
    "own_nats",
    "pytest_runtest_protocol",
    "set_constants",
    "shared_nats",
    "watch_calls",
]

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "nightly", deadline=None, max_examples=5_000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def as_logging_was() -> Iterator[None]:
    """What a command line in the test's own process says of logging ends with the test."""
    logger = logging.getLogger("kvrouter")
    handlers, level, propagates = logger.handlers[:], logger.level, logger.propagate
    yield
    close_log()
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagates


@pytest.fixture(autouse=True)
def _no_progress(set_constants: SetConstants) -> None:
    """A command says nothing of its progress where only a busy machine makes it slow."""
    set_constants(progress, LOGGED_AFTER_S=LIMIT_S)


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[[bytes], Path]:
    """Writes a trace, each time into the same file, and returns its path."""

    def write(content: bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(content)
        return path

    return write


@pytest.fixture(scope="module")
def scratch_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for every example of a property."""
    return tmp_path_factory.mktemp("traces") / "trace"
