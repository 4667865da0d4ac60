"""Mooncake's traces: a JSON row for each request, with names of blocks of 512 tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvrouter.sim.traces.lines import decode_row, named_pieces, read_lines, wrong_row
from kvrouter.sim.traces.request import TraceInfo, TraceRequest

PIECE_TOKENS = 512

INFO = TraceInfo("Mooncake", PIECE_TOKENS, has_sessions=False)

KEYS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})

TOKENS_MAX = 1 << 31

Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]

Milliseconds = Annotated[float, Meta(ge=0, le=1e15)]


class _Row(msgspec.Struct):
    """``timestamp`` is in milliseconds."""

    timestamp: Milliseconds
    input_length: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    output_length: Tokens
    hash_ids: list[Annotated[int, Meta(ge=0)]]
    session_id: msgspec.Raw | UnsetType = UNSET


def read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """Yield the rows. An answer of 0 tokens is read as one of 1: an engine that was asked says something.

    Raises ConfigError that names line and field.
    """
    decode = msgspec.json.Decoder(_Row).decode
    first_ms = last_ms = None
    for number, (line, text) in enumerate(read_lines(path)):
        row = decode_row(decode, path, line, text)
        if row.session_id is not UNSET:
            wrong_row(
                path, line, "session_id: is there, and was not in the first row: all rows have one, or none"
            )
        n_pieces = -(-row.input_length // PIECE_TOKENS)
        if len(row.hash_ids) != n_pieces:
            wrong_row(
                path,
                line,
                f"hash_ids: {len(row.hash_ids)} of them, where input_length {row.input_length} has "
                f"{n_pieces} blocks of {PIECE_TOKENS} tokens",
            )
        if first_ms is None or last_ms is None:
            first_ms = last_ms = row.timestamp
        if row.timestamp < last_ms:
            wrong_row(path, line, f"timestamp: {row.timestamp:g} is before {last_ms:g} of the row above")
        last_ms = row.timestamp
        yield TraceRequest(
            number=number,
            at_s=(row.timestamp - first_ms) / 1e3,
            input_tokens=row.input_length,
            output_tokens=max(1, row.output_length),
            piece_tokens=PIECE_TOKENS,
            pieces=named_pieces(path, line, "hash_ids", row.hash_ids),
            path=path,
            line=line,
        )
