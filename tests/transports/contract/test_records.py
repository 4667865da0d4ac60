"""Every store of records keeps the laws of the port."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import TypeVar

import nats
import pytest

from kvrouter.core.cordon_rules import Cordon
from kvrouter.transports.records.encoding import CARDS, CORDONS, CardRecord
from kvrouter.transports.records.file.folder import Folder
from kvrouter.transports.records.file.store import FileRecords
from kvrouter.transports.records.nats.store import BucketRecords
from kvrouter.transports.records.store import RecordKind
from tests.testing.discovery_stores import ignore_reports
from tests.testing.memory_records import MemoryRecords
from tests.testing.nats_server import NatsServer
from tests.testing.record_laws import RecordLaws, RecordStores

T = TypeVar("T")


class TestEveryStore(RecordLaws):
    """All stores without an API server."""

    @pytest.fixture(params=["memory", "file", "nats"])
    async def ends(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RecordStores]:
        if request.param == "memory":
            cards, cordons = MemoryRecords(CARDS), MemoryRecords(CORDONS)
            yield RecordStores(lambda: cards, lambda: cordons)
        elif request.param == "nats":
            async with buckets(request.getfixturevalue("shared_nats")) as found:
                yield found
        else:
            folder = Folder(tmp_path / "cards", "space")
            made: list[FileRecords[CardRecord] | FileRecords[Cordon]] = []

            def card_end() -> FileRecords[CardRecord]:
                made.append(
                    end := FileRecords(
                        CARDS,
                        folder,
                        is_host=True,
                        what="it",
                        answer_s=60.0,
                        poll_s=0.02,
                        on_refused=ignore_reports,
                    )
                )
                return end

            def cordon_end() -> FileRecords[Cordon]:
                made.append(
                    end := FileRecords(
                        CORDONS, folder, is_host=False, what="it", answer_s=60.0, on_refused=ignore_reports
                    )
                )
                return end

            folder.open()
            yield RecordStores(card_end, cordon_end)
            for end in made:
                await end.close()


@asynccontextmanager
async def buckets(server: NatsServer) -> AsyncIterator[RecordStores]:
    """Ends by two connections, in turn."""
    namespace = f"test-{secrets.token_hex(8)}"
    clients = [await nats.connect(server.url) for _ in range(2)]
    turn = cycle(clients)

    def end(kind: RecordKind[T], purpose: str, *, lease_s: float | None) -> BucketRecords[T]:
        return BucketRecords(
            next(turn),
            kind,
            namespace=namespace,
            purpose=purpose,
            token="t0p",
            replicas=1,
            answer_s=60.0,
            on_refused=ignore_reports,
            lease_s=lease_s,
        )

    yield RecordStores(
        lambda: end(CARDS, "discovery", lease_s=60.0), lambda: end(CORDONS, "cordons", lease_s=None)
    )
    for client in clients:
        await client.close()
