"""Opens a trace: its format is recognised by its content."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.json import Unreadable, attempted
from kvrouter.recording.schema import SCHEMA as RECORDING
from kvrouter.settings.problems import Document, parse_document
from kvrouter.sim.past.fleet_history import FleetHistory
from kvrouter.sim.traces import (
    agentic,
    agentic_mooncake,
    answers,
    azure,
    burstgpt,
    dynamo,
    generated,
    mooncake,
    mooncake_row,
    mooncake_sessions,
    recorded_trace,
    vllm_bench,
)
from kvrouter.sim.traces.arrivals import check_rate, drawn_arrivals, drawn_note
from kvrouter.sim.traces.lines import decode_row, read_lines, wrong_row
from kvrouter.sim.traces.mooncake_sessions import TraceFormat
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest

FORMATS = (
    "Mooncake rows, with sessions or without, dynamo.agentic_mooncake, agentic sessions, Azure's CSV, "
    "BurstGPT's CSV, vllm bench serve --save-detailed, dynamo.request.trace.v1, kvrouter.recording.v1, a "
    "generator's YAML"
)

Reader = Callable[[], Iterator[TraceRequest]]

GENERATOR_BYTES_MAX = 1 << 16


class Trace:
    """A trace in a file. Each iteration reads it again, and no further than ``rows_max`` rows take."""

    def __init__(
        self,
        info: TraceInfo,
        read: Reader,
        *,
        rows_max: int | None = None,
        fleet: FleetHistory | None = None,
    ) -> None:
        self.info = info
        self.fleet = fleet
        """A recording's fleet; None for other traces."""
        self._read = read
        self._rows_max = rows_max

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(self._read(), self._rows_max)


def ignore_silently(_what: str) -> None:
    """Ignore a warning."""


def open_trace(
    path: Path,
    *,
    rows_max: int | None = None,
    model: str | None = None,
    trace_format: TraceFormat | None = None,
    rate_per_s: float | None = None,
    reuses_answers: bool = False,
    warn: Callable[[str], None] = ignore_silently,
) -> Trace:
    """Recognise a trace's format. Raises ConfigError if it is unknown, or the file is empty.

    A folder is a recording. ``model`` names one of a recording's or of BurstGPT's; ``warn`` is called with
    the missing parts of a recording. ``rate_per_s`` is for a trace without times.
    ``trace_format`` states the contents of Mooncake's rows with sessions, ``mooncake`` or ``mooncake-delta``,
    and is wrong for other formats. With ``reuses_answers`` next turns name the blocks of answers
    (:mod:`~kvrouter.sim.traces.answers`).
    """
    if rate_per_s is not None:
        check_rate(rate_per_s)
    trace = _recognised(path, rows_max, model, trace_format, rate_per_s, warn)
    if rate_per_s is not None and drawn_note(rate_per_s) not in trace.info.notes:
        raise ConfigError(
            "rate-per-s: is for Mooncake's rows without session_id and results of vllm bench, both without "
            f"times; {path} is {trace.info.format}",
            param="rate-per-s",
        )
    if trace_format is not None and trace.info.format not in mooncake_sessions.FORMATS[trace_format]:
        raise ConfigError(
            f"trace_format: {trace_format} is a form of Mooncake's rows with session_id, and {path} has the "
            f"format {trace.info.format}",
            param="trace_format",
        )
    return _with_named_answers(trace) if reuses_answers else trace


def _with_named_answers(trace: Trace) -> Trace:
    if not trace.info.has_sessions:
        raise ConfigError(
            f"reuse_answers: {trace.info.format} has no sessions, so no turn follows an answer",
            param="reuse_answers",
        )
    info = msgspec.structs.replace(trace.info, notes=(*trace.info.notes, answers.NOTE))
    return Trace(info, lambda: answers.with_named_answers(trace), fleet=trace.fleet)


