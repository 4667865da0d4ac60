"""Router replicas: books the leases that other routers publish in this router's ledgers."""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from msgspec import structs

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, LeaseId, LeaseKey, ModelName, RouterId, Slot, WorkerRank
from kvrouter.core.replica_messages import (
    AddRequest,
    Delta,
    Deltas,
    Free,
    Goodbye,
    Heartbeat,
    LeaseName,
    LinkUpdate,
    MarkPrefillCompleted,
    OutputBlocks,
    StatePart,
    StateQuestion,
    SyncMessage,
)
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.ledger.journal import LEASES_MAX, Journal, SharedLedger
from kvrouter.kernel.ledger.link_exchange import LinkExchange
from kvrouter.kernel.ledger.port import Ledger


class RemoteLease:
    """A lease of another router, whether or not its rank is in the fleet."""

    __slots__ = ("booked", "request", "router_id")

    def __init__(self, router_id: RouterId, request: AddRequest) -> None:
        self.router_id = router_id
        self.request = request
        """The lease's current state, with later deltas applied."""

        self.booked: LeaseId | None = None
        """The lease in this router's ledger; None while it is not booked."""


class RemoteLeases:
    """Books other routers' leases of one model in its ledger, at the slots of their ranks.

    A lease whose rank, in the same incarnation, is not in the fleet is kept unbooked until the rank joins.
    ``on_load_decrease`` is called after load decreased, ``before_load_increase``, with ``now_s``, before a
    booking.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        *,
        on_load_decrease: Callable[[], None],
        before_load_increase: Callable[[float], None],
    ) -> None:
        self.unusable = 0
        """The number of leases that could not be booked: another block size, or an invalid prompt."""

        self._fleet = fleet
        self._ledger = ledger
        self._on_load_decrease = on_load_decrease
        self._before_load_increase = before_load_increase
        self._at: dict[WorkerRank, dict[RemoteLease, None]] = {}
        self._locations: dict[WorkerRank, tuple[Slot, Epoch] | None] = {}
        self._is_less = False
        self._n_bookings = 0
        self.requests_per_s = 0.0
        """The recent rate at which other routers place requests."""

    def count_booking(self, request: AddRequest) -> None:
        """Count a received booking. A request counts once, by its decode or aggregated leg."""
        self._n_bookings += request.leg_number % 2

    def measure(self, elapsed_s: float) -> None:
        """Update the rate, ``elapsed_s`` after the last call; the previous rate has half of the weight."""
        if elapsed_s > 0.0:
            self.requests_per_s = (self.requests_per_s + self._n_bookings / elapsed_s) / 2.0
            self._n_bookings = 0

    def add(self, lease: RemoteLease, *, now_s: float) -> None:
        """Add a new lease, and book it if its rank is in the fleet."""
        rank = lease.request.rank
        leases = self._at.get(rank)
        if leases is None:
            leases = self._at[rank] = {}
            self._locations[rank] = self._find(rank)
        leases[lease] = None
        self._book(lease, self._locations[rank], now_s)

    def remove(self, lease: RemoteLease) -> None:
        """Remove a lease."""
        rank = lease.request.rank
        leases = self._at[rank]
        leases.pop(lease, None)
        if not leases:
            del self._at[rank], self._locations[rank]
        if lease.booked is not None:
            self._ledger.close(lease.booked)
            lease.booked = None
            self._is_less = True

    def prefill_completed(self, lease: RemoteLease) -> None:
        """End a lease's prefill."""
        if lease.booked is not None:
            self._ledger.first_token(lease.booked)
            self._is_less = True

    def grew(self, lease: RemoteLease, blocks: int, *, now_s: float) -> None:
        """Add blocks full of output to a lease."""
        if lease.booked is not None:
            self._before_load_increase(now_s)
            self._ledger.output_block(lease.booked, blocks)

    def fleet_changed(self, *, now_s: float) -> None:
        """Book or unbook leases whose ranks joined, changed or left."""
        for rank, leases in self._at.items():
            location = self._find(rank)
            if location == self._locations[rank]:
                continue
            self._locations[rank] = location
            for lease in leases:
                if lease.booked is not None:
                    self._ledger.close(lease.booked)
                    lease.booked = None
                self._book(lease, location, now_s)

    def notify(self) -> None:
        """Call ``on_load_decrease`` if load has decreased since the last call."""
        if self._is_less:
            self._is_less = False
            self._on_load_decrease()

    def _find(self, rank: WorkerRank) -> tuple[Slot, Epoch] | None:
        slot, card = self._fleet.slot_of(rank), self._fleet.card(rank.worker_id)
        return None if slot is None or card is None else (slot, card.incarnation)

    def _book(self, lease: RemoteLease, location: tuple[Slot, Epoch] | None, now_s: float) -> None:
        request = lease.request
        if location is None or location[1] != request.incarnation:
            return
        try:
            prompt = Prompt.from_blocks(
                request.block_hashes, isl_tokens=request.isl_tokens, block_size=self._fleet.block_size
            )
        except ValueError:
            self.unusable += 1
            return
        self._ledger.ensure_slots(self._fleet.n_slots)
        self._before_load_increase(now_s)
        lease.booked = self._ledger.book(
            key=LeaseKey(lease.router_id, request.request_id, request.leg_number),
            slot=location[0],
            prompt=prompt,
            prefill_tokens=request.prefill_tokens,
            track_blocks=request.track_blocks,
        )
        if request.output_blocks:
            self._ledger.output_block(lease.booked, request.output_blocks)


