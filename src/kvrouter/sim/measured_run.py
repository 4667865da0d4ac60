"""A measured run of one real engine: its flags, its hardware, and when each of its requests moved on."""

import json
import re
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvrouter.core.errors import ConfigError
from kvrouter.sim.traces.lines import read_lines
from kvrouter.sim.traces.mooncake_row import TOKENS_MAX

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ASYNC_BY_DEFAULT_SINCE = (0, 14)
"""The version of vLLM since which ``async_scheduling`` is on where nothing is said."""

Tokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Seconds = Annotated[float, Meta(ge=0)]
Above0 = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]

STAMPS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
"""The engine's own stamps of a request, in the order in which they come."""


class EngineFlags(msgspec.Struct, frozen=True, kw_only=True):
    """``engine_kwargs`` of ``meta.json``: vLLM's flags, with its names and defaults. Others are not read."""

    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8_192
    block_size: Count = 16
    tensor_parallel_size: Count = 1
    data_parallel_size: Count = 1
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=1)] = 1
    enable_expert_parallel: bool = False
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    gpu_memory_utilization: Share | None = None
    num_gpu_blocks_override: Count | None = None
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"


class RunMeta(msgspec.Struct, frozen=True, kw_only=True):
    """``meta.json``: the model, the engine's version and its flags."""

    model: Annotated[str, Meta(min_length=1)]
    vllm_version: str = ""
    engine_kwargs: EngineFlags

    @property
    def plans_ahead(self) -> bool:
        """Whether the engine planned a step as the one before it began."""
        if self.engine_kwargs.async_scheduling is not None:
            return self.engine_kwargs.async_scheduling
        numbers = tuple(map(int, re.findall(r"\d+", self.vllm_version)[:2]))
        return numbers >= ASYNC_BY_DEFAULT_SINCE


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one GPU: ``mem_size`` in GiB, ``mem_bw`` in GB/s, and the share ``mem_util`` that the engine
    may fill.
    """

    mem_size: Above0
    mem_bw: Above0
    mem_util: Share = 0.9


class GpuInstance(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of the engine; ``peak_tflops`` of one, dense, in the type that it computes in."""

    hardware: Annotated[str, Meta(min_length=1)]
    npu_mem: GpuMemory
    peak_tflops: Above0 | None = None


class GpuNode(msgspec.Struct, frozen=True):
    """One host of ``config.json``."""

    instances: Annotated[list[GpuInstance], Meta(min_length=1)]


class RunHardware(msgspec.Struct, frozen=True, kw_only=True):
    """``config.json``: GPUs, and the links between them: ``link_bw`` in GB/s, ``link_latency`` in ns."""

    nodes: Annotated[list[GpuNode], Meta(min_length=1)]
    link_bw: Above0 = 16.0
    link_latency: Seconds = 20_000.0

    @property
    def gpu(self) -> GpuInstance:
        """The GPU of the engine that was measured."""
        return self.nodes[0].instances[0]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``requests.jsonl``. Arrivals are on one clock, the engine's stamps on another, in seconds."""

    request_id: str
    input_toks: Tokens
    output_toks: Tokens
    arrival_time: Seconds
    queued_ts: Seconds
    scheduled_ts: Seconds
    first_token_ts: Seconds
    last_token_ts: Seconds


class Stamps(msgspec.Struct, frozen=True):
    """When each request arrived, was seen by the scheduler, came into a step, and had its first and its last
    token: seconds, an entry a request; NaN where that was never reached.
    """

    arrival: F64
    queued: F64
    scheduled: F64
    first: F64
    last: F64


class MeasuredRun(msgspec.Struct, frozen=True):
    """A run, with its requests by arrival: prompt and answer lengths in tokens, and their stamps.

    ``hardware`` is None where nobody says on what GPUs it ran. The stamps ``queued`` and ``scheduled`` of
    requests that only a client measured are NaN.
    """

    meta: RunMeta
    hardware: RunHardware | None
    input_tokens: I64
    output_tokens: I64
    stamps: Stamps

    @property
    def n_requests(self) -> int:
        """How many requests it has."""
        return len(self.input_tokens)

    @property
    def knows_scheduler(self) -> bool:
        """Whether the scheduler's stamps of every request are known."""
        return not bool(np.isnan(self.stamps.scheduled).any())

    @property
    def decodes(self) -> Bools:
        """Whether each answer took time from its first to its last token: not where it has one token, and not
        where all came at once.
        """
        return (self.output_tokens > 1) & (self.stamps.last > self.stamps.first)


