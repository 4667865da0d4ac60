"""The results of vLLM's own benchmark as a trace: what ``vllm bench serve --save-detailed`` sent."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.lengths import FAILED_ANSWERS, NO_CONTENTS, PIECE_TOKENS, unshared_request
from kvrouter.sim.traces.lines import decode_row, read_lines, wrong_row
from kvrouter.sim.traces.mooncake_row import PromptTokens, Tokens
from kvrouter.sim.traces.trace_request import TraceInfo, TraceRequest

FORMAT = "vllm bench"

_SEED = 0
"""Arrivals that are drawn are the same in every replay, whatever its seed."""

Seconds = Annotated[float, Meta(ge=0, le=1e15)]


DETAILS = ("input_lens", "output_lens")
"""The lists that a result has if details were asked for."""


class _Result(msgspec.Struct):
    """The lists of a result, each with an entry a request."""

    input_lens: list[PromptTokens]
    output_lens: list[Tokens]
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
    """Reads a file with one result. Without ``start_times``, which older releases do not write, requests come
    ``rate_per_s`` a second on average, as a Poisson process has it.

    Raises ConfigError that names the field, and where nothing says when requests came.
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
        self._at_s, drawn = self._arrivals(rate_per_s)
        failed = (FAILED_ANSWERS,) if 0 in result.output_lens else ()
        self.info = TraceInfo(FORMAT, PIECE_TOKENS, has_sessions=False, notes=(NO_CONTENTS, *drawn, *failed))

    def __call__(self) -> Iterator[TraceRequest]:
        """Yield the requests in the order of their arrival."""
        result = self._result
        order = np.argsort(self._at_s, kind="stable").tolist()
        for number, at in enumerate(order):
            at_s = float(self._at_s[at] - self._at_s[order[0]])
            yield unshared_request(
                self._path,
                self._line,
                number,
                at_s,
                input_tokens=result.input_lens[at],
                output_tokens=result.output_lens[at],
            )

    def _arrivals(self, rate_per_s: float | None) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return when each request came, and what a reader of the figures is to know of that."""
        starts = self._result.start_times
        if starts is not UNSET:
            if rate_per_s is not None:
                raise ConfigError(
                    f"rate-per-s: {self._path} says when its requests came, in start_times",
                    param="rate-per-s",
                )
            return np.array(starts, np.float64), ()
        if rate_per_s is None:
            wrong_row(
                self._path,
                self._line,
                "start_times: is missing, so nothing says when requests came: --rate-per-s N draws it",
            )
        if not 0.0 < rate_per_s < float("inf"):
            raise ConfigError(f"rate-per-s: {rate_per_s} is not a number above 0", param="rate-per-s")
        gaps_s = np.random.default_rng(_SEED).exponential(1.0 / rate_per_s, len(self._result.input_lens))
        note = f"the trace has no times: --rate-per-s draws arrivals, {rate_per_s:g} a second on average"
        return np.cumsum(gaps_s), (note,)
