"""The Mooncake conversation trace: its rows, the conversations in them, and the sample to replay."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NewType

import msgspec

TRACE_BLOCK_TOKENS = 512
"""Tokens that one hash id of the trace stands for."""

BlockId = NewType("BlockId", int)
"""The trace's name of one block and of everything before it; equal ids are equal prompts up to there."""

Conversation = tuple[int, ...]
"""Row numbers of one dialogue, first turn first."""

MIN_LINK_BLOCKS = 2
"""Full blocks a row needs before another can be said to go on from it: every row shares the first one."""


class TraceRow(msgspec.Struct, frozen=True):
    """One request of the trace. The last id may stand for a partial block."""

    timestamp_ms: int = msgspec.field(name="timestamp")
    input_tokens: int = msgspec.field(name="input_length")
    output_tokens: int = msgspec.field(name="output_length")
    block_ids: tuple[BlockId, ...] = msgspec.field(name="hash_ids")

    @property
    def full_block_ids(self) -> tuple[BlockId, ...]:
        """The ids without a partial last block."""
        return self.block_ids[: self.input_tokens // TRACE_BLOCK_TOKENS]


class SampleRow(TraceRow, frozen=True):
    """A row of the sample: the trace's own fields, and where it stands in its conversation (both from 0)."""

    conversation: int
    turn: int


def read_trace(path: Path) -> list[TraceRow]:
    """Rows in file order. Raises ``msgspec.ValidationError`` for a line that is no row of the trace."""
    decoder = msgspec.json.Decoder(TraceRow)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def read_sample(path: Path) -> list[SampleRow]:
    """Rows in order of time. Raises ``msgspec.ValidationError`` for a line that is no row of a sample."""
    decoder = msgspec.json.Decoder(SampleRow)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def write_sample(path: Path, rows: Iterable[SampleRow]) -> None:
    """One JSON object a line, with the trace's own field names first."""
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def find_conversations(rows: Sequence[TraceRow]) -> list[Conversation]:
    """Every dialogue, in order of its first row; a row that continues none has one turn.

    A row goes on from the latest earlier row whose full blocks are the longest prefix of its own. What forks
    (two rows go on from one) is left out whole, and so is what cannot be a dialogue because a turn is
    shorter than the prompt and the answer before it.
    """
    following = _following_rows(rows)
    continued = {row for later in following.values() for row in later}
    conversations: list[Conversation] = []
    for first in range(len(rows)):
        if first in continued:
            continue
        turns = [first]
        while len(later := following.get(turns[-1], [])) == 1:
            turns.append(later[0])
        if not later and _grows(rows, turns):
            conversations.append(tuple(turns))
    return conversations


def _following_rows(rows: Sequence[TraceRow]) -> dict[int, list[int]]:
    latest_with: dict[tuple[BlockId, ...], int] = {}
    following: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        for blocks in range(len(row.block_ids), MIN_LINK_BLOCKS - 1, -1):
            before = latest_with.get(row.block_ids[:blocks])
            if before is not None:
                following.setdefault(before, []).append(number)
                break
        if len(row.full_block_ids) >= MIN_LINK_BLOCKS:
            latest_with[row.full_block_ids] = number
    return following


def _grows(rows: Sequence[TraceRow], turns: Sequence[int]) -> bool:
    return all(
        rows[later].input_tokens >= rows[earlier].input_tokens + rows[earlier].output_tokens
        for earlier, later in pairwise(turns)
    )


def select_sample(
    rows: Sequence[TraceRow], *, rows_wanted: int = 300, turns_min: int = 4, turns_max: int = 12
) -> list[SampleRow]:
    """Whole conversations that add up to exactly ``rows_wanted``, in order of time.

    The order of choice is a hash of the first row's number: spread over the whole trace, and the same on
    every machine. Raises ``ValueError`` when the trace holds too few conversations.
    """
    found = [turns for turns in find_conversations(rows) if turns_min <= len(turns) <= turns_max]
    found.sort(key=lambda turns: hashlib.sha256(str(turns[0]).encode()).digest())
    chosen: list[Conversation] = []
    rows_left = rows_wanted
    for turns in found:
        rows_after = rows_left - len(turns)
        if rows_after == 0 or rows_after >= turns_min:
            chosen.append(turns)
            rows_left = rows_after
    if rows_left:
        message = (
            f"the trace's whole conversations do not add up to {rows_wanted} rows: {rows_left} are missing"
        )
        raise ValueError(message)
    sample = [
        (number, _sample_row(rows[number], conversation, turn))
        for conversation, turns in enumerate(sorted(chosen))
        for turn, number in enumerate(turns)
    ]
    return [row for _, row in sorted(sample, key=lambda numbered: numbered[0])]


def _sample_row(row: TraceRow, conversation: int, turn: int) -> SampleRow:
    return SampleRow(
        timestamp_ms=row.timestamp_ms,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        block_ids=row.block_ids,
        conversation=conversation,
        turn=turn,
    )
