"""Exponential backoff: doubles from failure to failure, up to a limit, and begins again after a success."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.backoff import Backoff, Failures


@given(first_s=st.floats(0.001, 10.0), most_s=st.floats(0.001, 1000.0), n_failed=st.integers(1, 10**9))
def test_delay_doubles_with_each_failure_up_to_the_limit(
    first_s: float, most_s: float, n_failed: int
) -> None:
    backoff = Backoff(first_s, most_s)
    assert backoff.delay_s(1) == min(first_s, most_s)
    assert backoff.delay_s(n_failed) <= backoff.delay_s(n_failed + 1) <= most_s
    assert backoff.delay_s(n_failed + 1) in (most_s, 2 * backoff.delay_s(n_failed))


def test_a_reset_restarts_the_delay_at_its_first_value() -> None:
    failures = Failures(Backoff(1.0, 4.0))
    assert [failures.next_s() for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    failures.reset()
    assert failures.next_s() == 1.0
