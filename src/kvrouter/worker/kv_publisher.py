"""KV publisher: numbers and batches a worker's KV events, and keeps the latest for recovery."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from kvrouter.core.events import (
    Cleared,
    Held,
    KvBatch,
    KvEvent,
    KvSnapshot,
    Medium,
    Removed,
    Stored,
    pack_hashes,
)
from kvrouter.core.hashing import block_hashes, hash_seed
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import TokenBuffer
from kvrouter.core.workers import KvTransfers, LoadReport
from kvrouter.kernel.index import NativeBlockIndex
from kvrouter.transports.events.port import EventPublisher

FIRST_RANK = DpRank(0)


class RankMirror:
    """One rank's blocks as a router's index has them, in an index of the same kind. A rank of a million
    blocks is listed quickly, so that a router's request hardly delays the engine.

    Ranks of one process may share ``index``. A stored block without its parent is left out; routers count it
    as an orphan.
    """

    def __init__(self, index: NativeBlockIndex | None = None, dp_rank: DpRank = FIRST_RANK) -> None:
        self._index = NativeBlockIndex() if index is None else index
        self._slot = Slot(dp_rank)

    def apply(self, events: tuple[KvEvent, ...]) -> None:
        """Apply ``events`` in order. Raises ValueError when one is malformed."""
        self._index.apply(self._slot, events)

    def n_held(self) -> int:
        """The number of blocks over all media."""
        return sum(self._index.held(self._slot, medium) for medium in Medium)

    def held(self) -> tuple[Held, ...]:
        """All blocks as a snapshot lists them: a block stored ``n`` times is listed ``n`` times."""
        return tuple(self._index.dump(self._slot))


RING_EVENTS_MAX = 1024
PENDING_EVENTS_MAX = 1024

Snapshot = Callable[[DpRank], tuple[KvEvent, ...]]
HeldBlocks = Callable[[DpRank], int | None]


class _Rank:
    """One rank's events: ``pending`` are not sent yet, ``ring`` ends before ``next_event_id``."""

    __slots__ = ("mirror", "next_event_id", "pending", "rank", "ring")

    def __init__(self, rank: WorkerRank, *, ring_events_max: int, mirror: RankMirror | None) -> None:
        self.rank = rank
        self.next_event_id = EventId(0)
        self.pending: list[KvEvent] = []
        self.ring: deque[KvEvent] = deque(maxlen=ring_events_max)
        self.mirror = mirror


