"""Mooncake's rows with sessions, as Dynamo writes and replays them: rows of one ``session_id`` are its turns.

A turn has the time of its arrival, ``timestamp``, or says by ``delay`` how long after the answer before it is
asked, or both. The first of a session has a time. Rows stand in any order of sessions, so they are held whole
and sorted by arrival. A block has 512 tokens, or where the rows do not fit that, the other power of two that
they do fit.

Each row has its whole prompt. Dynamo's ``mooncake-delta`` has the same keys and only what a turn adds; no key
says which it is, so the turns do: some of those with whole prompts begin as the prompt before them does.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.lines import decode_row, named_pieces, read_lines, wrong_row
from kvrouter.sim.traces.mooncake import PIECE_TOKENS, TOKENS_MAX, Milliseconds, Tokens
from kvrouter.sim.traces.request import Pieces, TraceInfo, TraceRequest

KEY = "session_id"

AGENTIC = "dynamo.agentic_mooncake"

AGENTIC_KEYS = frozenset({"wait_for", "branches", "tool_wait_ms", "dependencies", "not_before_ms"})
"""Keys of rows that wait for the answers of others, by their names."""

_BLOCK_SIZES = (PIECE_TOKENS, *(1 << power for power in range(13) if 1 << power != PIECE_TOKENS))


class _Line(msgspec.Struct):
    """``timestamp`` and ``delay`` are in milliseconds."""

    session_id: Annotated[str, Meta(min_length=1)]
    input_length: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    output_length: Tokens
    hash_ids: list[Annotated[int, Meta(ge=0)]]
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    wait_for: msgspec.Raw | UnsetType = UNSET
    dependencies: msgspec.Raw | UnsetType = UNSET


class _Turn(msgspec.Struct):
    """A request, and the one before it in its session. ``at_ms`` is when it comes, at the earliest where it
    has a delay alone.
    """

    line: int
    session: str
    at_ms: float
    input_tokens: int
    output_tokens: int
    pieces: Pieces
    before: "_Turn | None"
    think_ms: float
    number: int = -1


class MooncakeSessionsReader:
    """Reads the turns of a file, again with each call.

    Raises ConfigError that names line and field of a row that is wrong, and for rows that are none of whole
    prompts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._piece_tokens = 0
        turns, has_times = self._read()
        _check_whole(path, turns, self._piece_tokens)
        self.info = TraceInfo(
            "Mooncake with sessions", self._piece_tokens, has_sessions=True, has_times=has_times
        )

    def __call__(self) -> Iterator[TraceRequest]:
        """Yield the turns by arrival."""
        turns, _ = self._read()
        turns.sort(key=lambda turn: turn.at_ms)
        first_ms = turns[0].at_ms if turns else 0.0
        for number, turn in enumerate(turns):
            turn.number = number
            yield TraceRequest(
                number=number,
                at_s=(turn.at_ms - first_ms) / 1e3,
                input_tokens=turn.input_tokens,
                output_tokens=turn.output_tokens,
                piece_tokens=self._piece_tokens,
                pieces=turn.pieces,
                session=turn.session,
                after=None if turn.before is None else turn.before.number,
                think_s=turn.think_ms / 1e3,
                path=self._path,
                line=turn.line,
            )

    def _read(self) -> tuple[list[_Turn], bool]:
        """Return the turns as they stand in the file, and whether all have times."""
        decode = msgspec.json.Decoder(_Line).decode
        turns: list[_Turn] = []
        last: dict[str, _Turn] = {}
        has_times = True
        for line, text in read_lines(self._path):
            row = decode_row(decode, self._path, line, text)
            for key in ("wait_for", "dependencies"):
                if getattr(row, key) is not UNSET:
                    not_agentic(self._path, line, key)
            before = last.get(row.session_id)
            at_ms, think_ms = self._times(line, row, before)
            has_times &= row.timestamp is not None
            turn = last[row.session_id] = _Turn(
                line=line,
                session=row.session_id,
                at_ms=at_ms,
                input_tokens=row.input_length,
                output_tokens=max(1, row.output_length),
                pieces=named_pieces(self._path, line, "hash_ids", row.hash_ids),
                before=before,
                think_ms=think_ms,
            )
            turns.append(turn)
        self._piece_tokens = _block_size(self._path, turns)
        return turns, has_times

    def _times(self, line: int, row: _Line, before: _Turn | None) -> tuple[float, float]:
        """When a turn comes, and how long after the answer before it; without a delay what passed between
        the two requests, with the time of that answer.
        """
        if before is None:
            if row.timestamp is None:
                wrong_row(self._path, line, f"timestamp: is missing in the first row of {row.session_id!r}")
            return row.timestamp, row.delay or 0.0
        if row.timestamp is None:
            if row.delay is None:
                wrong_row(self._path, line, "timestamp: is missing")
            return before.at_ms + row.delay, row.delay
        passed_ms = row.timestamp - before.at_ms
        if passed_ms < 0.0:
            wrong_row(
                self._path,
                line,
                f"timestamp: {row.timestamp:g} is before {before.at_ms:g} of the turn before",
            )
        return row.timestamp, passed_ms if row.delay is None else row.delay


def is_agentic(row: dict[str, object]) -> bool:
    """Whether a row is of Dynamo's agentic form, or that form's header."""
    return row.get("schema") == AGENTIC or not AGENTIC_KEYS.isdisjoint(row)


def not_agentic(path: Path, line: int, field: str) -> NoReturn:
    """Raise ConfigError for rows of Dynamo's agentic form."""
    wrong_row(
        path,
        line,
        f"{field}: {AGENTIC} is not read, as its requests may wait for several others; give the "
        "dynamo.request.trace.v1 that it was made from, or Mooncake's rows with session_id and delay",
    )


def _block_size(path: Path, turns: Iterable[_Turn]) -> int:
    """Return the tokens of a block that fit all rows."""
    sizes = list(_BLOCK_SIZES)
    for turn in turns:
        kept = [size for size in sizes if -(-turn.input_tokens // size) == len(turn.pieces)]
        if not kept:
            wrong_row(
                path,
                turn.line,
                f"hash_ids: {len(turn.pieces)} of them, where input_length {turn.input_tokens} has "
                f"{-(-turn.input_tokens // sizes[0])} blocks of {sizes[0]} tokens",
            )
        sizes = kept
    return sizes[0]


def _check_whole(path: Path, turns: Iterable[_Turn], piece_tokens: int) -> None:
    """Raise ConfigError where no turn can have its whole prompt: none begins as the one before it does, and
    some would have to, or are shorter.
    """
    doubtful: _Turn | None = None
    for turn in turns:
        before = turn.before
        if before is None:
            continue
        if before.input_tokens >= piece_tokens:
            if turn.pieces[0] == before.pieces[0]:
                return
            doubtful = doubtful or turn
        elif turn.input_tokens < before.input_tokens:
            doubtful = doubtful or turn
    if doubtful is not None:
        raise ConfigError(
            f"{path}:{doubtful.line}: hash_ids: no turn of this trace begins as the turn before it in its "
            "session does: these seem to be mooncake-delta rows, which have only what a turn adds and are "
            "not read; give rows with whole prompts",
            param=str(path),
        )
