"""Event ingest of one rank: its feed, its queued batches, and the recovery request in progress."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from kvrouter.core.events import KvBatch, Medium
from kvrouter.core.ids import Slot
from kvrouter.kernel.feed.rank_feed import RankFeed
from kvrouter.kernel.feed.states import FeedState

WAITING_EVENTS_MAX = 8192
"""Events of one rank that wait while the index works for it. When full, new ones are dropped, and the
feed sees a gap.
"""


def loop_time_s() -> float:
    """Return the time of the running loop, by which feeds and their timers go."""
    return asyncio.get_running_loop().time()


class WaitingBatches:
    """Batches in the order of arrival, which weigh as much as so many events at most."""

    __slots__ = ("_batches", "_n_events")

    def __init__(self) -> None:
        self._batches: deque[KvBatch] = deque()
        self._n_events = 0

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, batch: KvBatch) -> bool:
        """Keep ``batch``; False where there is no room for it."""
        n_events = self._n_events + batch.weight
        if n_events > WAITING_EVENTS_MAX:
            return False
        self._batches.append(batch)
        self._n_events = n_events
        return True

    def take(self) -> KvBatch:
        """Take out the one that waits for longest."""
        batch = self._batches.popleft()
        self._n_events -= batch.weight
        return batch


GPU_SLACK = 2
"""An engine may count its blocks otherwise than its events: so many times what it says are believed."""

OTHER_MEDIA_SLACK = 64
"""No worker says what fits into host memory or on a disk: so many times what the GPU holds is believed."""

CAPACITY_MIN_BLOCKS = 2048
"""As much is believed of any rank."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most blocks that a rank can hold, on its GPU and in each other medium."""

    gpu: int
    other: int

    @classmethod
    def of(cls, total_blocks: int | None, *, blocks_max: int) -> "Capacity":
        """By what its worker says of its GPU, where 0 says nothing; ``blocks_max`` holds in any case."""
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
"""A sender's clock is judged by what came in the last one to two such times: several heartbeats."""


class SenderClock:
    """How far a sender's wall clock is ahead of this one's. A message that was long on its way makes it seem
    behind, never ahead, so that the most of some messages is the nearest to the truth.
    """

    __slots__ = ("_before_s", "_since_s", "_window_s")

    def __init__(self) -> None:
        self._before_s: float | None = None
        self._window_s: float | None = None
        self._since_s = 0.0

    @property
    def ahead_s(self) -> float | None:
        """Seconds, below 0 for a clock that is behind; None before the first message."""
        known = [each for each in (self._before_s, self._window_s) if each is not None]
        return max(known, default=None)

    def note(self, ahead_s: float, *, now_s: float) -> None:
        """A message came whose stamp was so far ahead of the clock here."""
        if self._window_s is None or now_s - self._since_s >= CLOCK_WINDOW_S:
            self._before_s, self._window_s, self._since_s = self._window_s, ahead_s, now_s
        elif ahead_s > self._window_s:
            self._window_s = ahead_s


@dataclass(slots=True)
class RankIngest:
    """One rank's feed, and what runs for it.

    ``idle`` is set unless the index is at work for the rank: then the feed is handed nothing, and batches
    wait. ``capacity``: what the rank can hold, as its worker says; of what was stored ``unchecked_blocks``
    were not compared with it. ``is_behind``: the index is not yet where the feed is, so nothing of it scores.
    ``is_scoring``: what the pump's mask says.
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
        """How far what the index has of the rank can be trusted."""
        return FeedState.RECOVERING if self.is_behind else self.feed.state

    @property
    def scores(self) -> bool:
        """Whether what the index has of the rank may count."""
        return not self.is_behind and self.feed.scores
