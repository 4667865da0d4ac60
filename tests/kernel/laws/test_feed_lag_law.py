"""A stream that lags behind its worker costs one snapshot more for each recovery, however long it lags."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.events import KvBatch, KvSnapshot, Stored, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.kernel.feed.rank_feed import RankFeed
from kvrouter.kernel.feed.states import AskRange, AskSnapshot, Command, FeedState

RANK = WorkerRank(WorkerId(1), DpRank(0))
EPOCH = Epoch(1)
HEARTBEAT_S = 5
LASTS_S = 300
BLOCK = pack_hashes([1])


class LaggingStream:
    """Second by second: a worker that publishes, its stream, which loses nothing, and its answers."""

    def __init__(self, *, lag_s: int, answer_s: int) -> None:
        self.lag_s = lag_s
        self.feed = RankFeed(RANK)
        self.n_snapshots = 0
        self._answer_s = answer_s
        self._now_s = 0
        self._next_id = EventId(0)
        self._stream: deque[tuple[int, KvBatch]] = deque()
        self._answers: deque[tuple[int, int, KvSnapshot]] = deque()
        self._do(self.feed.on_new_epoch(EPOCH, now_s=0.0))

    def second(self, n_events: int, *, is_doubted: bool) -> None:
        now_s = self._now_s
        self._publish(n_events)
        if now_s % HEARTBEAT_S == 0:
            self._publish(0)
        while self._stream and self._stream[0][0] <= now_s - self.lag_s:
            self._do(self.feed.on_batch(self._stream.popleft()[1], now_s=now_s))
        if is_doubted:
            self._do(self.feed.on_doubt(now_s=now_s))
        while self._answers and self._answers[0][0] <= now_s:
            _, ticket, snapshot = self._answers.popleft()
            self._do(self.feed.on_snapshot(ticket, snapshot, now_s=now_s))
        self._do(self.feed.on_timeout(now_s=now_s))
        self._now_s += 1

    def _publish(self, n_events: int) -> None:
        batch = KvBatch(RANK, EPOCH, self._next_id, (Stored(None, BLOCK, BLOCK),) * n_events)
        self._stream.append((self._now_s, batch))
        self._next_id = batch.next_event_id

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            assert not isinstance(command, AskRange), "nothing is missing"
            if isinstance(command, AskSnapshot):
                self.n_snapshots += 1
                snapshot = KvSnapshot(RANK, EPOCH, self._next_id, ())
                self._answers.append((self._now_s + self._answer_s, command.ticket, snapshot))


@settings(max_examples=max(200, settings().max_examples))
@given(
    lag_s=st.integers(0, 120),
    answer_s=st.integers(0, 8),
    rates=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    doubts_s=st.sets(st.integers(0, LASTS_S - 1), max_size=4),
)
def test_a_lagging_stream_costs_at_most_one_more_snapshot_per_recovery(
    lag_s: int, answer_s: int, rates: list[int], doubts_s: set[int]
) -> None:
    stream = LaggingStream(lag_s=lag_s, answer_s=answer_s)
    for now_s in range(LASTS_S):
        stream.second(rates[now_s % len(rates)], is_doubted=now_s in doubts_s)
    assert stream.n_snapshots <= 2 * (1 + len(doubts_s))
    stream.lag_s = 0
    for _ in range(30):
        stream.second(0, is_doubted=False)
    assert stream.feed.state is FeedState.LIVE
