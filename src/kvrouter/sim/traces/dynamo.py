"""``dynamo.request.trace.v1``: a JSON record for each event; those of ended requests are replayed.

A request that says no piece names (``replay``) cannot be replayed. Its session is the agent context's. The
records come in the order of ends, so the trace is held whole and sorted by arrival.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvrouter.sim.traces.lines import read_lines, wrong_row
from kvrouter.sim.traces.mooncake import TOKENS_MAX, Tokens
from kvrouter.sim.traces.request import Pieces, TraceInfo, TraceRequest

SCHEMA = "dynamo.request.trace.v1"


class _Context(msgspec.Struct, frozen=True):
    session_id: str = ""


class _Replay(msgspec.Struct):
    trace_block_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    input_length: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    input_sequence_hashes: list[Annotated[int, Meta(ge=0)]]


class _Request(msgspec.Struct):
    request_received_ms: Annotated[float, Meta(ge=0)]
    output_tokens: Tokens
    total_time_ms: Annotated[float, Meta(ge=0)] | None = None
    replay: _Replay | None = None


class _Record(msgspec.Struct):
    schema: str = ""
    event_type: str = ""
    agent_context: _Context | None = None
    request: _Request | None = None


class _Row(msgspec.Struct):
    at_ms: float
    ends_ms: float
    request: _Request
    replay: _Replay
    pieces: Pieces
    session: str


def dynamo_info(piece_tokens: int, *, has_sessions: bool) -> TraceInfo:
    """Return what such a trace is."""
    return TraceInfo(SCHEMA, piece_tokens, has_sessions=has_sessions)


def read_dynamo(path: Path) -> Iterator[TraceRequest]:
    """Yield the ended requests by arrival. Raises ConfigError that names the line."""
    rows = _rows(path)
    rows.sort(key=lambda row: row.at_ms)
    last: dict[str, tuple[int, float]] = {}
    for number, row in enumerate(rows):
        before = last.get(row.session) if row.session else None
        if row.session:
            last[row.session] = (number, row.ends_ms)
        yield TraceRequest(
            number=number,
            at_s=(row.at_ms - rows[0].at_ms) / 1e3,
            input_tokens=row.replay.input_length,
            output_tokens=max(1, row.request.output_tokens),
            piece_tokens=row.replay.trace_block_size,
            pieces=row.pieces,
            session=row.session,
            after=None if before is None else before[0],
            think_s=0.0 if before is None else max(0.0, row.at_ms - before[1]) / 1e3,
        )


def _rows(path: Path) -> list[_Row]:
    decode = msgspec.json.Decoder(_Record).decode
    rows: list[_Row] = []
    for line, text in read_lines(path):
        try:
            record = decode(text)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            wrong_row(path, line, str(error))
        request = record.request
        if record.event_type != "request_end":
            continue
        if record.schema != SCHEMA:
            wrong_row(path, line, f"schema: {record.schema!r} is not {SCHEMA!r}")
        if request is None or request.replay is None:
            wrong_row(path, line, "request.replay: is missing; record with replay hashes on")
        replay = request.replay
        if rows and replay.trace_block_size != rows[0].replay.trace_block_size:
            wrong_row(
                path,
                line,
                f"request.replay.trace_block_size: {replay.trace_block_size}, and "
                f"{rows[0].replay.trace_block_size} above",
            )
        n_pieces = -(-replay.input_length // replay.trace_block_size)
        if len(replay.input_sequence_hashes) not in (
            n_pieces,
            replay.input_length // replay.trace_block_size,
        ):
            wrong_row(
                path,
                line,
                f"request.replay.input_sequence_hashes: {len(replay.input_sequence_hashes)} of them, where "
                f"{replay.input_length} tokens have {n_pieces} blocks of {replay.trace_block_size}",
            )
        try:
            pieces = array("Q", replay.input_sequence_hashes)
        except OverflowError:
            wrong_row(path, line, "request.replay.input_sequence_hashes: one does not fit in 64 bits")
        at_ms = request.request_received_ms
        rows.append(
            _Row(
                at_ms,
                at_ms + (request.total_time_ms or 0.0),
                request,
                replay,
                pieces,
                "" if record.agent_context is None else record.agent_context.session_id,
            )
        )
    return rows
