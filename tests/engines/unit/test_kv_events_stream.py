"""One engine's socket, scripted: attaching, gaps, replay, restart."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from kvrouter.core.events import Cleared, KvEvent, Stored
from kvrouter.core.ids import DpRank
from kvrouter.engines.kv_events.batches import REPLAY_END
from kvrouter.engines.kv_events.engine_events import EngineTraits
from kvrouter.engines.kv_events.event_stream import (
    AskReplay,
    Command,
    EngineEventStream,
    EventStreamLimits,
    MalformedBatch,
    Missed,
    Publish,
    Restarted,
)
from kvrouter.engines.vllm.events import decode

R0 = DpRank(0)


@dataclass
class Engine:
    """One start of an engine that stores one block a batch, named 1,000 × start + number."""

    start: int = 1
    ring_batches_max: int = 100
    payloads: list[bytes] = field(default_factory=list)

    def publish(self, n: int = 1) -> list[tuple[bytes, bytes, bytes]]:
        first = len(self.payloads)
        self.payloads.extend(_payload(1000 * self.start + first + i) for i in range(n))
        return [self.frames(first + i) for i in range(n)]

    def frames(self, seq: int) -> tuple[bytes, bytes, bytes]:
        return b"kv", seq.to_bytes(8, "big"), self.payloads[seq]

    def replay(self, start_seq: int) -> list[Sequence[bytes]]:
        kept = range(max(start_seq, len(self.payloads) - self.ring_batches_max), len(self.payloads))
        return [*((b"", *self.frames(seq)) for seq in kept), (b"", b"", REPLAY_END, b"")]


def test_attaching_at_the_start_gives_the_whole_cache() -> None:
    engine, follower = Engine(), _follower()
    assert follower.start() == [AskReplay(0)]
    assert _replay(follower, engine) == []
    live = _live(follower, engine.publish(3))
    assert (_names(live), follower.partial_ranks) == ([1000, 1001, 1002], ())


def test_batches_published_before_are_replayed_and_count_once() -> None:
    engine, follower = Engine(), _follower()
    sent = engine.publish(4)
    follower.start()
    waiting = _live(follower, sent[2:])  # the subscription was faster than the replay
    assert (waiting, follower.is_waiting) == ([], True)
    assert _names(_replay(follower, engine)) == [1000, 1001, 1002, 1003]
    assert (_live(follower, sent[3:]), follower.partial_ranks) == ([], ())


def test_attaching_after_the_replay_ring_overflowed_is_partial() -> None:
    engine, follower = Engine(ring_batches_max=2), _follower()
    engine.publish(5)
    follower.start()
    replayed = _replay(follower, engine)
    assert replayed[0] == Missed(0, 2)
    assert _names(replayed) == [1003, 1004]
    assert list(follower.partial_ranks) == [R0]
    _live(follower, [_cleared_frames(5)])
    assert list(follower.partial_ranks) == []


@pytest.mark.parametrize(("first_seq", "partial"), [(0, ()), (3, (R0,))])
def test_first_number_decides_if_partial_without_replay(first_seq: int, partial: tuple[DpRank, ...]) -> None:
    engine, follower = Engine(), _follower(can_replay=False)
    assert follower.start() == []
    _live(follower, engine.publish(4)[first_seq:])
    assert follower.partial_ranks == partial


def test_failed_replay_follows_from_the_first_live_batch() -> None:
    engine, follower = Engine(), _follower()
    follower.start()
    sent = engine.publish(3)
    _live(follower, sent[2:])
    assert _names(follower.on_replay_failed()) == [1002]
    assert (follower.partial_ranks, follower.is_waiting) == ((R0,), False)


def test_a_gap_is_filled_by_a_replay_from_the_last_batch_taken() -> None:
    engine, follower = _followed(2)
    sent = engine.publish(3)
    assert _live(follower, sent[2:]) == [AskReplay(1)]
    assert _names(_replay(follower, engine, 1)) == [1002, 1003, 1004]
    assert follower.partial_ranks == ()


def test_gap_beyond_the_replay_ring_clears_the_rank_and_is_partial() -> None:
    engine, follower = _followed(2)
    engine.ring_batches_max = 1
    sent = engine.publish(3)
    assert _live(follower, sent[2:]) == [AskReplay(1)]
    replayed = _replay(follower, engine, 1)
    assert replayed[:2] == [Missed(2, 3), Publish(R0, (Cleared(),))]
    assert _names(replayed) == [1004]
    assert follower.partial_ranks == (R0,)


def test_gap_is_given_up_after_one_failed_replay() -> None:
    engine, follower = _followed(2)
    sent = engine.publish(3)
    assert _live(follower, sent[2:]) == [AskReplay(1)]
    given_up = follower.on_replay_failed()
    assert given_up[:2] == [Missed(2, None), Publish(R0, (Cleared(),))]
    assert _names(given_up) == [1004]
    assert follower.partial_ranks == (R0,)


def test_engine_with_an_empty_replay_ring_is_followed_as_partial() -> None:
    engine, follower = Engine(ring_batches_max=0), _follower()
    engine.publish(2)
    follower.start()
    _replay(follower, engine)
    assert _live(follower, engine.publish()) == [AskReplay(0)]
    assert _replay(follower, engine) == []
    live = _live(follower, engine.publish())
    assert live[0] == Missed(0, 2)
    assert (_names(live), follower.partial_ranks) == ([1003], (R0,))
    assert _names(_live(follower, engine.publish())) == [1004]


def test_gap_without_replay_clears_the_rank_at_once() -> None:
    engine, follower = Engine(), _follower(can_replay=False)
    _live(follower, engine.publish())
    engine.publish()
    assert _live(follower, engine.publish())[:2] == [Missed(1, 1), Publish(R0, (Cleared(),))]


def test_repeated_batch_is_dropped() -> None:
    engine, follower = _followed(3)
    assert _live(follower, [engine.frames(0), engine.frames(2)]) == []


def test_known_number_with_another_batch_is_a_restart() -> None:
    _, follower = _followed(3)
    again = Engine(start=2)
    live = _live(follower, again.publish())
    assert live[:2] == [Restarted(), Publish(R0, (Cleared(),))]
    assert (_names(live), follower.partial_ranks) == ([2000], ())


def test_restart_with_missed_first_batches_asks_for_a_replay() -> None:
    _, follower = _followed(5)
    again = Engine(start=2)
    live = _live(follower, again.publish(3)[2:])
    assert live == [Restarted(), Publish(R0, (Cleared(),)), AskReplay(0)]
    assert (_names(_replay(follower, again)), follower.partial_ranks) == ([2000, 2001, 2002], ())


def test_restart_with_higher_numbers_is_detected_by_the_replay() -> None:
    _, follower = _followed(3)
    again = Engine(start=2)
    sent = again.publish(6)
    assert _live(follower, sent[5:]) == [AskReplay(2)]
    replayed = _replay(follower, again, 2)
    assert replayed == [Restarted(), Publish(R0, (Cleared(),)), AskReplay(0)]
    assert _names(_replay(follower, again)) == [2000 + i for i in range(6)]
    assert follower.partial_ranks == ()


def test_reconnection_checks_the_last_batch_by_a_replay() -> None:
    engine, follower = _followed(3)
    assert follower.on_reconnected() == [AskReplay(2)]
    assert _replay(follower, engine, 2) == []
    again = Engine(start=2)
    again.publish()
    follower.on_reconnected()
    assert _replay(follower, again, 2) == [Restarted(), Publish(R0, (Cleared(),)), AskReplay(0)]
    assert _names(_replay(follower, again)) == [2000]


def test_reconnection_without_replay_clears_the_rank() -> None:
    engine, follower = Engine(), _follower(can_replay=False)
    _live(follower, engine.publish())
    assert follower.on_reconnected() == [Missed(1, None), Publish(R0, (Cleared(),))]
    assert _names(_live(follower, engine.publish())) == [1001]
    assert follower.partial_ranks == (R0,)


def test_reconnection_during_a_replay_asks_for_everything_again() -> None:
    engine, follower = Engine(), _follower()
    engine.publish(2)
    follower.start()
    answer = engine.replay(0)
    follower.on_reconnected()
    assert [command for frames in answer for command in follower.on_replayed(frames)] == [AskReplay(0)]
    assert _names(_replay(follower, engine)) == [1000, 1001]


def test_waiting_batch_absent_from_the_replay_means_a_restart() -> None:
    old, follower = _followed(2)
    assert _live(follower, old.publish(8)[7:]) == [AskReplay(1)]
    again = Engine(start=2)
    again.publish(1)
    assert _replay(follower, again, 1) == [Restarted(), Publish(R0, (Cleared(),)), AskReplay(0)]
    assert _names(_replay(follower, again)) == [2000]
    assert not follower.is_waiting


def test_batches_over_the_waiting_limit_are_asked_for_again() -> None:
    engine, follower = Engine(), _follower(limits=EventStreamLimits(waiting_batches_max=2))
    follower.start()
    replay = engine.replay(0)
    _live(follower, engine.publish(4))
    asked = [command for frames in replay for command in follower.on_replayed(frames)]
    assert asked == [AskReplay(0)]
    assert _names(_replay(follower, engine)) == [1000, 1001, 1002, 1003]


def test_unreadable_payload_counts_as_a_lost_batch() -> None:
    engine, follower = _followed(2)
    refused, missed, emptied = _live(follower, [(b"kv", (2).to_bytes(8, "big"), b"\xc1")])
    assert isinstance(refused, MalformedBatch)
    assert (missed, emptied) == (Missed(2, 2), Publish(R0, (Cleared(),)))
    engine.publish()
    assert _names(_live(follower, engine.publish())) == [1003]
    assert follower.partial_ranks == (R0,)


def test_message_without_a_number_is_reported_and_ignored() -> None:
    engine, follower = _followed(1)
    (refused,) = follower.on_published((b"kv", b"?", b""))
    assert isinstance(refused, MalformedBatch)
    assert refused.error.param == "seq"
    assert _names(_live(follower, engine.publish())) == [1001]


def test_rest_of_an_abandoned_replay_is_ignored() -> None:
    engine, follower = Engine(), _follower()
    engine.publish()
    follower.start()
    follower.on_replay_failed()
    assert _replay(follower, engine) == []


def test_each_rank_has_its_own_ledger() -> None:
    follower = _follower(can_replay=False)
    for seq, rank in enumerate((0, 1)):
        _live(follower, [(b"", seq.to_bytes(8, "big"), _payload(7, dp_rank=rank))])
    assert set(follower.rank_blocks) == {DpRank(0), DpRank(1)}
    assert [blocks.held() for blocks in follower.rank_blocks.values()] == [1, 1]


def test_ranks_over_the_limit_of_a_socket_are_refused() -> None:
    follower = _follower(can_replay=False, limits=EventStreamLimits(ranks_max=2))
    ranks = (0, 1, 2, 1)
    commands = _live(
        follower,
        [(b"", seq.to_bytes(8, "big"), _payload(seq, dp_rank=rank)) for seq, rank in enumerate(ranks)],
    )
    (refused,) = [command for command in commands if isinstance(command, MalformedBatch)]
    assert refused.error.param == "data_parallel_rank"
    assert (_names(commands), set(follower.rank_blocks)) == ([0, 1, 3], {DpRank(0), DpRank(1)})


def _follower(*, can_replay: bool = True, limits: EventStreamLimits | None = None) -> EngineEventStream:
    return EngineEventStream(decode, EngineTraits(block_size=4), can_replay=can_replay, limits=limits)


def _followed(n_batches: int) -> tuple[Engine, EngineEventStream]:
    engine, follower = Engine(), _follower()
    follower.start()
    _replay(follower, engine)
    _live(follower, engine.publish(n_batches))
    return engine, follower


def _live(follower: EngineEventStream, messages: Sequence[Sequence[bytes]]) -> list[Command]:
    return [command for frames in messages for command in follower.on_published(frames)]


def _replay(follower: EngineEventStream, engine: Engine, start_seq: int = 0) -> list[Command]:
    return [command for frames in engine.replay(start_seq) for command in follower.on_replayed(frames)]


def _names(commands: Sequence[Command]) -> list[int]:
    events: list[KvEvent] = [
        event for command in commands if isinstance(command, Publish) for event in command.events
    ]
    return [int.from_bytes(event.engine_hashes, "little") for event in events if isinstance(event, Stored)]


def _payload(name: int, dp_rank: int = 0) -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": None,
        "token_ids": [name] * 4,
        "block_size": 4,
    }
    return msgspec.msgpack.encode([1.0, [event], dp_rank])


def _cleared_frames(seq: int) -> tuple[bytes, bytes, bytes]:
    payload = msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}], 0])
    return b"kv", seq.to_bytes(8, "big"), payload
