"""Student's intervals of paired differences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.sim.replay.intervals import student_t
from kvrouter.sim.worth.paired import difference

T_95 = (0.0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The two-sided 95 % points of a printed table, by degrees of freedom."""

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20)


@pytest.mark.parametrize("freedom", range(1, len(T_95)))
def test_students_t_agrees_with_the_95_percent_table(freedom: int) -> None:
    assert student_t(0.95, freedom) == pytest.approx(T_95[freedom], abs=6e-4)


@pytest.mark.parametrize(
    ("confidence", "freedom", "t"), [(0.99, 4, 4.604), (0.5, 1, 1.0), (0.999, 9, 4.781), (0.0, 3, 0.0)]
)
def test_students_t_agrees_with_known_values_at_other_points(
    confidence: float, freedom: int, t: float
) -> None:
    assert student_t(confidence, freedom) == pytest.approx(t, abs=6e-4)


@given(st.floats(0.01, 0.999), st.integers(1, 40))
def test_students_t_grows_with_confidence_and_falls_with_freedom(confidence: float, freedom: int) -> None:
    assert student_t(confidence, freedom) > student_t(confidence * 0.99, freedom)
    assert student_t(confidence, freedom) > student_t(confidence, freedom + 1)


@given(VALUES, st.floats(-1e6, 1e6), st.integers(1, 60))
def test_a_shift_of_all_parts_shifts_the_mean_alone(values: list[float], shift: float, n: int) -> None:
    one, other = difference(values, n), difference([value + shift for value in values], n)
    assert one is not None
    assert other is not None
    assert other.mean == pytest.approx(one.mean + shift, abs=1e-6)
    assert other.within == pytest.approx(one.within, abs=1e-5)
    assert one.within_all >= one.within


def test_equal_parts_give_a_zero_interval_and_one_part_gives_none() -> None:
    assert difference([3.0, 3.0, 3.0], 5) == (found := difference([3.0, 3.0, 3.0], 1))
    assert found is not None
    assert (found.mean, found.within, found.within_all) == (3.0, 0.0, 0.0)
    assert difference([3.0], 1) is None
    assert difference([], 1) is None


def test_confidence_intervals_hold_at_their_stated_rate() -> None:
    """One of 20 alone misses the truth; of twelve differences together, some one misses it as rarely."""
    drawn = np.random.Generator(np.random.PCG64(1)).normal(5.0, 2.0, (1_000, 12, 10))
    missed = missed_any = 0
    for of_all in drawn.tolist():
        found = [each for values in of_all if (each := difference(values, 12)) is not None]
        missed += sum(abs(each.mean - 5.0) > each.within for each in found)
        missed_any += any(abs(each.mean - 5.0) > each.within_all for each in found)
    assert 0.045 < missed / 12_000 < 0.055
    assert 0.03 < missed_any / 1_000 < 0.07
