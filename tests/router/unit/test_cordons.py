"""Cordons of a router: rules by name, what a call changes and refuses, and what becomes of requests."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from kvrouter.core.cordon_rules import CORDONS_MAX, Cordon, CordonRules, CordonSource, checked_cordon
from kvrouter.core.errors import (
    CordonsUnavailable,
    InvalidRequest,
    NoEligibleWorker,
    NotFound,
    Reason,
)
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, FinishReason, Leg
from kvrouter.core.workers import LoadReport, Role, WorkerCard
from kvrouter.router.fleet_cordons import CordonChange, CordonedElsewhere, NoWorkersLeft
from kvrouter.transports.records.memory import MemoryCordons
from kvrouter.transports.records.port import CordonStore
from tests.testing.frontend_harness import text_answer
from tests.testing.log_events import events_of
from tests.testing.router_harness import RouterHarness, card, decode_card, prefill_card, read_all
from tests.testing.scripted_transport import ScriptedTransport, address_of
from tests.testing.waits import until

ZONES = (card(1, zone="a"), card(2, zone="a"), card(3, zone="b"))


@asynccontextmanager
async def running(
    *cards: WorkerCard, plane: ScriptedTransport | None = None, cordons: CordonStore | None = None
) -> AsyncIterator[RouterHarness]:
    harness = RouterHarness(plane or ScriptedTransport(text_answer("ok")), cordons=cordons)
    await harness.start(*cards)
    try:
        yield harness
    finally:
        harness.service.stop()


async def put(
    harness: RouterHarness, level: str, name: str, *, force: bool = False, reason: str = ""
) -> CordonChange:
    return await harness.service.cordons.put(Cordon(level, name, reason=reason), force=force)


class BrokenStore(MemoryCordons):
    """A store that answers no more while it ``is_broken``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = False
        self.poll_s = 0.001

    def _check(self) -> None:
        if self.is_broken:
            raise CordonsUnavailable("the store is away")

    async def read(self) -> tuple[Cordon, ...]:
        self._check()
        return await super().read()

    async def put(self, cordon: Cordon) -> None:
        self._check()
        await super().put(cordon)

    async def remove(self, cordon: Cordon) -> None:
        self._check()
        await super().remove(cordon)


