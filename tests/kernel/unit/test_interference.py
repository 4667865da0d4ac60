"""What share of the decode steps of others a prompt waits for, as it is learned."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.ids import Slot
from kvrouter.kernel.placement.interference import Interference

STEPS_S = 0.007


def serve(
    learned: Interference,
    share: float,
    *,
    slowness: tuple[float, ...],
    n_requests: int = 200,
    noise: float = 0.1,
) -> None:
    """Serve requests of 20 to 60 ms, before each of which others decode in one case of two."""
    rng = Random(1)
    for _ in range(n_requests):
        for slot, slow in enumerate(slowness):
            plain_s = rng.uniform(0.02, 0.06)
            steps_s = rng.choice((0.0, STEPS_S))
            seen_s = slow * plain_s * rng.gauss(1.0, noise) + share * steps_s
            learned.note(Slot(slot), plain_s=plain_s, steps_s=steps_s, seen_s=seen_s)
    learned.refresh()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_interference_is_measured_across_ranks_of_different_speeds(share: float) -> None:
    learned = Interference()
    serve(learned, share, slowness=(0.5, 1.0, 2.0, 4.0) * 4)
    assert learned.share == pytest.approx(share, abs=0.15)


def test_interference_is_one_without_enough_samples_or_decode_steps() -> None:
    learned = Interference()
    learned.refresh()
    assert learned.share == 1.0
    serve(learned, 0.0, slowness=(1.0,), n_requests=3)
    assert learned.share > 0.7
    for _ in range(500):
        learned.note(Slot(1), plain_s=0.03, steps_s=0.0, seen_s=0.05)
    learned.refresh()
    assert learned.share > 0.7


def test_a_freed_slots_samples_are_dropped() -> None:
    learned = Interference()
    serve(learned, 0.0, slowness=(1.0, 1.0))
    assert learned.share < 0.3
    for slot in (0, 1):
        learned.freed(Slot(slot))
        learned.freed(Slot(slot))
    learned.refresh()
    assert learned.share == 1.0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.floats(1e-6, 100.0),
            st.floats(0.0, 10.0),
            st.floats(0.0, 1e6),
        ),
        max_size=50,
    )
)
def test_interference_stays_between_0_and_1(seen: list[tuple[int, float, float, float]]) -> None:
    learned = Interference()
    for slot, plain_s, steps_s, seen_s in seen:
        learned.note(Slot(slot), plain_s=plain_s, steps_s=steps_s, seen_s=seen_s)
        learned.refresh()
        assert 0.0 <= learned.share <= 1.0
