"""How far a worker's clock is from the router's, by the stamps of its KV events."""

import pytest

from kvrouter.router.rank_ingest import CLOCK_WINDOW_S, SenderClock


def test_the_clock_offset_is_unknown_before_the_first_message() -> None:
    assert SenderClock().ahead_s is None


def test_delayed_messages_do_not_change_the_clock_offset() -> None:
    clock = SenderClock()
    for at_s, ahead_s in ((0.0, -9.0), (1.0, -0.01), (2.0, -30.0)):
        clock.note(ahead_s, now_s=at_s)
    assert clock.ahead_s == -0.01


@pytest.mark.parametrize(("before_s", "after_s"), [(60.0, 0.0), (0.0, -60.0)])
def test_a_changed_worker_clock_is_known_after_two_windows(before_s: float, after_s: float) -> None:
    clock = SenderClock()
    clock.note(before_s, now_s=0.0)
    clock.note(after_s, now_s=CLOCK_WINDOW_S)
    assert clock.ahead_s == before_s
    clock.note(after_s, now_s=2 * CLOCK_WINDOW_S)
    assert clock.ahead_s == after_s