@pytest.mark.parametrize(
    ("level", "name", "field"),
    [
        ("", "a", "level"),
        ("zone", "", "name"),
        ("zone", " a", "name"),
        ("zone", "a\n", "name"),
        ("zone", "a" * 257, "name"),
        ("z" * 257, "a", "level"),
        ("worker", "seven", "name"),
        ("worker", "-1", "name"),
        ("worker", str(2**63), "name"),
    ],
)
def test_an_invalid_cordon_is_refused_by_field(level: str, name: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked_cordon(Cordon(level, name))
    assert refused.value.param == field
    assert refused.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize("at_s", [1764205200000.0, -1.0, float("nan"), float("inf")])
def test_a_cordon_with_an_invalid_time_is_refused_by_field(at_s: float) -> None:
    """One such record would make every answer that shows it fail."""
    with pytest.raises(InvalidRequest) as refused:
        checked_cordon(Cordon("zone", "a", at_s=at_s))
    assert refused.value.param == "at_s"


def test_cordons_match_by_worker_id_node_level_and_cluster() -> None:
    worker = structs.replace(card(7, zone="a"), node="gpu-4")
    domains = worker.runtime_config.domains | {"host": "h1", "cluster": "east"}

    def holds(level: str, name: str, cluster: str = "") -> bool:
        return bool(CordonRules([Cordon(level, name, cluster=cluster)]).on(worker, domains))

    assert holds("worker", "7")
    assert holds("node", "gpu-4")
    assert holds("node", "h1"), "a host is a node"
    assert holds("host", "h1")
    assert holds("zone", "a")
    assert holds("zone", "a", "east")
    for level, name in (("worker", "8"), ("node", "gpu-5"), ("zone", "b"), ("rack", "a"), ("host", "gpu-4")):
        assert not holds(level, name)
    assert not holds("zone", "a", "west"), "a cordon of another cluster is about that cluster's workers"
    assert checked_cordon(Cordon("worker", "007")).name == "7"


async def test_a_cordon_keeps_new_requests_away_until_it_is_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    plane = ScriptedTransport(text_answer("ok"))
    async with running(*ZONES, plane=plane) as harness:
        change = await put(harness, "zone", "a", reason="rack 4")
        assert (change.changed, change.warnings) == (True, ())
        assert [worker.card.worker_id for worker in change.reading.workers] == [1, 2]
        assert change.reading.cordon.at_s > 0.0
        for number in range(6):
            await read_all(harness, request_id=f"r{number}")
        assert {stream.address for stream in plane.opened} == {address_of(3)}
        again = await put(harness, "zone", "a")
        assert (again.changed, again.reading.cordon) == (False, change.reading.cordon)
        back = await harness.service.cordons.remove("zone", "a")
        assert back.changed
        assert not (await harness.service.cordons.remove("zone", "a")).changed
        plane.opened.clear()
        for worker in (1, 2):
            await read_all(harness, request_id=f"s{worker}", pinned=worker)
        assert [stream.address for stream in plane.opened] == [address_of(1), address_of(2)]
    found = [event for event in events_of(caplog.records) if "cordoned" in event]
    assert found == [*["worker_cordoned"] * 2, "cordoned", *["worker_uncordoned"] * 2, "uncordoned"]


async def test_a_refusal_by_a_cordon_has_the_reason_cordoned() -> None:
    async with running(card(1)) as harness:
        await put(harness, "worker", "1", force=True)
        with pytest.raises(NoEligibleWorker) as refused:
            await read_all(harness, pinned=1)
        assert refused.value.refusals == {Reason.CORDONED: 1}
        assert harness.telemetry.refusals.value("cordoned", "decode") == 1


async def test_a_running_request_continues_on_a_cordoned_worker() -> None:
    plane = ScriptedTransport()
    async with running(card(1), card(2), plane=plane) as harness:
        reading = asyncio.create_task(read_all(harness, max_tokens=2))
        stream = await plane.wait_for(Leg.AGGREGATED)
        where = str(1 if stream.address == address_of(1) else 2)
        change = await put(harness, "worker", where)
        assert [worker.running_requests for worker in change.reading.workers] == [1]
        stream.tokens(1, 2, finish=FinishReason.LENGTH)
        assert await reading == [1, 2]
        assert stream.cancelled_for is None
        (now,) = harness.service.cordons.readings()
        assert [worker.running_requests for worker in now.workers] == [0]


@pytest.mark.parametrize("others", [True, False])
async def test_decode_moves_off_a_cordoned_worker_if_another_is_open(
    others: bool,
) -> None:
    plane = ScriptedTransport()
    cards = [prefill_card(1), decode_card(2), *([decode_card(3)] if others else [])]
    async with running(*cards, plane=plane) as harness:
        reading = asyncio.create_task(read_all(harness, max_tokens=1))
        prefill = await plane.wait_for(Leg.PREFILL)
        booked = harness.model.ledger.columns().requests
        (before,) = (
            each
            for each in (2, 3)
            if harness.model.fleet.card(WorkerId(each)) and booked[_slot(harness, each)]
        )
        await put(harness, "worker", str(before), force=True)
        await put(harness, "worker", "1", force=True)
        prefill.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params={"block": 7}))
        decode = await plane.wait_for(Leg.DECODE)
        assert (decode.address == address_of(before)) is not others
        decode.tokens(1, finish=FinishReason.LENGTH)
        assert await reading == [1]
        assert harness.booked() == 0


def _slot(harness: RouterHarness, worker_id: int) -> int:
    return harness.model.fleet.slots_of(WorkerId(worker_id))[0]


