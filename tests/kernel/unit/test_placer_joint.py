"""The placer where pairs are chosen together: what is booked, picked again, and learned of links."""

from msgspec import structs

from kvrouter.core.constraints import PdSelection
from kvrouter.core.ids import LeaseKey, RequestId, RouterId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.core.workers import ModelRuntimeConfig, Role
from kvrouter.kernel.fleet.circuit import Fault
from kvrouter.kernel.journey import Shape
from kvrouter.kernel.placement.placement import Draw, Placement
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.routing.decision_input import DecisionInput, decision_input
from kvrouter.kernel.routing.fleet_links import links_of
from kvrouter.kernel.routing.interface import Decision, RouteRequest, RoutingSettings, Times, View
from kvrouter.kernel.topology.link_table import Link, LinkTable
from tests.kernel.unit.test_placer import place, placer_of
from tests.testing.router_harness import card

LINKS = LinkTable({"zone": Link(1e-4, 1e9)}, Link(1e-4, 1e9))
JOINT = RoutingSettings(cost="time", pd_selection=PdSelection.JOINT, links=LINKS)
PAIR = ((1, Role.PREFILL), (2, Role.DECODE), (3, Role.DECODE))


def joint(*workers: tuple[int, Role], decode_only: bool = True, settings: RoutingSettings = JOINT) -> Placer:
    placer = placer_of(settings=settings)
    for worker_id, role in workers:
        config = ModelRuntimeConfig(
            topology_domains={"zone": "a"},
            topology_levels=("zone",),
            kv_bytes_per_token=100_000,
            total_kv_blocks=1000,
            max_num_seqs=4,
        )
        placer.fleet.join(
            structs.replace(
                card(worker_id, role),
                runtime_config=config,
                decode_only=decode_only and role is Role.DECODE,
            )
        )
    return placer


def handed_on(placer: Placer, placement: Placement, at_s: float, takes_s: float) -> None:
    """Prefill ends, and the first token comes so long after it."""
    placer.prefill_done(placement, now_s=at_s)
    placer.pick_decode_again(placement, now_s=at_s)
    placer.first_token(placement, now_s=at_s + takes_s)
    placer.release(placement, now_s=at_s + takes_s, tokens=8)


def test_a_local_prefill_is_booked_on_the_decode_worker_alone() -> None:
    placer = joint(*PAIR, decode_only=False)
    placement = place(placer)
    assert placement.shape is Shape.AGGREGATED
    assert placement.decision.together
    assert placement.decision.decode.leg is Leg.AGGREGATED
    assert placement.transfer is None
    slot = placement.decision.decode.slot
    assert placer.ledger.columns().prefill_tokens[slot] == placement.prompt.isl_tokens
    placer.first_token(placement, now_s=0.01)
    assert placer.ledger.columns().prefill_tokens[slot] == 0
    placer.release(placement, now_s=2.0)
    assert len(placer.ledger) == 0
    reading = placer.speeds.reading(slot)
    assert reading is not None
    assert reading.requests == 1


def test_the_second_decode_pick_uses_the_costs_of_the_first() -> None:
    """A worker that prefills for itself meanwhile is as dear then as it was before."""
    placer = joint(*PAIR)
    first = place(placer)
    placer.ledger.book(
        key=LeaseKey(RouterId("here"), RequestId("another"), 0),
        slot=Slot(3 - first.decision.decode.slot),
        prompt=first.prompt,
        prefill_tokens=8000,
        track_blocks=False,
    )
    placer.prefill_done(first, now_s=1.0)
    assert not placer.pick_decode_again(first, now_s=1.0)
    times = first.decision.decode.times
    assert times is not None
    assert times.queue_s == 0.0


def test_links_are_learned_only_from_transfers_without_other_waits() -> None:
    placer = joint(*PAIR[:2])
    for number in range(8):
        handed_on(placer, place(placer, Draw(number, number, number)), 10.0 * number, 0.2)
    (reading,) = placer.transfers.learned.readings()
    assert reading.transfers == 8
    crowded = joint(*PAIR[:2])
    several = [place(crowded, Draw(number, number, number)) for number in range(6)]
    for placement in several:  # two of them wait for a seat
        handed_on(crowded, placement, 10.0, 5.0)
    shown = [reading.transfers for reading in crowded.transfers.learned.readings()]
    assert sum(shown) < len(several)


