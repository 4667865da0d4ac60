"""The parts of the JetStream transport that need no server."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from kvrouter.core.events import Cleared, KvBatch, Removed, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.transports.events.jetstream import stream_subscriber as replay_module
from kvrouter.transports.events.jetstream.consumer import _delivery_info
from kvrouter.transports.events.jetstream.publisher import merged
from kvrouter.transports.events.jetstream.stream import ComponentNames
from kvrouter.transports.events.jetstream.stream_subscriber import Replay, Replays
from kvrouter.transports.events.loads import Drops
from tests.testing.event_transports import TransportReports
from tests.testing.waits import until

RANK = WorkerRank(WorkerId(7), DpRank(1))


def batch(first: int, n: int, *, epoch: int = 1) -> KvBatch:
    return KvBatch(RANK, Epoch(epoch), EventId(first), (Cleared(),) * n, float(first))


def test_consecutive_batches_are_merged() -> None:
    (whole,) = merged([batch(3, 2), batch(5, 0), batch(5, 1)], events_max=10)
    assert (whole.first_event_id, whole.next_event_id, whole.published_s) == (3, 6, 3.0)


@pytest.mark.parametrize(
    "apart",
    [
        [batch(3, 2), batch(6, 1)],
        [batch(3, 2), batch(4, 2)],
        [batch(3, 2), batch(5, 1, epoch=2)],
        [batch(3, 6), batch(9, 5)],
    ],
    ids=["a gap", "a repetition", "another epoch", "too many events"],
)
def test_nonconsecutive_or_too_large_batches_are_not_merged(apart: list[KvBatch]) -> None:
    assert list(merged(apart, events_max=10)) == apart


def test_merging_keeps_the_events_in_order() -> None:
    events = [Removed(pack_hashes([number])) for number in range(3)]
    batches = [KvBatch(RANK, Epoch(1), EventId(number), (event,)) for number, event in enumerate(events)]
    (whole,) = merged(batches, events_max=3)
    assert whole.events == tuple(events)


def test_merging_no_batches_gives_none() -> None:
    assert list(merged([], events_max=3)) == []


@pytest.mark.parametrize(
    "reply",
    ["$JS.ACK.stream.consumer.1.42.7.1700000000.3", "$JS.ACK.hub.hash.stream.consumer.1.42.7.1700000000.3.x"],
    ids=["as in old servers", "with a domain and an account"],
)
def test_reply_subject_gives_sequence_number_and_pending_count(reply: str) -> None:
    place = _delivery_info(reply)
    assert place is not None
    assert (place.stream_sequence, place.number, place.pending) == (42, 7, 3)


@pytest.mark.parametrize("reply", ["", "_INBOX.x", "$JS.ACK.stream.consumer.1.x.7.1700000000.3", "." * 30])
def test_foreign_reply_subject_gives_no_delivery_info(reply: str) -> None:
    assert _delivery_info(reply) is None


def test_names_carry_namespace_and_component_without_nats_characters() -> None:
    names = ComponentNames("prod.eu", "back end*")
    assert names.stream == "kvrouter-prod_eu-back_end_-kv-events"
    assert names.bucket == "kvrouter-prod_eu-back_end_-index"
    assert names.events(RANK) == "kvrouter.prod_eu.back_end_.kv.7.1"
    assert names.all_events == "kvrouter.prod_eu.back_end_.kv.*.*"
    assert names.all_loads == "kvrouter.prod_eu.back_end_.loads.*.*"


class FakeDelivery:
    """A delivery that a test turns by hand; ``pending`` is what the server says when it opens."""

    made: "list[FakeDelivery]"
    pending = 1

    def __init__(
        self,
        client: object,
        jetstream: object,
        on_message: Callable[[str, bytes, int, int], None],
        *,
        on_idle: Callable[[], None],
        stream: str,
        subjects: str,
        heartbeat_s: float,
    ) -> None:
        self.on_message, self.on_idle = on_message, on_idle
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.opened = asyncio.Event()
        self.made.append(self)

    async def open(self, *, after: int) -> int:
        self.opened.set()
        return self.pending

    def stop(self, why: str) -> None:
        if not self.broken.done():
            self.broken.set_result(why)

    async def close(self) -> None:
        self.stop("closed")


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, pending: int = 1) -> None:
        FakeDelivery.made = []
        FakeDelivery.pending = pending
        monkeypatch.setattr(replay_module, "PushConsumer", FakeDelivery)
        self.handed: list[bytes] = []
        self.ended: list[Replay] = []
        replays = Replays(
            client=None,  # type: ignore[arg-type]
            jetstream=None,  # type: ignore[arg-type]
            names=ComponentNames("n", "c"),
            observer=TransportReports(),
            heartbeat_s=1.0,
            deliver=lambda _subject, payload, _epoch: self.handed.append(payload),
            check=self.check,
        )
        replays.begin(RANK, Epoch(1), after=4)
        self.replay = replays.running[RANK]

    def check(self, replay: Replay) -> Coroutine[None, None, None]:
        self.ended.append(replay)
        return asyncio.sleep(0)

    async def delivery(self) -> FakeDelivery:
        await until(lambda: bool(FakeDelivery.made))
        await FakeDelivery.made[-1].opened.wait()
        return FakeDelivery.made[-1]


async def test_replay_ends_at_the_last_message_that_live_delivery_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    delivery = await bench.delivery()
    delivery.on_message("kv", b"5", 5, 1)
    bench.replay.skipped(8)  # live is ahead of what the server had to send when it said that nothing follows
    delivery.on_message("kv", b"7", 7, 0)
    assert bench.ended == []
    delivery.on_message("kv", b"8", 8, 0)
    assert bench.ended == [bench.replay]
    delivery.on_message("kv", b"9", 9, 0)
    assert bench.handed == [b"5", b"7", b"8"], "from then on live has them"


async def test_replay_without_messages_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, pending=0)
    await asyncio.wait_for(bench.replay.over.wait(), 60)
    assert bench.ended == [bench.replay]


async def test_replay_without_messages_waits_for_a_skipped_message(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, pending=0)
    bench.replay.skipped(6)
    delivery = await bench.delivery()
    await asyncio.sleep(0)
    assert bench.ended == []
    delivery.on_message("kv", b"6", 6, 0)
    assert bench.ended == [bench.replay]


async def test_replay_does_not_wait_for_a_purged_message(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    delivery = await bench.delivery()
    bench.replay.skipped(6)
    delivery.on_idle()
    bench.replay.skipped(7)
    delivery.on_idle()
    assert bench.ended == [], "a heartbeat may be older than the message"
    delivery.on_idle()
    assert bench.ended == [bench.replay]


async def test_broken_replay_resumes_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    delivery = await bench.delivery()
    delivery.on_message("kv", b"5", 5, 1)
    delivery.stop("silent")
    await until(lambda: len(FakeDelivery.made) > 1)
    again = FakeDelivery.made[-1]
    await again.opened.wait()
    again.on_message("kv", b"6", 6, 0)
    assert bench.handed == [b"5", b"6"]


async def test_a_cancelled_replay_hands_over_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    delivery = await bench.delivery()
    bench.replay.cancel()
    delivery.on_message("kv", b"5", 5, 0)
    assert (bench.handed, bench.ended) == ([], [])


async def test_first_drop_is_reported_at_once_and_later_ones_together() -> None:
    reported: list[tuple[int, str]] = []
    drops = Drops(lambda n_batches, why: reported.append((n_batches, why)), every_s=0.01)
    drops.add(1, "full")
    assert reported == [(1, "full")]
    drops.add(2, "full")
    drops.add(1, "too large")
    assert len(reported) == 1
    await until(lambda: len(reported) == 2)
    assert reported[1] == (3, "too large")
    drops.add(4, "the end")
    drops.close()
    drops.close()
    assert reported[2:] == [(4, "the end")]
