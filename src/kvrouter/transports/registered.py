"""Entries of dictionaries that a caller can remove again: subscribers, recovery sources, followed workers."""

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def registered(entries: dict[K, V], key: K, value: V) -> Callable[[], None]:
    """Set ``entries[key]``; return the function that removes it, unless it was replaced. Idempotent."""
    entries[key] = value

    def remove() -> None:
        if entries.get(key) is value:
            del entries[key]

    return remove
