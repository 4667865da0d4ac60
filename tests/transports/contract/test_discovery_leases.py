"""Every discovery whose store is outside of the processes that use it keeps the laws of leases."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.testing.discovery_laws import LeaseLaws
from tests.testing.discovery_stores import STORES, Store
from tests.testing.nats_server import NatsServer


class TestEveryLease(LeaseLaws):
    """All stores but memory, which no process shares."""

    @pytest.fixture(params=[name for name in STORES if name != "memory"])
    async def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
        server: NatsServer | None = request.getfixturevalue("own_nats") if request.param == "nats" else None
        async with STORES[request.param](tmp_path, server) as made:
            yield made
