"""The valid snapshot of one component, read rank by rank by a replica that starts."""

import asyncio
from dataclasses import dataclass

from nats.js.errors import NotFoundError

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvSnapshot
from kvrouter.core.ids import Epoch, WorkerRank
from kvrouter.planes.events.jetstream.shelf import (
    HeldRank,
    SnapshotShelf,
    decode_ranks,
    part_name,
    ranks_name,
)
from kvrouter.planes.events.jetstream.stream import EventStream, StreamReading
from kvrouter.planes.events.wire import decode_snapshot

PART_KEPT_S = 10.0
"""How long a part stays in memory for the other ranks in it."""

PARTS_READ_MAX = 4
"""Parts that are read at the same time."""

LOADS_MAX = 5
"""A snapshot that is replaced again and again while it is read is given up."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a replica may begin with: a snapshot's ranks, and the stream that goes on from it.

    ``sequence`` is where the stream goes on: the snapshot knows everything up to there; 0 without a snapshot.
    """

    snapshot: str
    sequence: int
    ranks: dict[WorkerRank, HeldRank]
    stream: StreamReading

    @property
    def is_reached(self) -> bool:
        """Whether the stream still has everything that follows the snapshot."""
        return self.stream.first <= self.sequence + 1


class StoredIndex:
    """Reads the valid snapshot; what was read is kept until :meth:`forget`."""

    def __init__(self, shelf: SnapshotShelf, stream: EventStream) -> None:
        self._shelf = shelf
        self._stream = stream
        self._stage: Stage | None = None
        self._loading = asyncio.Lock()
        self._reading = asyncio.Semaphore(PARTS_READ_MAX)
        self._parts: dict[str, asyncio.Task[memoryview]] = {}

    def forget(self, stage: Stage) -> None:
        """Read anew next time, if ``stage`` is what was read last: it was replaced."""
        if self._stage is stage:
            self._stage = None

    def close(self) -> None:
        """Read nothing any more."""
        for task in list(self._parts.values()):
            task.cancel()

    async def stage(self) -> Stage:
        """What there is to begin with. A stream that is past the snapshot has a newer one: load again.

        Raises what the client does.
        """
        async with self._loading:
            for _ in range(LOADS_MAX):
                if self._stage is not None:
                    return self._stage
                try:
                    stage = await self._load()
                except NotFoundError:
                    continue  # its objects went while they were read
                if not stage.snapshot or stage.is_reached:
                    self._stage = stage
            raise NotFoundError(description=f"no snapshot could be read in {LOADS_MAX} tries")

    async def _load(self) -> Stage:
        claim = (await self._shelf.claim()).claim
        reading = await self._stream.read()
        if not claim.snapshot or claim.stream != reading.made:
            return Stage("", 0, {}, reading)  # none, or one of a stream that is no more
        ranks = decode_ranks(await self._shelf.get(ranks_name(claim.snapshot)))
        # Read the stream after the snapshot: one that is past it by then shows.
        return Stage(claim.snapshot, claim.sequence, ranks, await self._stream.read())

    async def snapshot(self, stage: Stage, rank: WorkerRank, epoch: Epoch) -> KvSnapshot | None:
        """The rank in the snapshot; None when it is not in it, or from another start of its worker.

        Raises NotFoundError when the snapshot was replaced, and what the client does.
        """
        held = stage.ranks.get(rank)
        if held is None or held.epoch != epoch:
            return None
        part = await self._part(part_name(stage.snapshot, held.part))
        snapshot = decode_snapshot(part[held.start : held.start + held.size])
        if snapshot is None or (snapshot.rank, snapshot.epoch) != (rank, epoch):
            raise ProtocolError(
                f"snapshot {stage.snapshot}: not rank {rank} where it should be", param="part"
            )
        return snapshot

    async def _part(self, name: str) -> memoryview:
        task = self._parts.get(name)
        if task is None:
            task = self._parts[name] = asyncio.get_running_loop().create_task(self._read(name))
            task.add_done_callback(lambda task: self._read_part(name, task))
        return await asyncio.shield(task)

    def _read_part(self, name: str, task: "asyncio.Task[memoryview]") -> None:
        """Keep a part for a while; one that could not be read is read anew by whoever wants it next."""
        if task.cancelled() or task.exception() is not None:
            self._parts.pop(name, None)
        else:
            asyncio.get_running_loop().call_later(PART_KEPT_S, self._parts.pop, name, None)

    async def _read(self, name: str) -> memoryview:
        async with self._reading:
            return await self._shelf.get(name)
