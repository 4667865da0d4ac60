"""Laws of the clocks that callers turn: the awake clock, and the last change of a value."""

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.clock import LATE_TICKS, AwakeClock, LastChange

SECONDS = st.floats(0.0, 100.0)


@given(st.floats(0.01, 10.0), st.lists(SECONDS, max_size=20))
def test_awake_clock_counts_a_late_tick_as_one_interval(every_s: float, ticks_s: list[float]) -> None:
    clock = AwakeClock(every_s)
    for elapsed_s in ticks_s:
        before_s = clock.now_s
        stood_still = clock.advance(elapsed_s)
        assert stood_still == (elapsed_s > LATE_TICKS * every_s)
        assert clock.now_s == before_s + (every_s if stood_still else elapsed_s)


@given(st.lists(st.tuples(st.integers(0, 2), SECONDS), min_size=1, max_size=20), SECONDS, SECONDS)
def test_a_claim_is_valid_for_one_lease_after_its_last_change(
    seen: list[tuple[int, float]], lease_s: float, later_s: float
) -> None:
    claim, now_s, changed_s, last = LastChange(), 0.0, 0.0, None
    assert not claim.is_within(lease_s, now_s)
    for value, after_s in seen:
        now_s += after_s
        claim.see(value, now_s)
        if value != last:
            last, changed_s = value, now_s
    now_s += later_s
    assert claim.at_s == changed_s
    assert claim.is_within(lease_s, now_s) == (now_s < changed_s + lease_s)