BACKLOG_MAX: Final = 256
"""The most messages that are kept behind a missing one. Beyond it they are dropped: the requested state
includes them."""


class ReplicaLeases:
    """The leases of one other router, of all models."""

    def __init__(self, router_id: RouterId, models: dict[ModelName, RemoteLeases], leases_max: int) -> None:
        self.over_limit = 0
        self._router_id = router_id
        self._models = models
        self._leases_max = leases_max
        self._by_name: dict[LeaseName, RemoteLease] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def apply(self, delta: Delta, *, now_s: float) -> None:
        """Apply a delta; a change of an unknown lease is ignored."""
        if isinstance(delta, AddRequest):
            self._add(delta, now_s)
            model = self._models.get(delta.model)
            if model is not None:
                model.count_booking(delta)
            return
        lease = self._by_name.get(delta.lease)
        if lease is None:
            return
        match delta:
            case Free():
                self._remove(delta.lease)
            case MarkPrefillCompleted():
                lease.request = structs.replace(lease.request, prefill_tokens=0)
                model = self._models.get(delta.lease.model)
                if model is not None:
                    model.prefill_completed(lease)
            case OutputBlocks(blocks=blocks) if blocks > lease.request.output_blocks:
                more = blocks - lease.request.output_blocks
                lease.request = structs.replace(lease.request, output_blocks=blocks)
                model = self._models.get(delta.lease.model)
                if model is not None:
                    model.grew(lease, more, now_s=now_s)

    def replace(self, leases: Iterable[AddRequest], *, now_s: float) -> None:
        """Replace all leases by these."""
        by_name = {request.name: request for request in leases}
        for name in [name for name in self._by_name if name not in by_name]:
            self._remove(name)
        for request in by_name.values():
            self._add(request, now_s)

    def clear(self) -> None:
        """Remove all leases."""
        for name in tuple(self._by_name):
            self._remove(name)

    def rebook(self, name: ModelName, model: RemoteLeases | None, *, now_s: float) -> None:
        """Book the model's leases in its new ledger; None: the model was removed."""
        for lease in self._by_name.values():
            if lease.request.model == name:
                lease.booked = None
                if model is not None:
                    model.add(lease, now_s=now_s)

    def _add(self, request: AddRequest, now_s: float) -> None:
        name = request.name
        old = self._by_name.get(name)
        if old is not None:
            if old.request == request:
                return
            self._remove(name)
        elif len(self._by_name) >= self._leases_max:
            self.over_limit += 1
            return
        lease = self._by_name[name] = RemoteLease(self._router_id, request)
        model = self._models.get(name.model)
        if model is not None:
            model.add(lease, now_s=now_s)

    def _remove(self, name: LeaseName) -> None:
        lease = self._by_name.pop(name)
        model = self._models.get(name.model)
        if model is not None:
            model.remove(lease)


