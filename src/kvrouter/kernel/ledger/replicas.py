"""The other router replicas, and their leases in this router's ledgers."""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from msgspec import structs

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, LeaseId, LeaseKey, ModelName, RouterId, Slot, WorkerRank
from kvrouter.core.sync import (
    AddRequest,
    Delta,
    Deltas,
    Free,
    Goodbye,
    Heartbeat,
    LeaseName,
    LinkNews,
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
    the moment its rank joins. ``on_less`` is called when load went away, ``before_more``, with the moment,
    when more is about to be booked.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        *,
        on_less: Callable[[], None],
        before_more: Callable[[float], None],
    ) -> None:
        self.unusable = 0
        """Leases that could not be booked: another block size, or no such prompt."""

        self._fleet = fleet
        self._ledger = ledger
        self._on_less = on_less
        self._before_more = before_more
        self._at: dict[WorkerRank, dict[RemoteLease, None]] = {}
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

    def add(self, lease: RemoteLease, *, now_s: float) -> None:
        """Take in a lease that is not here yet."""
        rank = lease.request.rank
        leases = self._at.get(rank)
        if leases is None:
            leases = self._at[rank] = {}
            self._where[rank] = self._find(rank)
        leases[lease] = None
        self._book(lease, self._where[rank], now_s)

    def remove(self, lease: RemoteLease) -> None:
        """Remove a lease."""
        rank = lease.request.rank
        leases = self._at[rank]
        leases.pop(lease, None)
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

    def grew(self, lease: RemoteLease, blocks: int, *, now_s: float) -> None:
        """So many more blocks are full of output."""
        if lease.booked is not None:
            self._before_more(now_s)
            self._ledger.output_block(lease.booked, blocks)

    def fleet_changed(self, *, now_s: float) -> None:
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
                self._book(lease, where, now_s)

    def notify(self) -> None:
        """Call ``on_less`` when there is less load than before."""
        if self._is_less:
            self._is_less = False
            self._on_less()

    def _find(self, rank: WorkerRank) -> tuple[Slot, Epoch] | None:
        slot, card = self._fleet.slot_of(rank), self._fleet.card(rank.worker_id)
        return None if slot is None or card is None else (slot, card.incarnation)

    def _book(self, lease: RemoteLease, where: tuple[Slot, Epoch] | None, now_s: float) -> None:
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
        self._before_more(now_s)
        lease.booked = self._ledger.book(
            key=LeaseKey(lease.router_id, request.request_id, request.leg_number),
            slot=where[0],
            prompt=prompt,
            prefill_tokens=request.prefill_tokens,
            track_blocks=request.track_blocks,
        )
        if request.output_blocks:
            self._ledger.output_block(lease.booked, request.output_blocks)


BACKLOG_MAX: Final = 256
"""How many messages are kept that follow a missing one. When there are more they are dropped: the state that
was asked for has them."""


class ReplicaLeases:
    """The leases of one other router over all models, as they are booked here."""

    def __init__(self, router_id: RouterId, models: dict[ModelName, RemoteLeases], leases_max: int) -> None:
        self.over_limit = 0
        self._router_id = router_id
        self._models = models
        self._leases_max = leases_max
        self._by_name: dict[LeaseName, RemoteLease] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def apply(self, delta: Delta, *, now_s: float) -> None:
        """One of them changed; of one that is not known nothing is left to change."""
        if isinstance(delta, AddRequest):
            self._add(delta, now_s)
            model = self._models.get(delta.model)
            if model is not None:
                model.heard(delta)
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
        """These are all of them."""
        by_name = {request.name: request for request in leases}
        for name in [name for name in self._by_name if name not in by_name]:
            self._remove(name)
        for request in by_name.values():
            self._add(request, now_s)

    def clear(self) -> None:
        """There are none any more."""
        for name in tuple(self._by_name):
            self._remove(name)

    def rebook(self, name: ModelName, model: RemoteLeases | None, *, now_s: float) -> None:
        """The model has another ledger now, or none."""
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
    """Puts one router's messages in order. What was missed is asked for as a whole; see :meth:`wants_state`.

    A router that was never heard of held nothing before its first deltas, which have the number 1. While it
    is behind, nothing is applied: deltas that follow a gap wait for it to be closed, or for the state.
    """

    def __init__(self, leases: ReplicaLeases, *, now_s: float, leases_max: int) -> None:
        self.leases = leases
        self.heard_s = now_s
        self.duplicates = 0
        self.gaps = 0
        self._leases_max = leases_max
        self._next = 1
        self._latest = 0
        """The highest number that is known to exist."""

        self._is_doubted = False
        self._backlog: dict[int, tuple[Delta, ...]] = {}
        self._asked_s: float | None = None
        self._parts: dict[int, tuple[AddRequest, ...]] = {}
        self._parts_number = -1

    @property
    def is_behind(self) -> bool:
        """Whether something of this router's leases is not known here."""
        return self._next <= self._latest or self._is_doubted

    def wants_state(self, now_s: float, *, again_after_s: float) -> bool:
        """Whether to ask now; asking is taken for done."""
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
        """Deltas came, in whatever order."""
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
        """It lives, and says how far it is."""
        self._latest = max(self._latest, message.number)
        if message.number == self._next - 1 and min(message.open_leases, self._leases_max) != len(
            self.leases
        ):
            self._is_doubted = True

    def on_state_part(self, message: StatePart, *, now_s: float) -> None:
        """A part of its leases came, asked for or not."""
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
"""How many other routers are listened to. What those beyond say is counted as ``unheard``: their load
is not seen."""

