"""How an engine tells what its cache does: each way has listeners of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvrouter.core.ids import DpRank
from kvrouter.engines.customs.words import Skipped
from kvrouter.engines.port import EventsSink

OnChange = Callable[[str], None]
"""Hears in words what was lost, refused or began anew."""


class Listener(Protocol):
    """Hears one engine's KV events from :meth:`start` to :meth:`stop`."""

    @property
    def is_partial(self) -> bool:
        """Whether events were missed: more blocks may be held than are known."""

    def skipped(self, dp_rank: DpRank) -> Mapping[Skipped, int]:
        """Counts of what was not passed on of a rank, since its engine began."""

    def start(self) -> None:
        """Begin; what was told before is asked for, where the engine still has it."""

    def stop(self) -> None:
        """Listen no more. Idempotent."""


class Telling(Protocol):
    """One engine's way to tell."""

    def listeners(self, on_events: EventsSink, on_change: OnChange) -> Sequence[Listener]:
        """Return what hears it, not started yet; none where it tells nothing."""
