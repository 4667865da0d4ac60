"""A budget of bytes that several holders share; when it is exceeded, the largest holder is shed."""

from typing import Protocol

__all__ = ["ByteBudget", "ByteHolder"]


class ByteHolder(Protocol):
    """A holder of bytes of a budget."""

    def shed(self) -> None:
        """Drop the bytes: the budget is exceeded, and this holder has the most."""


class ByteBudget:
    """A budget of ``bytes_max``. When it is exceeded, the largest holder is shed, so that small ones
    continue.

    Finding the largest holder takes time in proportion to the number of holders, but happens only when the
    budget is exceeded, and each search frees at least an equal share of it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held_bytes: dict[ByteHolder, int] = {}
        self.bytes = 0
        """The bytes of all holders."""

    def hold(self, holder: ByteHolder, n_bytes: int) -> None:
        """Set the bytes of ``holder``; 0 when it has released them."""
        self.bytes += n_bytes - self._held_bytes.pop(holder, 0)
        if n_bytes:
            self._held_bytes[holder] = n_bytes
        while self.bytes > self._bytes_max:
            largest = max(self._held_bytes, key=self._held_bytes.__getitem__)
            self.bytes -= self._held_bytes.pop(largest)
            largest.shed()
