"""Every discovery keeps the laws of the port."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.testing.discovery_laws import CardLaws
from tests.testing.discovery_stores import STORES, Store
from tests.testing.nats_server import NatsServer


class TestEveryDiscovery(CardLaws):
    """All stores."""

    @pytest.fixture(params=STORES)
    async def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
        server: NatsServer | None = (
            request.getfixturevalue("shared_nats") if request.param == "nats" else None
        )
        async with STORES[request.param](tmp_path, server) as made:
            yield made
