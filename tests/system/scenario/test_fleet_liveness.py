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
from tests.support.fleets import Bench, HandEvents, card, read_all
from tests.support.scripted_transport import ScriptedPlane, address_of


async def bench_of(*cards: WorkerCard, config: KvRouterConfig | None = None) -> tuple[Bench, ScriptedPlane]:
    plane = ScriptedPlane(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    bench = Bench(plane, config)
    await bench.start(*cards)
    return bench, plane


@pytest.mark.parametrize("mode", list(RouterMode))
async def test_a_worker_that_does_not_answer_gets_no_new_requests_until_it_does(mode: RouterMode) -> None:
    bench, plane = await bench_of(card(1), card(2), config=KvRouterConfig(router_mode=mode))
    plane.followers[address_of(1)](False)
    for number in range(6):
        await read_all(bench, request_id=f"r{number}")
    assert {address for _, address in plane.legs()} == {address_of(2)}
    plane.followers[address_of(2)](False)
    with pytest.raises(NoEligibleWorker) as refused:
        await read_all(bench, request_id="nobody")
    assert refused.value.refusals == {Reason.NOT_ALIVE: 2}
    plane.followers[address_of(1)](True)
    await read_all(bench, request_id="again")
    assert plane.legs()[-1][1] == address_of(1)


async def test_a_worker_whose_lease_ran_out_is_kept_while_it_answers_and_goes_when_it_does_not() -> None:
    bench, plane = await bench_of(card(1), card(2))
    bench.discovery.drop(1, why=Gone.EXPIRED)
    assert bench.service.liveness.has_lapsed(WorkerId(1))
    page = msgspec.json.decode(msgspec.json.encode(fleet_state(bench.service)))
    assert [worker["lapsed"] for worker in page["workers"]] == [True, False]
    await read_all(bench)
    plane.followers[address_of(1)](False)
    assert [each.worker_id for each in bench.model.fleet] == [2]
    assert address_of(1) not in plane.followers


async def test_a_worker_that_did_not_answer_goes_with_its_lease() -> None:
    bench, plane = await bench_of(card(1), card(2))
    plane.followers[address_of(1)](False)
    bench.discovery.drop(1, why=Gone.EXPIRED)
    assert [each.worker_id for each in bench.model.fleet] == [2]


async def test_a_lapsed_worker_that_is_announced_again_is_as_before() -> None:
    bench, plane = await bench_of(card(1))
    bench.discovery.drop(1, why=Gone.EXPIRED)
    bench.discovery.put(card(1))
    assert not bench.service.liveness.has_lapsed(WorkerId(1))
    plane.followers[address_of(1)](False)
    assert [each.worker_id for each in bench.model.fleet] == [1]


@pytest.mark.parametrize("why", [Gone.WITHDRAWN, Gone.REPLACED])
async def test_a_worker_that_says_goodbye_goes_though_it_answers(why: Gone) -> None:
    bench, _ = await bench_of(card(1))
    bench.discovery.drop(1, why=why)
    assert list(bench.model.fleet) == []


async def test_a_new_incarnation_is_followed_and_the_old_ones_life_is_nobodys_business() -> None:
    bench, plane = await bench_of(card(1))
    old = plane.followers[address_of(1)]
    bench.discovery.put(replace(card(1), incarnation=Epoch(2)))
    old(False)
    assert bench.model.fleet.is_alive(WorkerId(1))
    plane.followers[address_of(1)](False)
    assert not bench.model.fleet.is_alive(WorkerId(1))


async def test_a_lost_discovery_is_reported_and_changes_nothing() -> None:
    bench, _ = await bench_of(card(1))
    assert bench.discovery.on_store is not None
    bench.discovery.on_store(False, "the directory is gone")
    assert bench.service.store_lost == "the directory is gone"
    assert fleet_state(bench.service).discovery == Discovery(reachable=False, why="the directory is gone")
    assert bench.telemetry.discovery_up.value() == 0
    await read_all(bench)
    bench.discovery.on_store(True, "")
    lost: str | None = bench.service.store_lost
    assert (lost, bench.telemetry.discovery_up.value()) == (None, 1.0)


@pytest.mark.parametrize(
    "config",
    [KvRouterConfig(), KvRouterConfig(kv_events=False), KvRouterConfig(router_mode=RouterMode.ROUND_ROBIN)],
)
async def test_every_worker_is_followed_for_its_load_and_left_when_it_goes(config: KvRouterConfig) -> None:
    quiet = replace(card(2), publishes_kv_events=False)
    bench, plane = await bench_of(card(1), quiet, config=config)
    assert bench.events.followed == [1, 2]
    bench.discovery.put(replace(card(1), draining=True))
    assert bench.events.followed == [1, 2]
    bench.discovery.drop(1)
    assert (bench.events.followed, list(plane.followers)) == ([2], [address_of(2)])
    bench.service.stop()
    assert (bench.events.followed, plane.followers) == ([], {})


class Lanes:
    """Two event transports, each with its subscriber."""

    def __init__(self) -> None:
        self.zmq, self.stream = HandEvents(), HandEvents()
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


async def test_each_worker_of_a_mixed_fleet_is_heard_and_asked_on_its_own_lane() -> None:
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


async def test_what_another_lane_brings_of_a_worker_does_not_count() -> None:
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


async def test_a_worker_on_a_lane_that_is_not_heard_is_reported_of_and_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plane = ScriptedPlane(lambda stream: stream.tokens(1, finish=FinishReason.STOP))
    bench = Bench(plane, subscriber=Lanes().both)
    await bench.start(on(EventTransport.NATS, 1))
    assert "config_warning" in caplog.text
    await read_all(bench)
