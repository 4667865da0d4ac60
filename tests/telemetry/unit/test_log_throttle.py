"""What is tried again and again is reported rarely."""

from kvrouter.telemetry.logs import LINES_MAX, LogThrottle


def test_same_line_is_allowed_once_per_interval() -> None:
    now_s = 0.0
    rarely = LogThrottle(again_after_s=60.0, clock=lambda: now_s)
    assert rarely.allows("a")
    assert rarely.allows("b")
    now_s = 59.0
    assert not rarely.allows("a")
    now_s = 60.0
    assert rarely.allows("a")
    now_s = 119.0
    assert not rarely.allows("a")


def test_throttle_remembers_a_bounded_number_of_lines() -> None:
    rarely = LogThrottle(clock=lambda: 0.0)
    assert all(rarely.allows(str(number)) for number in range(LINES_MAX + 1))
    assert rarely.allows("0")
    assert not rarely.allows(str(LINES_MAX))
