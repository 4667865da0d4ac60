"""``kvrouter.recording.v1``: a frontend's recording of its own traffic, in a file or a folder of files.

Records come in the order of ends, so the requests are held whole and sorted by arrival. A request that was
refused, failed or lost its client arrives like any other, and is answered with its recorded number of tokens,
at least one.
"""

import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from kvrouter.core.errors import ConfigError
from kvrouter.core.json import Unreadable, attempted
from kvrouter.recording.files import recording_files
from kvrouter.recording.schema import (
    FILE_SUFFIX,
    PART_SUFFIX,
    SCHEMA,
    FleetRecord,
    Header,
    Record,
    RefusalRecord,
    RequestRecord,
)
from kvrouter.sim.past.fleet_history import FleetHistory, FleetNote, Span, fleet_history
from kvrouter.sim.traces.lines import read_lines, wrong_row
from kvrouter.sim.traces.trace_request import Pieces, TraceInfo, TraceRequest, Wait

Warn = Callable[[str], None]

_HASH_BYTES = 8


class PastRequest(msgspec.Struct, frozen=True):
    """A request with all of its record; ``at_s`` counts from the first one. ``record`` is without ``blocks``,
    which are the ``pieces``. It is in ``line`` of the file at ``path``.
    """

    number: int
    at_s: float
    record: RequestRecord
    pieces: Pieces
    path: Path
    line: int


class Past(msgspec.Struct, frozen=True):
    """A recording of one model: its requests by arrival, and its fleet at each moment.

    ``from_s`` is the first arrival, in seconds of the Unix epoch.
    """

    from_s: float
    requests: Sequence[PastRequest]
    fleet: FleetHistory


class _Row(msgspec.Struct):
    """``at_s`` and ``ends_s`` are counted from the Unix epoch."""

    at_s: float
    ends_s: float
    recording: str
    request: RequestRecord
    pieces: Pieces
    path: Path
    line: int


