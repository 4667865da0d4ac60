from typing import Any

import numpy as np
import pytest
from msgspec import structs

from kvrouter.core.errors import ConfigError
from kvrouter.core.hashing import mix64
from kvrouter.core.ids import DpRank, Epoch, ModelName, Slot, Taint, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Enforcement, KvTransfers, LoadReport, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.columns import UNKNOWN, hash_rank
from kvrouter.kernel.fleet.fleet import MAX_SLOTS, Fleet
from kvrouter.kernel.routing.masks import ready
from tests.testing.plain_fleets import worker_card

MODEL = ModelName("m")


def card(
    worker_id: int,
    role: Role = Role.BOTH,
    *,
    incarnation: int = 1,
    config: ModelRuntimeConfig | None = None,
    **fields: Any,
) -> WorkerCard:
    return worker_card(
        worker_id,
        role,
        config,
        **{"incarnation": Epoch(incarnation), "block_size": 16, "context_length": 4096, **fields},
    )


def in_zone(zone: str | None, *taints: str) -> ModelRuntimeConfig:
    return ModelRuntimeConfig(
        topology_domains={} if zone is None else {"zone": zone}, taints=frozenset(map(Taint, taints))
    )


def rank(worker_id: int, dp_rank: int = 0) -> WorkerRank:
    return WorkerRank(WorkerId(worker_id), DpRank(dp_rank))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(MODEL, 16)


def test_each_rank_gets_a_slot(fleet: Fleet) -> None:
    change = fleet.join(card(7, dp_size=2, dp_start=4))
    assert change.joined == (0, 1)
    assert change.freed == ()
    assert [fleet.rank_at(slot) for slot in change.joined] == [rank(7, 4), rank(7, 5)]
    assert fleet.slot_of(rank(7, 5)) == 1
    assert fleet.slot_of(rank(7, 0)) is None
    assert fleet.card_at(Slot(1)) == card(7, dp_size=2, dp_start=4)
    assert (len(fleet), fleet.n_slots) == (1, 2)


def test_a_freed_slot_is_reused(fleet: Fleet) -> None:
    fleet.join(card(1))
    fleet.join(card(2))
    assert fleet.leave(WorkerId(1), Epoch(1)) == [0]
    assert fleet.rank_at(Slot(0)) is None
    assert fleet.card_at(Slot(0)) is None
    assert not fleet.columns.present[0]
    assert fleet.join(card(3)).joined == (0,)
    assert [c.worker_id for c in fleet] == [2, 3]


def test_an_emptied_fleet_starts_again_at_slot_0(fleet: Fleet) -> None:
    fleet.join(card(1))
    fleet.leave(WorkerId(1), Epoch(1))
    assert fleet.n_slots == 0
    assert fleet.join(card(1)).joined == (0,)


def test_a_new_incarnation_replaces_the_old_incarnation(fleet: Fleet) -> None:
    fleet.join(card(1, dp_size=2))
    fleet.set_alive(WorkerId(1), alive=False)
    change = fleet.join(card(1, incarnation=2))
    assert change.freed == (0, 1)
    assert change.joined == (0,)
    assert fleet.is_alive(WorkerId(1))
    assert fleet.leave(WorkerId(1), Epoch(1)) == []
    assert fleet.leave(WorkerId(1), Epoch(2)) == [0]
    assert fleet.leave(WorkerId(1), Epoch(2)) == []


def test_a_new_card_of_a_present_worker_keeps_slots_and_liveness(fleet: Fleet) -> None:
    fleet.join(card(1, config=in_zone("a")))
    fleet.set_alive(WorkerId(1), alive=False)
    change = fleet.join(card(1, Role.PREFILL, draining=True, dp_size=2, config=in_zone("b")))
    assert (change.joined, change.freed) == ((1,), ())
    assert fleet.columns.prefill.tolist() == [True, True]
    assert fleet.columns.draining.tolist() == [True, True]
    assert fleet.columns.alive.tolist() == [False, False]
    assert fleet.places.value_at("zone", Slot(0)) == "b"
    assert fleet.join(card(1)).freed == (1,)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (card(2, block_size=32), "block_size"),
        (card(2, dp_size=0), "dp_size"),
        (card(2, dp_start=-1), "dp_size"),
        (card(2, dp_size=MAX_SLOTS), "dp_size"),
        (card(2, config=in_zone(None, "dynamo.topology/zone=a")), "taints"),
        (WorkerCard(WorkerId(2), Epoch(1), ModelName("other"), Role.BOTH, 16, 4096, "here"), "model"),
    ],
)
def test_an_unfit_card_is_refused_by_name_and_changes_nothing(
    fleet: Fleet, wrong: WorkerCard, field: str
) -> None:
    fleet.join(card(1))
    with pytest.raises(ConfigError, match=field) as refused:
        fleet.join(wrong)
    assert refused.value.param == field
    assert list(fleet) == [card(1)]
    assert fleet.n_slots == 1


