"""Laws of places: distance, links over a whole fleet, and a fleet's columns after any changes."""

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.ids import DpRank, Epoch, ModelName, Slot, Taint, WorkerId, WorkerRank
from kvrouter.core.taints import topology_taint, worker_taints
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.engines.mock_engine.mock_links import Links
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.fleet_links import FleetLinks, links_of
from kvrouter.kernel.topology.link_table import Link, LinkState, LinkTable, SharedLink, distance
from kvrouter.kernel.topology.policy import policy_of
from tests.testing.plain_fleets import worker_card

LEVELS = ("zone", "rack", "host")
places = st.dictionaries(st.sampled_from(LEVELS), st.sampled_from("abc"))
levels = st.permutations(LEVELS).flatmap(lambda order: st.integers(0, 3).map(lambda n: tuple(order[:n])))


def card(worker_id: int, config: ModelRuntimeConfig, **fields: int) -> WorkerCard:
    return worker_card(
        worker_id,
        (Role.PREFILL, Role.DECODE, Role.BOTH)[fields.get("role", 2)],
        config,
        incarnation=Epoch(fields.get("incarnation", 1)),
        dp_size=fields.get("dp_size", 1),
        draining=bool(fields.get("draining", 0)),
        engine_silent=bool(fields.get("engine_silent", 0)),
    )


@given(places, places, levels)
def test_distance_is_symmetric_and_smallest_to_oneself(
    a: dict[str, str], b: dict[str, str], order: tuple[str, ...]
) -> None:
    assert distance(a, b, order) == distance(b, a, order)
    assert distance(a, a, order).depth >= distance(a, b, order).depth


def draw_table(rng: Random) -> LinkTable:
    def link() -> Link:
        return Link(rng.random(), rng.uniform(1, 1e12))

    ends = [(rng.choice(LEVELS), rng.choice("abc"), rng.choice("abc")) for _ in range(rng.randrange(4))]
    return LinkTable(
        {level: link() for level in LEVELS if rng.random() < 0.7}, link(), {end: link() for end in ends}
    )


def test_fleet_links_equal_table_links_of_each_worker() -> None:
    for seed in range(1_000):
        rng = Random(seed)
        order, table = tuple(rng.sample(LEVELS, rng.randrange(4))), draw_table(rng)
        workers = [
            {level: rng.choice("abc") for level in LEVELS if rng.random() < 0.8}
            for _ in range(rng.randrange(1, 7))
        ]
        fleet = Fleet(ModelName("m"), 4)
        for worker_id, domains in enumerate(workers):
            fleet.join(card(worker_id, ModelRuntimeConfig(topology_domains=domains, topology_levels=order)))
        links = FleetLinks(fleet, table)
        found = [links.link(Slot(0), Slot(slot)) for slot in range(fleet.n_slots)]
        assert found == [table.link(workers[0], domains, order) for domains in workers]


def draw_card(rng: Random) -> WorkerCard:
    config = ModelRuntimeConfig(
        topology_domains={level: rng.choice(("a", "b", " b ", "")) for level in LEVELS if rng.random() < 0.7},
        taints=frozenset(Taint(taint) for taint in ("gpu", "fast") if rng.random() < 0.5),
        total_kv_blocks=rng.choice((None, 10)),
        kv_transfer_domain=rng.choice((None, "zone", "rack")),
        kv_transfer_enforcement=rng.choice((None, Enforcement.REQUIRED, Enforcement.FALLBACK)),
    )
    return card(
        rng.randrange(6),
        config,
        incarnation=rng.choice((1, 1, 1, 2)),
        role=rng.randrange(3),
        dp_size=rng.choice((1, 2, 20)),
        draining=rng.random() < 0.2,
        engine_silent=rng.random() < 0.2,
    )


