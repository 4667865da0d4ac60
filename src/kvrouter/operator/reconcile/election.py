"""Leader election: one of several replicas writes, by a lease that it renews."""

from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import JsonValue

from kvrouter.operator.reconcile.kinds import LEASES, Key, Manifest, metadata_of


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long a lease holds that is not renewed, how long its holder may fail to renew it before it stops,
    and how often everybody tries. Seconds, each more than the next.
    """

    lease_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.lease_s > self.renew_s > self.retry_s > 0:
            raise ValueError(f"lease times must fall and be above 0, not {self}")


class LeaseCandidate:
    """What one replica makes of the lease: it takes one that is free, that is its own, or that nobody renewed
    for ``lease_s`` seconds of its own clock. Clocks of other hosts are never compared.
    """

    def __init__(self, identity: str, place: Key, times: LeaseTimes) -> None:
        self.identity = identity
        self._place, self._times = place, times
        self._seen: JsonValue = None
        self._seen_s = 0.0

    def claim(self, lease: Manifest | None, now_s: float, today: datetime) -> Manifest | None:
        """Return the lease to write, None while it is another's. ``today`` is aware of its time zone.

        With the ``resourceVersion`` of ``lease``, so that of two who write the second is refused.
        """
        spec = _spec(lease)
        if lease is None or spec != self._seen:
            self._seen, self._seen_s = spec, now_s
        holder = spec.get("holderIdentity") or ""
        is_ours = holder == self.identity
        if holder and not is_ours and now_s < self._seen_s + self._times.lease_s:
            return None
        return self._held(lease, today)

    def take(self, lease: Manifest | None, today: datetime) -> Manifest | None:
        """Return the lease to write, regardless of its holder; None where it has none."""
        return self._held(lease, today) if _spec(lease).get("holderIdentity") else None

    def release(self, lease: Manifest | None, today: datetime) -> Manifest | None:
        """Return the lease to write so that another takes it at once; None when it is not ours."""
        spec = _spec(lease)
        if spec.get("holderIdentity") != self.identity:
            return None
        return self._lease(
            lease, {**spec, "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _written(today)}
        )

    def _held(self, lease: Manifest | None, today: datetime) -> Manifest:
        spec = _spec(lease)
        is_ours = spec.get("holderIdentity") == self.identity
        changes = spec.get("leaseTransitions")
        changed = lease is not None and not is_ours
        written = _written(today)
        held: Manifest = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": round(self._times.lease_s),
            "acquireTime": spec.get("acquireTime", written) if is_ours else written,
            "renewTime": written,
            "leaseTransitions": (changes if isinstance(changes, int) else 0) + changed,
        }
        return self._lease(lease, held)

    def _lease(self, lease: Manifest | None, spec: Manifest) -> Manifest:
        metadata: Manifest = {"namespace": self._place.namespace, "name": self._place.name}
        if lease is not None:
            metadata = metadata_of(lease)
        return {"apiVersion": LEASES.api_version, "kind": LEASES.name, "metadata": metadata, "spec": spec}


def _spec(lease: Manifest | None) -> Manifest:
    found = None if lease is None else lease.get("spec")
    return found if isinstance(found, dict) else {}


def _written(today: datetime) -> str:
    return today.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
