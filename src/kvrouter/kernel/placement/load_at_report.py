"""The ledger's load at the time of each rank's latest load report: any excess was booked afterwards."""

from typing import Final

import numpy as np

from kvrouter.core.ids import Slot
from kvrouter.kernel.ledger.port import CountColumn, LedgerColumns
from kvrouter.kernel.routing.interface import RoutingSettings

REPORT_AGE_S: Final = 0.1
"""The greatest age of a load report on arrival: its delay from the engine, and a request's delay to it."""


class LoadAtReport:
    """The ledger's load by slot, as the latest report of each rank may have found it.

    Reports have no timestamp comparable with this router's clock. A report may have been taken at any time in
    the last :data:`REPORT_AGE_S` before it arrived, so it is assumed to include the minimum that the ledger
    held in that time: a booking that it may not include counts in addition until the next report. A lease
    that ended in that time is not subtracted from the report.

    Call :meth:`update` before each booking, and :meth:`reported` when a report arrives. Both cost a few
    operations on columns.
    """

    def __init__(self, columns: LedgerColumns, *, now_s: float) -> None:
        self._read_s = self._turned_s = now_s
        self._tokens = _Minima(columns.prefill_tokens)
        self._blocks = _Minima(columns.active_blocks)

    def prefill_tokens(self, n_slots: int) -> CountColumn:
        """Return the prefill tokens by slot at its latest report."""
        return self._tokens.at_report[:n_slots]

    def active_blocks(self, n_slots: int) -> CountColumn:
        """Return the active blocks by slot at its latest report."""
        return self._blocks.at_report[:n_slots]

    def update(self, columns: LedgerColumns, *, now_s: float) -> None:
        """Read the ledger's current load, before a booking or at a report."""
        if now_s - self._turned_s >= REPORT_AGE_S:
            # Without bookings since the last reading, the current load was there all the time since then.
            is_quiet = now_s - self._read_s >= REPORT_AGE_S
            self._tokens.turn(columns.prefill_tokens, is_quiet=is_quiet)
            self._blocks.turn(columns.active_blocks, is_quiet=is_quiet)
            self._turned_s = now_s
        else:
            self._tokens.update(columns.prefill_tokens)
            self._blocks.update(columns.active_blocks)
        self._read_s = now_s

    def reported(self, slot: Slot, columns: LedgerColumns, *, now_s: float) -> None:
        """Handle a load report of the rank at ``slot``."""
        self.update(columns, now_s=now_s)
        self._tokens.reported(slot)
        self._blocks.reported(slot)


def load_at_report(settings: RoutingSettings, columns: LedgerColumns, *, now_s: float) -> LoadAtReport | None:
    """Return the tracker of the load at reports; None when no busy threshold is set."""
    thresholds = settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold
    return None if thresholds == (None, None) else LoadAtReport(columns, now_s=now_s)


class _Minima:
    """The minimum of a column in the current and in the previous interval, and at the latest reports."""

    __slots__ = ("_before", "_now", "at_report")

    def __init__(self, column: CountColumn) -> None:
        self._now, self._before, self.at_report = column.copy(), column.copy(), column.copy()

    def update(self, column: CountColumn) -> None:
        if len(column) > len(self._now):
            self._grow(column)
        np.minimum(self._now, column, out=self._now)

    def turn(self, column: CountColumn, *, is_quiet: bool) -> None:
        if len(column) > len(self._now):
            self._grow(column)
        self._before = column.copy() if is_quiet else np.minimum(self._now, column)
        self._now = column.copy()

    def reported(self, slot: Slot) -> None:
        self.at_report[slot] = min(self._now[slot], self._before[slot])

    def _grow(self, column: CountColumn) -> None:
        """Extend the arrays for new slots, with their current load."""
        self._now, self._before, self.at_report = (
            np.concatenate((old, column[len(old) :])) for old in (self._now, self._before, self.at_report)
        )