class Recording:
    """Reads a recording, one model of it. ``warn`` is called once for each missing part."""

    def __init__(self, path: Path, *, model: str | None, warn: Warn) -> None:
        self._path = path
        self._model = model
        self._warn = warn
        self._warned: set[str] = set()
        self._decode: Callable[[bytes], Record] = msgspec.json.Decoder(Record).decode

    def summary(self) -> tuple[TraceInfo, FleetHistory]:
        """Return the values of the recording, and its fleet. Raises ConfigError if it holds no request of the
        model.
        """
        rows, history = self._rows_and_fleet(keeps_attempts=False)
        has_sessions = any(row.request.session is not None for row in rows)
        return TraceInfo(SCHEMA, history.block_size, has_sessions=has_sessions), history

    def past(self) -> Past:
        """Return all that is recorded of the model. Raises ConfigError where it holds no request of it, or
        that names the line.
        """
        rows, history = self._rows_and_fleet(keeps_attempts=True)
        rows.sort(key=lambda row: row.at_s)
        from_s = rows[0].at_s
        requests = [
            PastRequest(number, row.at_s - from_s, row.request, row.pieces, row.path, row.line)
            for number, row in enumerate(rows)
        ]
        return Past(from_s, requests, history)

    def read(self) -> Iterator[TraceRequest]:
        """Yield the requests by arrival. Raises ConfigError that names the line."""
        rows = self._rows()
        rows.sort(key=lambda row: row.at_s)
        last: dict[str, tuple[int, float]] = {}
        for number, row in enumerate(rows):
            request = row.request
            before = None if request.session is None else last.get(request.session)
            if before is None and request.parent is not None:
                before = last.get(request.parent)
                if before is not None and before[1] > row.at_s:
                    before = None  # it still ran, and cannot have been waited for
            if request.session is not None:
                last[request.session] = (number, row.ends_s)
            yield TraceRequest(
                number=number,
                at_s=row.at_s - rows[0].at_s,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                piece_tokens=request.block_size,
                pieces=row.pieces,
                session=request.session or "",
                waits=() if before is None else (Wait(before[0], max(0.0, row.at_s - before[1])),),
                path=row.path,
                line=row.line,
            )

    def _rows_and_fleet(self, *, keeps_attempts: bool) -> tuple[list[_Row], FleetHistory]:
        """Return the requests in the order of the files, and the fleet: the past one with ``keeps_attempts``,
        else one with which a replay can begin.
        """
        notes: list[FleetNote] = []
        rows = self._rows(notes, keeps_attempts=keeps_attempts)
        if not rows:
            raise ConfigError(f"{self._path}: no request is recorded there", param=str(self._path))
        spans: dict[str, Span] = {}
        for row in rows:
            span = spans.get(row.recording, Span(row.at_s, row.ends_s))
            spans[row.recording] = Span(min(span.first_s, row.at_s), max(span.last_s, row.ends_s))
        first = rows[0].request
        return rows, fleet_history(
            notes, spans, model=first.model, block_size=first.block_size, from_serving=not keeps_attempts
        )

    def _rows(self, notes: list[FleetNote] | None = None, *, keeps_attempts: bool = False) -> list[_Row]:
        """Return the requests in the order of the files; add the records of the fleet to ``notes``."""
        rows: list[_Row] = []
        block_sizes: dict[str, int] = {}
        salts: set[str] = set()
        n_refused = 0
        for path in self._files():
            if path.name.endswith(PART_SUFFIX):
                self._warn_once(f"{path}: was not ended: its frontend was killed, or records on")
            header: Header | None = None
            for line, text in read_lines(path, self._warn_once):
                record = self._decoded(path, line, text)
                if isinstance(record, Header) != (header is None):
                    wrong_row(path, line, "each file of a recording begins with its header, and has one")
                if isinstance(record, Header):
                    header = record
                    if header.schema != SCHEMA:
                        wrong_row(path, line, f"schema: {header.schema!r} is not {SCHEMA!r}")
                    salts.add(header.salt)
                elif isinstance(record, RefusalRecord):
                    n_refused += 1
                elif isinstance(record, FleetRecord) and header is not None:
                    if notes is not None:
                        at_s = header.started_s + record.at_s
                        notes.append(FleetNote(header.recording, at_s, record, path, line))
                elif isinstance(record, RequestRecord) and header is not None:
                    known = block_sizes.setdefault(record.model, record.block_size)
                    if record.block_size != known:
                        wrong_row(path, line, f"block_size: {record.block_size}, and {known} above")
                    if self._model in (None, record.model):
                        rows.append(_row(path, line, record, header, keeps_attempts))
        self._check_models(block_sizes.keys())
        if len(salts) > 1:
            self._warn_once(f"{self._path}: {len(salts)} salts: blocks under one are never those of another")
        if n_refused:
            self._warn_once(
                f"{self._path}: {n_refused} calls are left out: they were refused with lengths unknown"
            )
        return rows

    def _files(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        try:
            found = recording_files(self._path)
        except OSError as error:
            raise ConfigError(
                f"{self._path}: cannot be read: {error.strerror or error}", param=str(self._path)
            ) from error
        if not found:
            raise ConfigError(
                f"{self._path}: no recording is there: no file recording-*{FILE_SUFFIX}",
                param=str(self._path),
            )
        return found

    def _decoded(self, path: Path, line: int, text: bytes) -> Record:
        try:
            return attempted(self._decode, text)
        except Unreadable as error:
            wrong_row(path, line, str(error))

    def _check_models(self, models: Collection[str]) -> None:
        known = ", ".join(sorted(models))
        if self._model is None and len(models) > 1:
            raise ConfigError(
                f"{self._path}: requests for {len(models)} models are recorded there ({known}), and a replay "
                "has one: name it with --model",
                param="model",
            )
        if self._model is not None and models and self._model not in models:
            raise ConfigError(
                f"model: no request for {self._model!r} is recorded in {self._path}; recorded: {known}",
                param="model",
            )

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._warn(what)


def _row(path: Path, line: int, record: RequestRecord, header: Header, keeps_attempts: bool) -> _Row:
    block_size = record.block_size
    if not record.input_tokens:
        wrong_row(path, line, "input_tokens: must be at least 1")
    names = record.blocks
    n_blocks = record.input_tokens // block_size
    if len(names) != n_blocks * _HASH_BYTES:
        wrong_row(
            path,
            line,
            f"blocks: {len(names)} bytes, where {record.input_tokens} tokens have {n_blocks} full blocks of "
            f"{block_size} tokens",
        )
    pieces = array("Q", names)
    if sys.byteorder == "big":
        pieces.byteswap()
    at_s = header.started_s + record.at_s
    attempts = record.attempts if keeps_attempts else ()
    bare = msgspec.structs.replace(record, blocks=b"", attempts=attempts)
    return _Row(at_s, at_s + record.ended_s, header.recording, bare, pieces, path, line)
