"""Workers that stop answering, leases that run out, a discovery that is lost: who gets requests then."""

import msgspec
import pytest
from msgspec.structs import replace

from kvrouter.api.fleet_schema import Discovery
from kvrouter.app.router_transports import CombinedSubscriber
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import NoEligibleWorker, Reason
from kvrouter.core.events import KvBatch
from kvrouter.core.ids import Epoch, EventId, WorkerId
from kvrouter.core.requests import FinishReason
from kvrouter.core.workers import EventSource, EventTransport, LoadReport, WorkerCard
from kvrouter.frontend.fleet_state import fleet_state
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.events.port import DropReason, EventSubscriber
from kvrouter.transports.records.port import Gone
from tests.testing.router_harness import RouterHarness, ScriptedEvents, card, read_all
from tests.testing.scripted_transport import ScriptedTransport, address_of


async def bench_of(
    *cards: WorkerCard, config: KvRouterConfig | None = None
) -> tuple[RouterHarness, ScriptedTransport]:
    plane = ScriptedTransport(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    harness = RouterHarness(plane, config)
    await harness.start(*cards)
    return harness, plane


@pytest.mark.parametrize("mode", list(RouterMode))
async def test_an_unresponsive_worker_gets_no_requests_until_it_answers(mode: RouterMode) -> None:
    harness, plane = await bench_of(card(1), card(2), config=KvRouterConfig(router_mode=mode))
    plane.followers[address_of(1)](False)
    for number in range(6):
        await read_all(harness, request_id=f"r{number}")
    assert {address for _, address in plane.legs()} == {address_of(2)}
    plane.followers[address_of(2)](False)
    with pytest.raises(NoEligibleWorker) as refused:
        await read_all(harness, request_id="nobody")
    assert refused.value.refusals == {Reason.NOT_ALIVE: 2}
    plane.followers[address_of(1)](True)
    await read_all(harness, request_id="again")
    assert plane.legs()[-1][1] == address_of(1)


async def test_a_worker_with_a_lapsed_lease_is_kept_while_it_answers() -> None:
    harness, plane = await bench_of(card(1), card(2))
    harness.discovery.drop(1, why=Gone.EXPIRED)
    assert harness.service.liveness.has_lapsed(WorkerId(1))
    page = msgspec.json.decode(msgspec.json.encode(fleet_state(harness.service)))
    assert [worker["lapsed"] for worker in page["workers"]] == [True, False]
    await read_all(harness)
    plane.followers[address_of(1)](False)
    assert [each.worker_id for each in harness.model.fleet] == [2]
    assert address_of(1) not in plane.followers


async def test_an_unresponsive_worker_is_removed_when_its_lease_lapses() -> None:
    harness, plane = await bench_of(card(1), card(2))
    plane.followers[address_of(1)](False)
    harness.discovery.drop(1, why=Gone.EXPIRED)
    assert [each.worker_id for each in harness.model.fleet] == [2]


async def test_a_lapsed_worker_announced_again_is_a_normal_worker() -> None:
    harness, plane = await bench_of(card(1))
    harness.discovery.drop(1, why=Gone.EXPIRED)
    harness.discovery.put(card(1))
    assert not harness.service.liveness.has_lapsed(WorkerId(1))
    plane.followers[address_of(1)](False)
    assert [each.worker_id for each in harness.model.fleet] == [1]


@pytest.mark.parametrize("why", [Gone.WITHDRAWN, Gone.REPLACED])
async def test_a_withdrawn_or_replaced_worker_is_removed_though_it_answers(why: Gone) -> None:
    harness, _ = await bench_of(card(1))
    harness.discovery.drop(1, why=why)
    assert list(harness.model.fleet) == []


async def test_only_the_new_incarnations_liveness_counts() -> None:
    harness, plane = await bench_of(card(1))
    old = plane.followers[address_of(1)]
    harness.discovery.put(replace(card(1), incarnation=Epoch(2)))
    old(False)
    assert harness.model.fleet.is_alive(WorkerId(1))
    plane.followers[address_of(1)](False)
    assert not harness.model.fleet.is_alive(WorkerId(1))


async def test_a_lost_discovery_is_reported_and_requests_still_run() -> None:
    harness, _ = await bench_of(card(1))
    assert harness.discovery.on_store is not None
    harness.discovery.on_store(False, "the directory is gone")
    assert harness.service.store_lost == "the directory is gone"
    assert fleet_state(harness.service).discovery == Discovery(reachable=False, why="the directory is gone")
    assert harness.telemetry.discovery_up.value() == 0
    await read_all(harness)
    harness.discovery.on_store(True, "")
    lost: str | None = harness.service.store_lost
    assert (lost, harness.telemetry.discovery_up.value()) == (None, 1.0)


@pytest.mark.parametrize(
    "config",
    [KvRouterConfig(), KvRouterConfig(kv_events=False), KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN)],
)
async def test_load_events_of_each_worker_are_followed_until_it_leaves(config: KvRouterConfig) -> None:
    quiet = replace(card(2), publishes_kv_events=False)
    harness, plane = await bench_of(card(1), quiet, config=config)
    assert harness.events.followed == [1, 2]
    harness.discovery.put(replace(card(1), draining=True))
    assert harness.events.followed == [1, 2]
    harness.discovery.drop(1)
    assert (harness.events.followed, list(plane.followers)) == ([2], [address_of(2)])
    harness.service.stop()
    assert (harness.events.followed, plane.followers) == ([], {})


