"""A log line's time is that of the standard library, to the millisecond, whatever came before it."""

from datetime import UTC, datetime

from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.telemetry.log_forms import time_text


@given(st.lists(st.floats(min_value=0.0, max_value=4e9), min_size=1, max_size=4))
@example([1.9999996, 1.9999994, 2.0])
@example([1_795_916_335.9999999, 1_795_916_335.0005])
def test_log_line_time_is_that_of_its_event_to_the_millisecond(moments_s: list[float]) -> None:
    for created in moments_s:
        expected = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
        assert time_text(created) == f"{expected.removesuffix('+00:00')}Z"