async def test_running_requests_of_a_cordoned_worker_include_engine_reports() -> None:
    async with running(card(1), card(2)) as harness:
        harness.load(
            LoadReport(WorkerRank(WorkerId(1), DpRank(0)), 5, 100, running_requests=2, waiting_requests=1)
        )
        change = await put(harness, "worker", "1")
        assert [worker.running_requests for worker in change.reading.workers] == [3]
        harness.model.fleet.set_alive(WorkerId(1), False)
        (now,) = harness.service.cordons.readings()
        assert [worker.running_requests for worker in now.workers] == [0], (
            "an old report of a dead worker is none"
        )


async def test_workers_joining_a_cordoned_zone_are_cordoned_until_they_move() -> None:
    async with running(*ZONES) as harness:
        await put(harness, "zone", "a")
        harness.discovery.put(card(4, zone="a"), card(5, zone="b"), card(2, zone="a", incarnation=2))
        fleet = harness.model.fleet
        assert [bool(fleet.cordons_on(WorkerId(each))) for each in (1, 2, 3, 4, 5)] == [
            True,
            True,
            False,
            True,
            False,
        ]
        harness.discovery.put(card(4, zone="b"))
        assert not fleet.cordons_on(WorkerId(4))
        assert not fleet.columns.cordoned[_slot(harness, 4)]
        harness.discovery.put(card(9, zone="a", model="other"))
        other = harness.service.find(card(9, model="other").model)
        assert other is not None
        assert other.fleet.cordons_on(WorkerId(9)), "a model that is new here, too"


async def test_last_resort_routing_keeps_off_cordoned_workers() -> None:
    async with running(card(1), card(2)) as harness:
        await put(harness, "worker", "1")
        harness.model.fleet.set_circuit_open(WorkerId(2), True)
        for number in range(4):
            await read_all(harness, request_id=f"r{number}")
        assert harness.model.ledger.columns().requests.sum() == 0
        harness.model.fleet.set_alive(WorkerId(2), False)
        with pytest.raises(NoEligibleWorker) as refused:
            await read_all(harness)
        assert refused.value.refusals == {Reason.CORDONED: 1, Reason.NOT_ALIVE: 1}


async def test_a_cordon_of_the_last_workers_of_a_role_needs_force() -> None:
    async with running(prefill_card(1), decode_card(2), decode_card(3)) as harness:
        cordons = harness.service.cordons
        with pytest.raises(NoWorkersLeft) as refused:
            await put(harness, "zone", "a")
        assert refused.value.param == "force"
        assert "none of its 1 prefill workers" in refused.value.message
        assert "none of its 2 decode workers" in refused.value.message
        assert not cordons.rules
        await put(harness, "worker", "2")
        with pytest.raises(NoWorkersLeft):
            await put(harness, "worker", "3")
        change = await put(harness, "worker", "3", force=True)
        assert change.warnings == ("model mock: none of its 2 decode workers takes new requests",)
        assert [(each.role, each.workers, each.left) for each in cordons.remaining()] == [
            (Role.PREFILL, 1, 1),
            (Role.DECODE, 2, 0),
        ]
        await put(harness, "node", "elsewhere")  # what changes nothing for the worse needs no force


@pytest.mark.parametrize(
    ("level", "name", "field", "known"),
    [("rack", "1", "level", "worker, node, zone"), ("worker", "9", "name", "no worker 9")],
)
async def test_an_unknown_level_or_worker_is_not_found(level: str, name: str, field: str, known: str) -> None:
    async with running(*ZONES) as harness:
        with pytest.raises(NotFound) as refused:
            await put(harness, level, name)
        assert refused.value.param == field
        assert known in refused.value.message
        if field == "level":
            with pytest.raises(NotFound):
                await harness.service.cordons.remove(level, name)


async def test_a_zone_without_workers_may_be_cordoned_with_a_warning() -> None:
    async with running(*ZONES) as harness:
        change = await put(harness, "zone", "c")
        assert change.changed
        (warning,) = change.warnings
        assert "no worker is in zone c now" in warning
        assert "a, b" in warning
        harness.discovery.put(card(4, zone="c"))
        assert harness.model.fleet.cordons_on(WorkerId(4))


