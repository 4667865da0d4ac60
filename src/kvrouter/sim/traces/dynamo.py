"""``dynamo.request.trace.v1``: a JSON record for each event; those of ended requests are replayed.

Dynamo's file sinks put each record into an envelope, ``{"timestamp": …, "event": {…}}``; both are read. A
request without piece names (``replay``) cannot be replayed. Its session is the agent context's.

The records come in the order of ends. So the file is read twice: first for the arrivals, of which 8 bytes a
request are kept; then a request is held until all that came before it are read.
"""

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.lines import Row, decode_row, named_pieces, read_lines, wrong_row
from kvrouter.sim.traces.mooncake_row import TOKENS_MAX, Milliseconds, Tokens
from kvrouter.sim.traces.trace_request import Pieces, TraceInfo, TraceRequest, Wait

SCHEMA = "dynamo.request.trace.v1"

REQUEST_END = "request_end"


class _Line(msgspec.Struct):
    """A record or, with ``event``, an envelope around one."""

    schema: str = ""
    event_type: str = ""
    event: msgspec.Raw | UnsetType = UNSET


class _Context(msgspec.Struct, frozen=True):
    session_id: str = ""


class _ReplayBlocks(msgspec.Struct):
    trace_block_size: Annotated[int, Meta(ge=1, le=1 << 16)]


class _Replay(_ReplayBlocks):
    input_length: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    input_sequence_hashes: list[Annotated[int, Meta(ge=0)]]


class _Arrival(msgspec.Struct):
    request_received_ms: Milliseconds
    replay: _ReplayBlocks | None = None


class _Request(msgspec.Struct):
    request_received_ms: Milliseconds
    output_tokens: Tokens
    replay: _Replay
    total_time_ms: Milliseconds | None = None


class _ArrivalRecord(msgspec.Struct):
    """The fields of an ended request for the first reading."""

    request: _Arrival
    agent_context: _Context | None = None


class _Record(msgspec.Struct):
    """The fields for the second reading."""

    request: _Request
    agent_context: _Context | None = None


class _Row(msgspec.Struct):
    """A request that waits for those that came before it."""

    line: int
    at_ms: float
    ends_ms: float
    input_tokens: int
    output_tokens: int
    pieces: Pieces
    session: str


class DynamoReader:
    """Reads the ended requests of a file, again with each call.

    Raises ConfigError if no request has ended, and that names line and field of an invalid record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        arrivals = array("d")
        piece_tokens: int | None = None
        has_sessions = False
        for line, within, record in _ended(path, _ArrivalRecord):
            replay = record.request.replay
            if replay is None:
                wrong_row(path, line, f"{within}request.replay: is missing; record with replay hashes on")
            if piece_tokens is None:
                piece_tokens = replay.trace_block_size
            if replay.trace_block_size != piece_tokens:
                wrong_row(
                    path,
                    line,
                    f"{within}request.replay.trace_block_size: {replay.trace_block_size}, and "
                    f"{piece_tokens} above",
                )
            arrivals.append(record.request.request_received_ms)
            has_sessions |= record.agent_context is not None and bool(record.agent_context.session_id)
        if piece_tokens is None:
            raise ConfigError(f"{path}: no request has ended in this trace", param=str(path))
        self.info = TraceInfo(SCHEMA, piece_tokens, has_sessions=has_sessions)
        self._first_ms = min(arrivals)
        self._next_ms = _earliest_after(arrivals)

    def __call__(self) -> Iterator[TraceRequest]:
        """Yield the ended requests by arrival. Raises ConfigError that names line and field."""
        last: dict[str, tuple[int, float]] = {}
        for number, row in enumerate(self._by_arrival()):
            before = last.get(row.session) if row.session else None
            if row.session:
                last[row.session] = (number, row.ends_ms)
            yield TraceRequest(
                number=number,
                at_s=(row.at_ms - self._first_ms) / 1e3,
                input_tokens=row.input_tokens,
                output_tokens=row.output_tokens,
                piece_tokens=self.info.piece_tokens,
                pieces=row.pieces,
                session=row.session,
                waits=() if before is None else (Wait(before[0], max(0.0, row.at_ms - before[1]) / 1e3),),
                path=self._path,
                line=row.line,
            )

    def _by_arrival(self) -> Iterator[_Row]:
        waiting: list[tuple[float, int, _Row]] = []
        for index, (line, within, record) in enumerate(_ended(self._path, _Record)):
            if index == len(self._next_ms):
                wrong_row(self._path, line, "was not there when the file was read before")
            row = self._row(line, f"{within}request.replay", record)
            heappush(waiting, (row.at_ms, index, row))
            while waiting and waiting[0][0] <= self._next_ms[index]:
                yield heappop(waiting)[2]

    def _row(self, line: int, field: str, record: _Record) -> _Row:
        request = record.request
        replay = request.replay
        n_full = replay.input_length // self.info.piece_tokens
        n_pieces = -(-replay.input_length // self.info.piece_tokens)
        if len(replay.input_sequence_hashes) not in (n_full, n_pieces):
            wrong_row(
                self._path,
                line,
                f"{field}.input_sequence_hashes: {len(replay.input_sequence_hashes)} of them, where "
                f"{replay.input_length} tokens have {n_pieces} blocks of {self.info.piece_tokens}",
            )
        hashes = f"{field}.input_sequence_hashes"
        return _Row(
            line=line,
            at_ms=request.request_received_ms,
            ends_ms=request.request_received_ms + (request.total_time_ms or 0.0),
            input_tokens=replay.input_length,
            output_tokens=request.output_tokens,
            pieces=named_pieces(self._path, line, hashes, replay.input_sequence_hashes),
            session="" if record.agent_context is None else record.agent_context.session_id,
        )


def _ended(path: Path, kind: type[Row]) -> Iterator[tuple[int, str, Row]]:
    """Yield the records of ended requests, with their lines and the prefix of their field names."""
    decode_line = msgspec.json.Decoder(_Line).decode
    decode = msgspec.json.Decoder(kind).decode
    for line, text in read_lines(path):
        within = ""
        record = decode_row(decode_line, path, line, text)
        if not isinstance(record.event, UnsetType):
            text, within = bytes(record.event), "event."  # noqa: PLW2901 - the record without its envelope
            record = decode_row(decode_line, path, line, text, within=within)
        if record.event_type != REQUEST_END:
            continue
        if record.schema != SCHEMA:
            wrong_row(path, line, f"{within}schema: {record.schema!r} is not {SCHEMA!r}")
        yield line, within, decode_row(decode, path, line, text, within=within)


def _earliest_after(arrivals: "array[float]") -> "array[float]":
    """Return for each arrival the earliest of those behind it; for the last, infinity."""
    earliest = array("d", arrivals)
    least = float("inf")
    for index in range(len(arrivals) - 1, -1, -1):
        earliest[index] = least
        least = min(least, arrivals[index])
    return earliest
