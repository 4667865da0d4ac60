"""Discovery in several clusters: the cluster is a level, ids are one cluster's, a lost one takes nobody."""

import asyncio
from collections.abc import Callable

import pytest
from msgspec import structs

from kvrouter.core.errors import NoEligibleWorker, Reason
from kvrouter.core.ids import WorkerId
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.kernel.placement.placement import Draw
from kvrouter.kernel.topology.link_table import Link, LinkTable
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.records import clusters
from kvrouter.transports.records.clusters import ClustersDiscovery, placed_in
from kvrouter.transports.records.memory import MemoryDiscovery
from kvrouter.transports.records.port import CardSink, Gone, GoneSink, StoreSink
from tests.testing.constants import SetConstants
from tests.testing.discovery_stores import DiscoveryRecorder, record_discovery
from tests.testing.router_harness import RouterHarness, ScriptedDiscovery, card, generate_request
from tests.testing.scripted_transport import ScriptedTransport

EAST, WEST = "east", "west"


class Clusters:
    """Two clusters, whose cards a test turns by hand."""

    def __init__(self) -> None:
        self.east, self.west = ScriptedDiscovery(), ScriptedDiscovery()
        self.refused: list[tuple[str, str]] = []
        self.discovery = ClustersDiscovery(
            {EAST: self.east, WEST: self.west},
            on_refused=lambda what, why: self.refused.append((what, why)),
        )


def with_cluster(given: WorkerCard, level: str, value: str) -> WorkerCard:
    """A card that says itself in which cluster it is, as its narrowest level."""
    config = given.runtime_config
    own = structs.replace(
        config,
        topology_domains={**config.topology_domains, level: value},
        topology_levels=(*config.topology_levels, level),
    )
    return structs.replace(given, runtime_config=own)


async def test_cluster_is_the_broadest_level_of_every_worker() -> None:
    here = Clusters()
    recorder = await record_discovery(here.discovery)
    here.east.put(card(1, zone="a"))
    here.west.put(with_cluster(card(2, zone="a"), " cluster ", "somewhere"))
    places = [each.runtime_config for each in recorder.events if isinstance(each, WorkerCard)]
    assert [dict(each.topology_domains) for each in places] == [
        {"cluster": EAST, "zone": "a"},
        {"cluster": WEST, "zone": "a"},
    ]
    assert [each.topology_levels for each in places] == [("cluster", "zone")] * 2
    bare = structs.replace(
        card(3), runtime_config=structs.replace(card(3).runtime_config, topology_levels=())
    )
    assert placed_in(EAST, bare).runtime_config.topology_levels == ("cluster",)


def test_equal_zone_names_in_two_clusters_use_the_link_across_clusters() -> None:
    near, far = Link(0.001, 1e9), Link(0.1, 1e7)
    table = LinkTable(by_level={"cluster": near, "zone": Link(0.0, 1e10)}, otherwise=far)

    def place(cluster: str, zone: str) -> dict[str, str]:
        return dict(placed_in(cluster, card(1, zone=zone)).runtime_config.topology_domains)

    levels = placed_in(EAST, card(1, zone="a")).runtime_config.topology_levels
    assert table.link(place(EAST, "a"), place(EAST, "b"), levels) == near
    assert table.link(place(EAST, "a"), place(WEST, "a"), levels) == far


async def test_required_cluster_policy_keeps_kv_in_cluster_with_equal_zone_names() -> None:
    here, harness = (
        Clusters(),
        RouterHarness(ScriptedTransport(None), KvRouterConfig(kv_transfer_topology_level="cluster")),
    )
    await harness.start()
    end = await here.discovery.watch(harness.discovery.put, harness.discovery.drop)
    for number, cluster in ((1, here.east), (3, here.west)):
        cluster.put(card(number, Role.PREFILL, zone="a"), card(number + 1, Role.DECODE, zone="a"))

    def pair(request_id: str) -> tuple[int, int]:
        decision = harness.model.placer.explain(
            generate_request(request_id=request_id), Draw(0, 0, 0), now_s=0.0
        )
        assert decision.prefill is not None
        return int(decision.prefill.rank.worker_id), int(decision.decode.rank.worker_id)

    try:
        first = pair("first")
        assert first in {(1, 2), (3, 4)}
        here.east.drop(1)
        assert pair("east has no prefill") == (3, 4)
        here.east.put(card(1, Role.PREFILL, zone="a"))
        here.west.drop(3)
        assert pair("west has no prefill") == (1, 2)
        here.east.drop(2)
        with pytest.raises(NoEligibleWorker) as refused:
            pair("east has no decode")
        assert refused.value.domain == "cluster"
        assert refused.value.refusals == {Reason.DOMAIN_MISMATCH: 1}
    finally:
        end()
        harness.service.stop()


