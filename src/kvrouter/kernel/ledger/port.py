"""The ledger: the load of each slot as the sum of open leases; the port and the native implementation."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvrouter._native import Ledger as _Ledger
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, LeaseKey, RequestId, RouterId, Slot

CountColumn = npt.NDArray[np.int64]
"""One count for each slot; read-only."""

BlocksColumn = npt.NDArray[np.uint32]
"""A number of blocks for each slot."""


class LeaseExists(Exception):
    """A lease with this key is already open."""

    def __init__(self, router_id: str, request_id: str, leg_number: int) -> None:
        super().__init__(f"leg {leg_number} of request {request_id!r} is booked by router {router_id!r}")
        self.key = LeaseKey(RouterId(router_id), RequestId(request_id), leg_number)


class LedgerColumns(NamedTuple):
    """The ledger's load by slot, as live arrays, which show later changes until ``ensure_slots`` replaces
    them.

    ``requests`` counts open leases, ``waiting`` those without a first token.
    """

    prefill_tokens: CountColumn
    active_blocks: CountColumn
    requests: CountColumn
    waiting: CountColumn

    def first(self, n_slots: int) -> "LedgerColumns":
        """Return the first ``n_slots`` entries of each."""
        return LedgerColumns(*(column[:n_slots] for column in self))


class Ledger(Protocol):
    """Active prefill tokens, active blocks and requests of each slot, as the sum of open leases.

    A block that several requests hold at a slot counts once; a partial tail and a full block of output count
    once for each request. Calls for a lease that is not open have no effect and return False.
    """

    def ensure_slots(self, n_slots: int) -> bool:
        """Make room for ``n_slots`` slots. Return whether the columns were replaced: fetch them again."""

    def columns(self) -> LedgerColumns:
        """Return the load by slot, as live arrays."""

    def book(
        self, *, key: LeaseKey, slot: Slot, prompt: Prompt, prefill_tokens: int, track_blocks: bool = True
    ) -> LeaseId:
        """Open a lease with ``prefill_tokens`` and, if ``track_blocks``, the prompt's blocks.

        Raises LeaseExists, or ValueError for a slot beyond ``ensure_slots``.
        """

    def find(self, key: LeaseKey) -> LeaseId | None:
        """Return the open lease with this key; None without one."""

    def first_token(self, lease: LeaseId) -> bool:
        """End the lease's prefill: its tokens, and the request as a waiting one, no longer count."""

    def output_block(self, lease: LeaseId, n: int = 1) -> bool:
        """Add ``n`` blocks full of output."""

    def close(self, lease: LeaseId) -> bool:
        """Close the lease."""

    def move(self, lease: LeaseId, slot: Slot, prefill_tokens: int) -> bool:
        """Move the lease and all its blocks to another slot, where ``prefill_tokens`` remain.

        Raises ValueError for a slot beyond ``ensure_slots``; the lease is then unchanged.
        """

    def not_active(self, prompt: Prompt, out: BlocksColumn, exclude: LeaseId | None = None) -> None:
        """Fill ``out`` with the number of the prompt's blocks, the partial tail included, that no lease holds
        at the slot.

        ``exclude`` counts as closed. ``out`` may be shorter or longer than the columns.
        """

    def drop_slot(self, slot: Slot) -> int:
        """Close all leases at the slot; return their number."""

    def drop_router(self, router_id: RouterId) -> int:
        """Close all leases of one router incarnation, such as a lost replica; return their number."""

    def __len__(self) -> int:
        """The number of open leases."""


class NativeLedger(_Ledger):
    """The native ledger; its columns are views of native memory."""

    __slots__ = ("_columns",)

    def __init__(self, n_slots: int = 64) -> None:  # noqa: ARG002 - an argument of the native constructor
        self._columns = self._take_columns()

    def ensure_slots(self, n_slots: int) -> bool:
        """Make room for ``n_slots`` slots. Return whether the columns were replaced: fetch them again."""
        is_new = super().ensure_slots(n_slots)
        if is_new:
            self._columns = self._take_columns()
        return is_new

    def columns(self) -> LedgerColumns:
        """Return the load by slot, as live arrays."""
        return self._columns

    def _take_columns(self) -> LedgerColumns:
        return LedgerColumns(
            prefill_tokens=np.asarray(self.prefill_tokens),
            active_blocks=np.asarray(self.active_blocks),
            requests=np.asarray(self.requests),
            waiting=np.asarray(self.waiting),
        )
