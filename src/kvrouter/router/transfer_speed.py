"""The speed of KV transfers to worker ranks, by their engines' counts.

Engines count whole transfers, and what a few bytes cost is latency. So windows of transfers are compared: one
is slow when KV travels at less than a share of the speed that the rank has shown, *and* each transfer takes
so much longer than it did then. On a link of constant latency and bandwidth the second never comes with the
first, whatever sizes are carried: with mean size m, a transfer takes latency + m / bandwidth.
"""

from collections import deque
from typing import NamedTuple

from kvrouter.core.ids import Slot
from kvrouter.core.workers import KvTransfers

RECENT_S = 60.0
"""How long what was carried counts as recent."""

BUCKET_S = 5.0
"""What is carried within this time is kept as one sum."""

WINDOW_S = 10.0
"""A window of transfers lasts at least so long, and is dropped when :data:`RECENT_S` did not fill it."""

WINDOW_BYTES = 64 << 20
WINDOW_TRANSFERS = 4
"""What fills a window: less says nothing of the link."""

WINDOWS = 2
"""A speed is shown, or lost, by so many windows in a row."""

SLOW_SHARE = 0.25
"""Below this share of what was shown KV travels slow,"""

WELL_SHARE = 0.5
"""and at this share or above it is well again."""


class Speed(NamedTuple):
    """How fast KV travels: ``bytes_per_s`` in one transfer, which takes ``transfer_s`` on average."""

    bytes_per_s: float
    transfer_s: float

    def is_under(self, share: float, shown: "Speed") -> bool:
        """Whether this is less than ``share`` of ``shown``, and not because less was carried at a time."""
        return self.bytes_per_s < share * shown.bytes_per_s and share * self.transfer_s > shown.transfer_s


class SpeedVerdict(NamedTuple):
    """KV travels slow to a rank from now on, or no longer: the last window with what was shown before."""

    is_slow: bool
    now: Speed
    shown: Speed


class NotedTransfers(NamedTuple):
    """What a report brought: ``carried`` since the one before, and what changed."""

    carried: KvTransfers
    verdict: SpeedVerdict | None


class TransferReading(NamedTuple):
    """What is known of one rank: its engine's own sums, and speeds where there is enough to know them.

    ``recent_bytes_per_s`` is that of the last minute, ``shown_bytes_per_s`` the best that lasted.
    """

    reported: KvTransfers
    recent_bytes_per_s: float | None
    shown_bytes_per_s: float | None
    is_slow: bool


NOTHING = KvTransfers(0, 0, 0.0)


class TransferSpeeds:
    """Follows what engines report of the KV that they fetched. ``now_s`` is any clock that never goes back.

    Of each slot there are a few sums, however much is carried.
    """

    def __init__(self) -> None:
        self._ranks: dict[Slot, _Rank] = {}

    def note(self, slot: Slot, sums: KvTransfers | None, *, now_s: float) -> NotedTransfers | None:
        """An engine reported its sums, or that it has none yet; None where that is nothing new. Sums that
        are its first report may be of long ago, and count as nothing carried.
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
        """What is known of the slot's rank; None where its engine does not report it."""
        rank = self._ranks.get(slot)
        return None if rank is None or rank.sums is None else rank.reading(rank.sums, now_s)

    def freed(self, slot: Slot) -> None:
        """The slot's rank is gone."""
        self._ranks.pop(slot, None)


class _Sums:
    """What was carried from ``begun_s`` on."""

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
        """Note what was carried; return the verdict when it changes."""
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
    """What came between two sums; sums that became less are those of an engine that restarted."""
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
