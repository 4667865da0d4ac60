"""The ledger's load at the time of each rank's latest load report: any excess was booked afterwards."""

from typing import Final

import numpy as np

from kvrouter.core.ids import Slot
from kvrouter.kernel.ledger.port import CountColumn, LedgerColumns
from kvrouter.kernel.routing.request import RoutingSettings

REPORT_AGE_S: Final = 0.1
"""How old a load report may be when it comes: its way from the engine, and a request's way to it."""


class LoadAtReport:
    """The ledger's load by slot, as the latest report of each may have found it.

    A report has no time that could be compared with this router's clock. It may have been taken at any
    moment of the last :data:`REPORT_AGE_S` before it came, so the least that the ledger held in that time is
    taken for what it has seen: a booking that it may not have seen counts in addition, for as long as no
    later report comes. One that ended in that time counts for no less than it would by any moment.

    :meth:`look` before anything is booked, and :meth:`reported` when a report comes. Both cost a few
    operations on columns.
    """

    def __init__(self, columns: LedgerColumns, *, now_s: float) -> None:
        self._read_s = self._turned_s = now_s
        self._tokens = _Lows(columns.prefill_tokens)
        self._blocks = _Lows(columns.active_blocks)

    def prefill_tokens(self, n_slots: int) -> CountColumn:
        """Prefill tokens by slot when its latest report was taken."""
        return self._tokens.at_report[:n_slots]

    def active_blocks(self, n_slots: int) -> CountColumn:
        """Active blocks by slot when its latest report was taken."""
        return self._blocks.at_report[:n_slots]

    def look(self, columns: LedgerColumns, *, now_s: float) -> None:
        """Take in what the ledger holds now: something is about to be booked, or a report came."""
        if now_s - self._turned_s >= REPORT_AGE_S:
            # Nothing was booked since the last reading: what is held now was there all the time since then.
            is_quiet = now_s - self._read_s >= REPORT_AGE_S
            self._tokens.turn(columns.prefill_tokens, is_quiet=is_quiet)
            self._blocks.turn(columns.active_blocks, is_quiet=is_quiet)
            self._turned_s = now_s
        else:
            self._tokens.look(columns.prefill_tokens)
            self._blocks.look(columns.active_blocks)
        self._read_s = now_s

    def reported(self, slot: Slot, columns: LedgerColumns, *, now_s: float) -> None:
        """A load report of the rank at ``slot`` came."""
        self.look(columns, now_s=now_s)
        self._tokens.reported(slot)
        self._blocks.reported(slot)


def load_at_report(settings: RoutingSettings, columns: LedgerColumns, *, now_s: float) -> LoadAtReport | None:
    """Return what keeps the load that reports have found; None where no threshold makes a worker busy."""
    thresholds = settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold
    return None if thresholds == (None, None) else LoadAtReport(columns, now_s=now_s)


class _Lows:
    """The least of a column in the running interval and in the one before it, and what reports found."""

    __slots__ = ("_before", "_now", "at_report")

    def __init__(self, held: CountColumn) -> None:
        self._now, self._before, self.at_report = held.copy(), held.copy(), held.copy()

    def look(self, held: CountColumn) -> None:
        if len(held) > len(self._now):
            self._grow(held)
        np.minimum(self._now, held, out=self._now)

    def turn(self, held: CountColumn, *, is_quiet: bool) -> None:
        if len(held) > len(self._now):
            self._grow(held)
        self._before = held.copy() if is_quiet else np.minimum(self._now, held)
        self._now = held.copy()

    def reported(self, slot: Slot) -> None:
        self.at_report[slot] = min(self._now[slot], self._before[slot])

    def _grow(self, held: CountColumn) -> None:
        """Slots that are new hold what they hold."""
        self._now, self._before, self.at_report = (
            np.concatenate((old, held[len(old) :])) for old in (self._now, self._before, self.at_report)
        )
