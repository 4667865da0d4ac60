"""Discovery by the files of one directory, for the processes of one host and one user."""

from collections.abc import Mapping
from pathlib import Path

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import WorkerCard
from kvrouter.transports.records.card_publisher import HeldCards
from kvrouter.transports.records.card_tracker import TroubleSink
from kvrouter.transports.records.encoding import CARDS, CardRecord, checked_lease, checked_namespace
from kvrouter.transports.records.file.folder import Folder, Stamp
from kvrouter.transports.records.file.store import POLL_S, FileRecords
from kvrouter.transports.records.port import GoneSink
from kvrouter.transports.records.stored import StoredDiscovery

LEASE_S = 10.0

READ_WITHIN_S = 2 * POLL_S
"""How long a change takes to every watcher: it is read by the next poll, whose scan takes time. A watcher
polls at least every ``POLL_S``, whatever its lease.
"""

REMOVE_AFTER_S = 600.0
"""When a watcher removes the file of a worker that is not renewed; with long leases, after ten of them."""

ANSWER_LEAST_S = 2.0
"""The least time in which file operations must return, else the store counts as lost."""


class _Cards(HeldCards[Stamp]):
    """A first card that cannot be written is an error of the settings; later failures are reported for each
    worker, once until its card can be written.
    """

    def __init__(
        self,
        store: FileRecords[CardRecord],
        *,
        lease_s: float,
        on_trouble: TroubleSink,
        on_lost: GoneSink | None,
    ) -> None:
        super().__init__(store, lease_s=lease_s, on_trouble=on_trouble, on_lost=on_lost)
        self._failing: set[WorkerId] = set()

    def note_unannounced(self, card: WorkerCard, failure: Exception) -> None:
        """Raise ConfigError, and stop renewing the card."""
        del self._held[card.worker_id]
        raise ConfigError(str(failure), param="directory") from failure

    def note(self, outcomes: Mapping[WorkerId, Exception | None]) -> None:
        """Report the workers whose cards cannot be written, each once until it can."""
        for worker_id, failure in outcomes.items():
            if failure is None:
                self._failing.discard(worker_id)
            elif worker_id not in self._failing:
                self._failing.add(worker_id)
                self._on_trouble(f"worker {worker_id}", f"its card cannot be written: {failure}")


class FileDiscovery(StoredDiscovery[Stamp]):
    """Keeps the cards of ``namespace`` as files of ``directory``, for this user alone.

    Watchers notice a worker that starts or withdraws within ``poll_s`` and the time of one scan, a dead one
    within ``lease_s`` + ``poll_s``. ``on_refused`` is called for foreign files, once for all watches;
    ``on_trouble`` for cards that cannot be renewed; ``on_lost`` for a card published here that lost its id
    for good: a newer incarnation replaced it, or another process withdrew it.

    Raises ConfigError: at once for arguments out of range, from ``publish`` and ``watch`` for a directory
    that cannot be made, is another user's, is world-writable, or holds other files.
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
        checked_lease(lease_s)
        if poll_s is None:
            poll_s = min(POLL_S, lease_s / 4)
        if not 0 < poll_s <= lease_s / 2:
            raise ConfigError(f"poll_s: at most half of lease_s ({lease_s}), not {poll_s}", param="poll_s")
        if remove_after_s is None:
            remove_after_s = max(REMOVE_AFTER_S, 10 * lease_s)
        if remove_after_s < 2 * lease_s:
            raise ConfigError("remove_after_s: at least two leases", param="remove_after_s")
        store = FileRecords(
            CARDS,
            Folder(directory, checked_namespace(namespace)),
            is_host=True,
            what="the directory",
            answer_s=max(lease_s / 2, ANSWER_LEAST_S),
            on_refused=on_refused,
            poll_s=poll_s,
            half_stays_s=remove_after_s,
        )
        cards = _Cards(store, lease_s=lease_s, on_trouble=on_trouble, on_lost=on_lost)
        super().__init__(
            store,
            cards,
            lease_s=lease_s,
            remove_after_s=remove_after_s,
            on_trouble=on_trouble,
            propagation_s=READ_WITHIN_S,
        )
