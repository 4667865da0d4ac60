"""One feed, step by step: what each input makes of each state."""

from typing import get_args

import pytest

from kvrouter.core.events import Cleared, KvBatch, KvEvent, KvSnapshot, Removed, Stored, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.kernel.feed.rank_feed import TABLE, RankFeed
from kvrouter.kernel.feed.states import (
    Apply,
    AskRange,
    AskSnapshot,
    Command,
    Count,
    Empty,
    FeedCount,
    FeedLimits,
    FeedState,
    Input,
    Load,
)

RANK = WorkerRank(WorkerId(7), DpRank(0))
OLD, NEW = Epoch(11), Epoch(5)


def stored(block: int) -> Stored:
    return Stored(None, pack_hashes([block]), pack_hashes([block]))


def batch(first: int, *events: KvEvent, epoch: Epoch = OLD) -> KvBatch:
    return KvBatch(RANK, epoch, EventId(first), events)


def stores(first: int, n: int, *, epoch: Epoch = OLD) -> KvBatch:
    return batch(first, *(stored(first + i) for i in range(n)), epoch=epoch)


def snapshot(next_event_id: int, *, epoch: Epoch = OLD) -> KvSnapshot:
    return KvSnapshot(RANK, epoch, EventId(next_event_id), ())


def deeds(commands: list[Command]) -> list[Command]:
    return [command for command in commands if not isinstance(command, Count)]


def counts(commands: list[Command]) -> dict[FeedCount, int]:
    return {command.name: command.n for command in commands if isinstance(command, Count)}


def state(feed: RankFeed) -> FeedState:
    return feed.state


def scores(feed: RankFeed) -> bool:
    return feed.scores


def live_feed(next_event_id: int = 3, limits: FeedLimits | None = None) -> RankFeed:
    feed = RankFeed(RANK, limits=limits)
    feed.on_batch(batch(0), now_s=0.0)
    feed.on_snapshot(1, snapshot(next_event_id), now_s=0.0)
    assert state(feed) is FeedState.LIVE
    return feed


def partial_feed() -> RankFeed:
    feed = RankFeed(RANK)
    feed.on_batch(stores(4, 2), now_s=0.0)
    feed.on_snapshot(1, None, now_s=0.0)
    assert state(feed) is FeedState.PARTIAL
    return feed


def test_the_feed_table_has_a_row_for_every_state_and_input() -> None:
    assert set(TABLE) == {(state, kind) for state in FeedState for kind in get_args(Input)}


def test_a_discovered_feed_asks_for_a_snapshot_and_scores_once_loaded() -> None:
    feed = RankFeed(RANK)
    assert feed.on_new_epoch(OLD, now_s=0.0) == [Count(FeedCount.SNAPSHOTS_ASKED), AskSnapshot(1)]
    assert not scores(feed)
    assert deeds(feed.on_snapshot(1, snapshot(3), now_s=0.0)) == [Load(snapshot(3))]
    assert scores(feed)
    assert (state(feed), feed.epoch, feed.next_event_id) == (FeedState.LIVE, OLD, 3)


def test_a_first_batch_mid_stream_asks_for_a_snapshot() -> None:
    feed = RankFeed(RANK)
    assert deeds(feed.on_batch(stores(5, 1), now_s=0.0)) == [AskSnapshot(1)]
    assert deeds(feed.on_snapshot(1, snapshot(5), now_s=0.0)) == [
        Load(snapshot(5)),
        Apply(stores(5, 1).events),
    ]


def test_a_batch_with_the_next_event_id_is_applied() -> None:
    feed = live_feed()
    assert feed.on_batch(stores(3, 2), now_s=1.0) == [Apply(stores(3, 2).events)]
    assert feed.next_event_id == 5
    assert feed.next_timeout_s is None


@pytest.mark.parametrize(
    ("repeated", "n_repeated", "applied"),
    [(stores(1, 2), 2, []), (stores(1, 3), 2, [stored(3)]), (stores(0, 1), 1, [])],
)
def test_repeated_events_of_a_batch_are_dropped_and_counted(
    repeated: KvBatch, n_repeated: int, applied: list[KvEvent]
) -> None:
    feed = live_feed()
    commands = feed.on_batch(repeated, now_s=1.0)
    assert deeds(commands) == ([Apply(tuple(applied))] if applied else [])
    assert counts(commands) == {FeedCount.REPEATED_EVENTS: n_repeated}


