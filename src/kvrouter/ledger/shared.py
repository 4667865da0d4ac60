"""A ledger whose own leases other routers are told of."""

from kvrouter.core.columns import HASH_BYTES
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, LeaseKey, RouterId, Slot
from kvrouter.core.sync import NAMED_BLOCKS_MAX, AddRequest
from kvrouter.fleet import Fleet
from kvrouter.ledger.journal import Journal
from kvrouter.ledger.port import BlocksColumn, Ledger, LedgerColumns


class SharedLedger:
    """The ledger of one model, which writes what this router books into its journal.

    See :class:`kvrouter.ledger.port.Ledger` for what each call does.
    """

    def __init__(self, ledger: Ledger, fleet: Fleet, journal: Journal) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._journal = journal
        self._told: dict[LeaseId, tuple[AddRequest, Slot]] = {}
        """The open leases that others know, as they were booked or moved."""

    def ensure_slots(self, n_slots: int) -> bool:
        """Make room for ``n_slots`` slots. True when the columns are new: take them again."""
        return self._ledger.ensure_slots(n_slots)

    def columns(self) -> LedgerColumns:
        """The load by slot, to read in place."""
        return self._ledger.columns()

    def not_active(self, prompt: Prompt, out: BlocksColumn, exclude: LeaseId | None = None) -> None:
        """Fill ``out`` with the prompt's blocks that no lease but ``exclude`` holds at the slot yet."""
        self._ledger.not_active(prompt, out, exclude)

    def find(self, key: LeaseKey) -> LeaseId | None:
        """The open lease with this key."""
        return self._ledger.find(key)

    def __len__(self) -> int:
        """The number of open leases, those of other routers included."""
        return len(self._ledger)

    def book(
        self, *, key: LeaseKey, slot: Slot, prompt: Prompt, prefill_tokens: int, track_blocks: bool = True
    ) -> LeaseId:
        """Open a lease, and tell."""
        lease = self._ledger.book(
            key=key, slot=slot, prompt=prompt, prefill_tokens=prefill_tokens, track_blocks=track_blocks
        )
        card = self._fleet.card_at(slot)
        rank = self._fleet.rank_at(slot)
        if card is None or rank is None:  # nobody is there: nothing that another router could count
            return lease
        hashes = prompt.block_hashes[: HASH_BYTES * NAMED_BLOCKS_MAX] if track_blocks else b""
        request = AddRequest(
            model=self._fleet.model,
            request_id=key.request_id,
            leg_number=key.leg_number,
            rank=rank,
            incarnation=card.incarnation,
            isl_tokens=prompt.isl_tokens,
            block_hashes=hashes,
            prefill_tokens=prefill_tokens,
            track_blocks=track_blocks,
        )
        if self._journal.opened(request):
            self._told[lease] = (request, slot)
        return lease

    def move(self, lease: LeaseId, slot: Slot, prefill_tokens: int) -> bool:
        """Move the lease, and tell when that changed anything."""
        is_open = self._ledger.move(lease, slot, prefill_tokens)
        told = self._told.get(lease)
        if not is_open or told is None:
            return is_open
        card, rank = self._fleet.card_at(slot), self._fleet.rank_at(slot)
        if card is None or rank is None:
            self._forget(lease)
            return True
        old, _ = told
        request = AddRequest(
            model=old.model,
            request_id=old.request_id,
            leg_number=old.leg_number,
            rank=rank,
            incarnation=card.incarnation,
            isl_tokens=old.isl_tokens,
            block_hashes=old.block_hashes,
            prefill_tokens=prefill_tokens,
            track_blocks=old.track_blocks,
        )
        self._told[lease] = (request, slot)
        self._journal.moved(request)
        return True

    def first_token(self, lease: LeaseId) -> bool:
        """Prefill is over, and so others are told."""
        told = self._told.get(lease)
        if told is not None:
            self._journal.prefill_completed(told[0].name)
        return self._ledger.first_token(lease)

    def output_block(self, lease: LeaseId, n: int = 1) -> bool:
        """``n`` more blocks are full of output; others are told by and by."""
        told = self._told.get(lease)
        if told is not None and told[0].track_blocks:
            self._journal.grew(told[0].name, n)
        return self._ledger.output_block(lease, n)

    def close(self, lease: LeaseId) -> bool:
        """End the lease, and tell."""
        if lease in self._told:
            self._forget(lease)
        return self._ledger.close(lease)

    def drop_slot(self, slot: Slot) -> int:
        """Close all leases at the slot, whoever booked them, and tell of our own."""
        for lease in [lease for lease, (_, where) in self._told.items() if where == slot]:
            self._forget(lease)
        return self._ledger.drop_slot(slot)

    def drop_router(self, router_id: RouterId) -> int:
        """Close all leases of one router incarnation, and tell when they are our own."""
        if router_id == self._journal.router_id:
            for lease in list(self._told):
                self._forget(lease)
        return self._ledger.drop_router(router_id)

    def _forget(self, lease: LeaseId) -> None:
        request, _ = self._told.pop(lease)
        self._journal.ended(request.name)
