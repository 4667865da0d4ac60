"""Sessions of coding agents: a JSON object for each session, with its turns, think times and sub-agents.

Names of pieces are local to a session, so sessions share nothing here, though they may have shared a system
prompt. A trace of sessions is held whole: its rows are in the order of sessions, not of time.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvrouter.fleet import finish64
from kvrouter.sim.traces.lines import read_lines, wrong_row
from kvrouter.sim.traces.mooncake import TOKENS_MAX
from kvrouter.sim.traces.request import Pieces, TraceInfo, TraceRequest

SESSION_GAP_S = 10.0
"""Sessions say nothing of when they began: each begins so long after the one before."""

_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15

Seconds = Annotated[float, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]


class _Turn(msgspec.Struct):
    """One request, or the sub-agent that a request started: that has ``requests`` of its own."""

    t: Seconds
    input_tokens: Tokens = msgspec.field(name="in", default=0)
    output_tokens: Tokens = msgspec.field(name="out", default=0)
    hash_ids: list[Annotated[int, Meta(ge=0)]] = []
    think_time: Seconds = 0.0
    requests: "list[_Turn]" = []


class _Session(msgspec.Struct):
    id: Annotated[str, Meta(min_length=1)]
    block_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    requests: list[_Turn]


class _Row(NamedTuple):
    at_s: float
    order: int
    turn: _Turn
    pieces: Pieces
    session: str
    after: int | None
    """The ``order`` of the request before it."""
    think_s: float
    """Of the row where nothing is before it, and never more than passed since the request before it came:
    some rows count from an earlier answer, whose end was recorded.
    """


def agentic_info(piece_tokens: int) -> TraceInfo:
    """Return what a trace of sessions is."""
    return TraceInfo("agentic sessions", piece_tokens, has_sessions=True)


def read_agentic(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of all sessions by time. Raises ConfigError that names the line."""
    decode = msgspec.json.Decoder(_Session).decode
    rows: list[_Row] = []
    piece_tokens: int | None = None
    for number, (line, text) in enumerate(read_lines(path)):
        try:
            session = decode(text)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            wrong_row(path, line, str(error))
        if piece_tokens is None:
            piece_tokens = session.block_size
        if session.block_size != piece_tokens:
            wrong_row(path, line, f"block_size: {session.block_size}, and {piece_tokens} above")
        salt = finish64((number + 1) * _SPREAD & _MASK)
        _flatten(path, line, session, number * SESSION_GAP_S, salt, rows)
    rows.sort(key=lambda row: (row.at_s, row.order))
    numbers = {row.order: number for number, row in enumerate(rows)}
    for number, row in enumerate(rows):
        yield TraceRequest(
            number=number,
            at_s=row.at_s,
            input_tokens=row.turn.input_tokens,
            output_tokens=max(1, row.turn.output_tokens),
            piece_tokens=piece_tokens or 1,
            pieces=row.pieces,
            session=row.session,
            after=None if row.after is None else numbers[row.after],
            think_s=row.think_s,
        )


def _flatten(path: Path, line: int, session: _Session, begins_s: float, salt: int, rows: list[_Row]) -> None:
    """Add a session's requests. Each follows the one before it in its own agent; the first of a sub-agent
    follows the request that started it.
    """

    def walk(turns: list[_Turn], offset_s: float, name: str, before: int | None) -> None:
        last_s = 0.0
        for position, turn in enumerate(turns):
            if turn.t < last_s:
                wrong_row(path, line, f"requests[{position}].t: {turn.t:g} is before {last_s:g} above it")
            last_s = turn.t
            if turn.requests:
                walk(turn.requests, offset_s + turn.t, f"{name}/{position}", before)
                continue
            n_pieces = -(-turn.input_tokens // session.block_size)
            if not turn.input_tokens or len(turn.hash_ids) < turn.input_tokens // session.block_size:
                wrong_row(
                    path,
                    line,
                    f"requests[{position}].hash_ids: {len(turn.hash_ids)} of them, where {turn.input_tokens} "
                    f"tokens have {n_pieces} blocks of {session.block_size}, the tail included",
                )
            try:
                local = array("Q", turn.hash_ids[:n_pieces])
            except OverflowError:
                wrong_row(path, line, f"requests[{position}].hash_ids: one does not fit in 64 bits")
            order = len(rows)
            pieces = array("Q", [(salt + piece * _SPREAD) & _MASK for piece in local])
            at_s = begins_s + offset_s + turn.t
            passed_s = turn.think_time if before is None else max(0.0, at_s - rows[before].at_s)
            think_s = min(turn.think_time, passed_s)
            rows.append(_Row(at_s, order, turn, pieces, name, before, think_s))
            before = order

    walk(session.requests, 0.0, session.id, None)
