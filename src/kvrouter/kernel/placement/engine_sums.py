"""Compares the engines' own totals of fetched KV with the router's measurements of links.

The time from the end of a prefill to the first token includes the transfer and every other wait of the
request. Engines count the transfer alone. Over the ranks whose engines report it::

    ratio = (seconds per byte, as the router measures) / (seconds per byte, as engines count)

of the last minutes; the learned constant time of each transfer is subtracted first. If both are high, links
are slow; if the ratio is above :data:`AGREE`, something else delays the first tokens of requests whose KV has
arrived. This affects no decision: a first token that waits is late, whatever delays it.
"""

from typing import NamedTuple

from kvrouter.core.ids import Slot

HALF_S = 60.0
"""The half-life of a transfer's weight."""

AGREE = 2.0
"""The largest ratio at which both are considered to agree."""

TRANSFERS_MIN = 8.0
"""The least number of transfers on either side for a comparison."""


class SumsReading(NamedTuple):
    """The engines' and the router's bandwidth of the same ranks' transfers."""

    bandwidth_bytes_per_s: float
    """By the engines' totals: bytes over the sum of the transfers' seconds."""
    seen_bytes_per_s: float
    ratio: float
    agree: bool


class EngineSums:
    """The totals of one model's decode ranks. ``now_s`` is seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._counted = _Sums()
        self._observed = _Sums()
        self._slots: set[Slot] = set()

    def reported(self, slot: Slot, *, transfers: int, kv_bytes: int, seconds: float, now_s: float) -> None:
        """Add the KV that the slot's engine fetched since its last report."""
        self._slots.add(slot)
        if transfers > 0:
            self._counted.add(float(transfers), float(kv_bytes), seconds, now_s)

    def observed(self, slot: Slot, *, kv_bytes: float, seconds: float, now_s: float) -> None:
        """Add a transfer to the slot's rank, as the router measured it."""
        if slot in self._slots:
            self._observed.add(1.0, kv_bytes, seconds, now_s)

    def freed(self, slot: Slot) -> None:
        """Remove the slot's rank."""
        self._slots.discard(slot)

    def reading(self) -> SumsReading | None:
        """Return the comparison; None with too few transfers, or when no engine reports them."""
        counted, observed = self._counted, self._observed
        if (
            min(counted.transfers, observed.transfers) < TRANSFERS_MIN
            or min(counted.bytes, observed.bytes) <= 0.0
        ):
            return None
        if min(counted.seconds, observed.seconds) <= 0.0:
            return None
        counted_rate, seen_rate = counted.bytes / counted.seconds, observed.bytes / observed.seconds
        ratio = counted_rate / seen_rate
        return SumsReading(counted_rate, seen_rate, ratio, ratio <= AGREE)


class _Sums:
    """Sums in which older entries have less weight."""

    __slots__ = ("_at_s", "bytes", "seconds", "transfers")

    def __init__(self) -> None:
        self.transfers = self.bytes = self.seconds = self._at_s = 0.0

    def add(self, transfers: float, kv_bytes: float, seconds: float, now_s: float) -> None:
        kept = 2.0 ** -(max(0.0, now_s - self._at_s) / HALF_S)
        self._at_s = now_s
        self.transfers = kept * self.transfers + transfers
        self.bytes = kept * self.bytes + kv_bytes
        self.seconds = kept * self.seconds + seconds
