"""Unauthenticated connections of a listener: at most so many, and the oldest is dropped for a new one."""

from collections.abc import Callable
from typing import Generic, TypeVar

HELLO_WITHIN_S = 5.0
"""How long a connection has to show the token."""

T = TypeVar("T")

UNAUTHENTICATED_MAX = 128
"""How many connections of a listener may not have shown the token yet: with it that takes milliseconds."""


class UnauthenticatedConnections(Generic[T]):
    """The connections in the order of their arrival; ``drop`` ends one, ``on_dropped`` is told why."""

    def __init__(self, drop: Callable[[T], None], *, at_most: int, on_dropped: Callable[[str], None]) -> None:
        self._drop = drop
        self._at_most = at_most
        self._on_dropped = on_dropped
        self._since_s: dict[T, float] = {}

    def add(self, connection: T, *, now_s: float) -> None:
        """Add a connection; where it is one too many, the oldest is dropped."""
        self._since_s[connection] = now_s
        if len(self._since_s) > self._at_most:
            oldest = next(iter(self._since_s))
            del self._since_s[oldest]
            self._on_dropped(
                f"{self._at_most} connections have not said who they are: the oldest are dropped"
            )
            self._drop(oldest)

    def discard(self, connection: T) -> None:
        """The connection is authenticated now, or closed."""
        self._since_s.pop(connection, None)

    def older_than(self, then_s: float) -> list[T]:
        """The connections that were added before ``then_s``."""
        return [connection for connection, since_s in self._since_s.items() if since_s < then_s]