async def test_worker_id_belongs_to_first_cluster_until_that_worker_is_gone() -> None:
    here = Clusters()
    recorder, other = await record_discovery(here.discovery), await record_discovery(here.discovery)
    here.east.put(card(1))
    here.west.put(card(1, incarnation=2))
    here.west.put(card(1, incarnation=2, draining=True))
    assert recorder.events == [placed_in(EAST, card(1))]
    ((what, why),) = here.refused
    assert what == "worker 1 of cluster west"
    assert why == "cluster east has a worker of this id: start one of them with another --worker-id"

    here.east.drop(1, why=Gone.REPLACED)
    here.east.put(card(1, incarnation=3))
    assert recorder.events[1:] == [(1, 1, Gone.REPLACED), placed_in(EAST, card(1, incarnation=3))]

    here.east.drop(1, incarnation=3, why=Gone.EXPIRED)
    late = placed_in(WEST, card(1, incarnation=2, draining=True))
    assert recorder.events[3:] == [(1, 3, Gone.EXPIRED), late]
    assert other.events == recorder.events
    here.east.drop(1, incarnation=3, why=Gone.REPLACED)
    assert len(recorder.events) == 5
    here.west.drop(1, incarnation=2)
    assert recorder.events[5:] == [(1, 2, Gone.WITHDRAWN)]
    assert len(here.refused) == 1


async def test_passed_over_worker_that_left_does_not_join_later() -> None:
    here = Clusters()
    recorder = await record_discovery(here.discovery)
    here.east.put(card(1))
    here.west.put(card(1, incarnation=2))
    here.west.drop(1, incarnation=2)
    here.east.drop(1)
    assert recorder.events == [placed_in(EAST, card(1)), (1, 1, Gone.WITHDRAWN)]
    here.west.put(card(1, incarnation=4))
    assert recorder.events[2:] == [placed_in(WEST, card(1, incarnation=4))]


async def test_lost_store_is_reported_with_its_cluster_and_removes_no_worker() -> None:
    here, said = Clusters(), list[tuple[bool, str]]()
    recorder = DiscoveryRecorder()
    await here.discovery.watch(recorder.add, recorder.gone, lambda *store: said.append(store))
    here.east.put(card(1))
    here.west.put(card(2))
    assert here.east.on_store is not None
    assert here.west.on_store is not None
    here.west.on_store(False, "no route")
    here.east.put(card(3))
    here.east.on_store(False, "refused")
    here.west.on_store(True, "")
    here.east.on_store(True, "")
    assert recorder.losses == []
    assert [each.worker_id for each in recorder.events if isinstance(each, WorkerCard)] == [1, 2, 3]
    assert said == [
        (False, "cluster west: no route"),
        (False, "cluster west: no route; cluster east: refused"),
        (False, "cluster east: refused"),
        (True, ""),
    ]


class Away(MemoryDiscovery):
    """A cluster whose API server answers nobody until it ``answers``."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()

    async def watch(
        self, on_card: CardSink, on_gone: GoneSink, on_store: StoreSink | None = None
    ) -> Callable[[], None]:
        await self.answers.wait()
        return await super().watch(on_card, on_gone, on_store)


async def test_silent_cluster_does_not_delay_start_and_its_workers_join_later(
    set_constants: SetConstants,
) -> None:
    set_constants(clusters, OTHERS_WITHIN_S=0.01)
    east, west = MemoryDiscovery(), Away()
    both = ClustersDiscovery({EAST: east, WEST: west}, on_refused=lambda *_: None)
    await both.publish(card(1))
    await west.publish(card(2))
    async with asyncio.timeout(30.0):
        recorder, deaf = await record_discovery(both), await record_discovery(both)
    assert recorder.events == [placed_in(EAST, card(1))]
    deaf.end()
    west.answers.set()
    await recorder.until_heard(placed_in(EAST, card(1)), placed_in(WEST, card(2)))
    recorder.end()
    await both.publish(card(3))
    await west.publish(card(4))
    assert len(recorder.events) == 2
    assert deaf.events == [placed_in(EAST, card(1))]
    await both.close()


async def test_cards_are_published_and_withdrawn_in_the_own_cluster() -> None:
    east, west = MemoryDiscovery(), MemoryDiscovery()
    both = ClustersDiscovery({EAST: east, WEST: west}, on_refused=lambda *_: None)
    await both.publish(card(1))
    own, other = await record_discovery(east), await record_discovery(west)
    assert own.events == [card(1)]
    await both.withdraw(WorkerId(1), card(1).incarnation)
    assert own.events[1:] == [(1, 1, Gone.WITHDRAWN)]
    assert other.events == []
