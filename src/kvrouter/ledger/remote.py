"""What other routers' requests load one model's ranks with."""

from collections.abc import Callable

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, LeaseId, LeaseKey, RouterId, Slot, WorkerRank
from kvrouter.core.sync import AddRequest
from kvrouter.fleet import Fleet
from kvrouter.ledger.port import Ledger


class RemoteLease:
    """A lease of another router, whether its rank is here or not."""

    __slots__ = ("booked", "request", "router_id")

    def __init__(self, router_id: RouterId, request: AddRequest) -> None:
        self.router_id = router_id
        self.request = request
        """As it is now: what came after it is in it."""

        self.booked: LeaseId | None = None
        """Its number in the ledger; None while its rank is not here."""


class RemoteLeases:
    """Books other routers' leases of one model in its ledger, at the slots that their ranks have here.

    A lease whose rank is not here, or is another incarnation of its worker, is kept unbooked: it counts from
    the moment its rank joins. ``on_less`` is told when load went away, ``before_more`` when more is about to
    be booked.
    """

    def __init__(
        self, fleet: Fleet, ledger: Ledger, *, on_less: Callable[[], None], before_more: Callable[[], None]
    ) -> None:
        self.unusable = 0
        """Leases that could not be booked: another block size, or no such prompt."""

        self._fleet = fleet
        self._ledger = ledger
        self._on_less = on_less
        self._before_more = before_more
        self._at: dict[WorkerRank, set[RemoteLease]] = {}
        self._where: dict[WorkerRank, tuple[Slot, Epoch] | None] = {}
        self._is_less = False
        self._heard = 0
        self.requests_per_s = 0.0
        """How many requests others place a second, of late."""

    def heard(self, request: AddRequest) -> None:
        """A booking was heard of just now. A request counts once, by its decode or aggregated leg."""
        self._heard += request.leg_number % 2

    def measure(self, elapsed_s: float) -> None:
        """So much time passed since the last measure; the one before counts for half of the new one."""
        if elapsed_s > 0.0:
            self.requests_per_s = (self.requests_per_s + self._heard / elapsed_s) / 2.0
            self._heard = 0

    def add(self, lease: RemoteLease) -> None:
        """Take in a lease that is not here yet."""
        rank = lease.request.rank
        leases = self._at.get(rank)
        if leases is None:
            leases = self._at[rank] = set()
            self._where[rank] = self._find(rank)
        leases.add(lease)
        self._book(lease, self._where[rank])

    def remove(self, lease: RemoteLease) -> None:
        """Let go of a lease."""
        rank = lease.request.rank
        leases = self._at[rank]
        leases.discard(lease)
        if not leases:
            del self._at[rank], self._where[rank]
        if lease.booked is not None:
            self._ledger.close(lease.booked)
            lease.booked = None
            self._is_less = True

    def prefill_completed(self, lease: RemoteLease) -> None:
        """Prefill is over."""
        if lease.booked is not None:
            self._ledger.first_token(lease.booked)
            self._is_less = True

    def grew(self, lease: RemoteLease, blocks: int) -> None:
        """So many more blocks are full of output."""
        if lease.booked is not None:
            self._before_more()
            self._ledger.output_block(lease.booked, blocks)

    def fleet_changed(self) -> None:
        """A worker came, changed or left: its leases count from now on, or no more."""
        for rank, leases in self._at.items():
            where = self._find(rank)
            if where == self._where[rank]:
                continue
            self._where[rank] = where
            for lease in leases:
                if lease.booked is not None:
                    self._ledger.close(lease.booked)
                    lease.booked = None
                self._book(lease, where)

    def tell(self) -> None:
        """Say so when there is less load than before."""
        if self._is_less:
            self._is_less = False
            self._on_less()

    def _find(self, rank: WorkerRank) -> tuple[Slot, Epoch] | None:
        slot, card = self._fleet.slot_of(rank), self._fleet.card(rank.worker_id)
        return None if slot is None or card is None else (slot, card.incarnation)

    def _book(self, lease: RemoteLease, where: tuple[Slot, Epoch] | None) -> None:
        request = lease.request
        if where is None or where[1] != request.incarnation:
            return
        try:
            prompt = Prompt.from_blocks(
                request.block_hashes, isl_tokens=request.isl_tokens, block_size=self._fleet.block_size
            )
        except ValueError:
            self.unusable += 1
            return
        self._ledger.ensure_slots(self._fleet.n_slots)
        self._before_more()
        lease.booked = self._ledger.book(
            key=LeaseKey(lease.router_id, request.request_id, request.leg_number),
            slot=where[0],
            prompt=prompt,
            prefill_tokens=request.prefill_tokens,
            track_blocks=request.track_blocks,
        )
        if request.output_blocks:
            self._ledger.output_block(lease.booked, request.output_blocks)