class Replica:
    """Orders one router's messages, and asks for its state when one is missing; see :meth:`wants_state`.

    A new router held no leases before its first deltas, which have the number 1. Deltas behind a gap are not
    applied until the gap is closed or the state arrives.
    """

    def __init__(self, leases: ReplicaLeases, *, now_s: float, leases_max: int) -> None:
        self.leases = leases
        self.last_message_s = now_s
        self.duplicates = 0
        self.gaps = 0
        self._leases_max = leases_max
        self._next = 1
        self._latest = 0
        """The highest message number known to exist."""

        self._is_doubted = False
        self._backlog: dict[int, tuple[Delta, ...]] = {}
        self._asked_s: float | None = None
        self._parts: dict[int, tuple[AddRequest, ...]] = {}
        self._parts_number = -1

    @property
    def is_behind(self) -> bool:
        """Whether this router's leases may be incomplete here."""
        return self._next <= self._latest or self._is_doubted

    def wants_state(self, now_s: float, *, again_after_s: float) -> bool:
        """Whether to ask for the state now; True records that it was asked for."""
        if not self.is_behind:
            self._asked_s = None
            return False
        if self._asked_s is not None and now_s < self._asked_s + again_after_s:
            return False
        if self._asked_s is None:
            self.gaps += 1
        self._asked_s = now_s
        return True

    def on_deltas(self, message: Deltas, *, now_s: float) -> None:
        """Handle deltas, in any order."""
        number = message.number
        if number < self._next or number in self._backlog:
            self.duplicates += 1
            return
        self._latest = max(self._latest, number)
        self._backlog[number] = message.deltas
        self._drain(now_s)
        if len(self._backlog) > BACKLOG_MAX:
            self._backlog.clear()

    def on_heartbeat(self, message: Heartbeat) -> None:
        """Handle a heartbeat: compare its number and its count of leases."""
        self._latest = max(self._latest, message.number)
        if message.number == self._next - 1 and min(message.open_leases, self._leases_max) != len(
            self.leases
        ):
            self._is_doubted = True

    def on_state_part(self, message: StatePart, *, now_s: float) -> None:
        """Handle a part of the state, requested or not."""
        number = message.number
        if not self.is_behind or number < self._next - 1 or number < self._parts_number:
            return
        if number > self._parts_number:
            self._parts.clear()
            self._parts_number = number
        self._parts[message.part] = message.leases
        n_leases = sum(map(len, self._parts.values()))
        if n_leases > self._leases_max:
            self._parts.clear()
        if len(self._parts) < message.n_parts:
            return
        self.leases.replace((lease for part in self._parts.values() for lease in part), now_s=now_s)
        self._parts.clear()
        self._parts_number = -1
        self._is_doubted = False
        self._next = number + 1
        self._latest = max(self._latest, number)
        self._backlog = {later: deltas for later, deltas in self._backlog.items() if later > number}
        self._asked_s = None
        self._drain(now_s)

    def _drain(self, now_s: float) -> None:
        while self._next in self._backlog:
            for delta in self._backlog.pop(self._next):
                self.leases.apply(delta, now_s=now_s)
            self._next += 1


REPLICAS_MAX: Final = 64
"""The most other routers whose leases are booked. Messages of further routers are ignored and counted as
``unheard``."""

BOOKING_DELAY_S: Final = 0.004
"""The delay from another router's booking to its load here: batching, the network, and the event loops at
both ends. Half or twice as much works nearly as well."""

MODELS_MAX: Final = 1024
"""The most models with a ledger; beyond it, a model without workers is removed."""


class Asks(NamedTuple):
    """The messages to send: to ``ask`` routers for their state, and to ``answer`` routers with this one's."""

    ask: tuple[RouterId, ...] = ()
    answer: tuple[RouterId, ...] = ()


