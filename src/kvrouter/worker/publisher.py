"""Customs: an engine's stores and removals become numbered batches; the last ones are kept for a while."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from kvrouter.core.columns import pack_hashes
from kvrouter.core.events import Cleared, Held, KvBatch, KvEvent, KvSnapshot, Medium, Removed, Stored
from kvrouter.core.hashing import block_hashes, hash_seed
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.core.requests import TokenBuffer
from kvrouter.planes.events.port import EventPublisher

EVENTS_RING_MAX = 1024
"""Events of one rank that are kept for whoever missed them; a larger gap takes a snapshot."""

EVENTS_BATCH_MAX = 512
"""Events that wait before a batch is sent without waiting for the loop's next turn."""

Snapshot = Callable[[DpRank], tuple[Held, ...]]


class KvPublisher:
    """Numbers one worker's KV events, per rank from 0 within an epoch, and sends them in batches.

    Events that come in one turn of the event loop leave as one batch at its end. Nothing here waits: an
    engine never waits for a router. ``snapshot`` tells what a rank holds now.
    """

    def __init__(
        self,
        plane: EventPublisher,
        *,
        worker_id: WorkerId,
        epoch: Epoch,
        snapshot: Snapshot,
        block_size: int,
        wall_clock: Callable[[], float],
    ) -> None:
        self._plane = plane
        self._worker_id = worker_id
        self._epoch = epoch
        self._snapshot = snapshot
        self._block_size = block_size
        self._wall_clock = wall_clock
        self._ranks: dict[DpRank, _RankStream] = {}
        self._flush_is_due = False
        self._closed = False

    def publish(self, dp_rank: DpRank, events: Sequence[KvEvent]) -> None:
        """Send events of one rank, in this order."""
        if self._closed or not events:
            return
        stream = self._stream(dp_rank)
        stream.pending.extend(events)
        if len(stream.pending) >= EVENTS_BATCH_MAX:
            self._send(dp_rank, stream)
        elif not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def publish_stored(
        self,
        token_ids: TokenBuffer | Sequence[int],
        engine_hashes: Sequence[int],
        *,
        parent: int | None = None,
        dp_rank: int = 0,
        medium: Medium = Medium.GPU,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> None:
        """Tell of consecutive full blocks; ValueError unless there are ``block_size`` tokens for each."""
        if len(token_ids) != self._block_size * len(engine_hashes):
            raise ValueError(
                f"token_ids: {len(engine_hashes)} blocks of {self._block_size} tokens, not {len(token_ids)}"
            )
        seed = hash_seed(lora_name=lora_name, cache_namespace=cache_namespace)
        stored = Stored(
            parent=None if parent is None else EngineHash(parent),
            engine_hashes=pack_hashes(engine_hashes),
            block_hashes=block_hashes(token_ids, block_size=self._block_size, seed=seed),
            medium=medium,
        )
        self.publish(DpRank(dp_rank), (stored,))

    def publish_removed(
        self, engine_hashes: Sequence[int], *, dp_rank: int = 0, medium: Medium = Medium.GPU
    ) -> None:
        """Tell of blocks that left a medium."""
        self.publish(DpRank(dp_rank), (Removed(pack_hashes(engine_hashes), medium),))

    def publish_cleared(self, *, dp_rank: int = 0) -> None:
        """Tell that a rank holds nothing any more."""
        self.publish(DpRank(dp_rank), (Cleared(),))

    def flush(self) -> None:
        """Send what waits."""
        self._flush_is_due = False
        for dp_rank, stream in self._ranks.items():
            if stream.pending:
                self._send(dp_rank, stream)

    def close(self) -> None:
        """Send nothing more; what waits is let go, as when a worker dies."""
        self._closed = True
        self._ranks.clear()

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """The batch of ids ``first`` to ``last``, inclusive; None when some of them are gone."""
        stream = self._ranks.get(rank.dp_rank)
        if stream is None or self._closed:
            return None
        offset = first - (stream.next_event_id - len(stream.ring))
        if offset < 0 or last >= stream.next_event_id:
            return None
        events = tuple(stream.ring[index] for index in range(offset, offset + last - first + 1))
        return KvBatch(rank, self._epoch, first, events, self._wall_clock())

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        """The rank's whole state, with every event before ``next_event_id`` in it."""
        if self._closed or rank.worker_id != self._worker_id:
            return None
        held = self._snapshot(rank.dp_rank)  # may bring events of its own, which are in it
        stream = self._stream(rank.dp_rank)
        if stream.pending:
            self._send(rank.dp_rank, stream)
        return KvSnapshot(rank, self._epoch, stream.next_event_id, held)

    def _stream(self, dp_rank: DpRank) -> "_RankStream":
        stream = self._ranks.get(dp_rank)
        if stream is None:
            stream = self._ranks[dp_rank] = _RankStream()
        return stream

    def _send(self, dp_rank: DpRank, stream: "_RankStream") -> None:
        events, stream.pending = tuple(stream.pending), []
        first = stream.next_event_id
        stream.next_event_id = EventId(first + len(events))
        stream.ring.extend(events)
        rank = WorkerRank(self._worker_id, dp_rank)
        self._plane.publish(KvBatch(rank, self._epoch, first, events, self._wall_clock()))


class _RankStream:
    """One rank's numbering, what waits to be sent, and what was sent last."""

    __slots__ = ("next_event_id", "pending", "ring")

    def __init__(self) -> None:
        self.next_event_id = EventId(0)
        self.pending: list[KvEvent] = []
        self.ring: deque[KvEvent] = deque(maxlen=EVENTS_RING_MAX)
