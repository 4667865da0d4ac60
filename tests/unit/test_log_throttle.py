"""What is tried again and again is told seldom."""

from kvrouter.telemetry.logs import LINES_MAX, LogThrottle


def test_the_same_line_is_told_once_in_a_while() -> None:
    now_s = 0.0
    seldom = LogThrottle(again_after_s=60.0, clock=lambda: now_s)
    assert seldom.allows("a")
    assert seldom.allows("b")
    now_s = 59.0
    assert not seldom.allows("a")
    now_s = 60.0
    assert seldom.allows("a")
    now_s = 119.0
    assert not seldom.allows("a")


def test_only_so_many_lines_are_remembered() -> None:
    seldom = LogThrottle(clock=lambda: 0.0)
    assert all(seldom.allows(str(number)) for number in range(LINES_MAX + 1))
    assert seldom.allows("0")
    assert not seldom.allows(str(LINES_MAX))
