"""The cordons of a router's fleet: follows them in their store, and adds and removes them there."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from kvrouter.core.cordon_rules import (
    CORDONS_MAX,
    NODE_LEVEL,
    WORKER_LEVEL,
    Cordon,
    CordonRules,
    CordonSource,
    checked_cordon,
    names_at,
)
from kvrouter.core.errors import CordonsUnavailable, InvalidRequest, NotFound
from kvrouter.core.ids import ModelName, WorkerId
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.model_router import ModelRouter
from kvrouter.transports.background import spawn
from kvrouter.transports.records.port import CordonStore

NAMES_LISTED = 20
"""The most names that an error lists."""


class NoWorkersLeft(InvalidRequest):
    """The cordon would leave a model without a worker of some role, and the call has no ``force``."""

    status_hint = 409
    code = "nobody_left"


class CordonedElsewhere(InvalidRequest):
    """This router cannot remove the cordon: an annotation made it, or it belongs to another cluster."""

    status_hint = 409
    code = "cordoned_elsewhere"


@dataclass(frozen=True, slots=True)
class Remaining:
    """A model's workers of one role, and how many of them (``left``) take new requests."""

    model: ModelName
    role: Role
    workers: int
    left: int


@dataclass(frozen=True, slots=True)
class CordonedWorker:
    """A cordoned worker. ``running_requests`` is the larger of two counts: the bookings of all routers that
    share their load, and the requests that its engine reports.
    """

    card: WorkerCard
    alive: bool
    running_requests: int


@dataclass(frozen=True, slots=True)
class CordonReading:
    """A cordon and the workers that match it now."""

    cordon: Cordon
    workers: tuple[CordonedWorker, ...]


@dataclass(frozen=True, slots=True)
class CordonChange:
    """The result of a call. ``changed`` is False where nothing had to change. Each warning is one line."""

    reading: CordonReading
    changed: bool
    warnings: tuple[str, ...]


