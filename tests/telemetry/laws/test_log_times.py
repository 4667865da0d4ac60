"""A log line's time is that of the standard library, to the millisecond, whatever came before it."""

import logging
from datetime import UTC, datetime

from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.telemetry.logs import TextFormatter


@given(st.lists(st.floats(min_value=0.0, max_value=4e9), min_size=1, max_size=4))
@example([1.9999996, 1.9999994, 2.0])
@example([1_795_916_335.9999999, 1_795_916_335.0005])
def test_log_line_time_is_the_record_time_to_the_millisecond(moments_s: list[float]) -> None:
    formatter = TextFormatter()
    for created in moments_s:
        record = logging.makeLogRecord({"msg": "x", "levelname": "INFO", "created": created})
        expected = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
        assert formatter.format(record) == f"{expected.removesuffix('+00:00')}Z INFO    x"
