"""The ledger: the load of each slot as the sum of open leases; the port, and the native one."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvrouter._native import Ledger as _Ledger
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, LeaseKey, RequestId, RouterId, Slot

CountColumn = npt.NDArray[np.int64]
"""One count for each slot; read-only."""

BlocksColumn = npt.NDArray[np.uint32]
"""One number of blocks for each slot."""


class LeaseExists(Exception):
    """An open lease has this key; its fields are the key's."""

    def __init__(self, router_id: str, request_id: str, leg_number: int) -> None:
        super().__init__(f"leg {leg_number} of request {request_id!r} is booked by router {router_id!r}")
        self.key = LeaseKey(RouterId(router_id), RequestId(request_id), leg_number)


class LedgerColumns(NamedTuple):
    """The ledger's load by slot. The arrays show every later change, until ``ensure_slots`` grows them.

    ``requests`` counts open leases, ``waiting`` those whose first token has not come.
    """

    prefill_tokens: CountColumn
    active_blocks: CountColumn
    requests: CountColumn
    waiting: CountColumn


class Ledger(Protocol):
    """Active prefill tokens, active blocks and requests of each slot, as the sum of open leases.

    A block that several requests hold at a slot counts once; a partial tail and a full block of output are
    one each, unshared. Calls for a lease that is not open change nothing and return False.
    """

    def ensure_slots(self, n_slots: int) -> bool:
        """Make room for ``n_slots`` slots. True when the columns are new: take them again."""

    def columns(self) -> LedgerColumns:
        """The load by slot, to read in place."""

    def book(
        self, *, key: LeaseKey, slot: Slot, prompt: Prompt, prefill_tokens: int, track_blocks: bool = True
    ) -> LeaseId:
        """Open a lease: ``prefill_tokens`` of prefill and, if ``track_blocks``, the prompt's blocks.

        Raises LeaseExists, or ValueError for a slot beyond ``ensure_slots``.
        """

    def find(self, key: LeaseKey) -> LeaseId | None:
        """The open lease with this key."""

    def first_token(self, lease: LeaseId) -> bool:
        """Prefill is over: its tokens are no load any more, and the request waits no longer."""

    def output_block(self, lease: LeaseId, n: int = 1) -> bool:
        """``n`` more blocks are full of output."""

    def close(self, lease: LeaseId) -> bool:
        """End the lease."""

    def move(self, lease: LeaseId, slot: Slot, prefill_tokens: int) -> bool:
        """Move the lease and all its blocks to another slot, with ``prefill_tokens`` to do there.

        Raises ValueError for a slot beyond ``ensure_slots``; the lease stays where it is.
        """

    def not_active(self, prompt: Prompt, out: BlocksColumn, exclude: LeaseId | None = None) -> None:
        """Fill ``out`` with the prompt's blocks, the partial tail included, that no lease holds at the slot
        yet.

        ``exclude`` counts as closed. ``out`` may be shorter or longer than the columns.
        """

    def drop_slot(self, slot: Slot) -> int:
        """Close all leases at the slot; return how many."""

    def drop_router(self, router_id: RouterId) -> int:
        """Close all leases of one router incarnation, such as a replica that is gone; return how many."""

    def __len__(self) -> int:
        """The number of open leases."""


class NativeLedger(_Ledger):
    """The ledger of the native core; its columns are arrays that are views of the native memory."""

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
        return LedgerColumns(
            prefill_tokens=np.asarray(self.prefill_tokens),
            active_blocks=np.asarray(self.active_blocks),
            requests=np.asarray(self.requests),
            waiting=np.asarray(self.waiting),
        )