NEWS_AGE_S: Final = 0.004
"""How long a booking of another router takes to be load here: the wait for others to travel with, the way,
and the loops at both ends. Half or twice as much does nearly as well."""

MODELS_MAX: Final = 1024
"""How many models' ledgers are kept; beyond them, models whose workers all left are forgotten."""


class Asks(NamedTuple):
    """What a message, or time, calls for: whom to ask for its state, and whom to give this router's own."""

    ask: tuple[RouterId, ...] = ()
    answer: tuple[RouterId, ...] = ()


NOTHING: Final = Asks()


class Counts(NamedTuple):
    """The figures about the other routers."""

    replicas: int
    behind: int
    leases: int
    gaps: int
    duplicates: int
    lost: int
    """Routers that fell silent; their leases were dropped."""

    over_limit: int
    """Leases that were not taken in: their router publishes too many."""

    unheard: int
    """Messages of routers beyond those that are listened to."""

    unusable: int
    """Leases that cannot be load here: their block size, or their prompt, is another."""


class Replicas:
    """Takes in what other routers publish; knows no wire and no clock.

    A router that is silent for ``silent_after_s``, or says goodbye, is forgotten with all its leases. When it
    is heard again it is asked for everything. A booking of another router is heard of after ``news_age_s``
    seconds.
    """

    def __init__(
        self,
        router_id: RouterId,
        *,
        silent_after_s: float,
        ask_again_s: float,
        news_age_s: float = NEWS_AGE_S,
        replicas_max: int = REPLICAS_MAX,
        leases_max: int = LEASES_MAX,
    ) -> None:
        self._router_id = router_id
        self._silent_after_s = silent_after_s
        self._ask_again_s = ask_again_s
        self._news_age_s = news_age_s
        self._replicas_max = replicas_max
        self._leases_max = leases_max
        self._replicas: dict[RouterId, Replica] = {}
        self._leases: dict[RouterId, ReplicaLeases] = {}
        self._models: dict[ModelName, RemoteLeases] = {}
        self._fleets: dict[ModelName, Fleet] = {}
        self._gone = Counts(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._ticked_s = 0.0
        self.links = LinkExchange(router_id)

    # Models

    def share(
        self,
        fleet: Fleet,
        ledger: Ledger,
        *,
        on_less: Callable[[], None],
        before_more: Callable[[float], None],
        now_s: float,
    ) -> None:
        """Book from now on in this ledger what others run of the fleet's model. An earlier one is let be."""
        if fleet.model not in self._models and len(self._models) >= MODELS_MAX:
            self._forget_a_model(now_s)
        self._count_last(fleet.model)
        model = self._models[fleet.model] = RemoteLeases(
            fleet, ledger, on_less=on_less, before_more=before_more
        )
        self._fleets[fleet.model] = fleet
        for leases in self._leases.values():
            leases.rebook(fleet.model, model, now_s=now_s)

    def fleet_changed(self, name: ModelName, *, now_s: float) -> None:
        """A worker of the model came, changed or left."""
        model = self._models.get(name)
        if model is not None:
            model.fleet_changed(now_s=now_s)

    def unseen(self, name: ModelName) -> float:
        """How many requests of the model others have placed that are not heard of yet, as expected."""
        model = self._models.get(name)
        return 0.0 if model is None else model.requests_per_s * self._news_age_s

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
        """Keep what a model's leases counted, before others take their place."""
        model = self._models.get(name)
        if model is not None:
            self._gone = self._gone._replace(unusable=self._gone.unusable + model.unusable)

    # Routers

    def on_message(self, message: SyncMessage, *, now_s: float) -> Asks:
        """Take in what came."""
        router_id = message.router_id
        if router_id == self._router_id:
            return NOTHING
        if isinstance(message, Goodbye):
            self._drop(router_id)
            self._tell()
            return NOTHING
        replica = self._replicas.get(router_id) or self._meet(router_id, now_s)
        if replica is None:
            return NOTHING
        replica.heard_s = now_s
        match message:
            case Deltas():
                replica.on_deltas(message, now_s=now_s)
            case Heartbeat():
                replica.on_heartbeat(message)
            case StatePart():
                replica.on_state_part(message, now_s=now_s)
            case LinkNews():
                self.links.on_news(message, now_s=now_s)
                return NOTHING
            case StateQuestion():
                return Asks(answer=(router_id,))
        self._tell()
        if replica.wants_state(now_s, again_after_s=self._ask_again_s):
            return Asks(ask=(router_id,))
        return NOTHING

    def tick(self, *, now_s: float) -> Asks:
        """Time passed: forget who is silent, ask again where nothing came.

        After a pause of this process nobody is taken for silent: what they said waits to be read.
        """
        elapsed_s = now_s - self._ticked_s
        for model in self._models.values():
            model.measure(elapsed_s)
        if elapsed_s > self._silent_after_s / 2:
            for replica in self._replicas.values():
                replica.heard_s = now_s
        self._ticked_s = now_s
        for router_id, replica in tuple(self._replicas.items()):
            if now_s - replica.heard_s > self._silent_after_s:
                self._drop(router_id)
                self._gone = self._gone._replace(lost=self._gone.lost + 1)
        self._tell()
        return Asks(
            ask=tuple(
                router_id
                for router_id, replica in self._replicas.items()
                if replica.wants_state(now_s, again_after_s=self._ask_again_s)
            )
        )

    def drop_all(self) -> None:
        """Forget every router and its leases."""
        for router_id in tuple(self._replicas):
            self._drop(router_id)
        self._tell()

    def counts(self) -> Counts:
        """Sizes now, and what happened since the start."""
        replicas = self._replicas.values()
        return Counts(
            replicas=len(replicas),
            behind=sum(replica.is_behind for replica in replicas),
            leases=sum(map(len, self._leases.values())),
            gaps=self._gone.gaps + sum(replica.gaps for replica in replicas),
            duplicates=self._gone.duplicates + sum(replica.duplicates for replica in replicas),
            lost=self._gone.lost,
            over_limit=self._gone.over_limit + sum(leases.over_limit for leases in self._leases.values()),
            unheard=self._gone.unheard,
            unusable=self._gone.unusable + sum(model.unusable for model in self._models.values()),
        )

    def _meet(self, router_id: RouterId, now_s: float) -> Replica | None:
        if len(self._replicas) >= self._replicas_max:
            self._gone = self._gone._replace(unheard=self._gone.unheard + 1)
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
        gone = self._gone
        self._gone = gone._replace(
            gaps=gone.gaps + replica.gaps,
            duplicates=gone.duplicates + replica.duplicates,
            over_limit=gone.over_limit + leases.over_limit,
        )

    def _tell(self) -> None:
        for model in self._models.values():
            model.notify()


class Replication(NamedTuple):
    """One router's part in replica sync, without the wire: what it publishes, and what it has heard."""

    journal: Journal
    replicas: Replicas

    def share(
        self,
        fleet: Fleet,
        ledger: Ledger,
        *,
        on_less: Callable[[], None],
        before_more: Callable[[float], None],
        now_s: float,
    ) -> SharedLedger:
        """Return the ledger that a model books in from now on: others hear of it, and it counts theirs.

        ``on_less`` is called when load of theirs went away, ``before_more``, with the moment, when more is
        about to be booked.
        """
        self.replicas.share(fleet, ledger, on_less=on_less, before_more=before_more, now_s=now_s)
        return SharedLedger(ledger, fleet, self.journal)
