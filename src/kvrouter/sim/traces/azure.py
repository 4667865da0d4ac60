"""Azure's traces: arrivals and lengths, a CSV row each. They have no contents, so a model adds them."""

import re
from array import array
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.lengths import PIECE_TOKENS, tokens_of
from kvrouter.sim.traces.lines import read_lines, wrong_row
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest

INFO = TraceInfo(
    "Azure",
    PIECE_TOKENS,
    has_sessions=False,
    notes=(
        "the trace has the lengths of prompts alone: contents are made up, half of the prompts begin with "
        "one of 64 texts that cover half of them",
    ),
)

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"

_COLUMNS = 3

_TIME_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,20})?(Z|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)


class PrefixModel(msgspec.Struct, frozen=True):
    """The shared parts of prompts: ``share`` of them begin with one of ``prefixes`` texts, with a popularity
    by Zipf's law with ``exponent``, which cover up to ``covers`` of a prompt.
    """

    share: float = 0.5
    prefixes: int = 64
    exponent: float = 1.1
    covers: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("share", "covers"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"prefix_model.{name}: must be between 0 and 1", param=name)
        if self.prefixes < 1 or not 0.0 < self.exponent < float("inf"):
            raise ConfigError(
                "prefix_model: at least one prefix, and an exponent above 0", param="prefix_model"
            )


def read_azure(path: Path, model: PrefixModel = PrefixModel()) -> Iterator[TraceRequest]:  # noqa: B008 - frozen
    """Yield the rows, with contents that ``model`` makes up. Raises ConfigError that names line and field."""
    chance = np.random.Generator(np.random.PCG64(model.seed))
    weights = np.arange(1, model.prefixes + 1, dtype=np.float64) ** -model.exponent
    reached = np.cumsum(weights / weights.sum())
    own = 1 << 40
    first_s = last_s = None
    for number, (line, text) in enumerate(islice(read_lines(path), 1, None)):
        columns = text.decode("ascii", "replace").strip().split(",")
        if len(columns) != _COLUMNS:
            wrong_row(path, line, f"{len(columns)} columns, not TIMESTAMP, ContextTokens, GeneratedTokens")
        at_s = _seconds(path, line, columns[0])
        input_tokens = tokens_of(path, line, "ContextTokens", columns[1], least=1)
        output_tokens = tokens_of(path, line, "GeneratedTokens", columns[2], least=0)
        if first_s is None or last_s is None:
            first_s = last_s = at_s
        if at_s < last_s:
            wrong_row(path, line, "TIMESTAMP: is before that of the row above")
        last_s = at_s
        n_pieces = -(-input_tokens // PIECE_TOKENS)
        n_shared = 0
        prefix = 0
        if chance.random() < model.share:
            prefix = int(np.searchsorted(reached, chance.random()))
            n_shared = int(model.covers * n_pieces)
        shared = range((prefix + 1) << 20, ((prefix + 1) << 20) + n_shared)
        pieces = array("Q", shared)
        pieces.extend(range(own, own + n_pieces - n_shared))
        own += n_pieces
        yield TraceRequest(
            number=number,
            at_s=at_s - first_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            piece_tokens=PIECE_TOKENS,
            pieces=pieces,
            path=path,
            line=line,
        )


def _seconds(path: Path, line: int, text: str) -> float:
    """Return the second of a time stamp, with as many digits after the point as it has. Without a zone it is
    UTC.
    """
    found = _TIME_STAMP.fullmatch(text)
    if found is None:
        wrong_row(path, line, f"TIMESTAMP: {text!r} is no date and time")
    day, time, fraction, zone = found.groups()
    try:
        whole = datetime.fromisoformat(f"{day}T{time}{zone or 'Z'}")
    except ValueError as error:
        wrong_row(path, line, f"TIMESTAMP: {text!r} is no date and time: {error}")
    return whole.timestamp() + float(fraction or 0)
