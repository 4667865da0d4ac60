"""Mooncake's traces: a JSON row for each request, with names of blocks of 512 tokens."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from kvrouter.sim.traces.arrivals import MISSING
from kvrouter.sim.traces.lines import decode_row, read_lines, wrong_row
from kvrouter.sim.traces.mooncake_row import PIECE_TOKENS, MooncakeRow, asked, check_pieces, timestamp_ms
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest

INFO = TraceInfo("Mooncake", PIECE_TOKENS, has_sessions=False)


class _Row(MooncakeRow, kw_only=True):
    session_id: msgspec.Raw | UnsetType = UNSET


def read_mooncake(path: Path, arrivals: Iterator[float] | None = None) -> Iterator[TraceRequest]:
    """Yield the rows; ``arrivals`` are their seconds if they have no time stamps. Raises ConfigError that
    names line and field.
    """
    decode = msgspec.json.Decoder(_Row).decode
    first_ms = last_ms = None
    for number, (line, text) in enumerate(read_lines(path)):
        row = decode_row(decode, path, line, text)
        if row.session_id is not UNSET:
            wrong_row(
                path, line, "session_id: is there, and was not in the first row: all rows have one, or none"
            )
        at_ms = timestamp_ms(path, line, row)
        if arrivals is not None:
            if at_ms is not None:
                wrong_row(path, line, "timestamp: is there, and was not in the first row")
            at_ms = next(arrivals) * 1e3
        if at_ms is None:
            wrong_row(path, line, f"timestamp: {MISSING if number == 0 else 'is missing'}")
        if first_ms is None or last_ms is None:
            first_ms = last_ms = at_ms
        if at_ms < last_ms:
            wrong_row(path, line, f"timestamp: {at_ms:g} is before {last_ms:g} of the row above")
        last_ms = at_ms
        found = asked(path, line, row)
        check_pieces(found, PIECE_TOKENS)
        yield found.request(number, at_ms - first_ms, PIECE_TOKENS)