def test_a_card_with_a_domain_without_value_joins_with_a_warning(fleet: Fleet) -> None:
    change = fleet.join(card(1, config=ModelRuntimeConfig(kv_transfer_domain="zone")))
    assert "has no value" in change.warnings[0]


def test_columns_follow_the_cards_and_are_read_only(fleet: Fleet) -> None:
    config = ModelRuntimeConfig(total_kv_blocks=100, kv_bytes_per_token=64)
    fleet.join(card(1, Role.PREFILL, config=config))
    fleet.join(card(2, Role.DECODE))
    columns = fleet.columns
    assert columns.prefill.tolist() == [True, False]
    assert columns.decode_or_both.tolist() == [False, True]
    assert columns.total_blocks.tolist() == [100.0, np.inf]
    assert columns.kv_bytes_per_token.tolist() == [64, UNKNOWN]
    with pytest.raises(ValueError, match="read-only"):
        columns.alive[0] = False
    fleet.join(card(2, config=in_zone("a", "fast")))
    for column in (fleet.places.ids("zone"), fleet.places.carries(Taint("fast"))):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


def test_kv_blocks_is_the_larger_of_card_and_report_up_to_4_times_the_card(
    fleet: Fleet,
) -> None:
    fleet.join(card(1, config=ModelRuntimeConfig(total_kv_blocks=100)))
    fleet.join(card(2))
    assert [fleet.kv_blocks(Slot(n)) for n in range(3)] == [100, None, None]
    for reported, expected in ((300, 300), (0, 300), (90, 100), (400, 400), (12_000_000, 400)):
        fleet.report(LoadReport(rank(1), active_blocks=5, total_blocks=reported))
        assert fleet.kv_blocks(Slot(0)) == expected
    fleet.report(LoadReport(rank(2), active_blocks=5, total_blocks=300))
    assert fleet.kv_blocks(Slot(1)) is None


def fetched(n_bytes: int, tokens: int) -> LoadReport:
    sums = KvTransfers(transfers=9, bytes=n_bytes, seconds=1.0, tokens=tokens)
    return LoadReport(rank(2), active_blocks=5, total_blocks=90, kv_transfers=sums)


def bytes_per_token(fleet: Fleet, _: str) -> list[int]:
    return [int(each) for each in fleet.columns.kv_bytes_per_token]


def test_kv_transfers_measure_bytes_per_token_unless_a_card_has_them(fleet: Fleet) -> None:
    fleet.join(card(1, Role.PREFILL))
    fleet.join(card(2, Role.DECODE))
    fleet.join(card(3, Role.PREFILL, config=ModelRuntimeConfig(kv_bytes_per_token=64)))
    derived = fleet.derived_from_places(bytes_per_token, "bytes")
    assert derived == [UNKNOWN, UNKNOWN, 64]
    for report in (fetched(500 * 1023, 1023), fetched(0, 5000), fetched(5000, 0)):
        fleet.report(report)
        assert fleet.columns.kv_bytes_per_token.tolist() == [UNKNOWN, UNKNOWN, 64]
    fleet.report(fetched(500 * 1024, 1024))
    assert fleet.columns.kv_bytes_per_token.tolist() == [500, 500, 64]
    derived = fleet.derived_from_places(bytes_per_token, "bytes")
    assert derived == [500, 500, 64]
    fleet.report(fetched(520 * 2048, 2048))
    assert fleet.columns.kv_bytes_per_token.tolist() == [500, 500, 64]  # about the same
    fleet.report(fetched(1000 * 2048, 2048))
    fleet.join(card(4, Role.PREFILL))
    assert fleet.columns.kv_bytes_per_token.tolist() == [1000, 1000, 64, 1000]


