"""Transfer speed: judges how fast KV reaches each worker rank, by its engine's counts.

Engines count whole transfers, and small ones consist mostly of latency. So windows of transfers are compared:
a window is slow when its bytes per second are below a share of the best that the rank has shown, *and* its
mean transfer takes so much longer than it did then. On a link of constant latency and bandwidth both never
hold together, whatever the sizes: with mean size m a transfer takes latency + m / bandwidth.
"""

from collections import deque
from typing import NamedTuple

from kvrouter.core.ids import Slot
from kvrouter.core.workers import KvTransfers

RECENT_S = 60.0
"""Transfers of the last this many seconds are recent."""

BUCKET_S = 5.0
"""Transfers within this time share one bucket."""

WINDOW_S = 10.0
"""The least length of a window; a window not filled within :data:`RECENT_S` is dropped."""

WINDOW_BYTES = 64 << 20
WINDOW_TRANSFERS = 4
"""The least bytes and transfers of a window; fewer say nothing about the link."""

WINDOWS = 2
"""How many consecutive windows establish a best speed or a verdict."""

SLOW_SHARE = 0.25
"""Below this share of its best speed a rank becomes slow."""

WELL_SHARE = 0.5
"""From this share on it is no longer slow."""


class Speed(NamedTuple):
    """Bytes per second within transfers, and the mean seconds that one transfer takes."""

    bytes_per_s: float
    transfer_s: float

    def is_under(self, share: float, shown: "Speed") -> bool:
        """Whether the speed is below ``share`` of ``shown``, and not because transfers were smaller."""
        return self.bytes_per_s < share * shown.bytes_per_s and share * self.transfer_s > shown.transfer_s


class SpeedVerdict(NamedTuple):
    """A rank became slow or is no longer slow: the last window's speed and the best before it."""

    is_slow: bool
    now: Speed
    shown: Speed


class NotedTransfers(NamedTuple):
    """The transfers since the last report, and a verdict where it changed."""

    carried: KvTransfers
    verdict: SpeedVerdict | None


class TransferReading(NamedTuple):
    """One rank's sums from its engine, and its speeds; a speed is None before there are enough transfers.

    ``recent_bytes_per_s`` is that of the last minute, ``shown_bytes_per_s`` the best that lasted.
    """

    reported: KvTransfers
    recent_bytes_per_s: float | None
    shown_bytes_per_s: float | None
    is_slow: bool


NOTHING = KvTransfers(0, 0, 0.0)


class TransferSpeeds:
    """Follows the KV transfers that engines report. ``now_s`` is any monotonic clock.

    Memory is a few sums per slot, whatever is transferred.
    """

    def __init__(self) -> None:
        self._ranks: dict[Slot, _Rank] = {}

    def note(self, slot: Slot, sums: KvTransfers | None, *, now_s: float) -> NotedTransfers | None:
        """Note an engine's sums, None before its first transfer. Returns None where they have not changed.
        The first sums may be old, so they count as no transfer.
        """
        rank = self._ranks.get(slot)
        if rank is None:
            self._ranks[slot] = _Rank(sums)
            return None if sums is None else NotedTransfers(NOTHING, None)
        if sums is None or sums == rank.sums:
            return None
        carried, rank.sums = _since(rank.sums or NOTHING, sums), sums
        return NotedTransfers(carried, rank.add(carried, now_s))

    def reading(self, slot: Slot, *, now_s: float) -> TransferReading | None:
        """The reading of the slot's rank; None where its engine reports no transfers."""
        rank = self._ranks.get(slot)
        return None if rank is None or rank.sums is None else rank.reading(rank.sums, now_s)

    def freed(self, slot: Slot) -> None:
        """Forget the slot's rank, which has left."""
        self._ranks.pop(slot, None)


class _Sums:
    """Sums of transfers since ``begun_s``."""

    __slots__ = ("begun_s", "bytes", "seconds", "transfers")

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.transfers = 0
        self.bytes = 0
        self.seconds = 0.0

    def add(self, carried: KvTransfers) -> None:
        self.transfers += carried.transfers
        self.bytes += carried.bytes
        self.seconds += carried.seconds

    def is_filled(self, now_s: float) -> bool:
        return (
            now_s - self.begun_s >= WINDOW_S
            and self.bytes >= WINDOW_BYTES
            and self.transfers >= WINDOW_TRANSFERS
            and self.seconds > 0.0
        )

    def speed(self) -> Speed:
        return Speed(self.bytes / self.seconds, self.seconds / self.transfers)


class _Rank:
    __slots__ = ("_buckets", "_is_slow", "_last", "_shown", "_window", "sums")

    def __init__(self, sums: KvTransfers | None) -> None:
        self.sums = sums
        self._buckets: deque[_Sums] = deque(maxlen=int(RECENT_S / BUCKET_S) + 1)
        self._window: _Sums | None = None
        self._last: deque[Speed] = deque(maxlen=WINDOWS)
        self._shown: Speed | None = None
        self._is_slow = False

    def add(self, carried: KvTransfers, now_s: float) -> SpeedVerdict | None:
        """Add transfers; return the verdict where it changes."""
        if not self._buckets or now_s - self._buckets[-1].begun_s >= BUCKET_S:
            self._buckets.append(_Sums(now_s))
        self._buckets[-1].add(carried)
        window = self._window
        if window is None or now_s - window.begun_s > RECENT_S:
            window = self._window = _Sums(now_s)
        window.add(carried)
        if not window.is_filled(now_s):
            return None
        self._window = None
        return self._judge(window.speed())

    def _judge(self, speed: Speed) -> SpeedVerdict | None:
        self._last.append(speed)
        if len(self._last) < WINDOWS:
            return None
        lasting = min(self._last)
        shown = self._shown
        if shown is None or lasting > shown:
            shown = self._shown = lasting
        if self._is_slow:
            changes = not any(each.is_under(WELL_SHARE, shown) for each in self._last)
        else:
            changes = all(each.is_under(SLOW_SHARE, shown) for each in self._last)
        if not changes:
            return None
        self._is_slow = not self._is_slow
        return SpeedVerdict(self._is_slow, speed, shown)

    def reading(self, sums: KvTransfers, now_s: float) -> TransferReading:
        n_bytes, seconds = 0, 0.0
        for each in reversed(self._buckets):
            if now_s - each.begun_s >= RECENT_S:
                break
            n_bytes += each.bytes
            seconds += each.seconds
        return TransferReading(
            reported=sums,
            recent_bytes_per_s=n_bytes / seconds if seconds > 0.0 else None,
            shown_bytes_per_s=None if self._shown is None else self._shown.bytes_per_s,
            is_slow=self._is_slow,
        )


def _since(before: KvTransfers, sums: KvTransfers) -> KvTransfers:
    """The difference of two sums; sums that fell are those of a restarted engine, and count in full."""
    has_restarted = (
        sums.transfers < before.transfers
        or sums.bytes < before.bytes
        or sums.seconds < before.seconds
        or sums.failed < before.failed
        or sums.tokens < before.tokens
    )
    if has_restarted:
        return sums
    return KvTransfers(
        transfers=sums.transfers - before.transfers,
        bytes=sums.bytes - before.bytes,
        seconds=sums.seconds - before.seconds,
        failed=sums.failed - before.failed,
        tokens=sums.tokens - before.tokens,
    )
