"""One watcher of a folder: looks every so often, and says what changed."""

import asyncio
import time
from concurrent.futures import Executor

from kvrouter.core.errors import ConfigError
from kvrouter.planes.background import go_on
from kvrouter.planes.discovery.file.scanner import Scan, Scanner
from kvrouter.planes.discovery.leases import CardLeases, Delivery, TroubleSink

LOOK_LEAST_S = 0.005
"""The shortest pause between two looks."""


class FolderWatch:
    """Looks every ``poll_s``, and once more when a lease is about to run out.

    A look that has not come back after ``answer_s`` means that the store is lost.
    """

    def __init__(
        self,
        scanner: Scanner,
        delivery: Delivery,
        *,
        threads: Executor,
        poll_s: float,
        answer_s: float,
        on_refused: TroubleSink,
    ) -> None:
        self._scanner = scanner
        self._delivery = delivery
        self._threads = threads
        self._poll_s = poll_s
        self._answer_s = answer_s
        self._on_refused = on_refused
        self._leases = CardLeases()
        self._look: asyncio.Future[Scan] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, deliver what is there, and go on looking."""
        await self._look_once()
        self._task = go_on(self._run(), name="discovery: watch a folder")
        await asyncio.sleep(0)

    def end(self) -> None:
        """Look no more; idempotent."""
        self._delivery.end()
        for waiting in (self._task, self._look):
            if waiting is not None:
                waiting.cancel()

    async def _run(self) -> None:
        while True:
            pause_s = self._poll_s
            end = self._leases.next_end()
            if end is not None and not self._leases.is_lost:
                pause_s = min(pause_s, end - time.monotonic())
            await asyncio.sleep(max(pause_s, LOOK_LEAST_S))
            await self._look_once()

    async def _look_once(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().run_in_executor(self._threads, self._scanner.look)
        done, _ = await asyncio.wait({self._look}, timeout=self._answer_s)
        if not done:
            self._lose(f"the directory did not answer within {self._answer_s:g} s")
            return
        look, self._look = self._look, None
        try:
            scan = look.result()
        except OSError as error:
            self._lose(str(error))
        except ConfigError as error:
            self._lose(error.message)
        else:
            self._take(scan)

    def _lose(self, why: str) -> None:
        if not self._leases.is_lost:
            self._leases.lose()
            self._delivery.store(False, why)

    def _take(self, scan: Scan) -> None:
        leases, now = self._leases, scan.looked_at_s
        if leases.is_lost:
            leases.regain(now)
            self._delivery.store(True, "")
        leases.look(now)
        for record, stamp in scan.records:
            self._delivery.changes(leases.hear(record, stamp, now))
        self._delivery.changes(leases.expire(now))
        leases.forget({record.card.worker_id for record, _ in scan.records})
        for what, why in scan.troubles:
            self._on_refused(what, why)
