"""The life of a worker's process, as its log tells it."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrouter.app.lifetime import LOST_PLACE
from kvrouter.cli.worker.worker_process import WorkerProcess
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.settings.sources import load_settings
from kvrouter.transports.records.port import Gone, GoneSink
from tests.testing.log_events import events_of

ONE = WorkerId(1)


class Drained:
    """Runs, and has no worker at the moment."""

    worker = None

    async def drain(self, limit_s: float) -> bool:
        return True


async def test_stop_is_logged_once_the_worker_has_stopped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvrouter")
    before: list[str] = []

    @asynccontextmanager
    async def run(on_lost: GoneSink) -> AsyncIterator[Drained]:
        on_lost(ONE, Epoch(1), Gone.REPLACED)
        yield Drained()
        before.extend(events_of(caplog.records))

    settings = load_settings(flags={}, environ={}).settings
    process = WorkerProcess(settings, ONE, role="both", drain_limit_s=1.0)
    assert await process._serve(run) == LOST_PLACE
    assert events_of(caplog.records) == [*before, "stop"]
    assert before[-1] == "drain"
