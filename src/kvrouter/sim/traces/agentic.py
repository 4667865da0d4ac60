"""Sessions of coding agents: a JSON object for each session, with its turns, think times and sub-agents.

The format is kv-cache-tester's. Its rows are in the order of sessions, not of time, so those of the sessions
that have begun and not ended are held, and no others.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvrouter.core.hashing import finish64
from kvrouter.sim.traces.lines import decode_row, named_pieces, read_lines, wrong_row
from kvrouter.sim.traces.mooncake_row import TOKENS_MAX
from kvrouter.sim.traces.trace_request import Pieces, TraceInfo, TraceRequest, Wait

SESSION_GAP_S = 10.0
"""Sessions have no start times: each begins this long after the one before."""

CLOCK_ROUNDING_S = 1.0
"""Times are rounded to whole seconds in some places and not in others, so a time that is less than this
before another may still be after it."""

_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15

Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
BlockTokens = Annotated[int, Meta(ge=1, le=1 << 16)]


class _Turn(msgspec.Struct):
    """One request, or the sub-agent that a request started, which has ``requests`` too.

    ``api_time`` is the time of the answer, ``think_time`` that between the answer before and this request.
    """

    t: Seconds
    type: str = ""
    input_tokens: Tokens = msgspec.field(name="in", default=0)
    output_tokens: Tokens = msgspec.field(name="out", default=0)
    hash_ids: list[Annotated[int, Meta(ge=0)]] = []
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    requests: "list[_Turn] | None" = None


class _Session(msgspec.Struct):
    """Names of blocks are the session's own, or where the scope is ``global`` the same in all sessions."""

    id: Annotated[str, Meta(min_length=1)]
    block_size: BlockTokens
    requests: list[_Turn]
    hash_id_scope: Literal["local", "global"] = "local"


class _BlockSize(msgspec.Struct):
    block_size: BlockTokens


class _TurnTime(msgspec.Struct):
    t: Seconds
    requests: "list[_TurnTime] | None" = None


class _SessionTimes(msgspec.Struct):
    requests: list[_TurnTime]


class _Row(msgspec.Struct):
    """A request that waits for its turn in the trace. ``number`` is its place there, once it has one."""

    line: int
    at_s: float
    input_tokens: int
    output_tokens: int
    served_s: float
    piece_tokens: int
    pieces: Pieces
    session: str
    before: "_Row | None"
    think_s: float
    number: int = -1


class _Agent(msgspec.Struct):
    """An agent during the reading of its turns.

    ``field`` is their place, ``begins_s`` the origin of their times, and ``starts_s`` the earliest second at
    which one may come.
    """

    name: str
    field: str
    turns: Iterator[tuple[int, _Turn]]
    begins_s: float
    starts_s: float
    before: _Row | None
    is_new: bool = True
    last_t: float = 0.0


def agentic_info(path: Path, line: int, text: bytes) -> TraceInfo:
    """Return the values of a trace of sessions, by its first row. Raises ConfigError that names the field."""
    first = decode_row(msgspec.json.Decoder(_BlockSize).decode, path, line, text)
    note = f"the trace has no times of sessions: each begins {SESSION_GAP_S:g} s after the one before"
    return TraceInfo("agentic sessions", first.block_size, has_sessions=True, notes=(note,))