def test_a_range_answer_fills_a_gap_before_buffered_batches() -> None:
    feed = live_feed()
    commands = feed.on_batch(stores(5, 1), now_s=1.0)
    assert deeds(commands) == [AskRange(2, EventId(3), EventId(4))]
    assert counts(commands) == {FeedCount.GAPS: 1, FeedCount.RANGES_ASKED: 1}
    assert not scores(feed)
    assert feed.on_batch(stores(6, 2), now_s=1.0) == []
    assert deeds(feed.on_range(2, stores(3, 2), now_s=1.0)) == [
        Apply(stores(3, 2).events),
        Apply(stores(5, 3).events),
    ]
    assert state(feed) is FeedState.LIVE
    assert feed.next_event_id == 8


def test_a_late_batch_fills_a_gap_before_the_answer() -> None:
    feed = live_feed()
    feed.on_batch(stores(4, 1), now_s=1.0)
    assert deeds(feed.on_batch(stores(3, 1), now_s=1.0)) == [Apply(stores(3, 2).events)]
    assert state(feed) is FeedState.LIVE
    late = feed.on_range(2, stores(3, 1), now_s=1.0)
    assert late == [Count(FeedCount.ANSWERS_USELESS)]


def test_a_range_that_the_worker_lost_is_replaced_by_a_snapshot() -> None:
    feed = live_feed()
    feed.on_batch(stores(5, 1), now_s=1.0)
    assert deeds(feed.on_range(2, None, now_s=1.0)) == [AskSnapshot(3)]
    assert deeds(feed.on_snapshot(3, snapshot(7), now_s=1.0)) == [Load(snapshot(7))]
    assert state(feed) is FeedState.LIVE


def test_a_long_gap_asks_for_a_snapshot_at_once() -> None:
    feed = live_feed(limits=FeedLimits(range_events_max=4))
    assert deeds(feed.on_batch(stores(8, 1), now_s=1.0)) == [AskSnapshot(2)]


def test_an_empty_batch_reveals_a_lost_tail() -> None:
    feed = live_feed()
    assert feed.on_batch(batch(3), now_s=1.0) == []
    assert deeds(feed.on_batch(batch(5), now_s=1.0)) == [AskRange(2, EventId(3), EventId(4))]
    assert deeds(feed.on_range(2, stores(3, 2), now_s=1.0)) == [Apply(stores(3, 2).events)]
    assert state(feed) is FeedState.LIVE


def test_lost_history_empties_the_rank_and_makes_the_feed_partial() -> None:
    feed = live_feed()
    feed.on_batch(stores(5, 2), now_s=1.0)
    feed.on_range(2, None, now_s=1.0)
    commands = feed.on_snapshot(3, None, now_s=1.0)
    assert deeds(commands) == [Empty(), Apply(stores(5, 2).events)]
    assert counts(commands) == {FeedCount.HISTORY_LOST: 1}
    assert state(feed) is FeedState.PARTIAL
    assert scores(feed)


def test_lost_history_keeps_only_events_after_the_last_gap() -> None:
    feed = live_feed(limits=FeedLimits(range_events_max=0))
    feed.on_batch(stores(5, 2), now_s=1.0)
    feed.on_batch(stores(9, 1), now_s=1.0)
    assert deeds(feed.on_snapshot(2, None, now_s=1.0)) == [Empty(), Apply((stored(9),))]
    assert feed.next_event_id == 10


def test_a_partial_feed_asks_for_a_snapshot_again_and_goes_live() -> None:
    feed = partial_feed()
    assert feed.next_timeout_s == 10.0
    assert feed.on_timeout(now_s=9.0) == []
    assert deeds(feed.on_timeout(now_s=10.0)) == [AskSnapshot(2)]
    assert deeds(feed.on_batch(stores(6, 1), now_s=10.0)) == [Apply(stores(6, 1).events)]
    assert scores(feed)
    assert deeds(feed.on_snapshot(2, snapshot(6), now_s=11.0)) == [
        Load(snapshot(6)),
        Apply(stores(6, 1).events),
    ]
    assert state(feed) is FeedState.LIVE


def test_a_partial_feed_without_a_snapshot_keeps_its_blocks() -> None:
    feed = partial_feed()
    feed.on_timeout(now_s=10.0)
    assert deeds(feed.on_snapshot(2, None, now_s=11.0)) == []
    assert scores(feed)
    assert feed.next_timeout_s == 21.0


