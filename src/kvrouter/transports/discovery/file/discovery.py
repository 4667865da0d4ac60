"""Discovery by the files of one directory, for processes of one host and one user."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.background import go_on
from kvrouter.transports.discovery.card_tracker import (
    RENEWALS_PER_LEASE,
    CardLeases,
    OpenWatches,
    TroubleSink,
    WatcherSinks,
    lost_why,
)
from kvrouter.transports.discovery.file.folder import UNWRITTEN, Folder, HeldCard, Scan, Scanner
from kvrouter.transports.discovery.port import CardSink, Gone, GoneSink, StoreSink
from kvrouter.transports.discovery.wire import CardRecord, checked_lease, checked_namespace

LOOK_LEAST_S = 0.005
"""The shortest pause between two scans."""


class FolderWatch:
    """Scans every ``poll_s``, and once more when a lease is about to run out.

    A scan that has not come back after ``answer_s`` means that the store is lost.
    """

    def __init__(
        self,
        scanner: Scanner,
        delivery: WatcherSinks,
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
        self._scanning: asyncio.Future[Scan] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Scan once, deliver what is there, and go on scanning."""
        await self._scan_once()
        self._task = go_on(self._run(), name="discovery: watch a folder")
        await asyncio.sleep(0)

    def end(self) -> None:
        """Scan no more; idempotent."""
        self._delivery.end()
        for waiting in (self._task, self._scanning):
            if waiting is not None:
                waiting.cancel()

    async def _run(self) -> None:
        while True:
            pause_s = self._poll_s
            end = self._leases.next_end()
            if end is not None and not self._leases.is_lost:
                pause_s = min(pause_s, end - time.monotonic())
            await asyncio.sleep(max(pause_s, LOOK_LEAST_S))
            await self._scan_once()

    async def _scan_once(self) -> None:
        if self._scanning is None:
            self._scanning = asyncio.get_running_loop().run_in_executor(self._threads, self._scanner.look)
        done, _ = await asyncio.wait({self._scanning}, timeout=self._answer_s)
        if not done:
            self._lose(f"the directory did not answer within {self._answer_s:g} s")
            return
        scanning, self._scanning = self._scanning, None
        try:
            scan = scanning.result()
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


LEASE_S = 10.0
POLL_S = 0.5
"""How often a watcher scans; with short leases, four times in one."""

REMOVE_AFTER_S = 600.0
"""When a watcher removes the file of a worker that nobody renews; with long leases, after ten of them."""

ANSWER_LEAST_S = 2.0
"""The least time in which file operations must come back, else the store is lost."""

THREADS_MAX = 4

_T = TypeVar("_T")