NOTHING: Final = Asks()


class Counts(NamedTuple):
    """Counts about the other routers."""

    replicas: int
    behind: int
    leases: int
    gaps: int
    duplicates: int
    lost: int
    """Routers that became silent; their leases were dropped."""

    over_limit: int
    """Leases that were not added: their router publishes too many."""

    unheard: int
    """Messages of routers beyond :data:`REPLICAS_MAX`."""

    unusable: int
    """Leases that cannot be booked: their block size differs, or their prompt is invalid."""


class Replicas:
    """Applies the messages of other routers, without a transport or a clock.

    A router that is silent for ``silent_after_s``, or says goodbye, is removed with all its leases. When it
    sends again, it is asked for its state. A booking of another router arrives after ``booking_delay_s``.
    """

    def __init__(
        self,
        router_id: RouterId,
        *,
        silent_after_s: float,
        ask_again_s: float,
        booking_delay_s: float = BOOKING_DELAY_S,
        replicas_max: int = REPLICAS_MAX,
        leases_max: int = LEASES_MAX,
    ) -> None:
        self._router_id = router_id
        self._silent_after_s = silent_after_s
        self._ask_again_s = ask_again_s
        self._booking_delay_s = booking_delay_s
        self._replicas_max = replicas_max
        self._leases_max = leases_max
        self._replicas: dict[RouterId, Replica] = {}
        self._leases: dict[RouterId, ReplicaLeases] = {}
        self._models: dict[ModelName, RemoteLeases] = {}
        self._fleets: dict[ModelName, Fleet] = {}
        self._past = Counts(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._ticked_s = 0.0
        self.links = LinkExchange(router_id)

    # Models

    def share(
        self,
        fleet: Fleet,
        ledger: Ledger,
        *,
        on_load_decrease: Callable[[], None],
        before_load_increase: Callable[[float], None],
        now_s: float,
    ) -> None:
        """Book other routers' leases of the fleet's model in this ledger, in place of an earlier one."""
        if fleet.model not in self._models and len(self._models) >= MODELS_MAX:
            self._forget_a_model(now_s)
        self._count_last(fleet.model)
        model = self._models[fleet.model] = RemoteLeases(
            fleet, ledger, on_load_decrease=on_load_decrease, before_load_increase=before_load_increase
        )
        self._fleets[fleet.model] = fleet
        for leases in self._leases.values():
            leases.rebook(fleet.model, model, now_s=now_s)

    def fleet_changed(self, name: ModelName, *, now_s: float) -> None:
        """Update a model's leases after a worker joined, changed or left."""
        model = self._models.get(name)
        if model is not None:
            model.fleet_changed(now_s=now_s)

    def unseen(self, name: ModelName) -> float:
        """Return the expected number of the model's requests that others have placed and not reported yet."""
        model = self._models.get(name)
        return 0.0 if model is None else model.requests_per_s * self._booking_delay_s

    def _forget_a_model(self, now_s: float) -> None:
        for name, fleet in self._fleets.items():
            if not len(fleet):
                for leases in self._leases.values():
                    leases.rebook(name, None, now_s=now_s)
                self._count_last(name)
                self.links.forget(name)
                del self._fleets[name], self._models[name]
                return

    def _count_last(self, name: ModelName) -> None:
        """Add the counts of a model's leases to the past counts, before they are replaced."""
        model = self._models.get(name)
        if model is not None:
            self._past = self._past._replace(unusable=self._past.unusable + model.unusable)

    # Routers

    def on_message(self, message: SyncMessage, *, now_s: float) -> Asks:
        """Handle a message of replica sync."""
        router_id = message.router_id
        if router_id == self._router_id:
            return NOTHING
        if isinstance(message, Goodbye):
            self._drop(router_id)
            self._notify()
            return NOTHING
        replica = self._replicas.get(router_id) or self._add_replica(router_id, now_s)
        if replica is None:
            return NOTHING
        replica.last_message_s = now_s
        match message:
            case Deltas():
                replica.on_deltas(message, now_s=now_s)
            case Heartbeat():
                replica.on_heartbeat(message)
            case StatePart():
                replica.on_state_part(message, now_s=now_s)
            case LinkUpdate():
                self.links.on_link_update(message, now_s=now_s)
                return NOTHING
            case StateQuestion():
                return Asks(answer=(router_id,))
        self._notify()
        if replica.wants_state(now_s, again_after_s=self._ask_again_s):
            return Asks(ask=(router_id,))
        return NOTHING

    def tick(self, *, now_s: float) -> Asks:
        """Remove silent routers, and ask again for states that did not arrive.

        After a pause of this process no router counts as silent: its messages are still unread.
        """
        elapsed_s = now_s - self._ticked_s
        for model in self._models.values():
            model.measure(elapsed_s)
        if elapsed_s > self._silent_after_s / 2:
            for replica in self._replicas.values():
                replica.last_message_s = now_s
        self._ticked_s = now_s
        for router_id, replica in tuple(self._replicas.items()):
            if now_s - replica.last_message_s > self._silent_after_s:
                self._drop(router_id)
                self._past = self._past._replace(lost=self._past.lost + 1)
        self._notify()
        return Asks(
            ask=tuple(
                router_id
                for router_id, replica in self._replicas.items()
                if replica.wants_state(now_s, again_after_s=self._ask_again_s)
            )
        )

    def drop_all(self) -> None:
        """Remove every router and its leases."""
        for router_id in tuple(self._replicas):
            self._drop(router_id)
        self._notify()

    def counts(self) -> Counts:
        """Return current sizes, and totals since the start."""
        replicas = self._replicas.values()
        return Counts(
            replicas=len(replicas),
            behind=sum(replica.is_behind for replica in replicas),
            leases=sum(map(len, self._leases.values())),
            gaps=self._past.gaps + sum(replica.gaps for replica in replicas),
            duplicates=self._past.duplicates + sum(replica.duplicates for replica in replicas),
            lost=self._past.lost,
            over_limit=self._past.over_limit + sum(leases.over_limit for leases in self._leases.values()),
            unheard=self._past.unheard,
            unusable=self._past.unusable + sum(model.unusable for model in self._models.values()),
        )

    def _add_replica(self, router_id: RouterId, now_s: float) -> Replica | None:
        if len(self._replicas) >= self._replicas_max:
            self._past = self._past._replace(unheard=self._past.unheard + 1)
            return None
        leases = self._leases[router_id] = ReplicaLeases(router_id, self._models, self._leases_max)
        replica = self._replicas[router_id] = Replica(leases, now_s=now_s, leases_max=self._leases_max)
        return replica

    def _drop(self, router_id: RouterId) -> None:
        replica = self._replicas.pop(router_id, None)
        if replica is None:
            return
        leases = self._leases.pop(router_id)
        leases.clear()
        self.links.router_gone(router_id)
        past = self._past
        self._past = past._replace(
            gaps=past.gaps + replica.gaps,
            duplicates=past.duplicates + replica.duplicates,
            over_limit=past.over_limit + leases.over_limit,
        )

    def _notify(self) -> None:
        for model in self._models.values():
            model.notify()


class Replication(NamedTuple):
    """One router's state in replica sync, without a transport: its own leases, and those of other routers."""

    journal: Journal
    replicas: Replicas

    def share(
        self,
        fleet: Fleet,
        ledger: Ledger,
        *,
        on_load_decrease: Callable[[], None],
        before_load_increase: Callable[[float], None],
        now_s: float,
    ) -> SharedLedger:
        """Return a model's ledger that publishes its bookings and includes other routers' leases.

        ``on_load_decrease()`` is called after the load of these leases decreased,
        ``before_load_increase(now_s)`` before it increases.
        """
        self.replicas.share(
            fleet,
            ledger,
            on_load_decrease=on_load_decrease,
            before_load_increase=before_load_increase,
            now_s=now_s,
        )
        return SharedLedger(ledger, fleet, self.journal)