def test_a_clear_makes_a_partial_feed_live() -> None:
    feed = live_feed()
    feed.on_batch(stores(5, 1), now_s=1.0)
    feed.on_range(2, None, now_s=1.0)
    feed.on_snapshot(3, None, now_s=1.0)
    assert state(feed) is FeedState.PARTIAL
    feed.on_batch(batch(6, Cleared(), stored(1)), now_s=1.0)
    assert state(feed) is FeedState.LIVE


def test_a_partial_feed_with_a_gap_does_not_score() -> None:
    feed = partial_feed()
    assert deeds(feed.on_batch(batch(8, Removed(pack_hashes([4]))), now_s=1.0)) == [
        AskRange(2, EventId(6), EventId(7))
    ]
    assert not scores(feed)
    feed.on_range(2, stores(6, 2), now_s=1.0)
    assert state(feed) is FeedState.PARTIAL


def test_a_batch_of_another_epoch_is_decided_by_a_snapshot() -> None:
    feed = live_feed()
    assert deeds(feed.on_batch(stores(0, 1, epoch=NEW), now_s=1.0)) == [AskSnapshot(2)]
    assert not scores(feed)
    commands = feed.on_snapshot(2, snapshot(1, epoch=NEW), now_s=1.0)
    assert deeds(commands) == [Load(snapshot(1, epoch=NEW))]
    assert (state(feed), feed.epoch, feed.next_event_id) == (FeedState.LIVE, NEW, 1)
    assert counts(feed.on_batch(stores(3, 1), now_s=1.0)) == {FeedCount.STALE_EPOCH_BATCHES: 1}
    assert state(feed) is FeedState.LIVE


def test_a_late_batch_of_another_epoch_is_dropped_by_the_snapshot() -> None:
    feed = live_feed()
    feed.on_batch(stores(0, 1, epoch=NEW), now_s=1.0)
    assert deeds(feed.on_snapshot(2, snapshot(3), now_s=1.0)) == [Load(snapshot(3))]
    assert (state(feed), feed.epoch) == (FeedState.LIVE, OLD)


def test_discovery_ends_an_epoch_at_once() -> None:
    feed = live_feed()
    assert deeds(feed.on_new_epoch(NEW, now_s=1.0)) == [Empty(), AskSnapshot(2)]
    assert not scores(feed)
    assert deeds(feed.on_batch(stores(0, 2, epoch=NEW), now_s=1.0)) == [Apply(stores(0, 2).events)]
    assert (state(feed), feed.epoch) == (FeedState.LIVE, NEW)
    assert counts(feed.on_batch(stores(3, 1), now_s=1.0)) == {FeedCount.STALE_EPOCH_BATCHES: 1}
    assert feed.on_new_epoch(NEW, now_s=1.0) == []


def test_a_snapshot_of_an_epoch_ended_by_discovery_is_ignored() -> None:
    feed = live_feed()
    feed.on_new_epoch(NEW, now_s=1.0)
    commands = feed.on_snapshot(2, snapshot(9), now_s=1.0)
    assert counts(commands) == {FeedCount.ANSWERS_USELESS: 1, FeedCount.HISTORY_LOST: 1}
    feed.on_batch(stores(0, 1, epoch=NEW), now_s=1.0)
    assert (state(feed), feed.epoch) == (FeedState.LIVE, NEW)


def test_a_second_orphan_soon_after_a_snapshot_makes_the_feed_partial() -> None:
    feed = live_feed()
    assert deeds(feed.on_orphan(now_s=20.0)) == [AskSnapshot(2)]
    assert not scores(feed)
    feed.on_snapshot(2, snapshot(3), now_s=20.0)
    assert feed.on_orphan(now_s=21.0) == [Count(FeedCount.ORPHANS)]
    assert state(feed) is FeedState.PARTIAL
    assert feed.next_timeout_s == 30.0


def test_an_orphan_during_range_recovery_asks_for_a_snapshot() -> None:
    feed = live_feed()
    feed.on_batch(stores(5, 1), now_s=1.0)
    assert deeds(feed.on_orphan(now_s=1.0)) == [AskSnapshot(3)]
    assert feed.on_batch(stores(3, 2), now_s=1.0) == []
    assert not scores(feed)