class KvPublisher:
    """Publishes the KV events of one start of one worker; use it from its event loop.

    Events gather until the loop's next turn, so that one step of the engine becomes one batch per rank; from
    ``pending_events_max`` on they are sent at once. The last ``ring_events_max`` events of each rank are kept
    for :meth:`recover_range`. ``snapshot`` returns the engine's own list of a rank's blocks (stores, parents
    first), and ``held_blocks`` their number; without ``snapshot`` a mirror of the published events serves for
    both.
    """

    def __init__(
        self,
        events: EventPublisher,
        *,
        worker_id: WorkerId,
        epoch: Epoch,
        block_size: int,
        snapshot: Snapshot | None = None,
        held_blocks: HeldBlocks | None = None,
        ring_events_max: int = RING_EVENTS_MAX,
        pending_events_max: int = PENDING_EVENTS_MAX,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.epoch = epoch
        self.worker_id = worker_id
        self._events = events
        self._block_size = block_size
        self._snapshot = snapshot
        self._held_blocks = held_blocks
        self._ring_events_max = ring_events_max
        self._pending_events_max = pending_events_max
        self._wall_clock = wall_clock
        self._ranks: dict[DpRank, _Rank] = {}
        self._mirrored = NativeBlockIndex()
        self._loads: dict[DpRank, LoadReport] = {}
        self._is_flush_due = False
        self._is_closed = False

    def publish(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        """Send ``events`` in order, soon; never waits. Does nothing after :meth:`close`."""
        if self._is_closed or not events:
            return
        rank = self._rank(dp_rank)
        rank.pending.extend(events)
        if rank.mirror is not None:
            rank.mirror.apply(events)
        if len(rank.pending) >= self._pending_events_max:
            self._flush(rank)
        elif not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def publish_stored(
        self,
        token_ids: TokenBuffer | Sequence[int],
        engine_hashes: Sequence[int],
        *,
        parent: EngineHash | None = None,
        dp_rank: DpRank = FIRST_RANK,
        medium: Medium = Medium.GPU,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
        mm_hashes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Publish that consecutive blocks were stored: ``engine_hashes[i]`` names the i-th of ``token_ids``.

        Does nothing for no blocks. Raises ValueError when the tokens do not fill exactly as many blocks as
        there are hashes.
        """
        if len(token_ids) != len(engine_hashes) * self._block_size:
            raise ValueError(
                f"engine_hashes: {len(engine_hashes)} blocks of {self._block_size} tokens are "
                f"{len(engine_hashes) * self._block_size} token ids, not {len(token_ids)}"
            )
        if not engine_hashes:
            return
        seed = hash_seed(lora_name=lora_name, cache_namespace=cache_namespace)
        hashes = block_hashes(token_ids, block_size=self._block_size, seed=seed, mm_hashes=mm_hashes)
        self.publish(dp_rank, (Stored(parent, pack_hashes(engine_hashes), hashes, medium),))

    def publish_removed(
        self, engine_hashes: Sequence[int], *, dp_rank: DpRank = FIRST_RANK, medium: Medium = Medium.GPU
    ) -> None:
        """Publish that blocks were removed from ``medium``; each listing undoes one store."""
        self.publish(dp_rank, (Removed(pack_hashes(engine_hashes), medium),))

    def publish_cleared(self, *, dp_rank: DpRank = FIRST_RANK) -> None:
        """Publish that the rank holds no blocks."""
        self.publish(dp_rank, (Cleared(),))

    def publish_load(
        self,
        *,
        active_blocks: int,
        total_blocks: int,
        active_prefill_tokens: int | None = None,
        running_requests: int = 0,
        waiting_requests: int = 0,
        kv_transfers: KvTransfers | None = None,
        dp_rank: DpRank = FIRST_RANK,
    ) -> None:
        """Publish the rank's load and its fetched KV; only the latest report matters."""
        self.publish_load_report(
            LoadReport(
                rank=WorkerRank(self.worker_id, dp_rank),
                active_blocks=active_blocks,
                total_blocks=total_blocks,
                active_prefill_tokens=active_prefill_tokens,
                running_requests=running_requests,
                waiting_requests=waiting_requests,
                kv_transfers=kv_transfers,
            )
        )

    def publish_load_report(self, report: LoadReport) -> None:
        """Publish ``report``; each :meth:`heartbeat` repeats the latest one of each rank."""
        if self._is_closed:
            return
        self._loads[report.rank.dp_rank] = report
        self._events.publish_load(report)

    def drop_load(self, *, dp_rank: DpRank = FIRST_RANK) -> None:
        """Stop repeating the rank's load report: its engine has left."""
        self._loads.pop(dp_rank, None)

    def flush(self) -> None:
        """Send all pending events."""
        self._is_flush_due = False
        for rank in self._ranks.values():
            self._flush(rank)

    def heartbeat(self, dp_ranks: Sequence[DpRank]) -> None:
        """Publish the next event id and the block count of each of ``dp_ranks``, so that routers notice a
        lost last batch or a wrong index. The latest load report of every rank is repeated for routers that
        joined later or lost it.
        """
        if self._is_closed:
            return
        for dp_rank in dp_ranks:
            rank = self._rank(dp_rank)
            n_held = self._n_held(rank)
            self._flush(rank)  # includes events that held_blocks() has just published
            self._events.publish(
                KvBatch(rank.rank, self.epoch, rank.next_event_id, (), self._wall_clock(), n_held)
            )
        for report in self._loads.values():
            self._events.publish_load(report)

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last`` (inclusive); None when the ring has not all of them."""
        stream = self._ranks.get(rank.dp_rank)
        if self._is_closed or stream is None or rank.worker_id != self.worker_id:
            return None
        ring_first = stream.next_event_id - len(stream.ring)
        if not ring_first <= first <= last < stream.next_event_id:
            return None
        events = tuple(islice(stream.ring, first - ring_first, last - ring_first + 1))
        return KvBatch(rank, self.epoch, first, events, self._wall_clock())

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        """The rank's full state; None for a rank of another worker."""
        if self._is_closed or rank.worker_id != self.worker_id:
            return None
        held = self._held(rank.dp_rank)
        stream = self._rank(rank.dp_rank)
        self._flush(stream)  # includes events that snapshot() has just published
        return KvSnapshot(rank, self.epoch, stream.next_event_id, held)

    def close(self) -> None:
        """Stop: pending events are dropped and recovery requests get None."""
        self._is_closed = True
        for rank in self._ranks.values():
            rank.pending.clear()

    def _n_held(self, rank: _Rank) -> int | None:
        if rank.mirror is not None:
            return rank.mirror.n_held()
        return None if self._held_blocks is None else self._held_blocks(rank.rank.dp_rank)

    def _held(self, dp_rank: DpRank) -> tuple[Held, ...]:
        mirror = self._rank(dp_rank).mirror
        if mirror is None and self._snapshot is not None:
            mirror = RankMirror()
            mirror.apply(self._snapshot(dp_rank))
        return () if mirror is None else mirror.held()

    def _rank(self, dp_rank: DpRank) -> _Rank:
        rank = self._ranks.get(dp_rank)
        if rank is None:
            rank = self._ranks[dp_rank] = _Rank(
                WorkerRank(self.worker_id, dp_rank),
                ring_events_max=self._ring_events_max,
                mirror=None if self._snapshot is not None else RankMirror(self._mirrored, dp_rank),
            )
        return rank

    def _flush(self, rank: _Rank) -> None:
        if not rank.pending:
            return
        events = tuple(rank.pending)
        rank.pending.clear()
        first = rank.next_event_id
        rank.ring.extend(events)
        rank.next_event_id = EventId(first + len(events))
        self._events.publish(KvBatch(rank.rank, self.epoch, first, events, self._wall_clock()))
