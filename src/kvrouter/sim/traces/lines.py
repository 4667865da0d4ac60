"""The lines of a trace's file, packed or not; rows of JSON, and the errors that name line and field."""

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from kvrouter.core.errors import ConfigError
from kvrouter.core.files import open_regular
from kvrouter.core.json import Unreadable, attempted
from kvrouter.sim.traces.trace_request import Pieces

LINE_BYTES_MAX = 1 << 25
"""The longest line that is read."""

Row = TypeVar("Row")

GZIP_MAGIC = b"\x1f\x8b"

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_AT_FIELD = re.compile(r" - at `\$\.?([^`]*)`$")
_KEY = re.compile(r"Object (missing required|contains unknown) field `(.*)`$", re.DOTALL)
_KEY_WORDS = {"missing required": "is missing", "contains unknown": "is not known"}


def read_lines(path: Path, on_cut: Callable[[str], None] | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1, without a byte-order mark.

    Raises ConfigError that names the line. With ``on_cut`` a file that is cut short is read up to its last
    whole line, and ``on_cut`` is called.
    """
    number = 0
    try:
        with open_regular(path) as plain:
            is_packed = plain.read(2) == GZIP_MAGIC
            plain.seek(0)
            with gzip.open(plain) if is_packed else plain as lines:
                while line := lines.readline(LINE_BYTES_MAX + 1):
                    number += 1
                    if number == 1:
                        line = line.removeprefix(BYTE_ORDER_MARK)
                    if len(line) > LINE_BYTES_MAX:
                        wrong_row(path, number, f"is longer than {LINE_BYTES_MAX} bytes")
                    if on_cut is not None and not line.endswith(b"\n"):
                        on_cut(f"{path}: is cut short in line {number}, which is left out")
                        return
                    if line.strip():
                        yield number, line
    except EOFError as error:
        if on_cut is not None:
            on_cut(f"{path}: is cut short after line {number}")
            return
        raise ConfigError(f"{path}:{number + 1}: the gzip file is cut short here", param=str(path)) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path}:{number + 1}: not a whole gzip file: {error}", param=str(path)) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}", param=str(path)) from error


def decode_row(
    decode: Callable[[bytes], Row], path: Path, line: int, text: bytes, *, within: str = ""
) -> Row:
    """Return the row of JSON that ``decode`` reads. Raises ConfigError that names line and field.

    ``within`` is the prefix of field names: ``event.`` if ``text`` is the value of that field.
    """
    try:
        return attempted(decode, text)
    except Unreadable as error:
        if error.has_wrong_shape:
            wrong_row(path, line, field_first(str(error), within=within))
        constant = _constant(text)
        if constant is None:
            wrong_row(path, line, str(error))
        field, name = constant
        wrong_row(path, line, f"{within}{field}: {name} is not a number in JSON")


def field_first(message: str, *, within: str = "") -> str:
    """Return an error of msgspec with the field at its front: ``request.replay: expected `object```."""
    at_field = _AT_FIELD.search(message)
    parts = [within.rstrip("."), at_field.group(1) if at_field else ""]
    what = message[: at_field.start()] if at_field else message
    key = _KEY.match(what)
    if key:
        parts.append(key.group(2))
        what = _KEY_WORDS[key.group(1)]
    field = ".".join(filter(None, parts))
    return f"{field}: {what[:1].lower()}{what[1:]}" if field else what


def named_pieces(path: Path, line: int, field: str, names: list[int]) -> Pieces:
    """Return the names of pieces. Raises ConfigError for one that has more than 64 bits."""
    try:
        return array("Q", names)
    except OverflowError:
        position = next(position for position, name in enumerate(names) if name >> 64)
        wrong_row(path, line, f"{field}[{position}]: {names[position]} does not fit in 64 bits")


def wrong_row(path: Path, line: int, what: str) -> NoReturn:
    """Raise ConfigError for a row."""
    raise ConfigError(f"{path}:{line}: {what}", param=str(path))


class _Constant(str):
    """``NaN``, ``Infinity`` or ``-Infinity``: Python's writer of JSON writes them, and JSON lacks them."""

    __slots__ = ()


def _constant(text: bytes) -> tuple[str, str] | None:
    """Return the first field that has a constant which JSON lacks, and the constant."""
    try:
        content: object = json.loads(text, parse_constant=_Constant)
    except (ValueError, RecursionError):
        return None
    unseen: list[tuple[str, object]] = [("", content)]
    while unseen:
        field, value = unseen.pop()
        if isinstance(value, _Constant):
            return field, str(value)
        if isinstance(value, dict):
            below = [(f"{field}.{key}" if field else key, item) for key, item in value.items()]
            unseen += reversed(below)
        elif isinstance(value, list):
            unseen += reversed([(f"{field}[{position}]", item) for position, item in enumerate(value)])
    return None
