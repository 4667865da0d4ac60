"""Pairs whose KV was lost: when they are forgotten, and what many of them cost."""

from array import array
from itertools import product
from typing import Any

import pytest
from msgspec import structs

from kvrouter.core.constraints import RouterMode
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import Epoch, LeaseId, RequestId, WorkerId
from kvrouter.core.requests import KvLoss, Leg
from kvrouter.core.workers import Role
from kvrouter.kernel.fleet.circuit import CircuitSettings, CircuitState, Pair
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.journey import Shape
from kvrouter.kernel.placement.circuits import REFUSED_S, REFUSING_PAIRS_MAX, Circuits
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.routing import Decision, Pick, RouteRequest
from kvrouter.kernel.routing.formats import format_groups
from tests.testing.placement_events import A_DRAW, RecordedPlacementEvents
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card

OPEN_S, OPEN_MAX_S = 2.0, 30.0
REQUEST = RequestId("r")


class Bench:
    """Circuits of as many prefill as decode workers, and a clock that is turned by hand."""

    def __init__(self, n_each: int) -> None:
        self.now_s = 100.0
        self.let_in = 0
        self.events = RecordedPlacementEvents()
        self.fleet = Fleet(MODEL, BLOCK_SIZE)
        self.prefill = tuple(range(1, n_each + 1))
        self.decode = tuple(range(n_each + 1, 2 * n_each + 1))
        for worker in (*self.prefill, *self.decode):
            self.fleet.join(card(worker, Role.PREFILL if worker in self.prefill else Role.DECODE))
        self.circuits = Circuits(
            self.fleet,
            CircuitSettings(3, OPEN_S, OPEN_MAX_S),
            self.events,
            seed=1,
            on_readmitted=self.note,
        )

    def note(self) -> None:
        self.let_in += 1

    def pass_time(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.circuits.refresh(now_s=self.now_s)

    def pick(self, worker: int, leg: Leg) -> Pick:
        (slot,) = self.fleet.slots_of(WorkerId(worker))
        rank = self.fleet.rank_at(slot)
        assert rank is not None
        return Pick(slot, rank, leg, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 1)

    def booked(self, prefill: int, decode: int) -> Placement:
        placement = Placement(
            route_request=RouteRequest(REQUEST, 1, 1),
            decision=Decision(
                REQUEST, 0, RouterMode.KV, self.pick(decode, Leg.DECODE), self.pick(prefill, Leg.PREFILL)
            ),
            prompt=Prompt(array("I", [1]), block_size=BLOCK_SIZE),
            token_ids=array("I", [1]),
            block_size=BLOCK_SIZE,
            shape=Shape.SYNCHRONOUS,
            draw=A_DRAW,
            decode_address="",
            decode_context_tokens=4096,
            decode_lease=LeaseId(0),
        )
        self.circuits.booked(placement, now_s=self.now_s)
        return placement

    def lose(self, prefill: int, decode: int, loss: KvLoss = KvLoss.BROKEN) -> None:
        placement = self.booked(prefill, decode)
        self.circuits.kv_lost(placement, loss, since_s=self.now_s, now_s=self.now_s)
        self.circuits.released(placement, now_s=self.now_s)

    def deliver(self, prefill: int, decode: int) -> None:
        placement = self.booked(prefill, decode)
        self.circuits.begun(placement, now_s=self.now_s)
        self.circuits.released(placement, now_s=self.now_s)

    def lose_twice(self, loss: KvLoss, *between: tuple[int, int]) -> None:
        """Lose KV from 1 to 3, and again when the pair may be tried; other pairs deliver meanwhile."""
        self.lose(1, 3, loss)
        self.pass_time(OPEN_S)
        for pair in between:
            self.deliver(*pair)
        self.lose(1, 3, loss)


def test_a_half_open_pair_being_tried_is_dropped_after_the_try() -> None:
    harness = Bench(1)
    harness.lose(1, 2)
    pair = Pair(WorkerId(1), WorkerId(2))
    assert dict(harness.circuits.pairs(now_s=harness.now_s)) == {pair: CircuitState.OPEN}
    harness.pass_time(OPEN_S)
    attempt = harness.booked(1, 2)
    assert attempt.tries
    harness.pass_time(2 * OPEN_MAX_S)
    assert list(harness.fleet.broken_pairs) == [pair], "one at a time"
    harness.circuits.released(attempt, now_s=harness.now_s)
    assert list(harness.circuits.pairs(now_s=harness.now_s)) == []
    assert list(harness.fleet.broken_pairs) == []


def test_an_unused_broken_pair_is_dropped_after_a_time() -> None:
    harness = Bench(1)
    harness.lose(1, 2)
    harness.pass_time(OPEN_S)
    assert len(list(harness.circuits.pairs(now_s=harness.now_s))) == 1
    assert list(harness.fleet.broken_pairs) == []
    harness.pass_time(OPEN_MAX_S)
    assert list(harness.circuits.pairs(now_s=harness.now_s)) == []


FIRST = Pair(WorkerId(1), WorkerId(3))


def test_a_refused_handshake_is_held_for_long_and_then_tried_once() -> None:
    harness = Bench(2)
    harness.lose(1, 3, KvLoss.REFUSED)
    assert harness.fleet.refusing_pairs == {FIRST: False}
    assert list(harness.fleet.broken_pairs) == []
    harness.pass_time(0.7 * REFUSED_S)
    assert harness.fleet.refusing_pairs == {FIRST: False}
    harness.pass_time(0.3 * REFUSED_S)
    assert harness.fleet.refusing_pairs == {FIRST: True}
    attempt = harness.booked(1, 3)
    assert harness.fleet.refusing_pairs == {FIRST: False}, "one at a time"
    harness.circuits.begun(attempt, now_s=harness.now_s)
    assert harness.fleet.refusing_pairs == {}
    assert harness.events.heard[-1] == ("pair_closed", 1, 3)


def test_a_pair_lost_before_its_engines_refuse_each_other_is_held_as_long() -> None:
    harness = Bench(2)
    harness.lose(1, 3)
    assert list(harness.fleet.broken_pairs) == [FIRST]
    harness.lose(1, 3, KvLoss.REFUSED)
    assert (list(harness.fleet.broken_pairs), harness.fleet.refusing_pairs) == ([], {FIRST: False})
    harness.pass_time(OPEN_MAX_S)
    assert harness.fleet.refusing_pairs == {FIRST: False}


@pytest.mark.parametrize(
    ("loss", "between"),
    [
        (KvLoss.BROKEN, []),
        (KvLoss.BROKEN, [(1, 4)]),
        (KvLoss.BROKEN, [(2, 3)]),
        (KvLoss.BROKEN, [(2, 4)]),
        (KvLoss.BROKEN, [(1, 4), (2, 3)]),
        (KvLoss.UNREACHABLE, [(1, 4), (2, 3)]),
        (KvLoss.TIMEOUT, [(1, 4), (2, 3)]),
        (KvLoss.UNKNOWN, [(1, 4), (2, 3)]),
    ],
)
def test_a_broken_network_or_worker_is_not_taken_for_a_refusal(
    loss: KvLoss, between: list[tuple[int, int]]
) -> None:
    harness = Bench(2)
    harness.lose_twice(loss, *between)
    assert harness.fleet.refusing_pairs == {}
    assert list(harness.fleet.broken_pairs) == [FIRST]


def two_builds() -> Bench:
    """Prefill workers 1 and 2 of one build, decode workers 3 and 4 of another."""
    harness = Bench(2)
    for known in tuple(harness.fleet):
        build = "sglang 0.5.23" if known.role is Role.PREFILL else "sglang 0.5.24"
        harness.fleet.join(structs.replace(known, engine=build))
    return harness


def test_a_network_cut_between_racks_leaves_the_pairs_within_them() -> None:
    """1 and 4 are in one rack, 2 and 3 in another: what is lost between racks says nothing of the builds."""
    harness = two_builds()
    for _ in range(4):
        harness.lose(1, 3)
        harness.lose(2, 4)
        assert {*harness.fleet.broken_pairs} == {(1, 3), (2, 4)}
        assert not format_groups(harness.fleet), "every other pair is allowed"
        harness.deliver(1, 4)
        harness.deliver(2, 3)
        harness.pass_time(OPEN_MAX_S / 2)


def test_pairs_that_work_for_a_moment_before_an_outage_are_only_broken() -> None:
    harness = two_builds()
    harness.lose(1, 3)
    harness.lose(2, 4)
    harness.pass_time(0.5)
    harness.deliver(1, 4)
    harness.deliver(2, 3)
    harness.pass_time(OPEN_S)
    every = [(1, 3), (2, 4), (1, 4), (2, 3)]
    for prefill, decode in every:
        harness.lose(prefill, decode)
    assert {*harness.fleet.broken_pairs} == {*every}
    assert not format_groups(harness.fleet), "the last resort is left"


def test_refusals_beyond_the_most_that_are_kept_are_open_circuits() -> None:
    harness = Bench(17)
    for pair in product(harness.prefill, harness.decode):
        harness.lose(*pair, KvLoss.REFUSED)
    assert len(harness.fleet.refusing_pairs) == REFUSING_PAIRS_MAX
    assert len({*harness.fleet.broken_pairs}) == 17 * 17 - REFUSING_PAIRS_MAX


@pytest.mark.parametrize("worker_id", FIRST)
@pytest.mark.parametrize("change", [{"incarnation": Epoch(2)}, {"engine_silent": True}])
def test_an_engine_that_restarts_is_a_partner_again(worker_id: WorkerId, change: dict[str, Any]) -> None:
    harness = Bench(2)
    harness.lose(1, 3, KvLoss.REFUSED)
    known = harness.fleet.card(worker_id)
    assert known is not None
    harness.fleet.join(structs.replace(known, **change))
    harness.circuits.fleet_changed()
    assert harness.fleet.refusing_pairs == {}


def test_each_broken_pair_is_updated_once_however_often_time_passes() -> None:
    harness = Bench(12)
    for prefill in harness.prefill:
        for decode in harness.decode:
            harness.lose(prefill, decode)
            harness.now_s += 0.001
    n_pairs = len(harness.prefill) * len(harness.decode)
    assert len(list(harness.fleet.broken_pairs)) == n_pairs
    looked_at = 0
    show = harness.fleet.set_broken_pair

    def counted(prefill: WorkerId, decode: WorkerId, is_broken: bool) -> None:
        nonlocal looked_at
        looked_at += 1
        show(prefill, decode, is_broken)

    harness.fleet.set_broken_pair = counted  # type: ignore[method-assign]
    for _ in range(2000):
        harness.pass_time(0.001)
    assert list(harness.fleet.broken_pairs) == []
    assert looked_at == n_pairs, "each once, however many requests came meanwhile"
    assert harness.let_in <= n_pairs
