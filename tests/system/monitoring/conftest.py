"""One Prometheus for the whole run."""

from collections.abc import Iterator

import pytest

from tests.system.monitoring.prometheus import Prometheus, running


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes nothing at first."""
    with running(tmp_path_factory.mktemp("prometheus")) as started:
        yield started
