"""A circuit opens for failures in a row alone, lets in one request at a time, and is never open for ever."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrouter.kernel.fleet.circuit import Circuit, CircuitSettings, CircuitState, Fault

OPEN_S, OPEN_MAX_S = 4.0, 60.0
FAULTS = st.sampled_from([Fault.LOST, Fault.SILENT])


class CircuitMachine(RuleBasedStateMachine):
    """Legs that are sent, bring something or nothing, and end, next to a clock that a test turns."""

    @initialize(failures=st.integers(1, 4), seed=st.integers(0, 2**64 - 1))
    def begin(self, failures: int, seed: int) -> None:
        self.now_s = 10.0
        self.failures = failures
        self.circuit = Circuit(CircuitSettings(failures, OPEN_S, OPEN_MAX_S), now_s=10.0, seed=seed)
        self.under_way: list[tuple[float, bool, bool]] = []  # sent at, has begun, is the one request
        self.unanswered_in_a_row = 0
        self.broken_in_a_row = 0
        self.opened_s = 10.0

    @property
    def state(self) -> CircuitState:
        return self.circuit.state(self.now_s)

    @rule(passed_s=st.sampled_from([0.001, 0.5, 5.0, 100.0]))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s

    @precondition(lambda self: len(self.under_way) < 8)
    @rule()
    def send(self) -> None:
        let_in = self.circuit.allows_request(self.now_s)
        was_closed = self.state is CircuitState.CLOSED
        is_probe = self.circuit.take(self.now_s)
        assert is_probe == (let_in and not was_closed)
        self.under_way.append((self.now_s, False, is_probe))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def begin_answer(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.under_way) - 1))
        sent_s, _, is_probe = self.under_way[at]
        was_open = self.state is not CircuitState.CLOSED
        assert self.circuit.begun(self.now_s) == was_open
        assert self.state is CircuitState.CLOSED, "whoever brings something is let in again"
        if is_probe:
            self.circuit.give_back()
        self.under_way[at] = (sent_s, True, False)
        self.unanswered_in_a_row = 0

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), fault=FAULTS)
    def fail(self, data: st.DataObject, fault: Fault) -> None:
        sent_s, has_begun, is_probe = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        before = self.state
        opened = self.circuit.failed(self.now_s, fault, since_s=sent_s, has_begun=has_begun)
        if is_probe:
            self.circuit.give_back()
        if has_begun:
            self.broken_in_a_row += 1
        else:
            self.unanswered_in_a_row += 1
        if opened:
            assert before is not CircuitState.OPEN
            in_a_row = max(self.broken_in_a_row, self.unanswered_in_a_row)
            assert before is CircuitState.HALF_OPEN or in_a_row >= self.failures
            half_open_s = self.circuit.half_open_s
            assert half_open_s is not None
            assert 0.75 * OPEN_S <= half_open_s - self.now_s <= OPEN_MAX_S
        assert opened == (self.state is CircuitState.OPEN and before is not CircuitState.OPEN)
        if before is CircuitState.HALF_OPEN and is_probe and fault is Fault.LOST and sent_s >= self.opened_s:
            assert opened, "the one request failed, and no leg of a last resort before it"
        if opened:
            self.opened_s = self.now_s

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Well, or with nothing that speaks for or against the worker: it was full, or its client left."""
        _, has_begun, is_probe = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        before = self.state
        if has_begun:
            self.circuit.ended()
            self.broken_in_a_row = 0
        if is_probe:
            self.circuit.give_back()
        assert self.state is before

    @invariant()
    def one_at_a_time(self) -> None:
        if not hasattr(self, "circuit"):
            return
        probes = sum(is_probe for _, _, is_probe in self.under_way)
        assert probes <= 1
        if probes and self.state is not CircuitState.CLOSED:
            assert not self.circuit.allows_request(self.now_s)

    @invariant()
    def it_is_tried_again_in_bounded_time(self) -> None:
        if hasattr(self, "circuit") and not any(is_probe for _, _, is_probe in self.under_way):
            assert self.circuit.allows_request(self.now_s + OPEN_MAX_S)


TestCircuit = CircuitMachine.TestCase
TestCircuit.settings = settings(stateful_step_count=40)