def test_no_link_is_learned_if_prefill_legs_end_after_their_transfer() -> None:
    placer = joint(*PAIR[:2])
    sender = placer.fleet.card(WorkerId(1))
    assert sender is not None
    placer.fleet.join(structs.replace(sender, ends_after_transfer=True))
    for number in range(8):
        handed_on(placer, place(placer, Draw(number, number, number)), 10.0 * number, 0.001)
    assert placer.transfers.learned.readings() == []
    assert len(placer.transfers.state) == 0


def test_switching_to_blocks_cost_removes_the_load_on_links() -> None:
    placer = joint(*PAIR[:2])
    going = [place(placer, Draw(number, number, number)) for number in range(2)]
    links = links_of(placer.fleet, LINKS)
    alone_s = LINKS.otherwise.transfer_s(1e9)
    assert links.transfer(Slot(0), Slot(1), 1e9)[0] > alone_s
    blocks = RoutingSettings(links=LINKS, kv_transfer_weight=10.0)
    placer.set_routing(blocks, now_s=1.0)
    last = place(placer, Draw(9, 9, 9))
    placer.release(going[0], now_s=1.0)
    again = place(placer, Draw(10, 10, 10))
    assert links.transfer(Slot(0), Slot(1), 1e9)[0] == alone_s
    assert again.decision.decode.transfer_blocks == last.decision.decode.transfer_blocks


def _decode_times(kept: DecisionInput) -> dict[WorkerRank, Times | None]:
    return {row.rank: row.times for row in kept.candidates() if row.leg is Leg.DECODE}


def test_a_kept_input_has_the_load_of_links_at_the_time_of_its_decision() -> None:
    placer = joint(*PAIR)
    kept: list[DecisionInput] = []

    def keep(
        route_request: RouteRequest, view: View, decision: Decision, *, prefill: WorkerRank | None
    ) -> None:
        assert decision.prefill is not None
        assert prefill is None
        kept.append(decision_input(route_request, view))

    placer.on_decided = keep
    going = [place(placer, Draw(number, number, number)) for number in range(4)]
    then = [_decode_times(each) for each in kept]
    for each in going:
        placer.release(each, now_s=1.0)
    assert [_decode_times(each) for each in kept] == then
    picked = going[3].decision.decode
    last = then[3][picked.rank]
    first = then[0][picked.rank]
    assert last == picked.times
    assert first is not None
    assert last is not None
    assert last.transfer_s > first.transfer_s, "three others were on their way"


def test_a_failed_local_prefill_does_not_set_aggregated_failed() -> None:
    placer = joint(*PAIR, decode_only=False)
    placer.fleet.set_broken_pair(WorkerId(1), WorkerId(2), True)
    local = place(placer)
    assert local.decision.prefill is None
    placer.circuits.failed(local, Leg.AGGREGATED, Fault.LOST, since_s=0.0, now_s=1.0)
    assert not placer.fleet.broken_pairs.aggregated_failed


def test_links_are_cached_until_a_worker_changes_its_domain() -> None:
    placer = joint(*PAIR)
    fleet, links = placer.fleet, links_of(placer.fleet, LINKS)
    first = fleet.card(WorkerId(2))
    assert first is not None
    fleet.join(structs.replace(first, draining=True))
    fleet.set_alive(WorkerId(2), False)
    fleet.set_circuit_open(WorkerId(3), True)
    assert links_of(fleet, LINKS) is links
    moved = structs.replace(first.runtime_config, topology_domains={"zone": "b"})
    fleet.join(structs.replace(first, runtime_config=moved))
    assert links_of(fleet, LINKS) is not links


def test_a_transfer_begun_under_another_link_table_is_not_measured() -> None:
    placer = joint(*PAIR)
    placements = [place(placer, Draw(0, number, 0)) for number in range(2)]
    placer.prefill_done(placements[0], now_s=1.0)
    placer.set_routing(structs.replace(JOINT, links=LinkTable({"zone": Link(1e-4, 5e8)})), now_s=1.5)
    placer.prefill_done(placements[1], now_s=2.0)
    for placement in placements:
        placer.first_token(placement, now_s=9.0)
        placer.release(placement, now_s=9.0, tokens=8)
    assert placer.transfers.learned.readings() == []
    assert len(placer.transfers.state) == 0
    same = structs.replace(JOINT, links=LinkTable({"zone": Link(1e-4, 5e8)}))
    for number in range(4):
        placement = place(placer, Draw(0, 10 + number, 0))
        handed_on(placer, placement, 10.0 + number, 0.5)
    placer.set_routing(same, now_s=20.0)
    assert placer.transfers.learned.readings() != []
