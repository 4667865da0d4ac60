"""BurstGPT's traces: arrivals, models and lengths, a CSV row each."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.lengths import NO_CONTENTS, PIECE_TOKENS, tokens_of, unshared_request
from kvrouter.sim.traces.lines import read_lines, wrong_row
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest

INFO = TraceInfo(
    "BurstGPT",
    PIECE_TOKENS,
    has_sessions=False,
    notes=(NO_CONTENTS, "rows with a prompt of 0 tokens failed, and are left out"),
)

TIMESTAMP, MODEL, PROMPT, ANSWER = COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
"""The columns that are read; later releases have more."""

_SECONDS = re.compile(r"\d{1,12}(\.\d{1,20})?", re.ASCII)


def is_header(line: bytes) -> bool:
    """Whether a line names BurstGPT's columns."""
    return set(COLUMNS) <= {*_columns(line)}


def read_burstgpt(path: Path, header: bytes, model: str | None) -> Iterator[TraceRequest]:
    """Yield the rows of one model, which may be None where the file has no other. Raises ConfigError that
    names line and column.
    """
    names = _columns(header)
    first_s = last_s = first_model = None
    number = 0
    for line, text in islice(read_lines(path), 1, None):
        values = _columns(text)
        if len(values) != len(names):
            wrong_row(path, line, f"{len(values)} columns, where the header has {len(names)}")
        row = dict(zip(names, values, strict=True))
        if _SECONDS.fullmatch(row[TIMESTAMP]) is None:
            wrong_row(path, line, f"{TIMESTAMP}: {row[TIMESTAMP]!r} is not a number of seconds")
        at_s = float(row[TIMESTAMP])
        if last_s is not None and at_s < last_s:
            wrong_row(path, line, f"{TIMESTAMP}: is before that of the row above")
        last_s = at_s
        if first_model is None:
            first_model = row[MODEL]
        if model is None and row[MODEL] != first_model:
            wrong_row(
                path,
                line,
                f"{MODEL}: {row[MODEL]!r}, and {first_model!r} above; a replay has one: --model names it",
            )
        input_tokens = tokens_of(path, line, PROMPT, row[PROMPT], least=0)
        output_tokens = tokens_of(path, line, ANSWER, row[ANSWER], least=0)
        if model not in (None, row[MODEL]) or not input_tokens:
            continue
        first_s = at_s if first_s is None else first_s
        yield unshared_request(
            path, line, number, at_s - first_s, input_tokens=input_tokens, output_tokens=output_tokens
        )
        number += 1
    if not number and model is not None:
        has = f"has no prompt for {model!r}, and begins with {first_model!r}"
        raise ConfigError(f"model: {path} {'has no rows' if first_model is None else has}", param="model")


def _columns(line: bytes) -> list[str]:
    return line.decode("utf-8", "replace").strip().split(",")
