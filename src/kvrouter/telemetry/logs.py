"""Log formats (text and JSON), and a throttle for repeated lines."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import TextIO

import msgspec

from kvrouter.core.errors import KvrouterError
from kvrouter.telemetry.log_events import LogValue, cut

ROOT = "kvrouter"
"""The parent of all kvrouter loggers; other loggers are not changed."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``ts`` (UTC, milliseconds), ``level``, ``logger``, ``event``, the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, LogValue] = {
            "ts": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": cut(event_of(record) or record.getMessage()),
        }
        line.update((key, cut(value)) for key, value in fields_of(record).items())
        if record.exc_info and record.exc_info[1]:
            line["exception"] = _traceback_text(record.exc_info[1])
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """Time, level, event, then ``key=value``; ambiguous values are quoted. Terminals may get colours."""

    def __init__(self, *, is_coloured: bool = False) -> None:
        super().__init__()
        self._is_coloured = is_coloured

    @property
    def is_coloured(self) -> bool:
        """Whether the output may have colours."""
        return self._is_coloured

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        message = record.getMessage()
        if event_of(record) is None:
            message = str(cut(message))
            message = message if message.isprintable() else msgspec.json.encode(message).decode()
        level = f"{record.levelname:<7}"
        if self._is_coloured:
            level = f"{_COLOURS.get(record.levelno, '')}{level}{_PLAIN}"
        line = f"{_time(record)} {level} {message}"
        return (
            f"{line}\n{_traceback_text(record.exc_info[1])}"
            if record.exc_info and record.exc_info[1]
            else line
        )


_FORMATS = ("text", "json")

_PLAIN = "\x1b[0m"
_COLOURS = {logging.DEBUG: "\x1b[2m", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[1;31m"}
"""The escape codes of a terminal's colours by level, and the one that resets them."""


def _is_coloured(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose user wants colours (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _Handler(logging.StreamHandler[TextIO]):
    """The handler of :func:`configure_logging`, distinguished from other handlers by its type."""


def configure_logging(level: str, *, log_format: str, stream: TextIO | None = None) -> None:
    """Write the lines of ``kvrouter`` loggers from ``level`` up to ``stream`` (standard error by default).

    ``level`` is debug, info, warning or error; ``log_format`` is text or json: ValueError for any other. A
    later call replaces an earlier one.
    """
    if log_format not in _FORMATS:
        raise ValueError(f"log_format: must be one of {', '.join(_FORMATS)}, not {log_format!r}")
    out = sys.stderr if stream is None else stream
    handler = _Handler(out)
    is_json = log_format == "json"
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter(is_coloured=_is_coloured(out)))
    logger = logging.getLogger(ROOT)
    for old in [old for old in logger.handlers if isinstance(old, _Handler)]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def terminal_handler() -> "logging.StreamHandler[TextIO] | None":
    """Return the handler of :func:`configure_logging` if it writes text to a terminal."""
    for handler in logging.getLogger(ROOT).handlers:
        if isinstance(handler, _Handler) and isinstance(handler.formatter, TextFormatter):
            return handler if handler.stream.isatty() else None
    return None


def _traceback_text(error: BaseException) -> str:
    """Return the traceback of ``error``, its causes first.

    It has the messages of kvrouter's and the system's errors only: others may quote a client's text.
    """
    before = error.__cause__ or error.__context__
    words = f": {error}" if isinstance(error, KvrouterError | OSError) else ""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{_traceback_text(before) if before else ''}{frames}{type(error).__name__}{words}\n"


def event_of(record: logging.LogRecord) -> str | None:
    """Return the event of a kvrouter line; None for any other line."""
    event: str | None = getattr(record, "kvrouter_event", None)
    return event


def fields_of(record: logging.LogRecord) -> Mapping[str, LogValue]:
    """Return the fields of a kvrouter line; {} for any other line."""
    fields: Mapping[str, LogValue] = getattr(record, "kvrouter_fields", {})
    return fields


def _time(record: logging.LogRecord) -> str:
    second = int(record.created)
    microseconds = round((record.created - second) * 1e6)
    if microseconds == 1_000_000:
        second, microseconds = second + 1, 0
    return f"{_second(second)}.{microseconds // 1000:03d}Z"


@lru_cache(maxsize=1)
def _second(second: int) -> str:
    """Return a second since 1970 as text; cached, because lines of one second share it."""
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


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
