"""Every store of records keeps the laws of the port."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrouter.core.cordons import Cordon
from kvrouter.transports.discovery.file.folder import Folder
from kvrouter.transports.discovery.file.records import FileRecords
from kvrouter.transports.discovery.wire import CARDS, CORDONS, CardRecord
from tests.support.discovery_stores import nobody
from tests.support.memory_records import MemoryRecords
from tests.support.record_laws import Ends, RecordLaws


class TestEveryStore(RecordLaws):
    """All stores without an API server."""

    @pytest.fixture(params=["memory", "file"])
    async def ends(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ends]:
        if request.param == "memory":
            cards, cordons = MemoryRecords(CARDS), MemoryRecords(CORDONS)
            yield Ends(lambda: cards, lambda: cordons)
        else:
            folder = Folder(tmp_path / "cards", "space")
            made: list[FileRecords[CardRecord] | FileRecords[Cordon]] = []

            def card_end() -> FileRecords[CardRecord]:
                made.append(
                    end := FileRecords(
                        CARDS, folder, is_host=True, what="it", answer_s=60.0, poll_s=0.02, on_refused=nobody
                    )
                )
                return end

            def cordon_end() -> FileRecords[Cordon]:
                made.append(
                    end := FileRecords(
                        CORDONS, folder, is_host=False, what="it", answer_s=60.0, on_refused=nobody
                    )
                )
                return end

            folder.open()
            yield Ends(card_end, cordon_end)
            for end in made:
                await end.close()