def test_a_late_recovery_answer_times_out() -> None:
    feed = live_feed()
    feed.on_batch(stores(5, 1), now_s=1.0)
    feed.on_asked(2, now_s=1.0)
    assert feed.next_timeout_s == 6.0
    assert feed.on_timeout(now_s=5.9) == []
    assert deeds(feed.on_timeout(now_s=6.0)) == [AskSnapshot(3)]
    feed.on_asked(3, now_s=6.0)
    assert feed.next_timeout_s == 66.0, "a whole state may be long: who asks gives up when nothing comes"
    assert feed.is_asking
    assert deeds(feed.on_timeout(now_s=66.0)) == [Empty(), Apply(stores(5, 1).events)]
    assert state(feed) is FeedState.PARTIAL
    assert not feed.is_asking


def test_an_answer_timeout_begins_when_its_question_is_sent() -> None:
    feed = live_feed()
    feed.on_batch(stores(5, 1), now_s=1.0)
    assert feed.next_timeout_s is None
    assert feed.on_timeout(now_s=100.0) == []
    feed.on_asked(1, now_s=100.0)  # given up long ago
    assert feed.next_timeout_s is None
    feed.on_asked(2, now_s=200.0)
    assert feed.next_timeout_s == 205.0


def test_a_full_inbox_keeps_the_newest_batch_and_asks_for_a_snapshot() -> None:
    feed = live_feed(limits=FeedLimits(inbox_events_max=4))
    feed.on_batch(stores(4, 2), now_s=1.0)
    commands = feed.on_batch(stores(6, 3), now_s=1.0)
    assert deeds(commands) == [AskSnapshot(3)]
    assert counts(commands)[FeedCount.INBOX_FULL] == 1
    # What the snapshot does not reach is asked for: the newest id is never forgotten.
    assert deeds(feed.on_snapshot(3, snapshot(5), now_s=1.0)) == [
        Load(snapshot(5)),
        AskRange(4, EventId(5), EventId(5)),
    ]


def test_a_snapshot_older_than_the_applied_events_is_ignored() -> None:
    feed = live_feed()
    feed.on_batch(stores(5, 1), now_s=1.0)
    feed.on_range(2, None, now_s=1.0)
    commands = feed.on_snapshot(3, snapshot(2), now_s=1.0)
    assert counts(commands) == {FeedCount.ANSWERS_USELESS: 1, FeedCount.HISTORY_LOST: 1}
    assert state(feed) is FeedState.PARTIAL


def live_at(next_event_id: int) -> RankFeed:
    """A feed that has loaded a snapshot with that id, at the time 0."""
    feed = RankFeed(RANK)
    (ask,) = deeds(feed.on_new_epoch(OLD, now_s=0.0))
    assert isinstance(ask, AskSnapshot)
    feed.on_asked(ask.ticket, now_s=0.0)
    feed.on_snapshot(ask.ticket, snapshot(next_event_id), now_s=0.0)
    assert state(feed) is FeedState.LIVE
    return feed


def asked_snapshot(commands: list[Command]) -> AskSnapshot:
    (ask,) = deeds(commands)
    assert isinstance(ask, AskSnapshot)
    return ask


def test_heartbeats_below_the_position_for_long_contradict_the_feed() -> None:
    feed = live_at(10)
    assert feed.on_batch(batch(4), now_s=20.0) == []
    asked = feed.on_batch(batch(4), now_s=25.0)
    assert counts(asked)[FeedCount.CONTRADICTIONS] == 1
    ask = asked_snapshot(asked)
    assert state(feed) is FeedState.RECOVERING
    assert deeds(feed.on_snapshot(ask.ticket, snapshot(4), now_s=25.1)) == [Load(snapshot(4))]
    assert state(feed) is FeedState.LIVE
    assert deeds(feed.on_batch(stores(4, 1), now_s=26.0)) == [Apply((stored(4),))], "no longer taken as known"


def test_single_low_heartbeats_do_not_contradict_the_feed() -> None:
    feed = live_at(10)
    assert feed.on_batch(batch(4), now_s=0.1) == []
    assert feed.on_batch(batch(10), now_s=0.2) == []
    assert feed.on_batch(batch(4), now_s=20.0) == []
    assert state(feed) is FeedState.LIVE


