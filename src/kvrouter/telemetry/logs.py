"""The log of a process: its configuration, where its lines go, and a throttle for repeated lines."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TextIO

from kvrouter.telemetry.log_events import EMISSION, Event, emit_record
from kvrouter.telemetry.log_forms import LogValue, cut, event_text, json_line, quoted, text_line
from kvrouter.telemetry.log_writer import LogWriter

ROOT = "kvrouter"
"""The parent of all kvrouter loggers."""

FORMATS = ("text", "json")


class HeldLine(NamedTuple):
    """An event's line that may be held back."""

    text: str
    event: Event
    fields: dict[str, LogValue]


class LogOutput:
    """Where lines go, as text or as JSON: those of events, and those of records of ``logging``."""

    def __init__(self, stream: TextIO, *, is_json: bool) -> None:
        self.is_terminal = stream.isatty()
        self.is_json = is_json
        self.is_coloured = self.is_terminal and _wants_colours()
        self.holds_back: Callable[[HeldLine], bool] | None = None
        """Whether a line is not to be written now."""
        self.writer = LogWriter(stream, self._lost_line)

    def emit(
        self,
        logger: logging.Logger,
        event: Event,
        fields: dict[str, LogValue],
        error: BaseException | None,
    ) -> None:
        """Write the line of an event."""
        line = self._event_line(logger.name, event, fields, error)
        if self.holds_back is None or not self.holds_back(HeldLine(line, event, fields)):
            self.writer.write(line, is_urgent=event.level >= logging.WARNING)

    def emit_record(self, record: logging.LogRecord) -> None:
        """Write the line of a record of ``logging``."""
        created_s, level, message = record.created, record.levelno, str(cut(record.getMessage()))
        error = record.exc_info[1] if record.exc_info else None
        if self.is_json:
            line = json_line(created_s, level, record.name, message, {}, error)
        else:
            message = message if message.isprintable() else quoted(message)
            line = text_line(created_s, level, message, error, is_coloured=self.is_coloured)
        self.writer.write(line, is_urgent=level >= logging.WARNING)

    def _event_line(
        self, logger: str, event: Event, fields: dict[str, LogValue], error: BaseException | None
    ) -> str:
        if self.is_json:
            return json_line(time.time(), event.level, logger, event, fields, error)
        message = event_text(event, fields)
        return text_line(time.time(), event.level, message, error, is_coloured=self.is_coloured)

    def _lost_line(self, lines: int) -> str:
        event = Event.LOG_LINES_LOST
        if not logging.getLogger(__name__).isEnabledFor(event.level):
            return ""
        return self._event_line(__name__, event, {"lines": lines}, None)


def _wants_colours() -> bool:
    """Whether the user of a terminal wants colours (no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _Handler(logging.Handler):
    """Passes records of ``logging`` to the output, and flushes it when ``logging`` ends, at the exit."""

    def __init__(self, output: LogOutput, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record."""
        try:
            self.output.emit_record(record)
        except Exception:  # noqa: BLE001 - as handlers of logging do: arguments may raise anything
            self.handleError(record)

    def flush(self) -> None:
        """Write the lines that wait."""
        self.output.writer.flush()


_LAST_RESORT = logging.lastResort


def configure_logging(level: str, *, log_format: str, stream: TextIO | None = None) -> None:
    """Write the lines of ``kvrouter`` loggers from ``level`` up to ``stream``, standard error by default, and
    in the same form those of other loggers that ``logging`` would write to standard error.

    ``level`` is debug, info, warning or error; ``log_format`` is text or json: ValueError for any other. A
    later call replaces an earlier one.
    """
    if log_format not in FORMATS:
        raise ValueError(f"log_format: must be one of {', '.join(FORMATS)}, not {log_format!r}")
    close_log()
    if sys.stderr is None:  # whoever started the process closed it
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    output = LogOutput(sys.stderr if stream is None else stream, is_json=log_format == "json")
    logger = logging.getLogger(ROOT)
    logger.addHandler(_Handler(output))
    logger.setLevel(level.upper())
    logger.propagate = False
    logging.lastResort = _Handler(output, logging.WARNING)
    EMISSION.emit = output.emit


def close_log() -> None:
    """Write the lines that wait, and undo :func:`configure_logging`."""
    logger = logging.getLogger(ROOT)
    for handler in [each for each in logger.handlers if isinstance(each, _Handler)]:
        EMISSION.emit = emit_record
        logging.lastResort = _LAST_RESORT
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        handler.output.writer.close()


def log_output() -> LogOutput | None:
    """Return the output of :func:`configure_logging`; None where it was not called."""
    for handler in logging.getLogger(ROOT).handlers:
        if isinstance(handler, _Handler):
            return handler.output
    return None


def lines_lost() -> int:
    """Return how many lines of the log were not written."""
    output = log_output()
    return 0 if output is None else output.writer.lines_lost


def flush_log() -> None:
    """Wait until the lines so far are written, within the writer's bounds."""
    output = log_output()
    if output is not None:
        output.writer.flush()


ROOM_AFTER_S = 0.05
"""How long a foreign line waits for room before it looks again, in seconds."""


async def write_line(line: str, waits: Callable[[], bool]) -> None:
    """Write a foreign line as it is, in order with those of the log; without a log to standard error.

    While ``waits()``, it waits until there is room that the log's own lines do not need.
    """
    output = log_output()
    if output is None:
        sys.stderr.write(line)
        return
    while output.writer.is_half_full and waits():  # noqa: ASYNC110 - a thread makes room
        await asyncio.sleep(ROOM_AFTER_S)
    output.writer.write(line, is_urgent=not waits())


AGAIN_AFTER_S = 60.0
"""How long a repeated line is suppressed."""

LINES_MAX = 256
"""Remembered lines; beyond it the oldest may be logged again."""


class LogThrottle:
    """Suppresses repeated log lines."""

    def __init__(
        self, *, again_after_s: float = AGAIN_AFTER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._again_after_s = again_after_s
        self._clock = clock
        self._logged_s: dict[str, float] = {}

    def allows(self, line: str) -> bool:
        """Return whether to log this line now: it was not logged within ``again_after_s``."""
        now_s = self._clock()
        logged_s = self._logged_s.pop(line, None)
        may = logged_s is None or now_s - logged_s >= self._again_after_s
        self._logged_s[line] = now_s if may or logged_s is None else logged_s
        if len(self._logged_s) > LINES_MAX:
            del self._logged_s[next(iter(self._logged_s))]
        return may