class Lanes:
    """Two event transports, each with its subscriber."""

    def __init__(self) -> None:
        self.zmq, self.stream = ScriptedEvents(), ScriptedEvents()
        lanes: dict[EventTransport, EventSubscriber] = {
            EventTransport.ZMQ: self.zmq,
            EventTransport.JETSTREAM: self.stream,
        }
        self.foreign: list[tuple[EventTransport, DropReason]] = []
        self.both = CombinedSubscriber(
            lanes, on_foreign=lambda lane, error: self.foreign.append((lane, error.reason))
        )


def on(lane: EventTransport, worker_id: int) -> WorkerCard:
    return replace(card(worker_id), event_source=EventSource(lane))


async def test_each_worker_is_followed_on_its_own_event_transport() -> None:
    lanes = Lanes()
    loads: list[LoadReport] = []
    end = lanes.both.subscribe(lambda _batch: None, loads.append)
    end_first = lanes.both.follow(on(EventTransport.ZMQ, 1))
    lanes.both.follow(on(EventTransport.JETSTREAM, 2))
    assert (lanes.zmq.followed, lanes.stream.followed) == ([1], [2])
    for ear, worker_id in ((lanes.zmq, 1), (lanes.stream, 2)):
        ear.load(LoadReport(card(worker_id).ranks()[0], 3, 9))
    assert [report.rank.worker_id for report in loads] == [1, 2]
    lanes.zmq.snapshots = {}
    assert await lanes.both.recover_snapshot(card(1).ranks()[0]) is not None
    end_first()
    assert lanes.zmq.followed == []
    assert await lanes.both.recover_snapshot(card(1).ranks()[0]) is None
    end()
    lanes.stream.load(LoadReport(card(2).ranks()[0], 4, 9))
    assert len(loads) == 2


async def test_events_of_a_worker_on_another_transport_are_ignored() -> None:
    lanes = Lanes()
    batches: list[KvBatch] = []
    loads: list[LoadReport] = []
    lanes.both.subscribe(batches.append, loads.append)
    lanes.both.follow(on(EventTransport.ZMQ, 1))
    rank = card(1).ranks()[0]
    batch, report = KvBatch(rank, Epoch(1), EventId(0), ()), LoadReport(rank, 3, 9)
    lanes.stream.load(report)
    assert (loads, lanes.foreign) == ([], []), "both lanes of NATS hear the loads of all workers"
    lanes.stream.batch(batch)
    assert (batches, lanes.foreign) == ([], [(EventTransport.JETSTREAM, DropReason.OTHER_TRANSPORT)])
    lanes.zmq.load(report)
    lanes.zmq.batch(batch)
    assert (batches, loads, len(lanes.foreign)) == ([batch], [report], 1)


async def test_a_worker_on_an_unheard_event_transport_is_logged_and_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plane = ScriptedTransport(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    harness = RouterHarness(plane, subscriber=Lanes().both)
    await harness.start(on(EventTransport.NATS, 1))
    assert "config_warning" in caplog.text
    await read_all(harness)
