"""Event ingest of one rank: its feed, its queued batches and its open recovery request."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from kvrouter.core.events import KvBatch, Medium
from kvrouter.core.ids import Slot
from kvrouter.kernel.feed.rank_feed import RankFeed
from kvrouter.kernel.feed.states import FeedState

WAITING_EVENTS_MAX = 8192
"""The most events of a rank that wait for the index. When full, new ones are dropped: the feed sees a gap."""


def loop_time_s() -> float:
    """Return the running loop's time, which feeds and their timers use."""
    return asyncio.get_running_loop().time()


class WaitingBatches:
    """A queue of batches, limited by the sum of their weights in events."""

    __slots__ = ("_batches", "_n_events")

    def __init__(self) -> None:
        self._batches: deque[KvBatch] = deque()
        self._n_events = 0

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, batch: KvBatch) -> bool:
        """Add ``batch``; return False when the queue is full."""
        n_events = self._n_events + batch.weight
        if n_events > WAITING_EVENTS_MAX:
            return False
        self._batches.append(batch)
        self._n_events = n_events
        return True

    def take(self) -> KvBatch:
        """Remove and return the oldest batch."""
        batch = self._batches.popleft()
        self._n_events -= batch.weight
        return batch


GPU_SLACK = 2
"""Factor on the GPU blocks that a worker states: engines may count blocks otherwise than their events."""

OTHER_MEDIA_SLACK = 64
"""Factor on the GPU blocks for host memory and disk, whose size no worker states."""

CAPACITY_MIN_BLOCKS = 2048
"""The least number of blocks accepted from any rank."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most blocks accepted from a rank, on its GPU and in each other medium."""

    gpu: int
    other: int

    @classmethod
    def of(cls, total_blocks: int | None, *, blocks_max: int) -> "Capacity":
        """The capacity for the GPU blocks that the worker states; 0 and None mean unknown."""
        if total_blocks is None or total_blocks <= 0:
            return cls(blocks_max, blocks_max)
        return cls(
            min(blocks_max, max(CAPACITY_MIN_BLOCKS, GPU_SLACK * total_blocks)),
            min(blocks_max, max(CAPACITY_MIN_BLOCKS, OTHER_MEDIA_SLACK * total_blocks)),
        )

    @property
    def total(self) -> int:
        """The most blocks over all media."""
        return sum(map(self.holds, Medium))

    def holds(self, medium: Medium) -> int:
        """The most blocks in the medium."""
        return self.gpu if medium is Medium.GPU else self.other


CLOCK_WINDOW_S = 30.0
"""The clock is judged by the messages of the last 30 to 60 s, which include several heartbeats."""


class SenderClock:
    """Estimates how far a sender's wall clock is ahead of the local one. A delayed message makes it seem
    behind, never ahead, so the maximum over some messages is the best estimate.
    """

    __slots__ = ("_before_s", "_since_s", "_window_s")

    def __init__(self) -> None:
        self._before_s: float | None = None
        self._window_s: float | None = None
        self._since_s = 0.0

    @property
    def ahead_s(self) -> float | None:
        """Seconds ahead, below 0 for a clock that is behind; None before the first message."""
        known = [each for each in (self._before_s, self._window_s) if each is not None]
        return max(known, default=None)

    def note(self, ahead_s: float, *, now_s: float) -> None:
        """Note a message whose timestamp is ``ahead_s`` ahead of the local clock."""
        if self._window_s is None or now_s - self._since_s >= CLOCK_WINDOW_S:
            self._before_s, self._window_s, self._since_s = self._window_s, ahead_s, now_s
        elif ahead_s > self._window_s:
            self._window_s = ahead_s


@dataclass(slots=True)
class RankIngest:
    """One rank's feed with its timer, recovery request and queue.

    ``idle`` is set unless the index is working for the rank; until then batches wait and the feed is not
    called. ``capacity`` limits the rank's blocks; ``unchecked_blocks`` were stored since the last comparison
    with it. While ``is_behind`` the index has not applied all that the feed has, so the rank does not score.
    ``is_scoring`` is the rank's value in the mask of :class:`EventIngest`.
    """

    feed: RankFeed
    slot: Slot
    last_message_s: float
    capacity: Capacity
    is_missing: bool = False
    reported: FeedState | None = None
    stale_since_s: float | None = None
    lag_s: float = 0.0
    clock: SenderClock = field(default_factory=SenderClock)
    timer: asyncio.TimerHandle | None = None
    ask: asyncio.Task[None] | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    is_behind: bool = False
    is_scoring: bool = False
    waiting: WaitingBatches = field(default_factory=WaitingBatches)
    unchecked_blocks: int = 0

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def state(self) -> FeedState:
        """The feed's state; RECOVERING also while the index is behind the feed."""
        return FeedState.RECOVERING if self.is_behind else self.feed.state

    @property
    def scores(self) -> bool:
        """Whether the rank's blocks in the index may score."""
        return not self.is_behind and self.feed.scores
