"""Traffic recording of a process, from its settings: opens the folder, logs losses, counts records."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvrouter.recording.files import RecordingFolder
from kvrouter.recording.recorder import Loss, Recorder
from kvrouter.recording.salt import Salt
from kvrouter.router.traffic import TrafficRecorder
from kvrouter.settings.recording_settings import RecordingSettings
from kvrouter.settings.setting import installed_version
from kvrouter.telemetry import Event, Telemetry, log_event
from kvrouter.telemetry.logs import LogThrottle

_log = logging.getLogger("kvrouter.recording")

_REASONS = {
    Loss.QUEUE_FULL: "too many records wait to be written",
    Loss.ENDED: "the recording has ended",
    Loss.ERROR: "a record could not be made",
    Loss.TOO_LONG: "a record is longer than recording.total_bytes",
}


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
    throttles = {why: LogThrottle() for why in Loss}  # each is used by one thread

    def on_lost(why: Loss, error: Exception | None) -> None:
        if throttles[why].allows(why):
            log_event(_log, Event.RECORDING_DROPPED, reason=_REASONS[why], exc_info=error)

    def on_stopped(error: Exception) -> None:
        if isinstance(error, OSError):
            log_event(_log, Event.RECORDING_ENDED, reason=error.strerror or str(error))
        else:
            log_event(_log, Event.RECORDING_ENDED, reason="a mistake of ours", exc_info=error)

    recorder = Recorder(
        folder,
        salt,
        recording=name,
        version=installed_version(),
        began_s=time.monotonic(),
        started_s=started_s,
        on_lost=on_lost,
        on_stopped=on_stopped,
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
    """Copies the recorder's counts into metrics."""

    def __init__(self, telemetry: Telemetry, recorder: Recorder) -> None:
        self._telemetry = telemetry
        self._recorder = recorder
        self._lost: Counter[Loss] = Counter()
        self._written = 0

    def refresh(self) -> None:
        """Add the counts since the last scrape."""
        telemetry, recorder = self._telemetry, self._recorder
        for why in Loss:
            lost = recorder.lost[why]
            telemetry.recording_dropped.inc(why, by=lost - self._lost[why])
            self._lost[why] = lost
        written = recorder.written
        telemetry.recording_records.inc(by=written - self._written)
        self._written = written
        telemetry.recording_active.set(float(recorder.is_recording))
