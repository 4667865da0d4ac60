"""Engines' own sums of the KV that they fetched, as a check of what the router sees of links.

What passes from the end of a prefill to the first token holds the transfer and all else that a request waits
for meanwhile. Engines count the transfer alone. Over the ranks whose engines report it::

    ratio = (seconds a byte, as the router saw them) / (seconds a byte, as engines count them)

of the last minutes; what is learned to pass with every transfer, no matter how much is moved, is taken off
before. Links themselves are slow where both say so; where the ratio is above
:data:`AGREE`, something else holds up the first tokens of requests whose KV is there. It changes no choice:
a first token that waits is late, whatever holds it up.
"""

from typing import NamedTuple

from kvrouter.core.ids import Slot

HALF_S = 60.0
"""What was so long ago counts half."""

AGREE = 2.0
"""Both agree where the router saw at most so many times what engines count."""

TRANSFERS_MIN = 8.0
"""Fewer on either side say nothing."""


class SumsReading(NamedTuple):
    """What engines count, and the router saw, of the same ranks' transfers."""

    bandwidth_bytes_per_s: float
    """By the engines' sums: bytes over the seconds that transfers took, each for itself."""
    seen_bytes_per_s: float
    ratio: float
    agree: bool


class EngineSums:
    """The sums of one model's decode ranks. ``now_s`` is a moment of one monotonic clock."""

    def __init__(self) -> None:
        self._counted = _Sums()
        self._seen = _Sums()
        self._slots: set[Slot] = set()

    def reported(self, slot: Slot, *, transfers: int, kv_bytes: int, seconds: float, now_s: float) -> None:
        """The engine of the slot's rank fetched so much since its last report."""
        self._slots.add(slot)
        if transfers > 0:
            self._counted.add(float(transfers), float(kv_bytes), seconds, now_s)

    def saw(self, slot: Slot, *, kv_bytes: float, seconds: float, now_s: float) -> None:
        """A transfer to that rank took so long, as far as the router sees."""
        if slot in self._slots:
            self._seen.add(1.0, kv_bytes, seconds, now_s)

    def freed(self, slot: Slot) -> None:
        """The slot's rank is gone."""
        self._slots.discard(slot)

    def reading(self) -> SumsReading | None:
        """What both say; None where too little was carried, or no engine reports it."""
        counted, seen = self._counted, self._seen
        if min(counted.transfers, seen.transfers) < TRANSFERS_MIN or min(counted.bytes, seen.bytes) <= 0.0:
            return None
        if min(counted.seconds, seen.seconds) <= 0.0:
            return None
        counted_rate, seen_rate = counted.bytes / counted.seconds, seen.bytes / seen.seconds
        ratio = counted_rate / seen_rate
        return SumsReading(counted_rate, seen_rate, ratio, ratio <= AGREE)


class _Sums:
    """Sums in which what is old counts less."""

    __slots__ = ("_at_s", "bytes", "seconds", "transfers")

    def __init__(self) -> None:
        self.transfers = self.bytes = self.seconds = self._at_s = 0.0

    def add(self, transfers: float, kv_bytes: float, seconds: float, now_s: float) -> None:
        kept = 2.0 ** -(max(0.0, now_s - self._at_s) / HALF_S)
        self._at_s = now_s
        self.transfers = kept * self.transfers + transfers
        self.bytes = kept * self.bytes + kv_bytes
        self.seconds = kept * self.seconds + seconds
