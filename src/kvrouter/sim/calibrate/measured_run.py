"""A measured run of one real engine: its flags, its hardware, and when each of its requests moved on."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError
from kvrouter.core.files import read_regular
from kvrouter.core.json import Unreadable, attempted, converted
from kvrouter.core.workers import ENGINE_SIZE_MAX
from kvrouter.sim.calibrate.gpus import LINK_GB_S, known_gpu
from kvrouter.sim.traces.lines import read_lines
from kvrouter.sim.traces.mooncake_row import TOKENS_MAX

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ASYNC_BY_DEFAULT_SINCE = (0, 14)
"""The version of vLLM since which ``async_scheduling`` is on by default."""

Tokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
Count = Annotated[int, Meta(ge=1, le=ENGINE_SIZE_MAX)]
Seconds = Annotated[float, Meta(ge=0)]
Above0 = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]

LARGE_GPU_GIB = 70.0
"""From this memory on vLLM takes larger batches by default, except on A100s."""

DEFAULT_BATCH = {True: {"max_num_seqs": 1_024, "max_num_batched_tokens": 8_192}}
DEFAULT_BATCH[False] = {"max_num_seqs": 256, "max_num_batched_tokens": 2_048}
"""The defaults of ``vllm serve``, whether the GPU is a large one."""

STAMPS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
"""The engine's own stamps of a request, in the order in which they come."""

META_BLOCKS = ("meta.json", "engine_kwargs.num_gpu_blocks_override")
METRICS_BLOCKS = ("metrics.txt", "num_gpu_blocks")
"""The file and the field that state the number of KV blocks."""

NVLINK_GB_S = 100.0
"""Links that are faster than this are no PCIe."""

PCIE_LATENCY_NS = 20_000.0
NVLINK_LATENCY_NS = 10_000.0
"""The time of a sum over GPUs besides that of its bytes."""


class EngineFlags(msgspec.Struct, frozen=True, kw_only=True):
    """``engine_kwargs`` of ``meta.json``: vLLM's flags, with its names and defaults. Others are not read."""

    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8_192
    block_size: Count = 16
    tensor_parallel_size: Count = 1
    data_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    gpu_memory_utilization: Share | None = None
    num_gpu_blocks_override: Count | None = None
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool | None = None
    enforce_eager: bool = False
    speculative_config: dict[str, Any] | str | None = None
    enable_lora: bool = False
    cpu_offload_gb: Annotated[float, Meta(ge=0)] = 0.0
    kv_transfer_config: dict[str, Any] | str | None = None

    @property
    def drafts(self) -> bool:
        """Whether tokens were guessed ahead, several of which may come in one step."""
        return bool(self.speculative_config)


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
    """The GPUs of the engine; ``peak_tflops`` of one, dense, in 16 bits. ``npu_mem`` may be missing for GPUs
    known by name; ``tp_size`` counts if the engine's flags do not state it.
    """

    hardware: Annotated[str, Meta(min_length=1)]
    npu_mem: GpuMemory | None = None
    peak_tflops: Above0 | None = None
    tp_size: Count | None = None

    @property
    def memory(self) -> GpuMemory:
        """Its memory, from a file or its name; raises ConfigError without either."""
        if self.npu_mem is None:
            raise ConfigError(
                f"config.json: npu_mem: is required: nothing is known of {self.hardware!r}", param="npu_mem"
            )
        return self.npu_mem


class GpuNode(msgspec.Struct, frozen=True):
    """One host of ``config.json``."""

    instances: Annotated[list[GpuInstance], Meta(min_length=1)]