class Cordons:
    """Reads the store every ``poll_s`` seconds, and calls ``apply`` when the rules have changed.

    While the store cannot be read, the rules of the last successful read stay in force.
    """

    def __init__(
        self,
        store: CordonStore,
        *,
        models: Callable[[], Iterable[ModelRouter]],
        apply: Callable[[CordonRules], None],
        instrumentation: ServiceInstrumentation,
    ) -> None:
        self._store = store
        self._models = models
        self._apply = apply
        self._instrumentation = instrumentation
        self._task: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._polls = 0
        self.rules = CordonRules()
        self.lost: str | None = None
        """Why the store cannot be read; None while it can."""

    # Following

    async def start(self) -> None:
        """Read the store once, before the first decision, then keep reading it in a background task."""
        await self._poll()
        self._task = spawn(self._follow(), name="cordons: follow their store")

    def stop(self) -> None:
        """Stop reading the store; idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    @property
    def poll_s(self) -> float:
        """Seconds between two reads of the store."""
        return self._store.poll_s

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._store.poll_s)
            if not self._changing.locked():  # put() and remove() read the store themselves
                await self._poll()

    async def _poll(self) -> None:
        self._polls += 1
        poll = self._polls
        try:
            found = await self._store.read()
        except CordonsUnavailable as error:
            if self.lost is None:
                self._instrumentation.cordons_lost(error.message)
            self.lost = error.message
            return
        if self.lost is not None:
            self._instrumentation.cordons_back()
        self.lost = None
        if poll == self._polls:  # else another reading is newer
            self._take(CordonRules(found))

    def _take(self, rules: CordonRules) -> None:
        if rules == self.rules:
            return
        before, self.rules = self.rules, rules
        self._apply(rules)
        old = {structs.replace(each, at_s=0.0, by="", reason=""): each for each in before.all}
        new = {structs.replace(each, at_s=0.0, by="", reason=""): each for each in rules.all}
        added = [cordon for key, cordon in new.items() if key not in old]
        gone = [cordon for key, cordon in old.items() if key not in new]
        covered = self._covered(CordonRules((*added, *gone)))
        for cordon in added:
            self._instrumentation.cordoned(cordon, workers=len(covered[cordon]))
        for cordon in gone:
            self._instrumentation.uncordoned(cordon, workers=len(covered[cordon]))

    # Reading

    def readings(self) -> list[CordonReading]:
        """Every cordon with the workers that match it."""
        return [_reading(cordon, workers) for cordon, workers in self._covered(self.rules).items()]

    def reading(self, cordon: Cordon) -> CordonReading:
        """The cordon with the workers that match it now."""
        return _reading(cordon, self._covered(CordonRules((cordon,)))[cordon])

    def remaining(self, rules: CordonRules | None = None) -> list[Remaining]:
        """Count each model's workers by role, and those that take new requests, or would under ``rules``."""
        found = []
        for model in self._models():
            for role in Role:
                cards = [card for card in model.fleet if card.role is role]
                left = sum(1 for card in cards if _may_take(model, card, rules))
                if cards:
                    found.append(Remaining(model.fleet.model, role, len(cards), left))
        return found

    def _covered(self, rules: CordonRules) -> dict[Cordon, list[tuple[ModelRouter, WorkerCard]]]:
        """The workers that match each cordon; each worker is checked once."""
        found: dict[Cordon, list[tuple[ModelRouter, WorkerCard]]] = {cordon: [] for cordon in rules.all}
        for model in self._models():
            for card in model.fleet:
                for cordon in rules.on(card, card.runtime_config.domains):
                    found[cordon].append((model, card))
        return found

    def _names(self, level: str) -> list[str]:
        found = {
            name
            for model in self._models()
            for card in model.fleet
            for name in names_at(level, card, card.runtime_config.domains)
        }
        return sorted(found)

    def _levels(self) -> list[str]:
        """Every level that may be cordoned: a worker has a name there, or a cordon exists there."""
        found = {
            domain
            for model in self._models()
            for card in model.fleet
            for domain in card.runtime_config.domains
        }
        return [
            WORKER_LEVEL,
            NODE_LEVEL,
            *sorted((found | {each.level for each in self.rules.all}) - _BUILT_IN),
        ]

    # Changing

    async def put(self, wanted: Cordon, *, force: bool) -> CordonChange:
        """Add the cordon ``wanted``, for every router; adding the same cordon again changes nothing.

        Raises InvalidRequest that names the field, NotFound for an unknown level or worker, NoWorkersLeft
        where a model would have no worker of a role left and ``force`` is False, and CordonsUnavailable.
        """
        wanted = checked_cordon(structs.replace(wanted, source=CordonSource.CALL, cluster=""))
        async with self._changing:
            await self._poll_now()
            self._check_level(wanted)
            before = self._find(wanted)
            known = bool(self._names_of(wanted))
            if wanted.level == WORKER_LEVEL and not known and before is None:
                raise NotFound(f"name: no worker {wanted.name} is here", param="name")
            warnings = [] if known else [self._no_worker_in(wanted)]
            if before is not None and wanted.reason in ("", before.reason):
                return CordonChange(self.reading(before), changed=False, warnings=tuple(warnings))
            if before is None and len(self.rules.all) >= CORDONS_MAX:
                raise InvalidRequest(f"name: {CORDONS_MAX} cordons are here already", param="name")
            warnings += self._emptied_roles(wanted, force=force)
            if wanted.at_s == 0.0:
                wanted = structs.replace(wanted, at_s=time.time())
            await self._store.put(wanted)
            self._polls += 1  # a reading that began before the write is old
            kept = [each for each in self.rules.all if each != before]
            self._take(CordonRules((*kept, wanted)))
        return CordonChange(self.reading(wanted), changed=True, warnings=tuple(warnings))

    async def remove(self, level: str, name: str) -> CordonChange:
        """Remove a cordon, for every router; removing an absent cordon changes nothing.

        Raises what :meth:`put` does, and CordonedElsewhere for a cordon that no call to this cluster made.
        """
        wanted = checked_cordon(Cordon(level, name))
        async with self._changing:
            await self._poll_now()
            before = self._find(wanted)
            if before is None:
                self._check_level(wanted)
                others = [each for each in self.rules.all if (each.level, each.name) == (level, wanted.name)]
                for other in others:
                    raise CordonedElsewhere(_cordoned_elsewhere(other), param="name")
                return CordonChange(self.reading(wanted), changed=False, warnings=())
            await self._store.remove(before)
            self._polls += 1
            self._take(CordonRules(each for each in self.rules.all if each != before))
        reading = self.reading(before)
        return CordonChange(reading, changed=True, warnings=tuple(self._still(reading)))

    async def _poll_now(self) -> None:
        await self._poll()
        if self.lost is not None:
            raise CordonsUnavailable(self.lost)

    def _find(self, wanted: Cordon) -> Cordon | None:
        """The cordon of this name that a call to this cluster made."""
        for each in self.rules.all:
            key = each.level, each.name, each.source, each.cluster
            if key == (wanted.level, wanted.name, CordonSource.CALL, ""):
                return each
        return None

    def _check_level(self, wanted: Cordon) -> None:
        levels = self._levels()
        if wanted.level not in levels:
            raise NotFound(
                f"level: no worker here has a {wanted.level!r}; known: {', '.join(levels[:NAMES_LISTED])}",
                param="level",
            )

    def _names_of(self, wanted: Cordon) -> list[str]:
        return [name for name in self._names(wanted.level) if name == wanted.name]

    def _no_worker_in(self, wanted: Cordon) -> str:
        names = self._names(wanted.level)
        known = ", ".join(names[:NAMES_LISTED]) + (", …" if len(names) > NAMES_LISTED else "")
        return (
            f"no worker is in {wanted.place} now; the cordon holds for those that join there (known: {known})"
        )

    def _emptied_roles(self, wanted: Cordon, *, force: bool) -> list[str]:
        after = self.remaining(CordonRules((*self.rules.all, wanted)))
        emptied = [
            then for now, then in zip(self.remaining(), after, strict=True) if now.left > 0 and not then.left
        ]
        emptied_lines = [
            f"model {each.model}: none of its {each.workers} {each.role.value} workers takes new requests"
            for each in emptied
        ]
        if emptied_lines and not force:
            raise NoWorkersLeft(
                f"force: must be true: with {wanted.place} cordoned, {'; '.join(emptied_lines)}",
                param="force",
            )
        return emptied_lines

    def _still(self, reading: CordonReading) -> list[str]:
        """A warning for each other cordon that still holds for the workers of a removed one."""
        holding: dict[str, list[WorkerId]] = {}
        for worker in reading.workers:
            card = worker.card
            for cordon in self.rules.on(card, card.runtime_config.domains):
                holding.setdefault(cordon.place, []).append(card.worker_id)
        return [
            f"{place} is still cordoned: {len(ids)} of these workers, such as {ids[0]}, take no new requests"
            for place, ids in holding.items()
        ]


