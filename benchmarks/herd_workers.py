"""The workers of the herd of processes: ``kvrouter worker mock`` eight times, and what each says it does."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from benchmarks.event_lanes import fail
from benchmarks.frontend.processes import environ_of
from kvrouter.core.events import KvBatch
from kvrouter.core.ids import WorkerRank
from kvrouter.core.workers import LoadReport, WorkerCard
from kvrouter.transports.events.zmq import ZmqEventSubscriber
from kvrouter.transports.records.file import FileDiscovery

N_WORKERS = 8
BLOCK_SIZE = 16
NAMESPACE = "default"

FLEET = f"""
version: 1
models: [{{name: mock, block_size: {BLOCK_SIZE}, context_length: 131072}}]
workers:
  - name: worker
    replicas: {N_WORKERS}
    engine:
      timing:
        prefill_quadratic: 0.0
        prefill_linear: 0.0625
        prefill_base: 0.0
        decode_quadratic: 0.0
        decode_linear: 200.0
        decode_base: 40.0
"""
"""Prefill takes what the simulated engines take. A step of decoding takes long, so that a few tokens keep a
worker as busy as many would: tokens cost the machine, time does not."""


@contextmanager
def mock_workers(discovery: Path) -> Iterator[None]:
    """Run the workers, announced in ``discovery``, until the block ends."""
    fleet = discovery.with_suffix(".yaml")
    fleet.write_text(FLEET)
    environ = environ_of(discovery)
    command = (sys.executable, "-m", "kvrouter.cli", "worker", "mock", "--fleet", str(fleet), "--index")
    quiet = subprocess.DEVNULL
    processes = [
        subprocess.Popen((*command, str(index)), env=environ, stdout=quiet, stderr=quiet)
        for index in range(N_WORKERS)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


class Loads:
    """The latest load of each worker rank, by its own reports."""

    def __init__(self) -> None:
        self._reports: dict[WorkerRank, LoadReport] = {}

    def hear(self, report: LoadReport) -> None:
        """A worker reported its load."""
        self._reports[report.rank] = report

    def blocks(self) -> list[float]:
        """Blocks that each worker's requests hold or wait to prefill; of those only that were ever busy."""
        return [
            report.active_blocks + (report.active_prefill_tokens or 0) / BLOCK_SIZE
            for report in self._reports.values()
        ]


@asynccontextmanager
async def loads_of(folder: Path) -> AsyncIterator[Loads]:
    """Listen to the workers announced in ``folder`` as a router would."""
    loads = Loads()
    heard = ZmqEventSubscriber(on_malformed=fail, on_foreign=fail)
    heard.subscribe(_let_go, loads.hear)
    discovery = FileDiscovery(
        folder,
        namespace=NAMESPACE,
        on_trouble=lambda what, why: fail(f"{what}: {why}"),
        on_refused=lambda what, why: fail(f"{what}: {why}"),
    )

    def on_card(card: WorkerCard) -> None:
        heard.follow(card)

    try:
        await discovery.watch(on_card, lambda *gone: fail(f"a worker is gone: {gone}"))
        yield loads
    finally:
        await discovery.close()
        await heard.close()


def _let_go(_batch: KvBatch) -> None:
    """What a worker caches is no load."""
