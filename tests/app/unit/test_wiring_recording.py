"""What a recording says of itself: its metrics, and its lines in the log."""

import logging
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvrouter.app.traffic_recording import recording
from kvrouter.core.errors import InvalidRequest
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import GenerateRequest, Sampling
from kvrouter.recording.files import recording_files
from kvrouter.router.traffic import NO_ORIGIN, Origin, TrafficRecorder
from kvrouter.settings.recording_settings import RecordingSettings
from kvrouter.sim.traces.read import open_trace
from kvrouter.telemetry import Telemetry
from tests.testing.waits import until

NO_TEXT = Origin(route="\ud800")
"""A route that no file can hold."""


def ended(traffic: TrafficRecorder, origin: Origin) -> None:
    """A request ended that was never placed."""
    prompt = Prompt(range(8), block_size=4)
    traffic.request_ended(
        GenerateRequest(RequestId("r"), ModelName("m"), array("I", range(8)), Sampling(max_tokens=9)),
        origin,
        trail=[],
        prompt=prompt,
        error=None,
        finished=True,
        begun_s=0.5,
        first_token_s=None,
        output_tokens=3,
    )


def counted(telemetry: Telemetry) -> Telemetry:
    telemetry.render()
    return telemetry


def lines(caplog: pytest.LogCaptureFixture, event: str) -> Sequence[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "kvrouter_event", "") == event]


async def test_unwritable_records_are_counted_and_logged_once_and_others_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()
    with caplog.at_level(logging.INFO):
        async with recording(RecordingSettings(folder=str(tmp_path)), telemetry) as traffic:
            assert traffic is not None
            for origin in (NO_TEXT, NO_ORIGIN, NO_TEXT, NO_ORIGIN):
                ended(traffic, origin)
            await until(lambda: counted(telemetry).recording_records.value() == 2)
    assert telemetry.recording_dropped.value("error") == 2
    (line,) = lines(caplog, "recording_dropped")
    assert line.exc_info is not None
    assert isinstance(line.exc_info[1], UnicodeEncodeError)
    assert lines(caplog, "recording_ended") == []
    assert len(list(open_trace(tmp_path))) == 2


async def test_recording_without_its_file_ends_with_a_log_line_and_counts_drops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry()
    folder = tmp_path / "a"
    with caplog.at_level(logging.INFO):
        async with recording(RecordingSettings(folder=str(folder)), telemetry) as traffic:
            assert traffic is not None
            folder.rename(tmp_path / "b")
            traffic.call_refused(InvalidRequest("no"), route="/v1/completions", model=None, received_s=0.0)
            await until(lambda: counted(telemetry).recording_dropped.value("ended") == 1)
            assert telemetry.recording_active.value() == 0
    (line,) = lines(caplog, "recording_ended")
    assert "No such file or directory" in line.getMessage()
    assert recording_files(tmp_path) == []
