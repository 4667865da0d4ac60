"""The ledger of the native core."""

import numpy as np

from kvrouter._native import Ledger as _Ledger
from kvrouter.ledger.port import LedgerColumns


class Ledger(_Ledger):
    """Its columns as arrays that are views of the native memory."""

    __slots__ = ("_columns",)

    def __init__(self, n_slots: int = 64) -> None:  # noqa: ARG002 - what the native part is made with
        self._columns = self._take_columns()

    def ensure_slots(self, n_slots: int) -> bool:
        """Make room for ``n_slots`` slots. True when the columns are new: take them again."""
        is_new = super().ensure_slots(n_slots)
        if is_new:
            self._columns = self._take_columns()
        return is_new

    def columns(self) -> LedgerColumns:
        """The load by slot, to read in place."""
        return self._columns

    def _take_columns(self) -> LedgerColumns:
        return LedgerColumns(np.asarray(self.prefill_tokens), np.asarray(self.active_blocks))