class RunHardware(msgspec.Struct, frozen=True, kw_only=True):
    """``config.json``: GPUs, and the links between them: ``link_bw`` in GB/s, ``link_latency`` in ns. What
    is None is that of the GPU.
    """

    nodes: Annotated[list[GpuNode], Meta(min_length=1)]
    link_bw: Above0 | None = None
    link_latency: Seconds | None = None

    @property
    def gpu(self) -> GpuInstance:
        """The GPU of the engine that was measured."""
        return self.nodes[0].instances[0]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``requests.jsonl``. Arrivals are on one clock, the engine's stamps on another, in seconds.

    ``num_cached_tokens`` of the prompt came from the engine's prefix cache.
    """

    request_id: str | int
    input_toks: Tokens
    output_toks: Tokens
    arrival_time: Seconds
    queued_ts: Seconds
    scheduled_ts: Seconds
    first_token_ts: Seconds
    last_token_ts: Seconds
    num_cached_tokens: Annotated[int, Meta(ge=0)] | None = None


class Stamps(msgspec.Struct, frozen=True):
    """When each request arrived, reached the scheduler, came into a step, and had its first and its last
    token: seconds, an entry a request; NaN if that was never reached.
    """

    arrival: F64
    queued: F64
    scheduled: F64
    first: F64
    last: F64


class MeasuredRun(msgspec.Struct, frozen=True):
    """A run, with its requests by arrival: prompt and answer lengths in tokens, and their stamps.

    ``hardware`` is None if its GPUs are unknown. The stamps ``queued`` and ``scheduled`` of requests measured
    only by a client are NaN. ``cached_tokens`` of the prompts came from a prefix cache; None if there is no
    cache or no report. ``notes`` are lines on values missing in the files, and the assumptions in their
    place.
    """

    meta: RunMeta
    hardware: RunHardware | None
    input_tokens: I64
    output_tokens: I64
    stamps: Stamps
    cached_tokens: I64 | None = None
    notes: tuple[str, ...] = ()

    @property
    def computed_tokens(self) -> I64:
        """The prompt tokens that the engine computed."""
        return self.input_tokens if self.cached_tokens is None else self.input_tokens - self.cached_tokens

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


def read_run(
    folder: Path, *, with_cache: Callable[[EngineFlags], EngineFlags] = lambda flags: flags
) -> MeasuredRun:
    """Read ``meta.json``, ``config.json`` and ``requests.jsonl`` of ``folder``. Failed requests are left out,
    and a note has their number. ``with_cache`` adds the sizes of the cache that ``metrics.txt`` reports;
    without that file it returns the same flags.

    Raises ConfigError that names file, line and field.
    """
    notes: list[str] = []
    path = folder / "requests.jsonl"
    contents = _read_rows(path, notes)
    hardware = read_hardware(folder / "config.json", notes)
    meta = _read_meta(folder / "meta.json", hardware, notes)
    flags = with_cache(meta.engine_kwargs)
    rows = [_row(path, line, content, drafts=flags.drafts) for line, content in contents]
    blocks_from = META_BLOCKS if flags is meta.engine_kwargs else METRICS_BLOCKS
    meta = replace(meta, engine_kwargs=_checked(folder, flags, rows, notes, blocks_from))
    rows.sort(key=lambda row: row.arrival_time)
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in ("arrival_time", *STAMPS)}
    # Both clocks tick alike; the request that waited least for the scheduler says how far they are apart.
    arrival = columns["arrival_time"]
    began = float(arrival[0])
    ahead = float((columns["queued_ts"] - (arrival - began)).min())
    return MeasuredRun(
        meta=meta,
        hardware=hardware,
        input_tokens=np.array([row.input_toks for row in rows], np.int64),
        output_tokens=np.array([row.output_toks for row in rows], np.int64),
        stamps=Stamps(arrival - began, *(columns[name] - ahead for name in STAMPS)),
        cached_tokens=_cached_tokens(rows, flags, notes),
        notes=tuple(notes),
    )


def _checked(
    folder: Path, flags: EngineFlags, rows: list[RequestRow], notes: list[str], blocks_from: tuple[str, str]
) -> EngineFlags:
    """Return flags with which the engine can have answered all ``rows``; ``blocks_from`` are the file and the
    field that state the number of blocks.
    """
    longest = max(row.input_toks for row in rows)
    if flags.enable_chunked_prefill is False and longest > flags.max_num_batched_tokens:
        if not any(note.startswith("max_num_batched_tokens") for note in notes):
            _wrong_file(
                folder / "meta.json",
                "engine_kwargs.max_num_batched_tokens",
                f"{flags.max_num_batched_tokens}: a prompt has {longest} tokens, and enable_chunked_prefill "
                "is false",
            )
        flags = replace(flags, max_num_batched_tokens=longest)
        notes.append(f"max_num_batched_tokens: {longest}, the longest prompt: chunked prefill is off")
    blocks = max(-(-(row.input_toks + row.output_toks) // flags.block_size) for row in rows)
    if flags.num_gpu_blocks_override is not None and blocks > flags.num_gpu_blocks_override:
        file, field = blocks_from
        _wrong_file(
            folder / file,
            field,
            f"{flags.num_gpu_blocks_override}: a request has {blocks} blocks of {flags.block_size} tokens",
        )
    return flags


def _cached_tokens(rows: list[RequestRow], flags: EngineFlags, notes: list[str]) -> I64 | None:
    cached = [row.num_cached_tokens for row in rows]
    n_unknown = cached.count(None)
    if n_unknown and flags.enable_prefix_caching is not False:
        which = "" if n_unknown == len(cached) else f"of {n_unknown} requests "
        notes.append(
            f"num_cached_tokens: {which}not in requests.jsonl, and prefix caching is not off: prompts are "
            "taken to share nothing"
        )
    known = np.array([count or 0 for count in cached], np.int64)
    if not known.any():
        return None
    all_tokens = sum(row.input_toks for row in rows)
    notes.append(
        f"{known.sum()} of {all_tokens} prompt tokens came from the prefix cache: taken for the beginning "
        "of one text that all share"
    )
    return known


def _read_meta(path: Path, hardware: RunHardware, notes: list[str]) -> RunMeta:
    """Read the engine's flags; missing ones get vLLM's defaults on its GPU."""
    content = read_json(path, dict[str, Any])
    flags = content.get("engine_kwargs")
    kwargs: dict[str, Any] = {}
    if isinstance(flags, dict):
        kwargs = {str(key).replace("-", "_"): value for key, value in flags.items()}
        content["engine_kwargs"] = kwargs
    meta = convert_json(path, content, RunMeta)
    flags, gpu = meta.engine_kwargs, hardware.gpu
    if flags.pipeline_parallel_size > 1:
        _wrong_file(
            path,
            "engine_kwargs.pipeline_parallel_size",
            f"{flags.pipeline_parallel_size}: engines whose stages work on several batches at once cannot be "
            "calibrated; measure one with tensor_parallel_size instead",
        )
    is_large = gpu.memory.mem_size >= LARGE_GPU_GIB and "a100" not in gpu.hardware.lower()
    for name, default in DEFAULT_BATCH[is_large].items():
        if name not in kwargs:
            flags = replace(flags, **{name: default})
            notes.append(f"{name}: not in meta.json: {default}, which vllm serve takes on such a GPU")
    if gpu.tp_size is not None and "tensor_parallel_size" not in kwargs:
        flags = replace(flags, tensor_parallel_size=gpu.tp_size)
    elif gpu.tp_size not in (None, flags.tensor_parallel_size):
        notes.append(
            f"tensor_parallel_size: {flags.tensor_parallel_size} of meta.json, though tp_size of config.json "
            f"is {gpu.tp_size}"
        )
    if not meta.vllm_version and flags.async_scheduling is None:
        flags = replace(flags, async_scheduling=True)
        notes.append("vllm_version: not in meta.json: steps are planned ahead, as vLLM does since 0.14")
    notes += _not_modelled(flags)
    return replace(meta, engine_kwargs=flags)


def _not_modelled(flags: EngineFlags) -> list[str]:
    found = []
    if flags.drafts:
        found.append(
            "speculative_config: how many drafted tokens are accepted is not modelled: it is a part of the "
            "time per token that is fitted, and without requests none is taken to be accepted"
        )
    found += [
        f"{name}: is not modelled: what it costs is a part of the figures that are fitted"
        for name in ("enable_lora", "cpu_offload_gb", "kv_transfer_config")
        if getattr(flags, name)
    ]
    return found


def read_hardware(path: Path, notes: list[str]) -> RunHardware:
    """Read ``config.json``; add to ``notes`` the values that the GPU's name gives.

    Raises ConfigError that names file and field, for a GPU with unknown memory too.
    """
    hardware = read_json(path, RunHardware)
    gpu = hardware.gpu
    known = known_gpu(gpu.hardware, None if gpu.npu_mem is None else gpu.npu_mem.mem_size)
    memory = gpu.npu_mem
    if memory is None:
        if known is None:
            _wrong_file(
                path,
                "npu_mem",
                f"is required: nothing is known of the GPU {gpu.hardware!r}; give mem_size in GiB and mem_bw "
                "in GB/s, and peak_tflops",
            )
        memory = GpuMemory(mem_size=known.memory_gib, mem_bw=known.bandwidth_gb_s)
        notes.append(
            f"npu_mem: not in config.json: {known.memory_gib:g} GiB at {known.bandwidth_gb_s:g} GB/s, which "
            f"{known.name} has"
        )
    link_bw, latency = hardware.link_bw, hardware.link_latency
    if link_bw is None:
        link_bw = LINK_GB_S if known is None else known.link_gb_s
    if latency is None:
        latency = PCIE_LATENCY_NS if known is None or known.link_gb_s < NVLINK_GB_S else NVLINK_LATENCY_NS
    node = GpuNode([replace(gpu, npu_mem=memory), *hardware.nodes[0].instances[1:]])
    return replace(hardware, nodes=[node, *hardware.nodes[1:]], link_bw=link_bw, link_latency=latency)


RUN_FILE_BYTES_MAX = 4 * 1024 * 1024
"""The limit of a file that describes a run or its hardware."""

Read = TypeVar("Read")


def read_json(path: Path, kind: type[Read]) -> Read:
    """Read one JSON object of a run, in which null is a missing value; raises ConfigError that names file and
    field.
    """
    try:
        content: object = attempted(msgspec.json.decode, read_regular(path, bytes_max=RUN_FILE_BYTES_MAX))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", param=str(path)) from error
    except Unreadable as error:
        raise ConfigError(f"{path}: {error}", param=str(path)) from error
    return convert_json(path, _without_nulls(content), kind)


def convert_json(path: Path, content: object, kind: type[Read]) -> Read:
    """Return the ``content`` of ``path`` as ``kind``; raises ConfigError that names file and field."""
    try:
        return converted(content, kind)
    except Unreadable as error:
        field, what = _field_and_fault(error)
        raise ConfigError(f"{path}: {field}: {what}", param=field) from error


def _without_nulls(content: object) -> object:
    if isinstance(content, dict):
        return {key: _without_nulls(value) for key, value in content.items() if value is not None}
    return [_without_nulls(item) for item in content] if isinstance(content, list) else content


def _read_rows(path: Path, notes: list[str]) -> list[tuple[int, object]]:
    """Return the requests that were answered, each with its line."""
    rows: list[tuple[int, object]] = []
    n_failed = 0
    for line, text in read_lines(path):
        try:
            content = json.loads(text)  # reads NaN, so that its field can be named
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{line}: not JSON: {error}", param=str(path)) from error
        if isinstance(content, dict) and _failed(content):
            n_failed += 1
        else:
            rows.append((line, content))
    if not rows:
        failed = f": all {n_failed} failed" if n_failed else ""
        raise ConfigError(f"{path}: has no requests{failed}", param=str(path))
    if n_failed:
        notes.append(
            f"{n_failed} of {n_failed + len(rows)} requests failed (error, or null for a stamp): left out, "
            "and with them what they cost the others"
        )
    return rows


def _failed(content: dict[str, object]) -> bool:
    """Whether a row states that its request had no answer: an absent key is a mistake of the file instead."""
    if content.get("error") or content.get("success") is False:
        return True
    return any(name in content and content[name] is None for name in ("output_toks", *STAMPS))


def _row(path: Path, line: int, content: object, *, drafts: bool) -> RequestRow:
    if isinstance(content, dict):
        _check_finite(path, line, content)
    try:
        row = converted(content, RequestRow)
    except Unreadable as error:
        field, what = _field_and_fault(error)
        _wrong(path, line, field, what)
    _check_times(path, line, row, drafts=drafts)
    if (row.num_cached_tokens or 0) >= row.input_toks:
        _wrong(path, line, "num_cached_tokens", f"{row.num_cached_tokens} of {row.input_toks} input_toks")
    return row


def _check_finite(path: Path, line: int, content: dict[str, object]) -> None:
    for name, value in content.items():
        if isinstance(value, float) and not isfinite(value):
            _wrong(path, line, name, f"must be a finite number, not {value}")


def _check_times(path: Path, line: int, row: RequestRow, *, drafts: bool) -> None:
    for earlier, later in pairwise(STAMPS):
        if getattr(row, later) < getattr(row, earlier):
            _wrong(path, line, later, f"{getattr(row, later)} is before {earlier}, {getattr(row, earlier)}")
    if row.first_token_ts == row.scheduled_ts:
        _wrong(path, line, "first_token_ts", "is scheduled_ts: no step takes no time")
    if row.output_toks > 1 and row.last_token_ts == row.first_token_ts and not drafts:
        _wrong(path, line, "last_token_ts", f"is first_token_ts, and there are {row.output_toks} tokens")


def _field_and_fault(error: Unreadable) -> tuple[str, str]:
    """Return the field of an error of msgspec, and its problem."""
    what, _, field = str(error).partition(" - at `$")
    missing = re.search(r"missing required field `(\w+)`", what)
    name = field.strip("`").removeprefix(".")
    if missing:
        return ".".join(filter(None, (name, missing[1]))), "is required"
    return name or "the file", what[:1].lower() + what[1:]


def _wrong_file(path: Path, field: str, what: str) -> NoReturn:
    raise ConfigError(f"{path}: {field}: {what}", param=field)


def _wrong(path: Path, line: int, field: str, what: str) -> NoReturn:
    raise ConfigError(f"{path}:{line}: {field}: {what}", param=field)