def check_columns(fleet: Fleet, cards: dict[WorkerId, WorkerCard], alive: dict[WorkerId, bool]) -> None:
    ranks = {rank: card for card in cards.values() for rank in card.ranks()}
    slots = {rank: fleet.slot_of(rank) for rank in ranks}
    assert len(set(slots.values())) == len(ranks) == np.count_nonzero(fleet.columns.present)
    assert [fleet.rank_at(Slot(slot)) for slot in fleet.rank_order.tolist()] == sorted(ranks)
    assert fleet.n_slots == (max(slot for slot in slots.values() if slot is not None) + 1 if slots else 0)
    columns = fleet.columns
    for rank, slot in slots.items():
        assert slot is not None
        there, config = ranks[rank], ranks[rank].runtime_config
        assert columns.alive[slot] == alive[rank.worker_id]
        assert columns.draining[slot] == there.draining
        assert columns.engine_silent[slot] == there.engine_silent
        assert (columns.prefill[slot], columns.decode_or_both[slot]) == (
            there.role is Role.PREFILL,
            there.role is not Role.PREFILL,
        )
        assert columns.total_blocks[slot] == (config.total_kv_blocks or np.inf)
        for level in LEVELS:
            value = config.domains.get(level)
            assert fleet.places.value_at(level, slot) == value
            same = fleet.places.value_id(level, value) if value else -1
            assert fleet.places.ids(level)[slot] == same
        for taint in (Taint("gpu"), Taint("fast"), *(topology_taint(level, "b") for level in LEVELS)):
            assert fleet.places.carries(taint)[slot] == (taint in worker_taints(config))
    published = {Slot(slot): policy for policy, at in fleet.policies for slot in at.tolist()}
    assert published == {
        slots[rank]: policy_of(there.runtime_config, None)
        for rank, there in ranks.items()
        if there.role is Role.PREFILL
    }
    free = ~columns.present
    assert not (
        columns.alive | columns.prefill | columns.decode_or_both | fleet.places.carries(Taint("gpu"))
    )[free].any()


@settings(max_examples=100)
@given(st.randoms(use_true_random=False), st.integers(1, 25))
def test_fleet_columns_equal_the_cards_after_any_changes(rng: Random, n_changes: int) -> None:
    fleet = Fleet(ModelName("m"), 4)
    cards: dict[WorkerId, WorkerCard] = {}
    alive: dict[WorkerId, bool] = {}
    held: dict[Slot, WorkerRank] = {}
    for _ in range(n_changes):
        drawn = draw_card(rng)
        worker_id, known = drawn.worker_id, cards.get(drawn.worker_id)
        if rng.random() < 0.6:
            change = fleet.join(drawn)
            if known is None or known.incarnation != drawn.incarnation:
                alive[worker_id] = True
            cards[worker_id] = drawn
            freed, joined = change.freed, change.joined
        elif rng.random() < 0.5:
            freed, joined = tuple(fleet.leave(worker_id, drawn.incarnation)), ()
            if known is not None and known.incarnation == drawn.incarnation:
                del cards[worker_id]
        else:
            freed = joined = ()
            assert fleet.set_alive(worker_id, alive=False) == (known is not None)
            alive[worker_id] = False
        for slot in freed:
            del held[slot]
        for slot in joined:
            rank = fleet.rank_at(slot)
            assert slot not in held
            assert rank is not None
            held[slot] = rank
        at = {slot: fleet.rank_at(slot) for slot in map(Slot, range(fleet.n_slots))}
        assert held == {slot: rank for slot, rank in at.items() if rank is not None}
        check_columns(fleet, cards, alive)


def test_a_rank_keeps_its_slot_through_an_update() -> None:
    fleet = Fleet(ModelName("m"), 4)
    fleet.join(card(1, ModelRuntimeConfig(), dp_size=2))
    fleet.join(card(1, ModelRuntimeConfig(), dp_size=3, draining=1))
    assert [fleet.slot_of(WorkerRank(WorkerId(1), DpRank(at))) for at in range(3)] == [0, 1, 2]


