"""All other routers, and their leases in the ledgers of this one."""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from msgspec import structs

from kvrouter.core.ids import ModelName, RouterId
from kvrouter.core.sync import (
    AddRequest,
    Delta,
    Deltas,
    Free,
    Goodbye,
    Heartbeat,
    LeaseName,
    MarkPrefillCompleted,
    OutputBlocks,
    StatePart,
    StateQuestion,
    SyncMessage,
)
from kvrouter.fleet import Fleet
from kvrouter.ledger.journal import LEASES_MAX
from kvrouter.ledger.port import Ledger
from kvrouter.ledger.remote import RemoteLease, RemoteLeases
from kvrouter.ledger.replica import Replica

REPLICAS_MAX: Final = 64
"""How many other routers are listened to. What those beyond say is counted as ``unheard``: their load
is not seen."""

MODELS_MAX: Final = 1024
"""How many models' ledgers are kept; beyond them, models whose workers all left are forgotten."""


class Asks(NamedTuple):
    """What a message, or time, calls for: whom to ask for its state, and whom to give this router's own."""

    ask: tuple[RouterId, ...] = ()
    answer: tuple[RouterId, ...] = ()


NOTHING: Final = Asks()


class Counts(NamedTuple):
    """What there is to tell of the other routers."""

    replicas: int
    behind: int
    leases: int
    gaps: int
    duplicates: int
    lost: int
    """Routers that fell silent; their leases were dropped."""

    over_limit: int
    """Leases that were not taken in: their router tells of too many."""

    unheard: int
    """Messages of routers beyond those that are listened to."""

    unusable: int
    """Leases that cannot be load here: their block size, or their prompt, is another."""


class Replicas:
    """Takes in what other routers tell; knows no wire and no clock.

    A router that is silent for ``silent_after_s``, or says goodbye, is forgotten with all its leases. When it
    is heard again it is asked for everything.
    """

    def __init__(
        self,
        router_id: RouterId,
        *,
        silent_after_s: float,
        ask_again_s: float,
        replicas_max: int = REPLICAS_MAX,
        leases_max: int = LEASES_MAX,
    ) -> None:
        self._router_id = router_id
        self._silent_after_s = silent_after_s
        self._ask_again_s = ask_again_s
        self._replicas_max = replicas_max
        self._leases_max = leases_max
        self._replicas: dict[RouterId, Replica] = {}
        self._leases: dict[RouterId, _Leases] = {}
        self._models: dict[ModelName, RemoteLeases] = {}
        self._fleets: dict[ModelName, Fleet] = {}
        self._gone = Counts(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._ticked_s = 0.0

    # Models

    def share(
        self, fleet: Fleet, ledger: Ledger, *, on_less: Callable[[], None], before_more: Callable[[], None]
    ) -> None:
        """Book from now on in this ledger what others run of the fleet's model. An earlier one is let be."""
        if fleet.model not in self._models and len(self._models) >= MODELS_MAX:
            self._forget_a_model()
        self._count_last(fleet.model)
        model = self._models[fleet.model] = RemoteLeases(
            fleet, ledger, on_less=on_less, before_more=before_more
        )
        self._fleets[fleet.model] = fleet
        for leases in self._leases.values():
            leases.rebook(fleet.model, model)

    def fleet_changed(self, name: ModelName) -> None:
        """A worker of the model came, changed or left."""
        model = self._models.get(name)
        if model is not None:
            model.fleet_changed()

    def requests_per_s(self, name: ModelName) -> float:
        """How many requests of the model others have placed a second, of late."""
        model = self._models.get(name)
        return 0.0 if model is None else model.requests_per_s

    def _forget_a_model(self) -> None:
        for name, fleet in self._fleets.items():
            if not len(fleet):
                for leases in self._leases.values():
                    leases.rebook(name, None)
                self._count_last(name)
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
                replica.on_deltas(message)
            case Heartbeat():
                replica.on_heartbeat(message)
            case StatePart():
                replica.on_state_part(message)
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
        leases = self._leases[router_id] = _Leases(router_id, self._models, self._leases_max)
        replica = self._replicas[router_id] = Replica(leases, now_s=now_s, leases_max=self._leases_max)
        return replica

    def _drop(self, router_id: RouterId) -> None:
        replica = self._replicas.pop(router_id, None)
        if replica is None:
            return
        leases = self._leases.pop(router_id)
        leases.replace(())
        gone = self._gone
        self._gone = gone._replace(
            gaps=gone.gaps + replica.gaps,
            duplicates=gone.duplicates + replica.duplicates,
            over_limit=gone.over_limit + leases.over_limit,
        )

    def _tell(self) -> None:
        for model in self._models.values():
            model.tell()


class _Leases:
    """The leases of one router, over all models."""

    def __init__(self, router_id: RouterId, models: dict[ModelName, RemoteLeases], leases_max: int) -> None:
        self.over_limit = 0
        self._router_id = router_id
        self._models = models
        self._leases_max = leases_max
        self._by_name: dict[LeaseName, RemoteLease] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def apply(self, delta: Delta) -> None:
        """One of them changed; of one that is not known nothing is left to change."""
        if isinstance(delta, AddRequest):
            self._add(delta)
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
                    model.grew(lease, more)

    def replace(self, leases: Iterable[AddRequest]) -> None:
        """These are all of them."""
        by_name = {request.name: request for request in leases}
        for name in self._by_name.keys() - by_name.keys():
            self._remove(name)
        for request in by_name.values():
            self._add(request)

    def rebook(self, name: ModelName, model: RemoteLeases | None) -> None:
        """The model has another ledger now, or none."""
        for lease in self._by_name.values():
            if lease.request.model == name:
                lease.booked = None
                if model is not None:
                    model.add(lease)

    def _add(self, request: AddRequest) -> None:
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
            model.add(lease)

    def _remove(self, name: LeaseName) -> None:
        lease = self._by_name.pop(name)
        model = self._models.get(name.model)
        if model is not None:
            model.remove(lease)
