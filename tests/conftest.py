"""How every test runs: Hypothesis profiles that depend on no clock, so that a slow machine fails nothing, and
the fixtures that any test may take.
"""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvrouter.telemetry.logs import close_log
from tests.testing.calls import make_fail, watch_calls
from tests.testing.constants import set_constants
from tests.testing.nats_server import own_nats, shared_nats
from tests.testing.timings import pytest_runtest_protocol

__all__ = [
    "as_logging_was",
    "make_fail",
    "own_nats",
    "pytest_runtest_protocol",
    "set_constants",
    "shared_nats",
    "watch_calls",
]

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
