"""Pairs that can talk: KV goes only to decode workers that can take it, and requests go elsewhere without."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvrouter.core.constraints import PdSelection, Pin, RouterMode
from kvrouter.core.errors import AllWorkersBusy, NoEligibleWorker, Reason
from kvrouter.core.ids import RequestId, WorkerId
from kvrouter.core.requests import Leg
from kvrouter.core.workers import Enforcement, KvFormat, ModelRuntimeConfig, Role, WorkerCard, can_transfer
from kvrouter.kernel.fleet.circuit import Pair
from kvrouter.kernel.fleet.columns import BoolColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing import Decision, RouteRequest, RoutingSettings, View, route, route_decode
from kvrouter.kernel.routing.formats import (
    format_groups,
    pair_capacity,
    partner_ranks,
    takers_of,
    takers_of_peer,
)
from kvrouter.kernel.topology.link_table import LinkTable
from tests.testing.plain_fleets import fleet_of, idle_view, worker_card

REQUIRED, FALLBACK, PREFERRED = Enforcement.REQUIRED, Enforcement.FALLBACK, Enforcement.PREFERRED
OLD = KvFormat(engine="vllm", version="0.31.0", connector="NixlConnector")
NEW = KvFormat(engine="vllm", version="0.32.0", connector="NixlConnector")
UNKNOWN = KvFormat()
SEQUENTIAL = RoutingSettings()
JOINT = RoutingSettings(cost="time", pd_selection=PdSelection.JOINT, links=LinkTable())
EVERY_PICK = pytest.mark.parametrize(
    "settings",
    [
        SEQUENTIAL,
        JOINT,
        RoutingSettings(mode=RouterMode.RANDOM),
        RoutingSettings(mode=RouterMode.ROUND_ROBIN),
    ],
    ids=["sequential", "joint", "random", "round robin"],
)

parts = st.sampled_from(["", "a", "b"])
formats = st.builds(KvFormat, engine=parts, version=parts, dtype=parts)


def worker(
    worker_id: int,
    role: Role,
    kv_format: KvFormat,
    zone: str = "a",
    enforcement: Enforcement | None = None,
    **fields: Any,
) -> WorkerCard:
    config = ModelRuntimeConfig(
        topology_domains={"zone": zone},
        kv_transfer_domain="zone" if enforcement else None,
        kv_transfer_enforcement=enforcement,
        kv_transfer_preferred_weight=0.9 if enforcement is PREFERRED else None,
        total_kv_blocks=100,
        kv_format=kv_format,
    )
    return worker_card(worker_id, role, config, **fields)


def prefill(worker_id: int, kv_format: KvFormat, *place: Any) -> WorkerCard:
    return worker(worker_id, Role.PREFILL, kv_format, *place)


def decode(worker_id: int, kv_format: KvFormat, zone: str = "a", **fields: Any) -> WorkerCard:
    return worker(worker_id, Role.DECODE, kv_format, zone, **fields)


def request(number: int = 0, **fields: Any) -> RouteRequest:
    return RouteRequest(RequestId(f"r{number}"), 8, 2, **fields)


def ids(decision: Decision) -> tuple[int | None, int]:
    first = None if decision.prefill is None else int(decision.prefill.rank.worker_id)
    return first, int(decision.decode.rank.worker_id)


def busy(fleet: Fleet, settings: RoutingSettings, *worker_ids: int) -> View:
    tokens = np.zeros(fleet.n_slots, np.int64)
    for worker_id in worker_ids:
        tokens[list(fleet.slots_of(WorkerId(worker_id)))] = 10
    return idle_view(fleet, settings, prefill_tokens=tokens)


@given(formats, formats)
def test_formats_fit_unless_a_known_part_differs(one: KvFormat, other: KvFormat) -> None:
    pairs = zip((one.engine, one.version, one.dtype), (other.engine, other.version, other.dtype), strict=True)
    assert can_transfer(one, other) == all("" in pair or pair[0] == pair[1] for pair in pairs)
    assert can_transfer(one, other) == can_transfer(other, one)
    assert can_transfer(one, UNKNOWN)


@given(formats, formats)
def test_a_part_stated_as_any_fits_every_other(one: KvFormat, other: KvFormat) -> None:
    stated = KvFormat(engine="any", version="any", dtype="any", connector="any").over(one)
    assert can_transfer(stated, other)
    assert can_transfer(other, stated)


@given(formats, formats)
def test_stated_parts_win_over_reported_ones(stated: KvFormat, reported: KvFormat) -> None:
    merged = stated.over(reported)
    assert merged.known == {**reported.known, **stated.known}
    assert UNKNOWN.over(reported) is reported


@EVERY_PICK
def test_no_pair_crosses_two_versions(settings: RoutingSettings) -> None:
    fleet = fleet_of(prefill(1, OLD), prefill(2, NEW), decode(3, OLD), decode(4, NEW))
    seen = {ids(route(request(n), idle_view(fleet, settings, turn=n, seed=n))) for n in range(40)}
    assert seen == {(1, 3), (2, 4)} or seen < {(1, 3), (2, 4), (None, 3), (None, 4)}


@EVERY_PICK
def test_prefill_without_a_partner_is_left_out_of_the_choice(settings: RoutingSettings) -> None:
    fleet = fleet_of(prefill(1, OLD), prefill(2, NEW), decode(4, NEW))
    assert {ids(route(request(n), idle_view(fleet, settings, turn=n)))[0] for n in range(8)} <= {2, None}


@EVERY_PICK
def test_an_unknown_format_pairs_with_every_other(settings: RoutingSettings) -> None:
    fleet = fleet_of(prefill(1, UNKNOWN), decode(3, OLD), decode(4, NEW))
    seen = {ids(route(request(n), busy(fleet, settings, 3 + n % 2)))[1] for n in range(8)}
    assert seen <= {3, 4}
    assert fleet_of(prefill(1, OLD), decode(3, UNKNOWN)).n_slots == 2


@EVERY_PICK
def test_formats_that_leave_no_pair_let_one_worker_serve_alone(settings: RoutingSettings) -> None:
    fleet = fleet_of(prefill(1, OLD), decode(4, NEW))
    decision = route(request(), idle_view(fleet, settings), explain=True)
    assert ids(decision) == (None, 4)
    assert decision.decode.leg is Leg.AGGREGATED
    refused = {(row.leg, row.rank.worker_id): row.refused for row in decision.rows}
    assert refused[Leg.PREFILL, WorkerId(1)] is Reason.CANNOT_TRANSFER
    assert refused[Leg.AGGREGATED, WorkerId(4)] is None


@EVERY_PICK
@pytest.mark.parametrize("enforcement", [FALLBACK, PREFERRED])
def test_soft_policies_cross_the_zone_to_a_partner_or_serve_alone(
    settings: RoutingSettings, enforcement: Enforcement
) -> None:
    fleet = fleet_of(prefill(1, OLD, "a", enforcement), decode(3, NEW), decode(4, OLD, "b"))
    seen = {ids(route(request(n), idle_view(fleet, settings))) for n in range(8)}
    assert seen <= {(1, 4), (None, 3), (None, 4)}
    if settings is not JOINT:
        assert seen == {(1, 4)}
    alone = fleet_of(prefill(1, OLD, "a", enforcement), decode(3, NEW))
    assert ids(route(request(), idle_view(alone, settings))) == (None, 3)


@EVERY_PICK
def test_required_fails_closed_where_its_zone_has_no_partner(settings: RoutingSettings) -> None:
    fleet = fleet_of(prefill(1, OLD, "a", REQUIRED), decode(3, NEW), decode(4, OLD, "b"))
    with pytest.raises(NoEligibleWorker) as refused:
        route(request(), idle_view(fleet, settings), explain=True)
    assert refused.value.refusals == {Reason.DOMAIN_MISMATCH: 1, Reason.CANNOT_TRANSFER: 1}
    assert (refused.value.role, refused.value.domain) == ("decode", "zone")
    rows = {row.rank.worker_id: row.refused for row in refused.value.rows}  # type: ignore[attr-defined]
    assert rows == {
        1: Reason.CANNOT_TRANSFER,
        3: Reason.CANNOT_TRANSFER,
        4: Reason.DOMAIN_MISMATCH,
    }


@EVERY_PICK
def test_required_uses_the_zone_that_has_a_partner(settings: RoutingSettings) -> None:
    fleet = fleet_of(
        prefill(1, OLD, "a", REQUIRED), decode(2, NEW),
        prefill(3, NEW, "b", REQUIRED), decode(4, NEW, "b"),
    )  # fmt: skip
    assert {ids(route(request(n), idle_view(fleet, settings))) for n in range(8)} <= {
        (3, 4),
        (None, 2),
        (None, 4),
    }


def test_a_pinned_prefill_worker_without_a_partner_is_refused() -> None:
    fleet = fleet_of(prefill(1, OLD), prefill(2, NEW), decode(4, NEW))
    with pytest.raises(NoEligibleWorker, match="1 cannot_transfer") as refused:
        route(request(prefill_pin=Pin(WorkerId(1))), idle_view(fleet))
    assert refused.value.refusals == {Reason.CANNOT_TRANSFER: 1}


def test_decode_workers_that_cannot_serve_alone_are_refused() -> None:
    fleet = fleet_of(prefill(1, OLD), decode(4, NEW, decode_only=True))
    with pytest.raises(NoEligibleWorker) as refused:
        route(request(), idle_view(fleet))
    assert refused.value.refusals == {Reason.CANNOT_TRANSFER: 1}


def test_a_busy_partner_is_waited_for_and_not_replaced_by_another_version() -> None:
    settings = RoutingSettings(active_prefill_tokens_threshold=5)
    fleet = fleet_of(prefill(1, OLD), decode(3, OLD), decode(4, NEW))
    with pytest.raises(AllWorkersBusy):
        route(request(), busy(fleet, settings, 3))


@EVERY_PICK
def test_rows_of_the_other_version_say_that_they_cannot_take_the_kv(settings: RoutingSettings) -> None:
    fleet = fleet_of(prefill(1, OLD), decode(3, OLD), decode(4, NEW))
    decision = route(request(pin=Pin(WorkerId(3))), idle_view(fleet, settings), explain=True)
    rows = {row.rank.worker_id: row.refused for row in decision.rows if row.leg is Leg.DECODE}
    assert rows[WorkerId(4)] is Reason.PINNED_ELSEWHERE
    decision = route(request(), busy(fleet, settings, 4), explain=True)
    rows = {row.rank.worker_id: row.refused for row in decision.rows if row.leg is Leg.DECODE}
    assert rows[WorkerId(4)] is Reason.CANNOT_TRANSFER


def test_decode_picked_again_takes_the_kv_that_waits() -> None:
    fleet = fleet_of(prefill(1, OLD), decode(3, OLD), decode(4, NEW), decode(5, OLD))
    (rank,) = prefill(1, OLD).ranks()
    sender = prefill(1, OLD).kv_peer

    def picked() -> set[WorkerId]:
        view = busy(fleet, SEQUENTIAL)
        again = [request(n, kv_sender=sender) for n in range(20)]
        return {route_decode(each, view, None, prefill=rank).decode.rank.worker_id for each in again}

    assert picked() == {3, 5}
    fleet.join(prefill(1, NEW))
    assert picked() == {3, 5}
    fleet.leave(WorkerId(1), fleet.card(WorkerId(1)).incarnation)  # type: ignore[union-attr]
    assert picked() == {3, 5}
    fleet.leave(WorkerId(3), fleet.card(WorkerId(3)).incarnation)  # type: ignore[union-attr]
    fleet.leave(WorkerId(5), fleet.card(WorkerId(5)).incarnation)  # type: ignore[union-attr]
    with pytest.raises(NoEligibleWorker, match="1 cannot_transfer"):
        route_decode(request(kv_sender=sender), busy(fleet, SEQUENTIAL), None, prefill=rank)


@EVERY_PICK
def test_lost_kv_is_avoided_among_workers_of_the_version(settings: RoutingSettings) -> None:
    fleet = fleet_of(prefill(1, OLD), decode(3, OLD), decode(4, NEW), decode(5, OLD))
    fleet.set_broken_pair(WorkerId(1), WorkerId(3), True)
    assert {ids(route(request(n), idle_view(fleet, settings))) for n in range(8)} <= {
        (1, 5),
        (None, 5),
        (None, 3),
        (None, 4),
    }
    fleet.leave(WorkerId(5), fleet.card(WorkerId(5)).incarnation)  # type: ignore[union-attr]
    decision = route(request(aggregated_if_broken=True), idle_view(fleet, SEQUENTIAL))
    assert decision.prefill is None


def refusing(fleet: Fleet, *pairs: tuple[int, int], is_tried: bool | None = False) -> Fleet:
    for sender, receiver in pairs:
        fleet.set_refusing_pair(Pair(WorkerId(sender), WorkerId(receiver)), is_tried)
    return fleet


def pairs_of(fleet: Fleet) -> set[tuple[int, int]]:
    """The pairs that can talk, as masks of pairs and of a sender alone both say."""
    cards = {each.worker_id: each for each in fleet}
    receivers = [each for each in cards.values() if each.role is not Role.PREFILL]
    groups, found = format_groups(fleet), set()
    for sender in (each for each in cards.values() if each.role is Role.PREFILL):
        of_slot = takers_of(groups, fleet.slots_of(sender.worker_id)[0])
        of_peer = takers_of_peer(fleet, sender.kv_peer)
        for receiver in receivers:
            (slot,) = fleet.slots_of(receiver.worker_id)
            both = {takers is None or bool(takers[slot]) for takers in (of_slot, of_peer)}
            assert len(both) == 1
            if both == {True}:
                found.add((int(sender.worker_id), int(receiver.worker_id)))
    return found


ALL_16 = {(sender, receiver) for sender in (1, 2, 3, 4) for receiver in (5, 6, 7, 8)}


def fleet_of_two_builds(kv_format: KvFormat = UNKNOWN) -> Fleet:
    """Prefill workers 1, 2 and decode workers 5, 6 of one build; 3, 4 and 7, 8 of another."""
    builds = {1: "sglang 0.5.23", 2: "sglang 0.5.23", 3: "sglang 0.5.24", 4: "sglang 0.5.24"}
    fleet = fleet_of(
        *(prefill(each, kv_format) for each in (1, 2, 3, 4)),
        *(decode(each, kv_format) for each in (5, 6, 7, 8)),
    )
    for card in tuple(fleet):
        fleet.join(structs.replace(card, engine=builds[(int(card.worker_id) - 1) % 4 + 1]))
    return fleet


@EVERY_PICK
def test_engines_that_refuse_each_other_are_no_pair(settings: RoutingSettings) -> None:
    fleet = refusing(fleet_of(prefill(1, UNKNOWN), decode(3, UNKNOWN), decode(4, UNKNOWN)), (1, 3))
    decisions = [route(request(n), busy(fleet, settings, 4), explain=True) for n in range(8)]
    assert {ids(each) for each in decisions} <= {(1, 4), (None, 3), (None, 4)}
    rows = {row.rank.worker_id: row.refused for row in decisions[0].rows if row.leg is Leg.DECODE}
    assert rows[WorkerId(3)] is Reason.CANNOT_TRANSFER
    assert ids(route(request(), idle_view(fleet.snapshot, settings))) in {(1, 4), (None, 3), (None, 4)}
    refusing(fleet, (1, 4))
    assert ids(route(request(), idle_view(fleet, settings)))[0] is None
    assert partner_ranks(format_groups(fleet), fleet.slots_of(WorkerId(1))[0], *able(fleet)) == 0


def test_two_workers_that_refuse_each_other_say_nothing_of_others() -> None:
    assert pairs_of(refusing(fleet_of_two_builds(), (1, 7))) == ALL_16 - {(1, 7)}
    assert pairs_of(refusing(fleet_of_two_builds(), (1, 7), (1, 8))) == ALL_16 - {(1, 7), (1, 8)}
    assert pairs_of(refusing(fleet_of_two_builds(), (1, 5), (2, 6))) == ALL_16 - {(1, 5), (2, 6)}, "one build"


def test_several_workers_of_each_build_that_refuse_each_other_part_the_builds() -> None:
    fleet = refusing(fleet_of_two_builds(), (1, 7), (2, 8))
    apart = {(1, 7), (1, 8), (2, 7), (2, 8)}
    assert pairs_of(fleet) == ALL_16 - apart
    fleet.join(structs.replace(prefill(9, UNKNOWN), engine="sglang 0.5.23"))
    assert {pair for pair in pairs_of(fleet) if pair[0] == 9} == {(9, 5), (9, 6)}
    refusing(fleet, (1, 7), is_tried=True)
    assert pairs_of(fleet) >= {(1, 7)}, "one request may try it again"
    assert not pairs_of(fleet) & {(1, 8), (2, 7), (2, 8), (9, 7)}, "and no other pair of the builds"
    refusing(fleet, (1, 7), is_tried=None)
    assert pairs_of(fleet) >= apart - {(2, 8)}
    refusing(fleet, (2, 8), is_tried=None)
    assert not format_groups(fleet)


def able(fleet: Fleet) -> tuple[BoolColumn, BoolColumn]:
    return fleet.columns.prefill, fleet.columns.decode_or_both


def test_a_split_costs_the_smaller_share_of_each_version() -> None:
    fleet = fleet_of(
        prefill(1, OLD), prefill(2, NEW),
        decode(3, OLD), decode(4, OLD), decode(5, OLD), decode(6, NEW),
    )  # fmt: skip
    groups = format_groups(fleet)
    assert pair_capacity(groups, *able(fleet)) == 0.75
    fleet.join(decode(4, UNKNOWN))
    assert pair_capacity(format_groups(fleet), *able(fleet)) == 1.0
    fleet.join(prefill(2, OLD))
    assert pair_capacity(format_groups(fleet), *able(fleet)) == 0.75
    same = fleet_of(prefill(1, OLD), decode(3, OLD))
    assert (format_groups(same), pair_capacity((), *able(same))) == ((), 1.0)


def test_no_capacity_is_left_without_a_pair_of_one_version() -> None:
    fleet = fleet_of(prefill(1, OLD), decode(3, NEW))
    senders, receivers = able(fleet)
    assert pair_capacity(format_groups(fleet), senders, receivers) == 0.0
    nobody = np.zeros_like(senders)
    assert pair_capacity(format_groups(fleet), nobody, receivers) == 1.0, (
        "formats are not why nobody is there"
    )


def test_partners_are_counted_by_rank_on_both_sides() -> None:
    fleet = fleet_of(prefill(1, OLD), prefill(2, NEW, "a"), decode(3, OLD, dp_size=3), decode(4, UNKNOWN))
    groups = format_groups(fleet)
    counts = [partner_ranks(groups, fleet.slots_of(WorkerId(each))[0], *able(fleet)) for each in (1, 2, 3, 4)]
    assert counts == [4, 1, 1, 2]


def test_a_card_of_another_format_changes_the_pairs() -> None:
    fleet = fleet_of(prefill(1, OLD), decode(3, NEW))
    assert ids(route(request(), idle_view(fleet)))[0] is None
    fleet.join(decode(3, OLD))
    assert ids(route(request(), idle_view(fleet))) == (1, 3)
    assert ids(route(request(), idle_view(fleet.snapshot))) == (1, 3)
