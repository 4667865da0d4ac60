"""The results of vLLM's own benchmark as a trace: what ``vllm bench serve --save-detailed`` sent."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvrouter.sim.traces.arrivals import MISSING, drawn_arrivals, drawn_note
from kvrouter.sim.traces.lengths import (
    LENGTH_MAX,
    NO_CONTENTS,
    PIECE_TOKENS,
    unshared_request,
)
from kvrouter.sim.traces.lines import decode_row, read_lines, wrong_row
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest

FORMAT = "vllm bench"

Seconds = Annotated[float, Meta(ge=0, le=1e15)]


DETAILS = ("input_lens", "output_lens")
"""The lists that a result has if details were asked for."""


class _Result(msgspec.Struct):
    """The lists of a result, each with an entry a request."""

    input_lens: list[Annotated[int, Meta(ge=1, le=LENGTH_MAX)]]
    output_lens: list[Annotated[int, Meta(ge=0, le=LENGTH_MAX)]]
    start_times: list[Seconds] | UnsetType = UNSET


def is_result(path: Path, line: int, row: dict[str, object]) -> bool:
    """Whether an object is a result of the benchmark. Raises ConfigError for one without details."""
    if not {"total_input_tokens", "request_throughput"} <= row.keys() and DETAILS[0] not in row:
        return False
    missing = next((name for name in DETAILS if name not in row), None)
    if missing is not None:
        wrong_row(path, line, f"{missing}: is missing: vllm bench serve writes it with --save-detailed")
    return True


class VllmBenchReader:
    """Reads a file with one result. Without ``start_times``, which older releases do not write, arrivals are
    drawn at ``rate_per_s``. Raises ConfigError that names the field.
    """

    def __init__(self, path: Path, line: int, text: bytes, rate_per_s: float | None) -> None:
        self._result = result = decode_row(msgspec.json.Decoder(_Result).decode, path, line, text)
        more = next(islice(read_lines(path), 1, None), None)
        if more is not None:
            wrong_row(path, more[0], "is another result: a trace is one run")
        n_requests = len(result.input_lens)
        for name in ("output_lens", "start_times"):
            values = getattr(result, name)
            if values is not UNSET and len(values) != n_requests:
                wrong_row(path, line, f"{name}: {len(values)} of them, and {n_requests} input_lens")
        self._path, self._line = path, line
        self._at_s = self._arrivals(rate_per_s)
        drawn: tuple[str, ...] = ()
        if rate_per_s is not None and result.start_times is UNSET:
            drawn = (drawn_note(rate_per_s),)
        self.info = TraceInfo(FORMAT, PIECE_TOKENS, has_sessions=False, notes=(NO_CONTENTS, *drawn))

    def __call__(self) -> Iterator[TraceRequest]:
        """Yield the requests in the order of their arrival."""
        result = self._result
        order = sorted(range(len(self._at_s)), key=self._at_s.__getitem__)
        for number, at in enumerate(order):
            at_s = self._at_s[at] - self._at_s[order[0]]
            yield unshared_request(
                self._path,
                self._line,
                number,
                at_s,
                input_tokens=result.input_lens[at],
                output_tokens=result.output_lens[at],
            )

    def _arrivals(self, rate_per_s: float | None) -> Sequence[float]:
        """Return when each request came, in seconds of any clock."""
        if self._result.start_times is not UNSET:
            return self._result.start_times
        if rate_per_s is None:
            wrong_row(self._path, self._line, f"start_times: {MISSING}")
        return list(islice(drawn_arrivals(rate_per_s), len(self._result.input_lens)))
