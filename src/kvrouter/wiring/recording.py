"""A recording of traffic, from its settings to its last file."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvrouter.config import RecordingSettings
from kvrouter.config.setting import installed_version
from kvrouter.recording.files import RecordingFolder
from kvrouter.recording.recorder import Recorder
from kvrouter.recording.salt import Salt
from kvrouter.service.traffic import TrafficRecorder
from kvrouter.telemetry import Event, Telemetry, log_event
from kvrouter.telemetry.logs import LogThrottle

_log = logging.getLogger("kvrouter.recording")


@asynccontextmanager
async def recording(
    settings: RecordingSettings, telemetry: Telemetry
) -> AsyncIterator[TrafficRecorder | None]:
    """Record traffic where the settings ask for it; yields None otherwise. Raises ConfigError."""
    if settings.folder is None:
        yield None
        return
    name = secrets.token_hex(4)
    started_s = time.time()
    salt = Salt.drawn() if settings.salt is None else Salt.read(Path(settings.salt))
    folder = RecordingFolder(
        Path(settings.folder),
        recording=name,
        file_bytes=settings.file_bytes,
        total_bytes=settings.total_bytes,
        started_s=started_s,
    )
    throttle = LogThrottle()

    def on_dropped() -> None:
        if throttle.allows("dropped"):
            log_event(_log, Event.RECORDING_DROPPED, reason="too many records wait to be written")

    recorder = Recorder(
        folder,
        salt,
        recording=name,
        version=installed_version(),
        began_s=time.monotonic(),
        started_s=started_s,
        on_dropped=on_dropped,
        on_stopped=lambda why: log_event(_log, Event.RECORDING_ENDED, reason=why),
    )
    end = telemetry.before_scrape(_Gauges(telemetry, recorder).refresh)
    log_event(_log, Event.RECORDING, detail=settings.folder)
    recorder.start()
    try:
        yield TrafficRecorder(recorder)
    finally:
        await asyncio.to_thread(recorder.close)
        end()


class _Gauges:
    """What the recorder counts, as metrics."""

    def __init__(self, telemetry: Telemetry, recorder: Recorder) -> None:
        self._telemetry = telemetry
        self._recorder = recorder
        self._dropped = 0
        self._written = 0

    def refresh(self) -> None:
        """Count what came since the last scrape."""
        telemetry, recorder = self._telemetry, self._recorder
        dropped, written = recorder.dropped, recorder.written
        telemetry.recording_dropped.inc(by=dropped - self._dropped)
        telemetry.recording_records.inc(by=written - self._written)
        telemetry.recording_active.set(float(recorder.is_recording))
        self._dropped, self._written = dropped, written
