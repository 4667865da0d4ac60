"""The forms of a log line, text and JSON, and of the values in it."""

import json
import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

import msgspec

from kvrouter import _native
from kvrouter.core.errors import KvrouterError

LogValue = str | int | float | bool | None

VALUE_MAX_CHARS = 512
"""A longer text is cut, with an ellipsis."""

CAUSES_MAX = 16
"""An error can be its own cause."""

_NO_COLOUR = "\x1b[0m"
_COLOURS = {logging.DEBUG: "\x1b[2m", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[1;31m"}
"""The escape codes of a terminal's colours by level, and the one that resets them."""


def text_line(
    created_s: float, level: int, message: str, error: BaseException | None, *, is_coloured: bool
) -> str:
    """Return the line of text: the time, the level, the message, and an error's traceback."""
    trace = "" if error is None else traceback_text(error)
    return f"{time_text(created_s)} {_level_text(level, is_coloured)} {message}\n{trace}"


def json_line(
    created_s: float,
    level: int,
    logger: str,
    event: str,
    fields: Mapping[str, LogValue],
    error: BaseException | None,
) -> str:
    """Return the line of JSON, one object: ``ts`` (UTC, milliseconds), ``level``, ``logger``, ``event``, the
    fields, and an error's traceback as ``exception``.
    """
    line: dict[str, LogValue] = {
        "ts": time_text(created_s),
        "level": logging.getLevelName(level).lower(),
        "logger": logger,
        "event": event,
    }
    for key, value in fields.items():
        line[key] = cut(value)
    if error is not None:
        line["exception"] = traceback_text(error)
    return json_text(line) + "\n"


@dataclass(frozen=True, slots=True)
class EventLine:
    """The message of an event's record in :mod:`logging`."""

    event: str
    fields: dict[str, LogValue]

    def __str__(self) -> str:
        return event_text(self.event, self.fields)


def event_text(event: str, fields: dict[str, LogValue]) -> str:
    """Return the event, then ``key=value`` for each field; ambiguous values are quoted."""
    return _native.event_text(event, fields, VALUE_MAX_CHARS, quoted)


def cut(value: LogValue) -> LogValue:
    """Return ``value``, a text cut to :data:`VALUE_MAX_CHARS`."""
    if isinstance(value, str) and len(value) > VALUE_MAX_CHARS:
        return value[:VALUE_MAX_CHARS] + "…"
    return value


def json_text(value: object) -> str:
    """Return a value as JSON. Half of a UTF-16 pair, as in a file name that is no text, becomes ``?``."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="replace").decode()


def quoted(text: str) -> str:
    """Return a text as a string of JSON with an escape for each character that is not printable: terminals
    obey some of them, and readers of lines end a line at others.
    """
    shown = json_text(cut(text))
    if shown.isprintable():
        return shown
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in shown)


def traceback_text(error: BaseException) -> str:
    """Return the traceback of ``error``, its causes first, at most :data:`CAUSES_MAX` of them.

    It has the messages of kvrouter's and the system's errors only: others may quote a client's text.
    """
    texts: list[str] = []
    shown: BaseException | None = error
    while shown is not None and len(texts) <= CAUSES_MAX:
        words = f": {shown}" if isinstance(shown, KvrouterError | OSError) else ""
        frames = "".join(traceback.format_tb(shown.__traceback__))
        texts.append(f"{frames}{type(shown).__name__}{words}\n")
        shown = shown.__cause__ or shown.__context__
    return "".join(reversed(texts))


def time_text(created_s: float) -> str:
    """Return seconds since 1970 as a line shows them: UTC, to the millisecond."""
    second = int(created_s)
    microseconds = round((created_s - second) * 1e6)
    if microseconds == 1_000_000:
        second, microseconds = second + 1, 0
    return f"{_second(second)}.{microseconds // 1000:03d}Z"


@lru_cache(maxsize=16)
def _level_text(level: int, is_coloured: bool) -> str:
    name = f"{logging.getLevelName(level):<7}"
    return f"{_COLOURS.get(level, '')}{name}{_NO_COLOUR}" if is_coloured else name


@lru_cache(maxsize=1)
def _second(second: int) -> str:
    """Return a second since 1970 as text; cached, because lines of one second share it."""
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