def test_the_latest_load_report_holds_until_a_new_incarnation(fleet: Fleet) -> None:
    fleet.join(card(1, config=ModelRuntimeConfig(total_kv_blocks=100)))
    fleet.join(card(2))
    assert fleet.report(LoadReport(rank(1), active_blocks=5, total_blocks=0))
    assert fleet.columns.total_blocks[0] == 100
    assert fleet.report(LoadReport(rank(1), active_blocks=7, total_blocks=90, active_prefill_tokens=3))
    assert not fleet.report(LoadReport(rank(9), active_blocks=7, total_blocks=90))
    columns = fleet.columns
    assert columns.has_report.tolist() == [True, False]
    assert (columns.report_active_blocks[0], columns.report_prefill_tokens[0]) == (7, 3)
    assert fleet.report(LoadReport(rank(1), 7, 90, running_requests=4, waiting_requests=2))
    assert (columns.report_running_requests[0], columns.report_waiting_requests[0]) == (4, 2)
    assert (columns.report_running_requests[1], columns.report_waiting_requests[1]) == (0, 0)
    assert columns.total_blocks[0] == 90
    fleet.join(card(1, draining=True, config=ModelRuntimeConfig(total_kv_blocks=100)))
    assert fleet.columns.total_blocks[0] == 90
    fleet.join(card(1, incarnation=2))
    assert not fleet.columns.has_report[0]
    assert fleet.columns.total_blocks[0] == np.inf


def test_domain_value_ids_are_reused(fleet: Fleet) -> None:
    for worker_id in range(40):
        fleet.join(card(worker_id, config=in_zone(f"z{worker_id}")))
    assert fleet.places.n_ids("zone") == 40
    for incarnation in range(2, 6):
        for worker_id in range(40):
            fleet.join(
                card(worker_id, incarnation=incarnation, config=in_zone(f"z{worker_id}-{incarnation}"))
            )
    assert fleet.places.n_ids("zone") <= 41
    assert fleet.places.value_id("zone", "z3") is None
    slot = fleet.slot_of(rank(3))
    assert slot is not None
    assert fleet.places.value_at("zone", slot) == "z3-5"
    assert fleet.places.ids("zone")[slot] == fleet.places.value_id("zone", "z3-5")


def test_a_domain_without_workers_has_no_value_ids(fleet: Fleet) -> None:
    fleet.join(card(1, config=in_zone("a")))
    assert fleet.places.ids("rack").tolist() == [-1]
    assert fleet.places.n_ids("rack") == 0
    assert fleet.places.value_at("rack", Slot(0)) is None
    fleet.leave(WorkerId(1), Epoch(1))
    assert fleet.places.n_ids("zone") == 0


def test_ranks_carry_their_own_and_their_domains_taints(fleet: Fleet) -> None:
    fleet.join(card(1, config=in_zone("a", "fast")))
    fleet.join(card(2, config=in_zone("b", "fast")))
    fleet.join(card(3, config=in_zone(None)))
    assert fleet.places.carries(Taint("fast")).tolist() == [True, True, False]
    assert fleet.places.carries(Taint("dynamo.topology/zone=b")).tolist() == [False, True, False]
    assert fleet.places.carries(Taint("dynamo.topology/zone=")).tolist() == [False, False, False]
    assert fleet.places.carries(Taint("dynamo.topology/rack=")).tolist() == [False, False, False]
    fleet.join(card(2, config=in_zone("a")))
    assert fleet.places.carries(Taint("fast")).tolist() == [True, False, False]
    assert fleet.places.carries(Taint("dynamo.topology/zone=b")).tolist() == [False, False, False]
    fleet.leave(WorkerId(3), Epoch(1))
    assert fleet.places.carries(Taint("fast")).tolist() == [True, False]


def test_unknown_taints_asked_for_do_not_change_known_taints(fleet: Fleet) -> None:
    fleet.join(card(1, config=in_zone("a", "fast")))
    for number in range(1000):
        assert not fleet.places.carries(Taint(f"asked-{number}")).any()
    assert fleet.places.carries(Taint("fast")).tolist() == [True]


def takes_prefill(fleet: Fleet) -> bool:
    return ready(fleet, Leg.PREFILL, last_resort=False).n_allowed > 0


def test_a_prefill_worker_counts_while_alive_and_not_draining(fleet: Fleet) -> None:
    seen = [takes_prefill(fleet)]
    fleet.join(card(1, Role.PREFILL))
    seen.append(takes_prefill(fleet))
    fleet.set_alive(WorkerId(1), alive=False)
    seen.append(takes_prefill(fleet))
    fleet.set_alive(WorkerId(1), alive=True)
    seen.append(takes_prefill(fleet))
    fleet.join(card(1, Role.PREFILL, draining=True))
    seen.append(takes_prefill(fleet))
    assert seen == [False, True, False, True, False]
    assert not fleet.set_alive(WorkerId(9), alive=True)


