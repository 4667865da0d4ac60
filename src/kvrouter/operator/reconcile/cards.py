"""Workers that registered in Kubernetes, as routers see them: each has a lease that it renews."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.json import Unreadable, converted
from kvrouter.core.workers import ModelRuntimeConfig, Role
from kvrouter.kernel.topology.policy import policy_of, validate_runtime_config
from kvrouter.kube.objects import (
    FLEET_LABEL,
    Key,
    Manifest,
    key_of,
    labels_of,
    metadata_of,
    objects_in,
    version_of,
)
from kvrouter.operator.status.available import Registered

EXPIRE_S = 5.0
"""How often leases are checked."""


class _Card(msgspec.Struct, frozen=True):
    """The fields of a worker's card that the operator reads."""

    model: str
    role: Role
    worker_id: int = 0
    draining: bool = False
    engine_silent: bool = False
    runtime_config: ModelRuntimeConfig = ModelRuntimeConfig()


class _Record(msgspec.Struct, frozen=True):
    card: _Card
    lease_s: float
    withdrawn: bool = False


@dataclass(slots=True)
class _Entry:
    """One object: its worker and its lease. ``is_there`` while the object exists."""

    registered: Registered
    lease_s: float
    withdrawn: bool
    stamp: str
    renewed_s: float
    is_there: bool = True
    has_expired: bool = False

    @property
    def is_live(self) -> bool:
        return not (self.withdrawn or self.has_expired)

    @property
    def ends_s(self) -> float:
        return self.renewed_s + self.lease_s

    @property
    def state(self) -> tuple[Registered, bool, bool]:
        return self.registered, self.is_live, self.is_there


class Cards:
    """The registered workers of each fleet, by the namespace and the fleet's name.

    ``changed`` is called with a fleet whenever one of its workers comes, changes, leaves or lets its lease
    run out; a renewal alone is no change. Times are seconds of one monotonic clock.
    """

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._fleets: dict[Key, dict[Key, _Entry]] = {}
        self._is_lost = False
        self.unread_because = "they were not read yet"
        """Why workers are unknown before they were first read."""

    def update(self, manifest: Manifest, now_s: float, *, is_there: bool) -> None:
        """Take an object as a watch shows it, or its last state if it ``is_there`` no more.

        A deleted object may come back with its worker's next renewal.
        """
        fleet, key = fleet_of(manifest), key_of(manifest)
        known = self._fleets.get(fleet, {}).get(key)
        before = None if known is None else known.state
        if not is_there:
            if known is not None:
                known.is_there = False
        elif known is None or known.stamp != version_of(manifest):
            known = _read(manifest, now_s)
            if known is None:
                self._fleets.get(fleet, {}).pop(key, None)
            else:
                self._fleets.setdefault(fleet, {})[key] = known
        if (None if known is None else known.state) != before:
            self._changed(fleet)

    def expire(self, now_s: float) -> None:
        """Remove the workers with an expired lease; does nothing while the objects cannot be watched."""
        if self._is_lost:
            return
        for fleet, workers in [*self._fleets.items()]:
            over = [each for each in workers.values() if each.is_live and each.ends_s <= now_s]
            for each in over:
                each.has_expired = True
            for key in [key for key, each in workers.items() if not (each.is_there or each.is_live)]:
                del workers[key]
            if not workers:
                del self._fleets[fleet]
            if over:
                self._changed(fleet)

    def watch_lost(self, reason: str) -> None:
        """The objects cannot be watched: the last known workers stay."""
        self._is_lost, self.unread_because = True, reason

    def watch_restored(self, now_s: float) -> None:
        """The objects can be watched again: every lease has its whole length to be renewed."""
        self._is_lost = False
        for workers in self._fleets.values():
            for each in workers.values():
                each.renewed_s = now_s

    def of(self, fleet: Key, *, has_pod: Callable[[str], bool]) -> tuple[Registered, ...]:
        """Return the workers of a fleet. Workers without an object count only while their pod exists:
        Kubernetes deletes both together, and users delete the object alone.
        """
        return tuple(
            each.registered
            for _, each in sorted(self._fleets.get(fleet, {}).items())
            if each.is_live and (each.is_there or has_pod(each.registered.pod))
        )


def fleet_of(manifest: Manifest) -> Key:
    """Return the fleet that a worker's object belongs to: its namespace, and the fleet's name there."""
    return Key(key_of(manifest).namespace, str(labels_of(manifest).get(FLEET_LABEL)))


def _read(manifest: Manifest, now_s: float) -> _Entry | None:
    """Return the worker in an object; None for an object that routers ignore too."""
    try:
        record = converted(manifest.get("spec"), _Record)
        validate_runtime_config(record.card.runtime_config)
        policy = policy_of(record.card.runtime_config, None)
    except (Unreadable, ConfigError):
        return None
    card = record.card
    registered = Registered(
        model=card.model,
        role=card.role,
        takes_requests=not (card.draining or card.engine_silent),
        domains=card.runtime_config.domains,
        policy=policy,
        pod=_pod_of(manifest),
        worker_id=card.worker_id,
        kv_format=card.runtime_config.kv_format,
    )
    return _Entry(registered, record.lease_s, record.withdrawn, version_of(manifest), now_s)


def _pod_of(manifest: Manifest) -> str:
    owners = objects_in(metadata_of(manifest).get("ownerReferences"))
    return next((str(owner.get("name")) for owner in owners if owner.get("kind") == "Pod"), "")
