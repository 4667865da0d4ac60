"""The pairs of workers that cannot hand KV on at present."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvrouter.core.ids import WorkerId


class Pair(NamedTuple):
    """A prefill worker, and a decode worker that its KV goes to."""

    prefill: WorkerId
    decode: WorkerId


class PartedPairs:
    """Prefill workers, and the decode workers that their KV does not reach."""

    def __init__(self) -> None:
        self._of: dict[WorkerId, set[WorkerId]] = {}
        self.whole_failed = False
        """Whether one worker alone failed with the last request that it was given because every pair was
        parted: then pairs are the better try, for as long as any is parted.
        """

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Pair]:
        return (Pair(prefill, decode) for prefill, decodes in self._of.items() for decode in decodes)

    def senders(self) -> Iterable[WorkerId]:
        """Return the prefill workers whose KV does not reach somebody."""
        return self._of.keys()

    def of(self, prefill: WorkerId) -> frozenset[WorkerId]:
        """Return the decode workers that KV of this prefill worker does not reach."""
        return frozenset(self._of.get(prefill, ()))

    def put(self, prefill: WorkerId, decode: WorkerId, is_parted: bool) -> bool:
        """Note it; return whether it is news."""
        decodes = self._of.get(prefill, set())
        if (decode in decodes) == is_parted:
            return False
        if is_parted:
            self._of.setdefault(prefill, set()).add(decode)
        else:
            decodes.discard(decode)
            if not decodes:
                del self._of[prefill]
                self.whole_failed = self.whole_failed and bool(self._of)
        return True