def test_a_circuit_stays_open_for_a_new_card_but_not_a_new_incarnation(fleet: Fleet) -> None:
    fleet.join(card(1, dp_size=2))
    fleet.set_circuit_open(WorkerId(1), True)
    assert fleet.columns.circuit_open.tolist() == [True, True]
    fleet.join(card(1, dp_size=3))
    assert fleet.columns.circuit_open.tolist() == [True, True, True]
    seen = [fleet.has_open_circuits]
    fleet.join(card(1, dp_size=1, incarnation=2))
    assert fleet.columns.circuit_open.tolist() == [False]
    seen.append(fleet.has_open_circuits)
    fleet.set_circuit_open(WorkerId(9), True)
    assert [*seen, fleet.has_open_circuits] == [True, False, False]


def test_broken_pairs_mark_only_present_decode_ranks(fleet: Fleet) -> None:
    fleet.join(card(1, Role.PREFILL))
    fleet.join(card(2, Role.DECODE, dp_size=2))
    assert fleet.unreached_from(Slot(0)) is None
    fleet.set_broken_pair(WorkerId(1), WorkerId(3), True)
    assert fleet.unreached_from(Slot(0)) is None, "3 is not here"
    fleet.set_broken_pair(WorkerId(1), WorkerId(2), True)
    column = fleet.unreached_from(Slot(0))
    assert column is not None
    assert column.tolist() == [False, True, True]
    assert sorted(fleet.broken_pairs) == [(1, 2), (1, 3)]
    fleet.set_broken_pair(WorkerId(1), WorkerId(2), False)
    fleet.set_broken_pair(WorkerId(1), WorkerId(3), False)
    assert fleet.unreached_from(Slot(0)) is None
    assert not fleet.broken_pairs


def test_aggregated_failed_is_reset_once_no_pair_is_broken(fleet: Fleet) -> None:
    pairs = [(WorkerId(1), WorkerId(3)), (WorkerId(2), WorkerId(3))]
    for pair in pairs:
        fleet.set_broken_pair(*pair, True)
    fleet.broken_pairs.aggregated_failed = True
    fleet.set_broken_pair(*pairs[0], False)
    assert fleet.broken_pairs.aggregated_failed, "one is broken still"
    fleet.set_broken_pair(*pairs[1], False)
    fleet.set_broken_pair(*pairs[1], True)
    assert not fleet.broken_pairs.aggregated_failed


def test_a_snapshot_stays_as_it_is_and_is_shared_until_the_fleet_changes(fleet: Fleet) -> None:
    """A report of load is no change; a new number of blocks is, and so is whether pairs are tried again."""
    fleet.join(card(1, config=ModelRuntimeConfig(total_kv_blocks=100)))
    rank, first = WorkerRank(WorkerId(1), DpRank(0)), fleet.snapshot
    fleet.report(LoadReport(rank, 7, 100))
    assert fleet.snapshot is first
    fleet.report(LoadReport(rank, 7, 120))
    assert fleet.snapshot.columns.total_blocks.tolist() == [120.0]
    fleet.set_aggregated_failed(True)
    second = fleet.snapshot
    assert [each.columns.total_blocks.tolist() for each in (first, second)] == [[100.0], [120.0]]
    assert [each.broken_pairs.aggregated_failed for each in (first, second)] == [False, True]
    fleet.join(card(1, config=ModelRuntimeConfig(topology_domains={"zone": "b"}), dp_size=2))
    kept = second.card(WorkerId(1))
    assert kept is not None
    assert (kept.dp_size, len(second.slots_of(WorkerId(1))), second.places.domains) == (1, 1, ())
    fleet.leave(WorkerId(1), kept.incarnation)
    assert second.rank_at(Slot(0)) == rank


def test_the_required_domain_comes_from_prefill_workers(fleet: Fleet) -> None:
    required = ModelRuntimeConfig(
        topology_domains={"zone": "a"},
        kv_transfer_domain="zone",
        kv_transfer_enforcement=Enforcement.REQUIRED,
    )
    fleet.join(card(1, Role.DECODE, config=required))
    assert fleet.policies.required_domain is None
    fleet.join(card(2, Role.PREFILL, config=required))
    assert fleet.policies.required_domain == "zone"