def read_run(folder: Path) -> MeasuredRun:
    """Read ``meta.json``, ``config.json`` and ``requests.jsonl`` of ``folder``.

    Raises ConfigError that names file, line and field.
    """
    rows = _read_rows(folder / "requests.jsonl")
    rows.sort(key=lambda row: row.arrival_time)
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in ("arrival_time", *STAMPS)}
    # Both clocks tick alike; the request that waited least for the scheduler says how far they are apart.
    arrival = columns["arrival_time"]
    began = float(arrival[0])
    ahead = float((columns["queued_ts"] - (arrival - began)).min())
    return MeasuredRun(
        meta=read_json(folder / "meta.json", RunMeta),
        hardware=read_json(folder / "config.json", RunHardware),
        input_tokens=np.array([row.input_toks for row in rows], np.int64),
        output_tokens=np.array([row.output_toks for row in rows], np.int64),
        stamps=Stamps(arrival - began, *(columns[name] - ahead for name in STAMPS)),
    )


Read = TypeVar("Read")


def read_json(path: Path, kind: type[Read]) -> Read:
    """Read one JSON object of a run, in which null is what is not said; raises ConfigError that names file
    and field.
    """
    try:
        return msgspec.convert(_said(msgspec.json.decode(path.read_bytes())), kind)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", param=str(path)) from error
    except msgspec.ValidationError as error:
        field, what = _field_and_fault(error)
        raise ConfigError(f"{path}: {field}: {what}", param=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}", param=str(path)) from error


def _said(content: object) -> object:
    if isinstance(content, dict):
        return {key: _said(value) for key, value in content.items() if value is not None}
    return [_said(item) for item in content] if isinstance(content, list) else content


def _read_rows(path: Path) -> list[RequestRow]:
    rows: list[RequestRow] = []
    for line, text in read_lines(path):
        try:
            content = json.loads(text)  # reads NaN, so that its field can be named
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{line}: not JSON: {error}", param=str(path)) from error
        if isinstance(content, dict):
            _check_finite(path, line, content)
        try:
            row = msgspec.convert(content, RequestRow)
        except msgspec.ValidationError as error:
            field, what = _field_and_fault(error)
            _wrong(path, line, field, what)
        _check_times(path, line, row)
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path}: has no requests", param=str(path))
    return rows


def _check_finite(path: Path, line: int, content: dict[str, object]) -> None:
    for name, value in content.items():
        if isinstance(value, float) and not isfinite(value):
            _wrong(path, line, name, f"must be a finite number, not {value}")


def _check_times(path: Path, line: int, row: RequestRow) -> None:
    for earlier, later in pairwise(STAMPS):
        if getattr(row, later) < getattr(row, earlier):
            _wrong(path, line, later, f"{getattr(row, later)} is before {earlier}, {getattr(row, earlier)}")
    if row.first_token_ts == row.scheduled_ts:
        _wrong(path, line, "first_token_ts", "is scheduled_ts: no step takes no time")
    if row.output_toks > 1 and row.last_token_ts == row.first_token_ts:
        _wrong(path, line, "last_token_ts", f"is first_token_ts, and there are {row.output_toks} tokens")


def _field_and_fault(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the field of an error of msgspec, and what is wrong with it."""
    what, _, field = str(error).partition(" - at `$")
    missing = re.search(r"missing required field `(\w+)`", what)
    name = field.strip("`").removeprefix(".")
    if missing:
        return ".".join(filter(None, (name, missing[1]))), "is required"
    return name or "the file", what[:1].lower() + what[1:]


def _wrong(path: Path, line: int, field: str, what: str) -> NoReturn:
    raise ConfigError(f"{path}:{line}: {field}: {what}", param=field)
