"""Mooncake's rows with sessions, as Dynamo writes and replays them: rows of one ``session_id`` are its turns.

A turn has its time of arrival, ``timestamp``, or its ``delay`` after the answer before it, or both. The first
of a session has a time. Rows are in any order of sessions, so they are held whole and sorted by arrival. A
block has 512 tokens, or if the rows do not fit that, the other power of two that they do fit.

Rows have whole prompts, or those of Dynamo's ``mooncake-delta`` only a turn's addition. No key states which:
the user does, or the turns. Whole prompts begin as the prompt before them.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.lines import decode_row, read_lines, wrong_row
from kvrouter.sim.traces.mooncake import INFO
from kvrouter.sim.traces.mooncake_delta import PIECES_MAX, Dialogue
from kvrouter.sim.traces.mooncake_row import (
    TOKENS_MAX,
    Asked,
    MooncakeRow,
    asked,
    block_size,
    block_size_note,
    delay_ms,
    timestamp_ms,
)
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest, Wait

KEY = "session_id"

TraceFormat = Literal["mooncake", "mooncake-delta"]
"""The contents of rows, by Dynamo's names: whole prompts, or a turn's addition."""

WHOLE, DELTA = "Mooncake with sessions", "mooncake-delta"

FORMATS: dict[TraceFormat, tuple[str, ...]] = {"mooncake": (INFO.format, WHOLE), "mooncake-delta": (DELTA,)}
"""The formats of traces that have that."""


class _Line(MooncakeRow, kw_only=True):
    session_id: Annotated[str, Meta(min_length=1)]
    wait_for: msgspec.Raw | UnsetType = UNSET
    dependencies: msgspec.Raw | UnsetType = UNSET


class _Turn(msgspec.Struct):
    """A request, and the one before it in its session. ``at_ms`` is its arrival, the earliest one if it has
    only a delay.
    """

    asked: Asked
    session: str
    at_ms: float
    before: "_Turn | None"
    think_ms: float
    number: int = -1


class MooncakeSessionsReader:
    """Reads the turns of a file, again with each call. ``trace_format`` states the contents of rows; without
    it the turns do.

    Raises ConfigError that names line and field of an invalid row, and if the turns do not show the format.
    """

    def __init__(self, path: Path, trace_format: TraceFormat | None = None) -> None:
        self._path = path
        self._is_delta = trace_format == "mooncake-delta"
        self._piece_tokens = 0
        turns, has_times = self._read()
        if trace_format is None:
            _check_whole(path, turns, self._piece_tokens)
        self.info = TraceInfo(
            DELTA if self._is_delta else WHOLE,
            self._piece_tokens,
            has_sessions=True,
            has_times=has_times,
            notes=(block_size_note(self._piece_tokens),),
        )

    def __call__(self) -> Iterator[TraceRequest]:
        """Yield the turns by arrival."""
        turns, _ = self._read()
        turns.sort(key=lambda turn: turn.at_ms)
        first_ms = turns[0].at_ms if turns else 0.0
        prompts = self._whole(turns) if self._is_delta else (turn.asked for turn in turns)
        for number, (turn, asked_for) in enumerate(zip(turns, prompts, strict=True)):
            turn.number = number
            waits = () if turn.before is None else (Wait(turn.before.number, turn.think_ms / 1e3),)
            yield asked_for.request(
                number, turn.at_ms - first_ms, self._piece_tokens, session=turn.session, waits=waits
            )

    def _whole(self, turns: list[_Turn]) -> Iterator[Asked]:
        """Yield whole prompts, where rows have what turns add."""
        last = {turn.session: turn for turn in turns}
        dialogues: dict[str, Dialogue] = {}
        for turn in turns:
            added, dialogue = turn.asked, dialogues.get(turn.session)
            if dialogue is None:
                dialogue = dialogues[turn.session] = Dialogue(added.line, self._piece_tokens)
            tokens = dialogue.length_with(added.input_tokens)
            most = min(TOKENS_MAX, PIECES_MAX * self._piece_tokens)
            if tokens > most:
                wrong_row(
                    self._path,
                    added.line,
                    f"input_length: with the turns before it the prompt has {tokens} tokens, and {most} is "
                    "the most",
                )
            pieces = dialogue.ask(added.pieces, added.input_tokens, max(1, added.output_tokens))
            yield msgspec.structs.replace(added, input_tokens=tokens, pieces=pieces)
            if last[turn.session] is turn:
                del dialogues[turn.session]

    def _read(self) -> tuple[list[_Turn], bool]:
        """Return the turns in the file's order, and whether all have times."""
        decode = msgspec.json.Decoder(_Line).decode
        turns: list[_Turn] = []
        last: dict[str, _Turn] = {}
        has_times = True
        for line, text in read_lines(self._path):
            row = decode_row(decode, self._path, line, text)
            for key in ("wait_for", "dependencies"):
                if getattr(row, key) is not UNSET:
                    wrong_row(self._path, line, f"{key}: is there, and the first row has no request_id")
            before = last.get(row.session_id)
            at_ms, think_ms, has_time = self._times(line, row, before)
            has_times &= has_time
            turn = _Turn(asked(self._path, line, row), row.session_id, at_ms, before, think_ms)
            last[row.session_id] = turn
            turns.append(turn)
        self._piece_tokens = block_size(turn.asked for turn in turns)
        return turns, has_times

    def _times(self, line: int, row: _Line, before: _Turn | None) -> tuple[float, float, bool]:
        """Return when a turn comes, its delay after the answer before it (without one the time between the
        two requests, with that answer's time), and whether it has a time.
        """
        at_ms, think_ms = timestamp_ms(self._path, line, row), delay_ms(self._path, line, row)
        if before is None:
            if at_ms is None:
                wrong_row(self._path, line, f"timestamp: is missing in the first row of {row.session_id!r}")
            return at_ms, think_ms or 0.0, True
        if at_ms is None:
            if think_ms is None:
                wrong_row(self._path, line, "timestamp: is missing")
            return before.at_ms + think_ms, think_ms, False
        passed_ms = at_ms - before.at_ms
        if passed_ms < 0.0:
            wrong_row(self._path, line, f"timestamp: {at_ms:g} is before {before.at_ms:g} of the turn before")
        return at_ms, passed_ms if think_ms is None else think_ms, True


def _check_whole(path: Path, turns: Iterable[_Turn], piece_tokens: int) -> None:
    """Raise ConfigError unless rows seem to have whole prompts: a turn that is longer than the one before,
    and begins as it does, has; one that begins otherwise, or is shorter, has not. Without a session of two
    turns there is no difference.
    """
    n_whole = n_other = 0
    doubtful: _Turn | None = None
    for turn in turns:
        before = turn.before
        if before is None:
            continue
        now, then = turn.asked, before.asked
        is_longer = now.input_tokens > then.input_tokens
        has_full_piece = then.input_tokens >= piece_tokens
        begins_alike = has_full_piece and now.pieces[0] == then.pieces[0]
        if begins_alike and is_longer:
            n_whole += 1
            continue
        doubtful = doubtful or turn
        n_other += not begins_alike and (has_full_piece or not is_longer)
    if doubtful is not None and n_whole < max(1, n_other):
        raise ConfigError(
            f"{path}:{doubtful.asked.line}: hash_ids: do not say whether rows have whole prompts or only "
            f"what a turn adds: {n_whole} turns begin as the one before in their session and are longer, "
            f"{n_other} begin otherwise; say it with --trace-format mooncake (whole prompts) or "
            "--trace-format mooncake-delta (what a turn adds)",
            param=str(path),
        )
