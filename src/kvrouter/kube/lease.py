"""Leader election by a Lease: one of several replicas leads while it renews the Lease.

A lease is alive while its content changes, by the clock of its reader.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from kvrouter.core.clock import LastChange
from kvrouter.kube.client import CONFLICT, ClusterError, KubeClient, RequestRefused
from kvrouter.kube.objects import LEASES, Key, Manifest, fields_of, metadata_of


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long an unrenewed lease is valid, how long its holder may fail to renew it before it stops, and how
    often replicas try. Seconds, each more than the next.
    """

    lease_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.lease_s > self.renew_s > self.retry_s > 0:
            raise ValueError(f"lease times must fall and be above 0, not {self}")


class LeaseCandidate:
    """Decides for one replica whether to take the lease: when it is free, its own, or not renewed for
    ``lease_s`` seconds of this replica's clock. Clocks of different hosts are never compared.
    """

    def __init__(self, identity: str, key: Key, times: LeaseTimes) -> None:
        self.identity = identity
        self._key, self._times = key, times
        self._spec = LastChange()

    def claim(self, lease: Manifest | None, now_s: float, today: datetime) -> Manifest | None:
        """Return the lease to write, None while another replica holds it. ``today`` is timezone-aware.

        It has the ``resourceVersion`` of ``lease``, so that the second of two writers is refused.
        """
        spec = _spec(lease)
        self._spec.see(spec if lease is not None else None, now_s)
        holder = spec.get("holderIdentity") or ""
        is_ours = holder == self.identity
        if holder and not is_ours and self._spec.is_within(self._times.lease_s, now_s):
            return None
        return self._held(lease, today)

    def take(self, lease: Manifest | None, today: datetime) -> Manifest | None:
        """Return the lease to write, regardless of its holder; None when it has no holder."""
        return self._held(lease, today) if _spec(lease).get("holderIdentity") else None

    def release(self, lease: Manifest | None, today: datetime) -> Manifest | None:
        """Return the lease to write so that another replica takes it at once; None when it is not ours."""
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
        metadata: Manifest = {"namespace": self._key.namespace, "name": self._key.name}
        if lease is not None:
            metadata = metadata_of(lease)
        return {"apiVersion": LEASES.api_version, "kind": LEASES.name, "metadata": metadata, "spec": spec}


def _spec(lease: Manifest | None) -> Manifest:
    return fields_of(None if lease is None else lease.get("spec"))


def _written(today: datetime) -> str:
    return today.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaderListener(Protocol):
    """Called for events of the lease."""

    def answered(self) -> None:
        """The API server answered."""

    def leads(self, identity: str) -> None:
        """This replica leads from now on."""

    def follows(self, identity: str, reason: str) -> None:
        """This replica no longer leads."""

    def not_renewed(self, error: ClusterError) -> None:
        """The lease could not be read or written; this is retried."""


class Leader:
    """Runs ``lead`` while this replica holds the lease; cancels it before another replica may lead."""

    def __init__(
        self, cluster: KubeClient, key: Key, identity: str, *, times: LeaseTimes, listener: LeaderListener
    ) -> None:
        self._cluster, self._key, self._times, self._listener = cluster, key, times, listener
        self._candidate = LeaseCandidate(identity, key, times)
        self.is_leading = False

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Follow and lead in turn until cancelled; then release the lease.

        Raises what ``lead`` raises.
        """
        try:
            while True:
                if await self._is_claimed():
                    await self._lead(lead)
                else:
                    await asyncio.sleep(self._times.retry_s)
        finally:
            with suppress(ClusterError, TimeoutError):
                async with asyncio.timeout(self._times.renew_s):
                    await self._release()

    async def _lead(self, lead: Callable[[], Awaitable[None]]) -> None:
        work = asyncio.ensure_future(lead())
        self.is_leading = True
        self._listener.leads(self._candidate.identity)
        try:
            reason = await self._renew_while(work)
        finally:
            self.is_leading = False
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
        self._listener.follows(self._candidate.identity, reason)

    async def _renew_while(self, work: asyncio.Future[None]) -> str:
        """Renew the lease while ``work`` runs; return why leading ended."""
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        while True:
            await asyncio.wait([work], timeout=self._times.retry_s)
            if work.done():
                work.result()
                return "it ended"
            try:
                async with asyncio.timeout_at(renewed_s + self._times.renew_s):
                    began_s = loop.time()
                    if not await self._claimed():
                        return "another replica took the lease"
                    renewed_s = began_s
            except TimeoutError:
                return f"the lease could not be renewed for {self._times.renew_s:g} s"
            except ClusterError as error:
                self._listener.not_renewed(error)
                if loop.time() >= renewed_s + self._times.renew_s:
                    return f"the lease could not be renewed for {self._times.renew_s:g} s"

    async def _is_claimed(self) -> bool:
        try:
            return await self._claimed()
        except ClusterError as error:
            if not (
                isinstance(error, RequestRefused) and error.status == CONFLICT
            ):  # then another replica was faster
                self._listener.not_renewed(error)
            return False

    async def _claimed(self) -> bool:
        """Take or renew the lease; return False while another replica holds it."""
        lease = await self._cluster.read(LEASES, self._key)
        self._listener.answered()
        claim = self._candidate.claim(lease, asyncio.get_running_loop().time(), datetime.now(UTC))
        if claim is None:
            return False
        await (self._cluster.create if lease is None else self._cluster.replace)(LEASES, claim)
        return True

    async def _release(self) -> None:
        lease = await self._cluster.read(LEASES, self._key)
        free = self._candidate.release(lease, datetime.now(UTC))
        if free is not None:
            await self._cluster.replace(LEASES, free)
