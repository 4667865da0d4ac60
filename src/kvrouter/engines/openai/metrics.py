"""A page of metrics in Prometheus's text format, of which only the metrics that are wanted are read.

An engine's page has thousands of lines, most of them histograms, and may have as many as it likes: the page
is read piece by piece, lines of other metrics are dropped as they come, and reading ends at a limit.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvrouter.core.errors import ProtocolError

PAGE_MAX_BYTES = 8 * 1024 * 1024
PAGE_LINES_MAX = 131_072
"""How many lines of a page are read: this many cost 50 ms."""

LINE_MAX_BYTES = 4_096
"""A longer line is left out."""

SAMPLES_MAX = 2_048
"""Lines of wanted metrics that are kept, some twelve for each data-parallel rank of an engine."""

KEPT_BYTES_MAX = 512 * 1024
"""The limit for the kept lines together: reading as much takes the event loop some 50 ms."""

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_SAMPLE = re.compile(rf"({_NAME})(?:[ \t]*+\{{(.*)\}})?[ \t]++(\S++)(?:[ \t].*+)?")
_LABEL = re.compile(rf'[ \t]*+({_NAME})[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"[ \t]*+(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one metric."""

    labels: Mapping[str, str]
    value: float


Samples = Mapping[str, Sequence[Sample]]
"""The samples of each metric that was found, by its name."""


class MetricLines:
    """Takes a page piece by piece and keeps the lines of the metrics ``names``."""

    def __init__(self, names: Iterable[str]) -> None:
        self._wanted = _lines_of(tuple(names))
        self._rest = b""
        self._bytes = 0
        self._n_lines = 0
        self._found: list[bytes] = []
        self._found_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether a limit is reached: the rest of the page is not read."""
        return (
            self._bytes > PAGE_MAX_BYTES
            or self._n_lines > PAGE_LINES_MAX
            or len(self._found) >= SAMPLES_MAX
            or self._found_bytes >= KEPT_BYTES_MAX
        )

    def push(self, piece: bytes) -> None:
        """Take the next piece."""
        self._bytes += len(piece)
        data = self._rest + piece
        end = data.rfind(b"\n") + 1
        self._n_lines += data.count(b"\n")
        for line in self._wanted.findall(data, 0, end):
            if len(line) <= LINE_MAX_BYTES and not self.is_full:
                self._found.append(line)
                self._found_bytes += len(line)
        # What is left out of a long line leaves it too long.
        self._rest = data[end : end + LINE_MAX_BYTES + 1]

    def page(self) -> bytes:
        """Return the lines."""
        if not self.is_full:
            self.push(b"\n")
        return b"\n".join((*self._found, b""))


@lru_cache(maxsize=32)
def _lines_of(names: tuple[str, ...]) -> "re.Pattern[bytes]":
    either = b"|".join(re.escape(name.encode()) for name in names)
    return re.compile(rb"^(?:%b)(?=[ \t{])[^\n]*+" % either, re.MULTILINE)


def read_metrics(page: bytes, names: Iterable[str]) -> Samples:
    """Return the samples of ``names`` in a page of bounded size; raise ProtocolError. A sample that is no
    finite number is left out.
    """
    found: dict[str, list[Sample]] = {}
    for line in _lines_of(tuple(names)).findall(page):
        name, labels, value = _sample(line)
        if math.isfinite(value):
            found.setdefault(name, []).append(Sample(labels, value))
    return found


def _sample(line: bytes) -> tuple[str, dict[str, str], float]:
    try:
        written = _SAMPLE.fullmatch(line.decode().rstrip())
        if written is None:
            raise ValueError("a name, labels and a number are expected")
        name, inside, value = written.groups()
        return name, _labels(inside or ""), float(value)
    except ValueError as error:
        shown = line[:80].decode("utf-8", "replace")
        raise ProtocolError(
            f"the engine's metrics page cannot be read: {shown!r}: {error}", param="metrics"
        ) from error


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        label = _LABEL.match(text, at)
        if label is None:
            raise ValueError(f"no label at {text[at : at + 20]!r}")
        name, value = label.groups()
        labels[name] = _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[0]), value)
        at = label.end()
    return labels