def _recognised(
    path: Path,
    rows_max: int | None,
    model: str | None,
    trace_format: TraceFormat | None,
    rate_per_s: float | None,
    warn: Callable[[str], None],
) -> Trace:
    if path.is_dir():
        return _recording(path, rows_max, model, warn)
    first = next(read_lines(path), None)
    if first is None:
        raise ConfigError(f"{path}: is empty", param=str(path))
    line, text = first
    if _is_recording(text):
        return _recording(path, rows_max, model, warn)
    if burstgpt.is_header(text):
        return Trace(burstgpt.INFO, lambda: burstgpt.read_burstgpt(path, text, model), rows_max=rows_max)
    if model is not None:
        raise ConfigError(
            "model: only a recording and BurstGPT's CSV say which models were asked for", param="model"
        )
    if text.strip() == azure.HEADER:
        return Trace(azure.INFO, lambda: azure.read_azure(path), rows_max=rows_max)
    found = _rows(path, line, text, trace_format, rate_per_s) or _generated(path)
    if found is None:
        if text.lstrip().startswith(b"{"):
            decode_row(msgspec.json.decode, path, line, text)
        wrong_row(path, line, f"is none of the formats that are known: {FORMATS}")
    info, read = found
    return Trace(info, read, rows_max=rows_max)


def _rows(
    path: Path, line: int, text: bytes, trace_format: TraceFormat | None, rate_per_s: float | None
) -> tuple[TraceInfo, Reader] | None:
    """Return the trace with rows of JSON like ``text``."""
    row = _json_object(text)
    if row is None:
        return None
    if agentic_mooncake.is_agentic(path, row):
        workflow = agentic_mooncake.AgenticMooncakeReader(path, line, text)
        return workflow.info, workflow
    if mooncake_sessions.KEY in row and "hash_ids" in row:
        turns = mooncake_sessions.MooncakeSessionsReader(path, trace_format)
        return turns.info, turns
    if "hash_ids" in row or mooncake_row.has_keys(row):
        return _mooncake(path, None if mooncake_row.has_time(row) else rate_per_s)
    if vllm_bench.is_result(path, line, row):
        run = vllm_bench.VllmBenchReader(path, line, text, rate_per_s)
        return run.info, run
    if isinstance(row.get("requests"), list):
        return agentic.agentic_info(path, line, text), agentic.AgenticReader(path)
    record = row["event"] if isinstance(row.get("event"), dict) else row
    if record.get("schema") == dynamo.SCHEMA or "event_type" in record:
        reader = dynamo.DynamoReader(path)
        return reader.info, reader
    return None


def _mooncake(path: Path, rate_per_s: float | None) -> tuple[TraceInfo, Reader]:
    if rate_per_s is None:
        return mooncake.INFO, lambda: mooncake.read_mooncake(path)
    info = msgspec.structs.replace(mooncake.INFO, notes=(drawn_note(rate_per_s),))
    return info, lambda: mooncake.read_mooncake(path, drawn_arrivals(rate_per_s))


def _json_object(text: bytes) -> dict[str, Any] | None:
    try:
        row = attempted(msgspec.json.decode, text)
    except Unreadable:
        return None
    return row if isinstance(row, dict) else None


def _recording(path: Path, rows_max: int | None, model: str | None, warn: Callable[[str], None]) -> Trace:
    found = recorded_trace.Recording(path, model=model, warn=warn)
    info, fleet = found.summary()
    return Trace(info, found.read, rows_max=rows_max, fleet=fleet)


def _is_recording(first_line: bytes) -> bool:
    return RECORDING.encode() in first_line


def _generated(path: Path) -> tuple[TraceInfo, Reader] | None:
    """Return the traffic of a generator, which is described in YAML or JSON under the key ``generate``."""
    text = _small_text(path)
    if text is None or "generate" not in text:
        return None
    document = _document(text, str(path))
    if "generate" not in document.content:
        return None
    for key in document.content:
        if key != "generate":
            where = document.place((key,))
            raise ConfigError(f"{where}: is not known; a generator's file has one key", param=str(path))
    spec = generated.parse_generator(document)
    return generated.generated_info(spec), lambda: generated.generate(spec)


def _document(text: str, name: str) -> Document:
    """Parse YAML or JSON. Raises ConfigError that names the line."""
    try:
        attempted(msgspec.json.decode, text)
    except Unreadable:
        described = text
    else:
        described = text.replace("\t", " ")  # which JSON has between values only, and YAML nowhere
    return parse_document(described, name)


def _small_text(path: Path) -> str | None:
    """Return the text of a file that is as small as a description, blank lines included."""
    text = b""
    last = 0
    for number, line in read_lines(path):
        if len(text) + number - 1 - last + len(line) > GENERATOR_BYTES_MAX:
            return None
        text += b"\n" * (number - 1 - last) + line
        last = number
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return None
