"""Opens a trace: its format is recognised by its content."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces import agentic, azure, dynamo, generated, mooncake
from kvrouter.sim.traces.lines import read_lines, wrong_row
from kvrouter.sim.traces.request import TraceInfo, TraceRequest

FORMATS = "Mooncake rows, agentic sessions, Azure CSV, dynamo.request.trace.v1, a generator's YAML"

Reader = Callable[[], Iterator[TraceRequest]]

GENERATOR_BYTES_MAX = 1 << 16


class Trace:
    """A trace in a file. Each iteration reads it again, ``rows_max`` rows of it where that is given."""

    def __init__(self, info: TraceInfo, read: Reader, *, rows_max: int | None = None) -> None:
        self.info = info
        self._read = read
        self._rows_max = rows_max

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(self._read(), self._rows_max)


def open_trace(path: Path, *, rows_max: int | None = None) -> Trace:
    """Recognise a trace's format. Raises ConfigError where it is none that is known, or is empty."""
    first = next(read_lines(path), None)
    if first is None:
        raise ConfigError(f"{path}: is empty", param=str(path))
    line, text = first
    if text.strip() == azure.HEADER:
        return Trace(azure.INFO, lambda: azure.read_azure(path), rows_max=rows_max)
    if not text.lstrip().startswith(b"{"):
        return _generated(path, line, rows_max)
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        wrong_row(path, line, str(error))
    if not isinstance(row, dict):
        _unknown(path, line)
    if "hash_ids" in row or row.keys() >= mooncake.KEYS:
        return Trace(mooncake.INFO, lambda: mooncake.read_mooncake(path), rows_max=rows_max)
    if isinstance(row.get("requests"), list) and isinstance(row.get("block_size"), int):
        info = agentic.agentic_info(row["block_size"])
        return Trace(info, lambda: agentic.read_agentic(path), rows_max=rows_max)
    if row.get("schema") != dynamo.SCHEMA and "event_type" not in row:
        _unknown(path, line)
    return _dynamo(path, line, rows_max)


def _dynamo(path: Path, line: int, rows_max: int | None) -> Trace:
    first = next(dynamo.read_dynamo(path), None)
    if first is None:
        wrong_row(path, line, "no request has ended in this trace")
    info = dynamo.dynamo_info(first.piece_tokens, has_sessions=bool(first.session))
    return Trace(info, lambda: dynamo.read_dynamo(path), rows_max=rows_max)


def _generated(path: Path, line: int, rows_max: int | None) -> Trace:
    """A generator is described in YAML, under the key ``generate``."""
    if path.stat().st_size > GENERATOR_BYTES_MAX:
        _unknown(path, line)
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        _unknown(path, line)
    if not isinstance(content, dict) or set(content) != {"generate"}:
        _unknown(path, line)
    spec = generated.parse_generator(content["generate"], str(path))
    return Trace(generated.generated_info(spec), lambda: generated.generate(spec), rows_max=rows_max)


def _unknown(path: Path, line: int) -> NoReturn:
    wrong_row(path, line, f"is none of the formats that are known: {FORMATS}")
