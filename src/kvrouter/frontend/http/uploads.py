"""The budget of uploads: the bytes of requests that no handler has yet, over all connections of a server."""

from typing import Protocol

__all__ = ["Upload", "Uploads"]


class Upload(Protocol):
    """One connection with a body that has not reached its handler."""

    def shed_upload(self) -> None:
        """Refuse the request and drop its bytes: the budget is full, and this one holds most of it."""


class Uploads:
    """A budget of ``bytes_max``. When it is full the largest upload is shed, so that small ones go on.

    The largest is looked for among those that wait, which takes time in proportion to their number, but only
    when the budget is full, and each search frees at least an equal share of it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held_bytes: dict[Upload, int] = {}
        self.bytes = 0
        """What all uploads hold now."""

    def hold(self, upload: Upload, n_bytes: int) -> None:
        """``upload`` holds so many bytes now, 0 when it is complete or given up."""
        self.bytes += n_bytes - self._held_bytes.pop(upload, 0)
        if n_bytes:
            self._held_bytes[upload] = n_bytes
        while self.bytes > self._bytes_max:
            largest = max(self._held_bytes, key=self._held_bytes.__getitem__)
            self.bytes -= self._held_bytes.pop(largest)
            largest.shed_upload()
