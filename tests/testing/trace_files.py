"""Files that a test writes a trace into: fixtures that any test may take."""

from collections.abc import Callable
from pathlib import Path

import pytest


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