async def test_a_worker_that_left_stays_cordoned_and_can_be_uncordoned() -> None:
    async with running(*ZONES) as harness:
        await put(harness, "worker", "1")
        harness.discovery.drop(1)
        assert not (await put(harness, "worker", "1")).changed
        harness.discovery.put(card(1, zone="a", incarnation=2))
        assert harness.model.fleet.cordons_on(WorkerId(1))
        assert (await harness.service.cordons.remove("worker", "1")).changed


async def test_removing_a_cordon_warns_of_another_that_still_holds() -> None:
    async with running(*ZONES) as harness:
        await put(harness, "zone", "a")
        await put(harness, "worker", "1")
        change = await harness.service.cordons.remove("worker", "1")
        assert change.warnings == (
            "zone a is still cordoned: 1 of these workers, such as 1, take no new requests",
        )
        assert harness.model.fleet.cordons_on(WorkerId(1))


async def test_a_cordon_of_another_source_or_cluster_cannot_be_removed() -> None:
    store = MemoryCordons()
    await store.put(Cordon("node", "n1", source=CordonSource.NODE_ANNOTATION))
    await store.put(Cordon("zone", "a", cluster="west"))
    async with running(*ZONES, cordons=store) as harness:
        for level, name, word in (("node", "n1", "kubectl annotate node n1"), ("zone", "a", "cluster west")):
            with pytest.raises(CordonedElsewhere) as refused:
                await harness.service.cordons.remove(level, name)
            assert word in refused.value.message
        assert len(harness.service.cordons.rules.all) == 2


async def test_a_starting_router_applies_stored_cordons_to_its_workers() -> None:
    store = MemoryCordons()
    await store.put(Cordon("zone", "a"))
    async with running(*ZONES, cordons=store) as harness:
        assert harness.model.fleet.cordons_on(WorkerId(1))
        assert not harness.model.fleet.cordons_on(WorkerId(3))


async def test_a_router_follows_another_routers_cordons() -> None:
    store = BrokenStore()
    async with running(*ZONES, cordons=store) as here, running(*ZONES, cordons=store) as there:
        await put(here, "zone", "a", reason="one")
        await until(lambda: bool(there.model.fleet.cordons_on(WorkerId(1))))
        await put(there, "zone", "a", reason="two")
        await until(lambda: here.service.cordons.rules.all[0].reason == "two")
        await there.service.cordons.remove("zone", "a")
        await until(lambda: not here.model.fleet.cordons_on(WorkerId(1)))


async def test_a_lost_cordon_store_fails_calls_and_keeps_known_cordons(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    store = BrokenStore()
    async with running(*ZONES, cordons=store) as harness:
        await put(harness, "worker", "1")
        store.is_broken = True
        cordons = harness.service.cordons
        for ask in (put(harness, "zone", "a"), cordons.remove("worker", "1")):
            with pytest.raises(CordonsUnavailable, match="away"):
                await ask
        await until(lambda: cordons.lost is not None)
        assert [each.place for each in cordons.rules.all] == ["worker 1"]
        assert harness.model.fleet.cordons_on(WorkerId(1))
        store.is_broken = False
        await until(lambda: cordons.lost is None)
        assert [each.place for each in await store.read()] == ["worker 1"], "nothing half-done"
    found = [event for event in events_of(caplog.records) if event.startswith("cordons_")]
    assert found == ["cordons_lost", "cordons_back"]


async def test_a_failed_cordon_write_changes_nothing() -> None:
    class ReadOnly(MemoryCordons):
        async def put(self, cordon: Cordon) -> None:
            raise CordonsUnavailable(f"{cordon.place} cannot be written")

    async with running(*ZONES, cordons=ReadOnly()) as harness:
        with pytest.raises(CordonsUnavailable):
            await put(harness, "zone", "a")
        assert not harness.service.cordons.rules
        assert not harness.model.fleet.columns.cordoned.any()


async def test_a_cordon_over_the_limit_is_refused() -> None:
    store = MemoryCordons()
    for number in range(CORDONS_MAX):
        await store.put(Cordon("zone", f"z{number}"))
    async with running(*ZONES, cordons=store) as harness:
        with pytest.raises(InvalidRequest, match="1024"):
            await put(harness, "worker", "1")