class AgenticReader:
    """Reads the sessions of a file, again with each call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts_from_agent: bool | None = None

    def __call__(self) -> Iterator[TraceRequest]:
        """Yield the requests of all sessions by time. Raises ConfigError that names line and field."""
        decode = msgspec.json.Decoder(_Session).decode
        waiting: list[tuple[float, int, _Row]] = []
        piece_tokens: int | None = None
        n_read = n_given = 0
        for index, (line, text) in enumerate(read_lines(self._path)):
            session = decode_row(decode, self._path, line, text)
            if piece_tokens is None:
                piece_tokens = session.block_size
            if session.block_size != piece_tokens:
                wrong_row(self._path, line, f"block_size: {session.block_size}, and {piece_tokens} above")
            for row in self._rows(line, index, session):
                heappush(waiting, (row.at_s, n_read, row))
                n_read += 1
            while waiting and waiting[0][0] <= (index + 1) * SESSION_GAP_S:
                yield _given(self._path, heappop(waiting)[2], n_given)
                n_given += 1
        while waiting:
            yield _given(self._path, heappop(waiting)[2], n_given)
            n_given += 1

    def _rows(self, line: int, index: int, session: _Session) -> Iterator[_Row]:
        """Yield a session's requests. Each follows the one before it in the same agent; the first of a
        sub-agent follows the request that started it.
        """
        session_s = index * SESSION_GAP_S
        salt = 0 if session.hash_id_scope == "global" else finish64((index + 1) * _SPREAD & _MASK)
        turns = iter(enumerate(session.requests))
        agents = [_Agent(session.id, "requests", turns, session_s, session_s, None)]
        while agents:
            agent = agents[-1]
            position, turn = next(agent.turns, (0, None))
            if turn is None:
                agents.pop()
                continue
            field = f"{agent.field}[{position}]"
            if turn.t < agent.last_t:
                wrong_row(self._path, line, f"{field}.t: {turn.t:g} is before {agent.last_t:g} above it")
            agent.last_t = turn.t
            at_s = max(agent.starts_s, agent.begins_s + turn.t)
            if turn.type == "subagent" or turn.requests is not None:
                inner = turn.requests or []
                begins_s = at_s if inner and self._counts_from(turn) else session_s
                agents.append(
                    _Agent(
                        f"{agent.name}/{position}",
                        f"{field}.requests",
                        iter(enumerate(inner)),
                        begins_s,
                        at_s,
                        agent.before,
                    )
                )
                continue
            row = _Row(
                line=line,
                at_s=at_s,
                input_tokens=turn.input_tokens,
                output_tokens=turn.output_tokens,
                served_s=turn.api_time or 0.0,
                piece_tokens=session.block_size,
                pieces=self._pieces(line, field, turn, session.block_size, salt),
                session=agent.name,
                before=agent.before,
                think_s=_think_s(turn, at_s, agent.before, is_new=agent.is_new),
            )
            agent.before, agent.is_new = row, False
            yield row

    def _pieces(self, line: int, field: str, turn: _Turn, block_size: int, salt: int) -> Pieces:
        n_pieces = -(-turn.input_tokens // block_size)
        if not turn.input_tokens:
            wrong_row(self._path, line, f"{field}.in: is missing or 0, and a prompt has a token at least")
        if len(turn.hash_ids) < turn.input_tokens // block_size:
            wrong_row(
                self._path,
                line,
                f"{field}.hash_ids: {len(turn.hash_ids)} of them, where {turn.input_tokens} "
                f"tokens have {n_pieces} blocks of {block_size}, the tail included",
            )
        pieces = named_pieces(self._path, line, f"{field}.hash_ids", turn.hash_ids)[:n_pieces]
        for at, piece in enumerate(pieces):
            pieces[at] = (salt + piece * _SPREAD) & _MASK
        return pieces

    def _counts_from(self, agent: _Turn) -> bool:
        """Whether a sub-agent's times count from its own start, as kv-cache-tester has them. In republished
        traces they count from the session's. No field states which; a time that is before its sub-agent's
        start does, for the whole file, which is searched for one if needed.
        """
        if self._counts_from_agent is None:
            if _precedes(agent):
                self._counts_from_agent = True
            elif agent.t > CLOCK_ROUNDING_S:
                self._counts_from_agent = self._finds_preceding()
        return self._counts_from_agent is not False

    def _finds_preceding(self) -> bool:
        decode = msgspec.json.Decoder(_SessionTimes).decode
        for line, text in read_lines(self._path):
            unseen = decode_row(decode, self._path, line, text).requests
            while unseen:
                turn = unseen.pop()
                if _precedes(turn):
                    return True
                unseen += turn.requests or ()
        return False


def _precedes(agent: _Turn | _TurnTime) -> bool:
    return any(turn.t < agent.t - CLOCK_ROUNDING_S for turn in agent.requests or ())


def _think_s(turn: _Turn, at_s: float, before: _Row | None, *, is_new: bool) -> float:
    """Return the time between the answer before and this request, at most the elapsed time.

    Some records count from an earlier answer, as the one before has no recorded end; others have no think
    time. A sub-agent's first request has 0, since it has no predecessor there.
    """
    if before is None:
        return 0.0
    passed_s = max(0.0, at_s - before.at_s - before.served_s)
    return passed_s if turn.think_time is None or is_new else min(turn.think_time, passed_s)


def _given(path: Path, row: _Row, number: int) -> TraceRequest:
    """Return a request with its place in the trace, and forget the request that it follows."""
    waits = () if row.before is None else (Wait(row.before.number, row.think_s),)
    row.number, row.before = number, None
    return TraceRequest(
        number=number,
        at_s=row.at_s,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        piece_tokens=row.piece_tokens,
        pieces=row.pieces,
        session=row.session,
        waits=waits,
        path=path,
        line=row.line,
    )