def test_derived_values_are_cached_until_a_change(fleet: Fleet) -> None:
    built = []

    def count(of: Fleet, key: str) -> int:
        built.append(key)
        return len(of)

    assert [fleet.derived(count, "a"), fleet.derived(count, "a"), fleet.derived(count, "b")] == [0, 0, 0]
    assert built == ["a", "b"]
    fleet.join(card(1))
    assert fleet.derived(count, "a") == 1
    fleet.report(LoadReport(rank(1), active_blocks=5, total_blocks=10))
    fleet.derived(count, "a")
    assert built == ["a", "b", "a"]


def test_ranks_are_sorted_independent_of_joining_order(fleet: Fleet) -> None:
    for worker_id in (5, 1, 3):
        fleet.join(card(worker_id, dp_size=2))
    fleet.leave(WorkerId(1), Epoch(1))
    in_order = [fleet.rank_at(Slot(slot)) for slot in fleet.rank_order.tolist()]
    assert in_order == [rank(3), rank(3, 1), rank(5), rank(5, 1)]


def test_columns_shrink_after_a_large_fleet_leaves(fleet: Fleet) -> None:
    for worker_id in range(2000):
        fleet.join(card(worker_id, config=in_zone(f"z{worker_id % 7}", "t")))
    assert fleet.columns.alive.sum() == 2000
    for worker_id in range(1, 2000):
        fleet.leave(WorkerId(worker_id), Epoch(1))
    assert fleet.n_slots == 1
    assert len(fleet.columns.alive) == 1
    base = fleet.columns.alive.base
    assert base is not None
    assert base.nbytes <= 64
    assert fleet.places.carries(Taint("dynamo.topology/zone=z0")).tolist() == [True]
    fleet.join(card(5000, config=in_zone("z0")))
    assert fleet.places.ids("zone").tolist() == [fleet.places.value_id("zone", "z0")] * 2


def test_mix64_equals_splitmix64_and_rank_hashes_do_not_collide() -> None:
    # The first outputs of splitmix64 seeded with 0 and with 1.
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(1) == 0x910A2DEC89025CC1
    hashes = {hash_rank(rank(worker_id, dp_rank)) for worker_id in range(100) for dp_rank in range(8)}
    assert len(hashes) == 800


def of_context(
    worker_id: int, context_length: int, role: Role = Role.BOTH, *, draining: bool = False
) -> WorkerCard:
    return structs.replace(card(worker_id, role, draining=draining), context_length=context_length)


def test_context_length_is_the_longest_of_the_answering_workers(fleet: Fleet) -> None:
    assert (fleet.context_length_tokens, fleet.shortest_context_tokens) == (None, 0)
    fleet.join(of_context(1, 9_000, Role.PREFILL))
    assert fleet.context_length_tokens == 9_000, "nobody else is here"
    fleet.join(of_context(2, 100))
    fleet.join(of_context(3, 1))
    fleet.join(of_context(4, 5_000, draining=True))
    assert (fleet.context_length_tokens, fleet.shortest_context_tokens) == (100, 1)
    fleet.set_alive(WorkerId(2), alive=False)
    assert fleet.context_length_tokens == 1
    fleet.set_alive(WorkerId(3), alive=False)
    assert fleet.context_length_tokens == 5_000, "of who drains, rather than of who is away"
    for worker_id in (1, 4):
        fleet.set_alive(WorkerId(worker_id), alive=False)
    assert fleet.context_length_tokens == 100, "nobody answers: of all"


def test_names_follow_most_answering_workers_and_takes_calls_needs_all(fleet: Fleet) -> None:
    for worker_id, adapter in ((1, "lie"), (2, None), (3, None), (4, "lie")):
        fleet.join(structs.replace(card(worker_id), names={"other": adapter}, takes_calls=adapter is None))
    fleet.set_alive(WorkerId(4), alive=False)
    assert (fleet.names, fleet.takes_calls) == ({"other": None}, False)
    fleet.set_alive(WorkerId(1), alive=False)
    assert (fleet.names, fleet.takes_calls) == ({"other": None}, True)
    for worker_id in (1, 4, 2, 3):
        fleet.leave(WorkerId(worker_id), Epoch(1))
    assert (fleet.names, fleet.takes_calls) == ({"other": None}, True), "as the last one said"