class FileDiscovery:
    """Keeps the cards of ``namespace`` as files of ``directory``, for this user alone.

    A worker that starts or withdraws is heard within ``poll_s`` and the time of one scan, one that dies
    within ``lease_s`` + ``poll_s``, by the watchers' own clocks. ``lease_s`` is what this end's cards ask
    for; a watcher honours what each card asks for. ``on_refused`` hears of files that do not belong
    there, once however many watch; ``on_trouble`` of cards that cannot be renewed.
    ``on_lost`` hears of a card published here that lost its place for ever: to a newer incarnation, or
    because somebody else withdrew it.

    Raises ConfigError: at once for arguments out of range, from ``publish`` and ``watch`` for a directory
    that cannot be made, is another user's, may be written by everybody, or holds something else.
    """

    def __init__(
        self,
        directory: Path,
        *,
        namespace: str,
        on_trouble: TroubleSink,
        on_refused: TroubleSink,
        on_lost: GoneSink | None = None,
        lease_s: float = LEASE_S,
        poll_s: float | None = None,
        remove_after_s: float | None = None,
    ) -> None:
        self._lease_s = checked_lease(lease_s)
        if poll_s is None:
            poll_s = min(POLL_S, lease_s / 4)
        if not 0 < poll_s <= lease_s / 2:
            raise ConfigError(f"poll_s: at most half of lease_s ({lease_s}), not {poll_s}", param="poll_s")
        if remove_after_s is None:
            remove_after_s = max(REMOVE_AFTER_S, 10 * lease_s)
        if remove_after_s < 2 * lease_s:
            raise ConfigError("remove_after_s: at least two leases", param="remove_after_s")
        self._folder = Folder(directory, checked_namespace(namespace))
        self._poll_s = poll_s
        self._scanner = Scanner(self._folder, remove_after_s=remove_after_s)
        self._answer_s = max(lease_s / 2, ANSWER_LEAST_S)
        self._on_trouble = on_trouble
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="discovery")
        self._writing = asyncio.Lock()
        self._held: dict[WorkerId, HeldCard] = {}
        self._failing: set[WorkerId] = set()
        self._watches: OpenWatches[FolderWatch] = OpenWatches()
        self._renewing: asyncio.Task[None] | None = None

    async def publish(self, card: WorkerCard) -> None:
        """Write the card and renew its lease from now on. A write of a replaced incarnation is ignored.

        An update that cannot be written is written with the next renewal that succeeds.
        """
        async with self._writing:
            known = self._held.get(card.worker_id)
            try:
                held = await self._in_thread(lambda: self._folder.put(card, self._lease_s, known))
            except (OSError, ConfigError) as error:
                if known is None or known.record.card.incarnation != card.incarnation:
                    raise ConfigError(str(error), param="directory") from error
                self._report_failing(card.worker_id, str(error))
                held = HeldCard(CardRecord(card, self._lease_s, known.record.replaced), UNWRITTEN)
            if held is None:
                return
            self._held[card.worker_id] = held
        if self._renewing is None:
            self._renewing = go_on(self._renew_for_ever(), name="discovery: renew leases")

    async def withdraw(self, worker_id: WorkerId, incarnation: Epoch) -> None:
        """Mark the card as withdrawn; where that cannot be written, its lease runs out."""
        async with self._writing:
            held = self._held.get(worker_id)
            if held is not None and held.record.card.incarnation == incarnation:
                del self._held[worker_id]
                self._failing.discard(worker_id)
            try:
                await self._in_thread(lambda: self._folder.withdraw(worker_id, incarnation))
            except OSError as error:
                self._on_trouble(f"worker {worker_id}", f"not withdrawn: {error}")

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        """Deliver every present card, then every change, in order; return the function that ends it."""
        await self._in_thread(self._folder.open)
        watch = FolderWatch(
            self._scanner,
            WatcherSinks(on_card, on_gone, on_store),
            threads=self._threads,
            poll_s=self._poll_s,
            answer_s=self._answer_s,
            on_refused=self._on_refused,
        )
        return await self._watches.start(watch)

    async def close(self) -> None:
        """Renew nothing and watch nothing any more; idempotent. Cards that were not withdrawn run out."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        self._watches.end()
        self._held.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            async with self._writing:
                all_held = tuple(self._held.values())
                try:
                    outcomes = await self._in_thread(lambda: self._renew_all(all_held))  # noqa: B023
                except TimeoutError as error:
                    outcomes = [(held, error) for held in all_held]
                for held, outcome in outcomes:
                    self._note(held.record.card, outcome)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Run what blocks; raise TimeoutError, which is an OSError, when it does not come back."""
        waiting = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # asyncio.wait_for loses a cancellation that comes as the work ends, and close would wait for ever.
        done, _ = await asyncio.wait({waiting}, timeout=self._answer_s)
        if not done:
            waiting.cancel()
            raise TimeoutError(f"the directory did not answer within {self._answer_s:g} s")
        return waiting.result()

    def _renew_all(
        self, all_held: tuple[HeldCard, ...]
    ) -> list[tuple[HeldCard, HeldCard | Gone | Exception]]:
        """Renew each card, whatever becomes of the others. Blocks."""
        outcomes: list[tuple[HeldCard, HeldCard | Gone | Exception]] = []
        for held in all_held:
            try:
                outcomes.append((held, self._folder.renew(held)))
            except (OSError, ConfigError) as error:
                outcomes.append((held, error))
        return outcomes

    def _note(self, card: WorkerCard, outcome: HeldCard | Gone | Exception) -> None:
        worker_id = card.worker_id
        if isinstance(outcome, Exception):
            self._report_failing(worker_id, str(outcome))
            return
        self._failing.discard(worker_id)
        if isinstance(outcome, Gone):
            self._held.pop(worker_id, None)
            self._on_trouble(f"worker {worker_id}", lost_why(outcome))
            if self._on_lost is not None:
                self._on_lost(worker_id, card.incarnation, outcome)
        else:
            self._held[worker_id] = outcome

    def _report_failing(self, worker_id: WorkerId, why: str) -> None:
        if worker_id not in self._failing:
            self._failing.add(worker_id)
            self._on_trouble(f"worker {worker_id}", f"its card cannot be written: {why}")
