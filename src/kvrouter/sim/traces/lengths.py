"""Requests of traces that have the lengths of prompts, and nothing of their contents."""

from array import array
from pathlib import Path

from kvrouter.sim.traces.lines import wrong_row
from kvrouter.sim.traces.trace_request import TraceRequest

PIECE_TOKENS = 64

LENGTH_MAX = 1 << 24
"""The most tokens of a prompt or an answer: a prompt gets pieces of its own, 8 bytes each, before it is known
whether an engine has room for it.
"""

NO_CONTENTS = "the trace has the lengths of prompts alone: no two share a prefix, and nothing is cached"

_PIECES_BITS = (LENGTH_MAX // PIECE_TOKENS).bit_length()
_TOKEN_DIGITS = len(str(LENGTH_MAX))


def unshared_request(
    path: Path, line: int, number: int, at_s: float, *, input_tokens: int, output_tokens: int
) -> TraceRequest:
    """Return a request whose prompt shares nothing with any other."""
    first = number << _PIECES_BITS
    return TraceRequest(
        number=number,
        at_s=at_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        piece_tokens=PIECE_TOKENS,
        pieces=array("Q", range(first, first - (-input_tokens // PIECE_TOKENS))),
        path=path,
        line=line,
    )


def tokens_of(path: Path, line: int, name: str, text: str, *, least: int) -> int:
    """Return a number of tokens in a CSV file. Raises ConfigError that names its line and column."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _TOKEN_DIGITS
    if not is_number or not least <= int(text) <= LENGTH_MAX:
        wrong_row(path, line, f"{name}: {text!r} is not a number of tokens from {least} to {LENGTH_MAX}")
    return int(text)
