"""Writes a snapshot: claim the key, store the ranks, commit, purge, clean up.

::

    claim ──▶ parts ──▶ list of ranks ──▶ commit ──▶ purge the stream ──▶ remove the old objects
      └────────── the old snapshot is valid ──┘└──────────── the new one is ──────────────┘

A replica may die between any two steps. The next replica that claims the key removes uncommitted objects, and
purges a stream that was not purged.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from kvrouter.core.clock import LastChange
from kvrouter.core.errors import KvrouterError
from kvrouter.core.events import KvSnapshot
from kvrouter.core.ids import WorkerRank
from kvrouter.transports.background import spawn
from kvrouter.transports.events.encoding import encode_snapshot
from kvrouter.transports.events.jetstream.snapshot_store import (
    Claim,
    ClaimLost,
    RevisedClaim,
    StoredRank,
    encode_ranks,
    is_of,
    part_name,
    ranks_name,
)
from kvrouter.transports.events.jetstream.stream_subscriber import ComponentSubscriber
from kvrouter.transports.events.port import SnapshotFailed
from kvrouter.transports.nats_client import CLIENT_ERRORS, reason

LEASE_S = 30.0
"""Time without a renewal after which another replica may take over a claim."""

PART_MAX_BYTES = 4 * 1024 * 1024
"""Ranks are stored together up to this size; a larger rank is a part by itself."""


class SnapshotWriter:
    """Takes the snapshots of one component at one replica."""

    def __init__(
        self, subscriber: ComponentSubscriber, *, replica_name: str, name: Callable[[], str], lease_s: float
    ) -> None:
        self._subscriber = subscriber
        self._replica_name = replica_name
        self._name = name
        self._revision = LastChange()
        self._lease_s = lease_s

    async def take(self) -> "SnapshotWrite | None":
        """Claim the key and begin; None when another replica holds it, or there is nothing new to cover."""
        subscriber = self._subscriber
        try:
            revised = await subscriber.snapshots.claim()
            if self._is_held(revised):
                return None
            claim, sequence, created = revised.claim, subscriber.position, subscriber.created
            if not created or (claim.snapshot and claim.stream == created and sequence <= claim.sequence):
                return None
            mine = msgspec.structs.replace(claim, holder=self._replica_name)
            try:
                revision = await subscriber.snapshots.write(mine, over=revised.revision)
            except ClaimLost:
                return None
            left_over = [
                name for name in await subscriber.snapshots.objects() if not is_of(claim.snapshot, name)
            ]
            await subscriber.snapshots.remove(left_over)
        except CLIENT_ERRORS as error:
            raise SnapshotFailed(f"{subscriber.names.component}: {reason(error)}") from error
        done = Claim(f"{sequence}-{self._name()}", created, sequence)
        return SnapshotWrite(
            subscriber, done, claimed=RevisedClaim(mine, revision), renew_s=self._lease_s / 3
        )

    def _is_held(self, revised: RevisedClaim) -> bool:
        """Whether a replica holds the key and renewed its claim in time, by this replica's clock."""
        now_s = asyncio.get_running_loop().time()
        self._revision.see(revised.revision, now_s)
        return bool(revised.claim.holder) and self._revision.is_within(self._lease_s, now_s)


class SnapshotWrite:
    """One snapshot being written; ``done`` is the key's value after the commit."""

    def __init__(
        self, subscriber: ComponentSubscriber, done: Claim, *, claimed: RevisedClaim, renew_s: float
    ) -> None:
        self._subscriber = subscriber
        self._store = subscriber.snapshots
        self._done = done
        self._claim = claimed.claim
        self._revision = claimed.revision
        self._writing = asyncio.Lock()
        self._ranks: list[StoredRank] = []
        self._part: list[bytes] = []
        self._part_bytes = 0
        self._n_parts = 0
        self._trouble = ""
        self._is_over = False
        self._renewal = spawn(self._renew(renew_s), name="index: hold the claim")

    def covers(self, rank: WorkerRank) -> bool:
        """Whether this replica has received all that the rank published before the snapshot began."""
        return self._subscriber.created == self._done.stream and self._subscriber.covers(rank)

    async def add(self, snapshot: KvSnapshot) -> None:
        """Store one rank; raise SnapshotFailed."""
        body = encode_snapshot(snapshot)
        self._ranks.append(
            StoredRank(
                rank=snapshot.rank,
                epoch=snapshot.epoch,
                next_event_id=snapshot.next_event_id,
                part=self._n_parts,
                start=self._part_bytes,
                size=len(body),
            )
        )
        self._part.append(body)
        self._part_bytes += len(body)
        if self._part_bytes >= PART_MAX_BYTES:
            await self._put_part()

    async def commit(self) -> None:
        """Make the snapshot valid; purge the stream; remove the previous snapshot. Raises SnapshotFailed."""
        await self._put_part()
        await self._put(ranks_name(self._done.snapshot), encode_ranks(self._ranks))
        try:
            await self._write_last(self._done)
        except (*CLIENT_ERRORS, ClaimLost) as error:
            raise self._failed(error) from error
        try:
            await self._clean_up()
        except (*CLIENT_ERRORS, KvrouterError) as error:
            raise self._failed(error) from error

    async def abandon(self) -> None:
        """Release the claim and remove the stored objects."""
        free = msgspec.structs.replace(self._claim, holder="")
        with suppress(*CLIENT_ERRORS, KvrouterError):
            with suppress(ClaimLost):
                await self._write_last(free)
            if (await self._store.claim()).claim.snapshot == self._done.snapshot:
                return  # the commit succeeded, and only its answer was lost
            mine = [name for name in await self._store.objects() if is_of(self._done.snapshot, name)]
            await self._store.remove(mine)

    async def _clean_up(self) -> None:
        reading = await self._subscriber.stream.read()
        if reading.created == self._done.stream:
            await self._subscriber.stream.purge(through=self._done.sequence)
        if self._claim.snapshot:
            old = [name for name in await self._store.objects() if is_of(self._claim.snapshot, name)]
            await self._store.remove(old)

    async def _put_part(self) -> None:
        if not self._part:
            return
        await self._put(part_name(self._done.snapshot, self._n_parts), b"".join(self._part))
        self._part.clear()
        self._part_bytes = 0
        self._n_parts += 1

    async def _put(self, name: str, body: bytes) -> None:
        if self._trouble:
            raise SnapshotFailed(f"{self._subscriber.names.component}: {self._trouble}")
        try:
            await self._store.put(name, body)
        except CLIENT_ERRORS as error:
            raise self._failed(error) from error

    async def _write_last(self, claim: Claim) -> None:
        """Write the key, and renew the claim no more.

        A renewal that has begun is awaited: NATS may have stored it already, and its revision is then the one
        to write over.
        """
        try:
            async with self._writing:
                await self._store.write(claim, over=self._revision)
        finally:
            self._end_renewal()

    def _end_renewal(self) -> None:
        self._is_over = True  # a task's cancellation can get lost in the client's own waiting
        self._renewal.cancel()

    async def _renew(self, every_s: float) -> None:
        while not self._is_over:
            await asyncio.sleep(every_s)
            try:
                async with self._writing:
                    self._revision = await self._store.write(self._claim, over=self._revision)
            except ClaimLost as error:
                self._trouble = str(error)
                return
            except CLIENT_ERRORS:
                continue  # the next attempt, or the commit, shows whether the claim is still held

    def _failed(self, error: BaseException) -> SnapshotFailed:
        return SnapshotFailed(f"{self._subscriber.names.component}: {reason(error)}")
