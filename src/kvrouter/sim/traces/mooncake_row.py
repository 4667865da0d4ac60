"""A row of Mooncake's, in any of its forms: fields that go by two names, and the tokens of its blocks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvrouter.sim.traces.lines import named_pieces, wrong_row
from kvrouter.sim.traces.trace_request import Pieces, TraceRequest, Wait

PIECE_TOKENS = 512

TOKENS_MAX = 1 << 31

Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]

PromptTokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]

Milliseconds = Annotated[float, Meta(ge=0, le=1e15)]

ALIASES = {
    "input_length": "input_tokens",
    "output_length": "output_tokens",
    "timestamp": "created_time",
    "delay": "delay_ms",
}
"""The other names of fields, which Dynamo reads too."""

_BLOCK_SIZES = (PIECE_TOKENS, *(1 << power for power in range(13) if 1 << power != PIECE_TOKENS))

Number = TypeVar("Number", int, float)


class MooncakeRow(msgspec.Struct, kw_only=True):
    """The fields of a row in any form: of two fields that are one by ALIASES it has one. Times are in
    milliseconds.
    """

    hash_ids: list[Annotated[int, Meta(ge=0)]]
    input_length: PromptTokens | UnsetType = UNSET
    input_tokens: PromptTokens | UnsetType = UNSET
    output_length: Tokens | UnsetType = UNSET
    output_tokens: Tokens | UnsetType = UNSET
    timestamp: Milliseconds | UnsetType | None = UNSET
    created_time: Milliseconds | UnsetType | None = UNSET
    delay: Milliseconds | UnsetType | None = UNSET
    delay_ms: Milliseconds | UnsetType | None = UNSET


class Asked(msgspec.Struct, frozen=True):
    """The request of a row, in ``line`` of the file at ``path``."""

    path: Path
    line: int
    input_tokens: int
    output_tokens: int
    pieces: Pieces

    def request(
        self,
        number: int,
        at_ms: float,
        piece_tokens: int,
        *,
        session: str = "",
        waits: tuple[Wait, ...] = (),
        not_before_s: float = 0.0,
    ) -> TraceRequest:
        """Return it as a request of the trace, ``at_ms`` milliseconds after the first one."""
        return TraceRequest(
            number=number,
            at_s=at_ms / 1e3,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            piece_tokens=piece_tokens,
            pieces=self.pieces,
            session=session,
            waits=waits,
            not_before_s=not_before_s,
            path=self.path,
            line=self.line,
        )


def has_keys(row: dict[str, object]) -> bool:
    """Whether a row has the keys that every row of Mooncake's has, but for the names of blocks."""
    return all(name in row or ALIASES[name] in row for name in ("timestamp", "input_length", "output_length"))


def has_time(row: dict[str, object]) -> bool:
    """Whether a row has a time stamp."""
    return row.get("timestamp", row.get(ALIASES["timestamp"])) is not None


def asked(path: Path, line: int, row: MooncakeRow) -> Asked:
    """Return the request of a row. Raises ConfigError if it states a number of tokens twice, or not."""
    input_tokens = _either(path, line, "input_length", row.input_length, row.input_tokens)
    output_tokens = _either(path, line, "output_length", row.output_length, row.output_tokens)
    if input_tokens is None:
        wrong_row(path, line, "input_length: is missing")
    if output_tokens is None:
        wrong_row(path, line, "output_length: is missing")
    pieces = named_pieces(path, line, "hash_ids", row.hash_ids)
    return Asked(path, line, input_tokens, output_tokens, pieces)


def timestamp_ms(path: Path, line: int, row: MooncakeRow) -> float | None:
    """Return a row's time of arrival. Raises ConfigError where it has two."""
    return _either(path, line, "timestamp", row.timestamp, row.created_time)


def delay_ms(path: Path, line: int, row: MooncakeRow) -> float | None:
    """Return a row's delay. Raises ConfigError where it has two."""
    return _either(path, line, "delay", row.delay, row.delay_ms)


def check_pieces(row: Asked, piece_tokens: int) -> None:
    """Raise ConfigError where a prompt has more or fewer blocks of this size than names."""
    n_pieces = -(-row.input_tokens // piece_tokens)
    if len(row.pieces) != n_pieces:
        wrong_row(
            row.path,
            row.line,
            f"hash_ids: {len(row.pieces)} of them, where {row.input_tokens} tokens have {n_pieces} blocks of "
            f"{piece_tokens}",
        )


def block_size(rows: Iterable[Asked]) -> int:
    """Return the tokens of a block that fit all rows: 512, or where they do not, another power of two."""
    sizes = list(_BLOCK_SIZES)
    for row in rows:
        kept = [size for size in sizes if -(-row.input_tokens // size) == len(row.pieces)]
        if not kept:
            check_pieces(row, sizes[0])
        sizes = kept
    return sizes[0]


def block_size_note(piece_tokens: int) -> str:
    """Return a note for reports on a size that :func:`block_size` found."""
    return f"no field says how large blocks are: {piece_tokens} tokens fit all rows"


def _either(
    path: Path, line: int, name: str, value: Number | UnsetType | None, other: Number | UnsetType | None
) -> Number | None:
    """Return the value of a field that goes by two names."""
    if isinstance(other, UnsetType):
        return None if isinstance(value, UnsetType) else value
    if not isinstance(value, UnsetType):
        wrong_row(path, line, f"{ALIASES[name]}: is another name of {name}, which is there too")
    return other
