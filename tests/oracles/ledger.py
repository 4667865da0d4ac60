"""The ledger as a dict of leases, summed up again for each question: what the native one has to equal."""

from dataclasses import dataclass

import numpy as np

from kvrouter.core.events import unpack_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, LeaseKey, RouterId, Slot
from kvrouter.kernel.ledger.port import BlocksColumn, LeaseExists, LedgerColumns


@dataclass
class _Lease:
    key: LeaseKey
    slot: Slot
    prompt: Prompt
    prefill_tokens: int
    track_blocks: bool
    output_blocks: int = 0
    waits: bool = True

    @property
    def sequences(self) -> set[int]:
        return set(unpack_hashes(self.prompt.sequence_hashes)) if self.track_blocks else set()

    @property
    def own_blocks(self) -> int:
        if not self.track_blocks:
            return 0
        return self.prompt.total_blocks - self.prompt.n_blocks + self.output_blocks


class NaiveLedger:
    """Load by slot; see :class:`kvrouter.kernel.ledger.port.Ledger`."""

    def __init__(self, n_slots: int = 64) -> None:
        self._leases: dict[LeaseId, _Lease] = {}
        self._n_booked = 0
        self._columns = _zeros(n_slots)

    def ensure_slots(self, n_slots: int) -> bool:
        """Make room for ``n_slots`` slots."""
        if n_slots <= len(self._columns.active_blocks):
            return False
        self._columns = _zeros(n_slots)
        self._sum_up()
        return True

    def columns(self) -> LedgerColumns:
        """The load by slot, to read in place."""
        return self._columns

    def _sum_up(self) -> None:
        for column in self._columns:
            column[:] = 0
        held: dict[Slot, set[int]] = {}
        for lease in self._leases.values():
            self._columns.prefill_tokens[lease.slot] += lease.prefill_tokens
            self._columns.active_blocks[lease.slot] += lease.own_blocks
            self._columns.requests[lease.slot] += 1
            self._columns.waiting[lease.slot] += lease.waits
            held.setdefault(lease.slot, set()).update(lease.sequences)
        for slot, sequences in held.items():
            self._columns.active_blocks[slot] += len(sequences)

    def _check(self, slot: Slot, prefill_tokens: int) -> None:
        if not 0 <= slot < len(self._columns.active_blocks):
            raise ValueError(f"slot: within the slots that there is room for, not {slot}")
        if prefill_tokens < 0:
            raise ValueError(f"prefill_tokens: 0 or more, not {prefill_tokens}")

    def book(
        self, *, key: LeaseKey, slot: Slot, prompt: Prompt, prefill_tokens: int, track_blocks: bool = True
    ) -> LeaseId:
        """Open a lease."""
        self._check(slot, prefill_tokens)
        if self.find(key) is not None:
            raise LeaseExists(*key)
        self._n_booked += 1
        lease = LeaseId(self._n_booked)
        self._leases[lease] = _Lease(key, slot, prompt, prefill_tokens, track_blocks)
        self._sum_up()
        return lease

    def find(self, key: LeaseKey) -> LeaseId | None:
        """The open lease with this key."""
        return next((number for number, lease in self._leases.items() if lease.key == key), None)

    def first_token(self, lease: LeaseId) -> bool:
        """Prefill is over."""
        if lease in self._leases:
            self._leases[lease].prefill_tokens = 0
            self._leases[lease].waits = False
            self._sum_up()
        return lease in self._leases

    def output_block(self, lease: LeaseId, n: int = 1) -> bool:
        """``n`` more blocks are full of output."""
        if lease in self._leases:
            self._leases[lease].output_blocks += n
            self._sum_up()
        return lease in self._leases

    def close(self, lease: LeaseId) -> bool:
        """End the lease."""
        closed = self._leases.pop(lease, None) is not None
        self._sum_up()
        return closed

    def move(self, lease: LeaseId, slot: Slot, prefill_tokens: int) -> bool:
        """Move the lease to another slot."""
        self._check(slot, prefill_tokens)
        if lease not in self._leases:
            return False
        self._leases[lease].slot = slot
        self._leases[lease].prefill_tokens = prefill_tokens
        self._sum_up()
        return True

    def not_active(self, prompt: Prompt, out: BlocksColumn, exclude: LeaseId | None = None) -> None:
        """Fill ``out`` with the prompt's blocks that no lease but ``exclude`` holds at the slot yet."""
        sequences = set(unpack_hashes(prompt.sequence_hashes))
        for slot in range(len(out)):
            held: set[int] = set()
            for number, lease in self._leases.items():
                if lease.slot == slot and number != exclude:
                    held |= lease.sequences
            out[slot] = prompt.total_blocks - len(sequences & held)

    def drop_slot(self, slot: Slot) -> int:
        """Close all leases at the slot; return how many."""
        return self._close({number for number, lease in self._leases.items() if lease.slot == slot})

    def drop_router(self, router_id: RouterId) -> int:
        """Close all leases of one router incarnation; return how many."""
        return self._close({n for n, lease in self._leases.items() if lease.key.router_id == router_id})

    def _close(self, leases: set[LeaseId]) -> int:
        return sum(self.close(lease) for lease in leases)

    def __len__(self) -> int:
        """The number of open leases."""
        return len(self._leases)


def _zeros(n_slots: int) -> LedgerColumns:
    return LedgerColumns(*(np.zeros(n_slots, np.int64) for _ in LedgerColumns._fields))