def test_fleet_links_are_shared_like_links_of_mock_workers() -> None:
    """Where every place is known: transfers share what mock workers do, in either direction."""
    for seed in range(1_000):
        rng = Random(seed)
        order = LEVELS[: rng.randrange(1, 4)]
        table = LinkTable(draw_table(rng).by_level, Link(1e-3, 1e9), {})
        workers = [{level: rng.choice("abc") for level in order} for _ in range(rng.randrange(2, 12))]
        fleet = Fleet(ModelName("m"), 4)
        for worker_id, domains in enumerate(workers):
            fleet.join(card(worker_id, ModelRuntimeConfig(topology_domains=domains, topology_levels=order)))
        links, shared = Links(table=table, levels=order), FleetLinks(fleet, table)
        of: dict[object, SharedLink | None] = {}
        for src, domains in enumerate(workers):
            for dst, others in enumerate(workers):
                name, _ = links.shared(
                    links.place(domains, WorkerId(src)), links.place(others, WorkerId(dst))
                )
                found = shared.shared(Slot(src), Slot(dst))
                assert of.setdefault(name, found) == found is not None
        assert len(set(of.values())) == len(of)


def test_a_measured_pair_of_values_has_its_own_shared_link() -> None:
    fleet = Fleet(ModelName("m"), 4)
    for worker_id, zone in enumerate("abcab"):
        config = ModelRuntimeConfig(topology_domains={"zone": zone}, topology_levels=("zone",))
        fleet.join(card(worker_id, config))
    fleet.join(card(9, ModelRuntimeConfig()))
    table = LinkTable({}, Link(1e-3, 1e9), {("zone", "a", "b"): Link(1e-4, 2e9)})
    links = links_of(fleet, table)
    near, measured, far, same, again, unknown = (links.shared(Slot(0), Slot(slot)) for slot in range(6))
    assert (near, measured, unknown) == (same, again, None)
    assert len({near, measured, far}) == 3
    assert links.shared(Slot(1), Slot(0)) not in (near, measured, far)
    assert links.link(Slot(0), Slot(4)) == Link(1e-4, 2e9)
    assert measured is not None
    loads = LinkState()
    loads.add(measured, 100.0)
    loads.add(measured, 50.5)
    loads.remove(measured, 100.0)
    assert loads.on(measured) == (50.5, 1)
    loads.remove(measured, 50.0)
    assert (loads.on(measured), len(loads)) == ((0.0, 0), 0)


def test_link_loads_survive_changes_of_the_fleet() -> None:
    """A fleet's links are made again with each card; loads belong to the names of places."""
    fleet, loads = Fleet(ModelName("m"), 4), LinkState()
    table = LinkTable({"zone": Link(1e-3, 1e9)})

    def place(zone: str, rack: str) -> ModelRuntimeConfig:
        domains = {"zone": zone, "rack": rack}
        return ModelRuntimeConfig(topology_domains=domains, topology_levels=("zone", "rack"))

    for worker_id, (zone, rack) in enumerate((("a", "1"), ("a", "2"), ("b", "1"), ("c", "1"))):
        fleet.join(card(worker_id, place(zone, rack)))
    links = links_of(fleet, table)
    links.use(loads)
    within, across = links.shared(Slot(0), Slot(1)), links.shared(Slot(0), Slot(2))
    assert within is not None
    assert across is not None
    loads.add(within, 1e9)
    loads.add(across, 2e9)
    assert links.transfer(Slot(0), Slot(1), 1e9)[0] == 1e-3 + 2.0
    assert links_of(fleet, table) is links
    fleet.set_alive(WorkerId(3), False)
    assert links_of(fleet, table) is links
    fleet.leave(WorkerId(2), Epoch(1))
    fleet.leave(WorkerId(0), Epoch(1))
    fleet.join(card(7, place("a", "9")))
    links = links_of(fleet, table)
    links.use(loads)
    here = fleet.slots_of(WorkerId(7))[0]
    assert links.transfer(here, Slot(1), 1e9)[0] == 1e-3 + 2.0
    assert links.transfer(here, Slot(3), 1e9) == (table.otherwise.transfer_s(1e9), 0.0)
    fleet.join(card(2, place("b", "5")))
    links = links_of(fleet, table)
    links.use(loads)
    back = fleet.slots_of(WorkerId(2))[0]
    assert links.transfer(here, back, 1e9)[0] == table.otherwise.transfer_s(2e9)
    links.use(None)
    assert links.transfer(here, back, 1e9)[0] == table.otherwise.transfer_s(1e9)
    links.use(loads)
    loads.remove(across, 2e9)
    assert links.transfer(here, back, 1e9)[0] == table.otherwise.transfer_s(1e9)
