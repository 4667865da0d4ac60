"""What opens a circuit, what does not, and for how long."""

import pytest

from kvrouter.kernel.fleet.circuit import HEALTHY_S, Circuit, CircuitSettings, CircuitState, Fault, Suspicion

THREE = CircuitSettings(failures=3, open_s=4.0, open_max_s=20.0)


def circuit(*, seed: int = 1) -> Circuit:
    return Circuit(THREE, now_s=0.0, seed=seed)


def fail(circuit: Circuit, now_s: float, *, since_s: float | None = None, has_begun: bool = False) -> bool:
    """One leg was lost that was sent just before."""
    sent_s = now_s - 0.01 if since_s is None else since_s
    return circuit.failed(now_s, Fault.LOST, since_s=sent_s, has_begun=has_begun)


def opened(at_s: float = 3.0) -> Circuit:
    of = circuit()
    assert [fail(of, at_s - 2), fail(of, at_s - 1), fail(of, at_s)] == [False, False, True]
    return of


def test_consecutive_failures_open_the_circuit() -> None:
    of = opened()
    assert of.state(3.0) is CircuitState.OPEN
    assert not of.allows_request(3.0)
    assert not of.take(3.0)


def test_a_leg_with_output_resets_consecutive_failures() -> None:
    of = circuit()
    for second in range(1, 50):
        assert not fail(of, 2 * second)
        if second % 2 == 0:
            assert not of.begun(2 * second + 1)


def test_an_output_from_before_a_failure_does_not_close_the_circuit() -> None:
    of = opened(3.0)
    assert not of.begun(2.9)
    assert of.state(3.0) is CircuitState.OPEN
    assert of.begun(3.1)
    assert of.state(3.1) is CircuitState.CLOSED


def test_a_worker_that_breaks_off_every_answer_opens_its_circuit() -> None:
    of = circuit()
    seen = []
    for second in range(1, 4):
        of.begun(second)
        seen.append(fail(of, second + 0.5, has_begun=True))
    assert seen == [False, False, True]
    of.begun(10.0)
    assert of.state(10.0) is CircuitState.CLOSED
    assert fail(of, 10.5, has_begun=True), "it began one, and broke it off again"
    of.begun(30.0)
    of.ended()
    assert not fail(of, 30.5, has_begun=True)


def test_legs_that_break_together_are_one_failure() -> None:
    of = circuit()
    assert not any(fail(of, 5.0 + n / 1000, since_s=4.0) for n in range(100))
    assert of.state(5.2) is CircuitState.CLOSED


def test_silence_counts_each_time_unless_another_leg_had_output() -> None:
    of = circuit()
    of.begun(2.0)
    for n in range(10):
        assert not of.failed(31.0 + n / 10, Fault.SILENT, since_s=1.0, has_begun=False)
    counted = [of.failed(40.0 + n / 10, Fault.SILENT, since_s=10.0, has_begun=False) for n in range(3)]
    assert counted == [False, False, True]


def test_failures_of_legs_sent_before_opening_do_not_reopen() -> None:
    of = opened(3.0)
    assert of.state(8.0) is CircuitState.HALF_OPEN
    assert not fail(of, 8.0, since_s=2.0)
    assert not of.failed(8.0, Fault.SILENT, since_s=2.0, has_begun=False)
    assert of.state(8.0) is CircuitState.HALF_OPEN


def test_a_half_open_circuit_allows_one_request_at_a_time() -> None:
    of = opened(3.0)
    assert of.take(8.0)
    assert not of.allows_request(8.0)
    assert not of.take(8.0)
    of.give_back()
    assert of.take(8.0), "its client left: nothing is known yet"
    assert of.begun(8.1)
    of.give_back()
    assert of.allows_request(8.1)
    assert not of.take(8.1), "it is closed: a request like any other"


@pytest.mark.parametrize("seed", range(20))
def test_the_open_time_doubles_up_to_a_limit(seed: int) -> None:
    of = circuit(seed=seed)
    now_s = 3.0
    fail(of, 1.0)
    fail(of, 2.0)
    for open_s in (4.0, 8.0, 16.0, 20.0, 20.0):
        assert fail(of, now_s)
        half_open_s = of.half_open_s
        assert half_open_s is not None
        assert 0.75 * open_s <= half_open_s - now_s <= open_s
        now_s = half_open_s + 1.0
    of.begun(now_s)
    of.ended()
    for failure in (1.0, 2.0, 3.0):
        fail(of, now_s + failure)
    half_open_s = of.half_open_s
    assert half_open_s is not None
    assert half_open_s - now_s <= 3.0 + 4.0, "an answer that came to its end makes up for all of it"


def test_routers_with_different_seeds_half_open_at_different_times() -> None:
    assert len({opened_until(seed) for seed in range(20)}) == 20


def opened_until(seed: int) -> float | None:
    of = circuit(seed=seed)
    for second in (1.0, 2.0, 3.0):
        fail(of, second)
    return of.half_open_s


def failed_later(circuit: Circuit, suspicion: Suspicion, *, sent_s: float, now_s: float) -> bool:
    """A request failed as it was sent, and what others did with it shows only now."""
    circuit.suspect(sent_s)
    return circuit.counts(suspicion, now_s) and circuit.failed(
        now_s, Fault.LOST, since_s=sent_s, has_begun=False, failed_s=sent_s
    )


def test_shared_failures_count_after_long_failing_without_output() -> None:
    of = circuit()
    opened_s = [s for s in range(1, 100) if failed_later(of, Suspicion.SHARED, sent_s=s, now_s=s + 0.5)]
    assert opened_s[0] == 1 + HEALTHY_S + THREE.failures - 1


@pytest.mark.parametrize("suspicion", [Suspicion.SHARED, Suspicion.ALONE])
def test_a_healthy_worker_is_not_blamed_for_requests_that_all_workers_fail(suspicion: Suspicion) -> None:
    of = circuit()
    for s in range(1000):
        if s % 25 == 0:
            of.begun(s)
        assert not failed_later(of, suspicion, sent_s=s + 0.1, now_s=s + 0.5)


def test_failures_of_legs_sent_before_an_output_do_not_count() -> None:
    of = circuit()
    of.begun(5.5)
    assert not any(failed_later(of, Suspicion.SURE, sent_s=s, now_s=6.0) for s in range(1, 6))
    assert [failed_later(of, Suspicion.SURE, sent_s=s, now_s=60.0) for s in (6, 7, 8)] == [False, False, True]
