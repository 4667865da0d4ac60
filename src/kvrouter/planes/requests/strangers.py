"""Connections that have not said who they are: a small budget of their own, in which the oldest make room."""

from collections.abc import Callable
from typing import Generic, TypeVar

HELLO_WITHIN_S = 5.0
"""How long a connection has to say who it is."""

T = TypeVar("T")

STRANGERS_MAX = 128
"""How many connections of a listener may not have said who they are. Whoever has the token says so in
milliseconds.
"""


class Strangers(Generic[T]):
    """The connections in the order of their arrival; ``drop`` ends one, ``on_dropped`` is told why."""

    def __init__(self, drop: Callable[[T], None], *, at_most: int, on_dropped: Callable[[str], None]) -> None:
        self._drop = drop
        self._at_most = at_most
        self._on_dropped = on_dropped
        self._waiting: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, connection: T) -> bool:
        return connection in self._waiting

    def add(self, connection: T) -> None:
        """A connection came; where it is one too many, the one that has been silent for longest goes."""
        self._waiting[connection] = None
        if len(self._waiting) > self._at_most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._on_dropped(
                f"{self._at_most} connections have not said who they are: the oldest are dropped"
            )
            self._drop(oldest)

    def discard(self, connection: T) -> None:
        """The connection is known now, or gone."""
        self._waiting.pop(connection, None)
