"""A budget of bytes that several holders share: when it is full the largest one is shed."""

from typing import Protocol

__all__ = ["ByteBudget", "ByteHolder"]


class ByteHolder(Protocol):
    """What holds bytes of a budget."""

    def shed(self) -> None:
        """Drop the bytes: the budget is full, and this holder has most of them."""


class ByteBudget:
    """A budget of ``bytes_max``. When it is full the largest holder is shed, so that small ones go on.

    The largest is searched for among all holders, which takes time in proportion to their number, but only
    when the budget is full, and each search frees at least an equal share of it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held_bytes: dict[ByteHolder, int] = {}
        self.bytes = 0
        """What all holders have now."""

    def hold(self, holder: ByteHolder, n_bytes: int) -> None:
        """``holder`` has so many bytes now, 0 when it is done with them."""
        self.bytes += n_bytes - self._held_bytes.pop(holder, 0)
        if n_bytes:
            self._held_bytes[holder] = n_bytes
        while self.bytes > self._bytes_max:
            largest = max(self._held_bytes, key=self._held_bytes.__getitem__)
            self.bytes -= self._held_bytes.pop(largest)
            largest.shed()