_BUILT_IN = frozenset({WORKER_LEVEL, NODE_LEVEL})


def _reading(cordon: Cordon, workers: Iterable[tuple[ModelRouter, WorkerCard]]) -> CordonReading:
    return CordonReading(
        cordon,
        tuple(
            CordonedWorker(card, model.fleet.is_alive(card.worker_id), running_on(model, card))
            for model, card in workers
        ),
    )


def running_on(model: ModelRouter, card: WorkerCard) -> int:
    """Requests that run or wait at a worker: per rank the larger of the ledger's and its engine's count."""
    model.ledger.ensure_slots(model.fleet.n_slots)
    booked, columns = model.ledger.columns().requests, model.fleet.columns
    slots: Sequence[int] = model.fleet.slots_of(card.worker_id)
    running = 0
    for slot in slots:
        reported = 0
        if columns.alive[slot] and columns.has_report[slot]:
            reported = int(columns.report_running_requests[slot] + columns.report_waiting_requests[slot])
        running += max(int(booked[slot]), reported)
    return running


def _may_take(model: ModelRouter, card: WorkerCard, rules: CordonRules | None) -> bool:
    if rules is None:
        return model.fleet.may_take(card)
    is_cordoned = bool(rules.on(card, card.runtime_config.domains))
    return model.fleet.is_alive(card.worker_id) and card.takes_new_requests and not is_cordoned


def _cordoned_elsewhere(cordon: Cordon) -> str:
    if cordon.cluster:
        return f"name: {cordon.place} is cordoned in cluster {cordon.cluster}: uncordon it there"
    return (
        f"name: {cordon.place} is cordoned by an annotation: kubectl annotate node {cordon.name} "
        "kvrouter.dev/cordon-"
    )
