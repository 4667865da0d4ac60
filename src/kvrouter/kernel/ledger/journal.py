"""The journal of this router's leases, published to other replicas in messages of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from msgspec import structs

from kvrouter.core.events import HASH_BYTES, count_hashes
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, LeaseKey, RouterId, Slot
from kvrouter.core.replica_messages import (
    DELTAS_MAX,
    MESSAGE_BLOCKS_MAX,
    NAMED_BLOCKS_MAX,
    AddRequest,
    Delta,
    Deltas,
    Free,
    Heartbeat,
    LeaseName,
    MarkPrefillCompleted,
    OutputBlocks,
    StatePart,
)
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.ledger.port import BlocksColumn, Ledger, LedgerColumns

LEASES_MAX: Final = 65_536
"""The most leases that a router publishes. Further ones are not published, and are counted as ``untold``."""

PENDING_MAX: Final = 4_096
"""The most deltas that may be pending. Beyond it they are dropped with a message number: the other replicas
see the gap and ask for the state."""

Item = TypeVar("Item", bound=Delta)


class Journal:
    """This router's published open leases, and the deltas not yet published.

    ``on_pending`` is called when the first delta becomes pending.
    """

    def __init__(
        self,
        router_id: RouterId,
        *,
        on_pending: Callable[[], None],
        leases_max: int = LEASES_MAX,
        pending_max: int = PENDING_MAX,
    ) -> None:
        self.router_id = router_id
        self.untold = 0
        self.dropped = 0
        self._on_pending = on_pending
        self._leases_max = leases_max
        self._pending_max = pending_max
        self._leases: dict[LeaseName, AddRequest] = {}
        self._grown: dict[LeaseName, int] = {}
        self._pending: list[Delta] = []
        self._number = 0

    def __len__(self) -> int:
        """The number of open, published leases."""
        return len(self._leases)

    @property
    def is_full(self) -> bool:
        """Whether the limit of published leases is reached."""
        return len(self._leases) >= self._leases_max

    # Changes of leases

    def opened(self, request: AddRequest) -> bool:
        """Record a booked lease. Return False when the journal is full and does not publish it."""
        name = request.name
        if name not in self._leases and self.is_full:
            self.untold += 1
            return False
        self._leases[name] = request
        self._note(request)
        return True

    def moved(self, request: AddRequest) -> None:
        """Record that a lease moved to another rank, with its blocks of output."""
        old = self._leases[request.name]
        request = structs.replace(request, output_blocks=old.output_blocks)
        if request != old:
            self._leases[request.name] = request
            self._note(request)

    def prefill_completed(self, name: LeaseName) -> None:
        """Record that prefill is over, if the lease had any."""
        old = self._leases[name]
        if old.prefill_tokens:
            self._leases[name] = structs.replace(old, prefill_tokens=0)
            self._note(MarkPrefillCompleted(name))

    def grew(self, name: LeaseName, blocks: int) -> None:
        """Record further blocks full of output; the next heartbeat publishes one sum for each lease."""
        self._grown[name] = self._grown.get(name, 0) + blocks

    def ended(self, name: LeaseName) -> None:
        """Record that a lease was closed."""
        del self._leases[name]
        self._grown.pop(name, None)
        self._note(Free(name))

    def _note(self, delta: Delta) -> None:
        if len(self._pending) >= self._pending_max:
            self.dropped += len(self._pending)
            self._pending.clear()
            self._number += 1
        self._pending.append(delta)
        if len(self._pending) == 1:
            self._on_pending()

    # Messages

    def take(self) -> Iterator[Deltas]:
        """Yield the pending deltas as numbered messages; afterwards no delta is pending."""
        pending, self._pending = self._pending, []
        for piece in pieces(pending):
            self._number += 1
            yield Deltas(self.router_id, self._number, piece)

    def take_heartbeat(self) -> Iterator[Deltas | Heartbeat]:
        """Yield the pending deltas, with the growth of output, and then a heartbeat."""
        for name, blocks in self._grown.items():
            old = self._leases[name]
            new = structs.replace(old, output_blocks=old.output_blocks + blocks)
            self._leases[name] = new
            self._note(OutputBlocks(name, new.output_blocks))
        self._grown.clear()
        yield from self.take()
        yield Heartbeat(self.router_id, self._number, len(self._leases))

    def state(self) -> Iterator[StatePart]:
        """Return every open lease, in parts, as of the last taken message.

        Raises RuntimeError while deltas are pending, so that a number always identifies the same leases.
        """
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} deltas wait to be taken before the state")
        parts = tuple(pieces(self._leases.values())) or ((),)
        number = self._number
        return (
            StatePart(self.router_id, number, part, len(parts), leases) for part, leases in enumerate(parts)
        )


def pieces(items: Iterable[Item]) -> Iterator[tuple[Item, ...]]:
    """Split ``items``, in order, into pieces that fit into a message."""
    piece: list[Item] = []
    n_blocks = 0
    for item in items:
        named = count_hashes(item.block_hashes) if isinstance(item, AddRequest) else 0
        if len(piece) == DELTAS_MAX or (piece and n_blocks + named > MESSAGE_BLOCKS_MAX):
            yield tuple(piece)
            piece, n_blocks = [], 0
        piece.append(item)
        n_blocks += named
    if piece:
        yield tuple(piece)


class SharedLedger:
    """A ledger of one model that also records this router's leases in its journal.

    It implements :class:`kvrouter.kernel.ledger.port.Ledger`.
    """

    def __init__(self, ledger: Ledger, fleet: Fleet, journal: Journal) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._journal = journal
        self._published: dict[LeaseId, tuple[AddRequest, Slot]] = {}
        """The published open leases, as they were booked or last moved."""

    def ensure_slots(self, n_slots: int) -> bool:
        """Make room for ``n_slots`` slots. Return whether the columns were replaced."""
        return self._ledger.ensure_slots(n_slots)

    def columns(self) -> LedgerColumns:
        """Return the load by slot, as live arrays."""
        return self._ledger.columns()

    def not_active(self, prompt: Prompt, out: BlocksColumn, exclude: LeaseId | None = None) -> None:
        """Fill ``out``, by slot, with the number of the prompt's blocks that no other lease holds."""
        self._ledger.not_active(prompt, out, exclude)

    def find(self, key: LeaseKey) -> LeaseId | None:
        """Return the open lease with this key; None without one."""
        return self._ledger.find(key)

    def __len__(self) -> int:
        """The number of open leases, of all routers."""
        return len(self._ledger)

    def book(
        self, *, key: LeaseKey, slot: Slot, prompt: Prompt, prefill_tokens: int, track_blocks: bool = True
    ) -> LeaseId:
        """Open a lease, and publish it."""
        lease = self._ledger.book(
            key=key, slot=slot, prompt=prompt, prefill_tokens=prefill_tokens, track_blocks=track_blocks
        )
        card = self._fleet.card_at(slot)
        rank = self._fleet.rank_at(slot)
        if card is None or rank is None:  # the slot is free: other routers could not count the lease
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
            self._published[lease] = (request, slot)
        return lease

    def move(self, lease: LeaseId, slot: Slot, prefill_tokens: int) -> bool:
        """Move the lease, and publish the move if it changed the lease."""
        is_open = self._ledger.move(lease, slot, prefill_tokens)
        published = self._published.get(lease)
        if not is_open or published is None:
            return is_open
        card, rank = self._fleet.card_at(slot), self._fleet.rank_at(slot)
        if card is None or rank is None:
            self._forget(lease)
            return True
        old, _ = published
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
        self._published[lease] = (request, slot)
        self._journal.moved(request)
        return True

    def first_token(self, lease: LeaseId) -> bool:
        """End the lease's prefill, and publish that."""
        published = self._published.get(lease)
        if published is not None:
            self._journal.prefill_completed(published[0].name)
        return self._ledger.first_token(lease)

    def output_block(self, lease: LeaseId, n: int = 1) -> bool:
        """Add ``n`` blocks full of output; the next heartbeat publishes them."""
        published = self._published.get(lease)
        if published is not None and published[0].track_blocks:
            self._journal.grew(published[0].name, n)
        return self._ledger.output_block(lease, n)

    def close(self, lease: LeaseId) -> bool:
        """Close the lease, and publish that."""
        if lease in self._published:
            self._forget(lease)
        return self._ledger.close(lease)

    def drop_slot(self, slot: Slot) -> int:
        """Close all leases at the slot, of all routers, and publish the end of this router's."""
        for lease in [lease for lease, (_, leased) in self._published.items() if leased == slot]:
            self._forget(lease)
        return self._ledger.drop_slot(slot)

    def drop_router(self, router_id: RouterId) -> int:
        """Close all leases of one router incarnation, and publish that if they are this router's."""
        if router_id == self._journal.router_id:
            for lease in list(self._published):
                self._forget(lease)
        return self._ledger.drop_router(router_id)

    def _forget(self, lease: LeaseId) -> None:
        request, _ = self._published.pop(lease)
        self._journal.ended(request.name)
