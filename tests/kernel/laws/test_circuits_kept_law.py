"""Whatever becomes of attempts, the fleet passes over those whose circuit lets nobody in, and for a time."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrouter.core.constraints import RouterMode
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, RequestId, WorkerId
from kvrouter.core.requests import KvLoss, Leg
from kvrouter.core.workers import Role
from kvrouter.kernel.fleet.circuit import CircuitSettings, CircuitState, Fault, Suspicion
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.journey import Shape
from kvrouter.kernel.placement.circuits import REFUSED_S, Circuits
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.routing import Decision, Pick, RouteRequest
from tests.testing.placement_events import A_DRAW, RecordedPlacementEvents
from tests.testing.router_harness import BLOCK_SIZE, MODEL, card

OPEN_MAX_S = 30.0
PREFILL, DECODE = (1, 2), (3, 4)
REQUEST = RequestId("r")


class CircuitsMachine(RuleBasedStateMachine):
    """Two prefill workers and two decode workers, and attempts at pairs and at one of the latter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.fleet = Fleet(MODEL, BLOCK_SIZE)
        self.incarnation = 1
        for worker in (*PREFILL, *DECODE):
            self.fleet.join(card(worker, Role.PREFILL if worker in PREFILL else Role.DECODE))
        self.let_in = 0
        self.circuits = Circuits(
            self.fleet,
            CircuitSettings(2, 2.0, OPEN_MAX_S),
            RecordedPlacementEvents(),
            seed=1,
            on_readmitted=self.note,
        )
        self.attempts: list[tuple[Placement, float]] = []
        self.suspected: list[tuple[Placement, Leg, float, float]] = []
        """Of legs that failed: when they were sent, and when they failed."""

    def note(self) -> None:
        self.let_in += 1

    def pick(self, worker: int, leg: Leg) -> Pick:
        (slot,) = self.fleet.slots_of(WorkerId(worker))
        rank = self.fleet.rank_at(slot)
        assert rank is not None
        return Pick(slot, rank, leg, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 1)

    @precondition(lambda self: len(self.attempts) < 10)
    @rule(prefill=st.sampled_from([None, *PREFILL]), decode=st.sampled_from(DECODE))
    def book(self, prefill: int | None, decode: int) -> None:
        self.circuits.refresh(now_s=self.now_s)
        decision = Decision(
            REQUEST,
            0,
            RouterMode.KV,
            self.pick(decode, Leg.AGGREGATED if prefill is None else Leg.DECODE),
            None if prefill is None else self.pick(prefill, Leg.PREFILL),
        )
        placement = Placement(
            route_request=RouteRequest(REQUEST, 1, 1),
            decision=decision,
            prompt=Prompt(array("I", [1]), block_size=BLOCK_SIZE),
            token_ids=array("I", [1]),
            block_size=BLOCK_SIZE,
            shape=Shape.AGGREGATED if prefill is None else Shape.SYNCHRONOUS,
            draw=A_DRAW,
            decode_address="",
            decode_context_tokens=4096,
            decode_lease=LeaseId(0),
        )
        self.circuits.booked(placement, now_s=self.now_s)
        self.attempts.append((placement, self.now_s))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        placement, _ = data.draw(st.sampled_from(self.attempts))
        self.circuits.begun(placement, now_s=self.now_s)
        assert not placement.tries

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), fault=st.sampled_from([Fault.LOST, Fault.SILENT]), is_suspected=st.booleans())
    def leg_fails(self, data: st.DataObject, fault: Fault, is_suspected: bool) -> None:
        at = data.draw(st.integers(0, len(self.attempts) - 1))
        placement, sent_s = self.attempts.pop(at)
        legs = [placement.decision.decode.leg] + [Leg.PREFILL] * (placement.decision.prefill is not None)
        leg = data.draw(st.sampled_from(legs))
        has_begun = placement.has_begun and leg is not Leg.PREFILL
        if is_suspected and not has_begun:
            self.circuits.suspected(placement, leg, now_s=self.now_s)
            self.suspected.append((placement, leg, sent_s, self.now_s))
        else:
            self.circuits.failed(placement, leg, fault, since_s=sent_s, has_begun=has_begun, now_s=self.now_s)
        self.circuits.released(placement, now_s=self.now_s)

    @precondition(lambda self: self.suspected)
    @rule(data=st.data(), suspicion=st.sampled_from(Suspicion))
    def is_blamed(self, data: st.DataObject, suspicion: Suspicion) -> None:
        at = data.draw(st.integers(0, len(self.suspected) - 1))
        placement, leg, since_s, failed_s = self.suspected.pop(at)
        self.circuits.failed(
            placement,
            leg,
            Fault.LOST,
            since_s=since_s,
            failed_s=failed_s,
            suspicion=suspicion,
            now_s=self.now_s,
        )

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), loss=st.sampled_from([None, KvLoss.BROKEN, KvLoss.REFUSED, KvLoss.TIMEOUT]))
    def end(self, data: st.DataObject, loss: KvLoss | None) -> None:
        at = data.draw(st.integers(0, len(self.attempts) - 1))
        placement, sent_s = self.attempts.pop(at)
        if loss is not None:
            self.circuits.kv_lost(placement, loss, since_s=sent_s, now_s=self.now_s)
        self.circuits.released(placement, now_s=self.now_s)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), decode=st.sampled_from(DECODE))
    def pick_again(self, data: st.DataObject, decode: int) -> None:
        placement, _ = data.draw(st.sampled_from(self.attempts))
        old = placement.decision
        if old.prefill is None or placement.has_begun:
            return
        self.circuits.prefilled(placement, now_s=self.now_s)
        self.circuits.give_back(placement, now_s=self.now_s)
        placement.decision = Decision(
            REQUEST, 0, RouterMode.KV, self.pick(decode, Leg.DECODE), prefill=old.prefill
        )
        self.circuits.booked(placement, now_s=self.now_s)

    @rule(worker=st.sampled_from([*PREFILL, *DECODE]))
    def start_again(self, worker: int) -> None:
        self.incarnation += 1
        role = Role.PREFILL if worker in PREFILL else Role.DECODE
        self.fleet.join(card(worker, role, incarnation=self.incarnation))
        self.circuits.fleet_changed()
        assert self.circuits.state_of(WorkerId(worker), now_s=self.now_s) is CircuitState.CLOSED
        assert not any(worker in pair for pair, _ in self.circuits.pairs(now_s=self.now_s))

    @rule(passed_s=st.sampled_from([0.1, 1.0, 5.0, 100.0, REFUSED_S]))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s

    @invariant()
    def the_fleet_shows_what_the_circuits_let_in(self) -> None:
        self.circuits.refresh(now_s=self.now_s)
        tried = {subject for placement, _ in self.attempts for subject, _ in placement.tries}
        for worker in map(WorkerId, (*PREFILL, *DECODE)):
            (slot,) = self.fleet.slots_of(worker)
            is_open = bool(self.fleet.columns.circuit_open[slot])
            state = self.circuits.state_of(worker, now_s=self.now_s)
            assert not (is_open and state is CircuitState.CLOSED)
            assert not (state is CircuitState.OPEN and not is_open)
            if state is CircuitState.HALF_OPEN and worker not in tried:
                assert not is_open, "nobody tries it, and nobody may"
        states = dict(self.circuits.pairs(now_s=self.now_s))
        refusing = self.fleet.refusing_pairs
        closed = {*self.fleet.broken_pairs, *(pair for pair, is_tried in refusing.items() if not is_tried)}
        assert not {*self.fleet.broken_pairs} & refusing.keys()
        for pair in closed:
            assert states[pair] is CircuitState.OPEN or pair in tried
        for pair, state in states.items():
            assert state is not CircuitState.OPEN or pair in closed
        assert refusing.keys() <= states.keys()

    @invariant()
    def no_circuit_is_tried_by_two(self) -> None:
        tries = [id(circuit) for placement, _ in self.attempts for _, circuit in placement.tries]
        assert len(tries) == len(set(tries))

    def teardown(self) -> None:
        """With everything over, time alone lets everybody in again, and forgets pairs."""
        for placement, _ in self.attempts:
            self.circuits.released(placement, now_s=self.now_s)
        for _ in range(2):
            self.now_s += 2 * max(OPEN_MAX_S, REFUSED_S) + 1.0
            self.circuits.refresh(now_s=self.now_s)
        assert not self.fleet.columns.circuit_open.any()
        assert list(self.circuits.pairs(now_s=self.now_s)) == []
        assert list(self.fleet.broken_pairs) == []
        assert self.fleet.refusing_pairs == {}


TestCircuits = CircuitsMachine.TestCase
TestCircuits.settings = settings(stateful_step_count=40)