def test_batches_beyond_two_snapshots_are_dropped() -> None:
    feed = live_at(10)
    first = asked_snapshot(feed.on_batch(batch(2**40), now_s=1.0))
    second = asked_snapshot(feed.on_snapshot(first.ticket, snapshot(10), now_s=1.1)[1:])
    reported = feed.on_snapshot(second.ticket, snapshot(10), now_s=1.2)
    assert counts(reported)[FeedCount.CONTRADICTIONS] == 1
    assert state(feed) is FeedState.LIVE
    assert deeds(feed.on_batch(stores(10, 1), now_s=1.3)) == [Apply((stored(10),))]


def test_late_batches_with_events_do_not_contradict_the_feed() -> None:
    feed = live_at(10)
    for now_s in (20.0, 30.0):
        assert counts(feed.on_batch(stores(4, 1), now_s=now_s)) == {FeedCount.REPEATED_EVENTS: 1}
    assert state(feed) is FeedState.LIVE


def test_a_contradicted_feed_drops_its_buffered_batches() -> None:
    feed = partial_feed()
    asked_snapshot(feed.on_timeout(now_s=10.0))
    feed.on_batch(stores(6, 1), now_s=10.0)
    feed.on_batch(batch(3), now_s=11.0)
    ask = asked_snapshot(feed.on_batch(batch(3), now_s=16.0))
    assert deeds(feed.on_snapshot(ask.ticket, snapshot(3), now_s=16.1)) == [Load(snapshot(3))]
    assert state(feed) is FeedState.LIVE


def test_a_snapshot_restarts_the_time_limit_of_low_heartbeats() -> None:
    feed = live_at(10)
    feed.on_batch(batch(4), now_s=20.0)
    ask = asked_snapshot(feed.on_orphan(now_s=20.5))
    feed.on_snapshot(ask.ticket, snapshot(10), now_s=21.0)
    assert feed.on_batch(batch(4), now_s=24.5) == [], "on its way since before the snapshot"
    assert state(feed) is FeedState.LIVE
    asked_snapshot(feed.on_batch(batch(4), now_s=28.5))


def test_heartbeats_below_the_snapshot_of_a_contradiction_are_ignored() -> None:
    """The stream lags: asking again for every heartbeat would never end."""
    feed = live_at(10)
    feed.on_batch(batch(4), now_s=20.0)
    ask = asked_snapshot(feed.on_batch(batch(5), now_s=25.0))
    feed.on_snapshot(ask.ticket, snapshot(12), now_s=25.1)
    for n in range(6, 12):
        assert feed.on_batch(batch(n), now_s=5.0 * n) == []
    assert state(feed) is FeedState.LIVE
    feed.on_batch(stores(12, 8), now_s=100.0)
    feed.on_batch(batch(12), now_s=101.0)
    asked_snapshot(feed.on_batch(batch(12), now_s=106.0))


def test_a_contradiction_in_a_new_epoch_may_have_lower_event_ids() -> None:
    feed = live_at(10)
    feed.on_batch(batch(4), now_s=20.0)
    ask = asked_snapshot(feed.on_batch(batch(5), now_s=25.0))
    feed.on_snapshot(ask.ticket, snapshot(12), now_s=25.1)
    ask = asked_snapshot(feed.on_new_epoch(NEW, now_s=30.0)[2:])
    feed.on_snapshot(ask.ticket, snapshot(8, epoch=NEW), now_s=30.1)
    feed.on_batch(batch(3, epoch=NEW), now_s=31.0)
    asked_snapshot(feed.on_batch(batch(3, epoch=NEW), now_s=36.0))


def test_a_feed_over_its_limit_is_emptied_and_asks_again_after_a_pause() -> None:
    feed = live_at(10)
    reported = feed.on_overfilled(now_s=20.0)
    assert (deeds(reported), counts(reported)) == ([Empty()], {FeedCount.OVER_LIMIT: 1})
    assert (state(feed), scores(feed), feed.next_timeout_s) == (FeedState.OVER_LIMIT, False, 80.0)
    assert feed.on_batch(stores(10, 1), now_s=30.0) == []
    assert feed.on_overfilled(now_s=30.0) == []
    assert feed.on_timeout(now_s=79.9) == []
    ask = asked_snapshot(feed.on_timeout(now_s=80.0))
    assert deeds(feed.on_snapshot(ask.ticket, snapshot(11), now_s=80.1)) == [Load(snapshot(11))]
    assert state(feed) is FeedState.LIVE
