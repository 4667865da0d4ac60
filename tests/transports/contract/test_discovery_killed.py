"""A worker whose process is killed is away once its lease has run out, in every store that outlives it."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrouter.transports.records.port import Gone
from tests.testing.discovery_stores import (
    FileStore,
    NatsStore,
    card,
    file_store,
    nats_store,
    record_discovery,
)
from tests.testing.nats_server import NatsServer

FILE_WORKER = """
import asyncio, sys
from pathlib import Path
from kvrouter.transports.records.file import FileDiscovery
from tests.testing.discovery_stores import SHORT_LEASE_S, card, ignore_reports

async def live():
    end = FileDiscovery(
        Path(sys.argv[1]),
        namespace="space",
        on_trouble=ignore_reports,
        on_refused=ignore_reports,
        lease_s=SHORT_LEASE_S,
        poll_s=0.02,
    )
    await end.publish(card())
    await asyncio.Event().wait()

asyncio.run(live())
"""

NATS_WORKER = """
import asyncio, sys
import nats
from kvrouter.transports.records.nats import NatsDiscovery
from tests.testing.discovery_stores import SHORT_LEASE_S, TOKEN, card, ignore_reports

async def live():
    client = await nats.connect(sys.argv[1])
    end = NatsDiscovery(
        client, namespace=sys.argv[2], token=TOKEN, lease_s=SHORT_LEASE_S,
        on_trouble=ignore_reports, on_refused=ignore_reports,
    )
    await end.publish(card())
    await asyncio.Event().wait()

asyncio.run(live())
"""


@pytest.fixture(params=["file", "nats"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FileStore | NatsStore]:
    if request.param == "file":
        async with file_store(tmp_path) as files:
            yield files
        return
    server: NatsServer = request.getfixturevalue("shared_nats")
    async with nats_store(None, server) as bucket:
        yield bucket


def command(store: FileStore | NatsStore) -> tuple[str, ...]:
    """A Python program that publishes a card, and its arguments."""
    if isinstance(store, FileStore):
        return (FILE_WORKER, str(store.directory))
    return (NATS_WORKER, store.server.url, store.namespace)


async def test_killed_worker_expires(store: FileStore | NatsStore) -> None:
    recorder = await record_discovery(store.end())
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", *command(store))
    try:
        await recorder.until_heard(card())
        worker.send_signal(signal.SIGKILL)
        await recorder.until_heard(card(), (1, 9, Gone.EXPIRED))
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()
