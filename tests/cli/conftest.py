"""What all tests of commands share."""

import pytest

from kvrouter.cli import progress
from tests.testing.constants import SetConstants
from tests.testing.waits import LIMIT_S


@pytest.fixture(autouse=True)
def _no_progress(set_constants: SetConstants) -> None:
    """A command says nothing of its progress where only a busy machine makes it slow."""
    set_constants(progress, LOGGED_AFTER_S=LIMIT_S)
