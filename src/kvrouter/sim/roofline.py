"""The timing that a model's size and a GPU's figures lead one to expect, with no request seen."""

import re
from typing import NamedTuple

from kvrouter.core.errors import ConfigError
from kvrouter.mock import Timing
from kvrouter.sim.measured_run import EngineFlags, RunHardware, RunMeta
from kvrouter.sim.model_shape import ModelShape

PEAK_TFLOPS = {
    "rtxpro6000": 504.0,
    "rtx5090": 210.0,
    "rtx4090": 165.0,
    "rtx3090": 71.0,
    "rtxa6000": 155.0,
    "a6000": 155.0,
    "rtx6000ada": 364.0,
    "l40s": 362.0,
    "l40": 181.0,
    "l4": 121.0,
    "a10": 125.0,
    "a100": 312.0,
    "a800": 312.0,
    "h20": 148.0,
    "h100": 989.0,
    "h800": 989.0,
    "h200": 989.0,
    "gh200": 989.0,
    "b200": 2_250.0,
    "b300": 2_250.0,
    "gb200": 2_450.0,
    "mi250": 362.0,
    "mi300": 1_307.0,
    "mi325": 1_307.0,
    "tpuv5e": 197.0,
    "tpuv6e": 918.0,
}
"""Dense 16-bit TFLOP/s of one GPU with 32-bit sums, as its vendor says, by the beginning of its name."""

FLOPS_PER_BYTE = 300.0
"""What a GPU of which nothing is known computes for each byte that its memory can give it."""

COMPUTE_SHARE = 0.8
"""The share of a GPU's peak that large matrix products reach."""

BANDWIDTH_SHARE = 0.9
"""The share of a GPU's memory bandwidth that a step reaches."""

STEP_MS = 1.0
"""What a step takes besides: its launch, its sampling, its bookkeeping."""

PREFILL_STEP_MS = 2.0
"""What a step takes more as it prefills, and so cannot be launched as one recorded graph."""

SEQUENCE_MS = 0.02
"""What sampling one token takes."""

MIXED_SHARE = 0.7
"""How much longer the reading of KV takes in a step that prefills too."""

GIB = 1 << 30

OTHER_MEMORY_GIB = 2.0
"""Memory of each GPU that holds neither weights nor KV: activations and the engine's own."""


class Roofline(NamedTuple):
    """The expected timing, tokens of KV that fit into memory, and what of it is a guess."""

    timing: Timing
    kv_tokens: int
    guesses: tuple[str, ...]


def roofline(meta: RunMeta, hardware: RunHardware | None, shape: ModelShape) -> Roofline:
    """Return what to expect of an engine from its flags, its hardware and its model's shape alone.

    Raises ConfigError where the model does not fit into the memory of its GPUs, and where nothing is known
    of these.
    """
    if hardware is None:
        raise ConfigError("config.json: is needed: it says on what GPUs the engine runs", param="hardware")
    flags = meta.engine_kwargs
    gpu = hardware.gpu
    guesses: list[str] = []
    peak_tflops = gpu.peak_tflops or _peak_tflops(gpu.hardware)
    if peak_tflops is None:
        peak_tflops = FLOPS_PER_BYTE * gpu.npu_mem.mem_bw / 1e3
        guesses.append(f"{gpu.hardware}: peak_tflops: {peak_tflops:g} from its memory bandwidth")
    shards = flags.tensor_parallel_size
    expert_shards = shards * (flags.data_parallel_size if flags.enable_expert_parallel else 1)
    weight_bytes, peak_tflops = _weights(flags, peak_tflops)
    flops_ms = peak_tflops * COMPUTE_SHARE * 1e9
    bytes_ms = gpu.npu_mem.mem_bw * BANDWIDTH_SHARE * 1e6
    kv_bytes = 2 * shape.layers * shape.kv_width * (1 if "fp8" in flags.kv_cache_dtype else 2) / shards
    # Two sums over all shards a layer; each shard sends and receives its part of the hidden states twice.
    link_share = 2 * shape.layers * 2 * (shards - 1) / shards
    token_link_ms = link_share * shape.hidden * 2 / (hardware.link_bw * 1e6)
    step_link_ms = 2 * shape.layers * hardware.link_latency / 1e6 if shards > 1 else 0.0
    read = shape.read_params(max(1, flags.max_num_seqs // 2))
    read_bytes = weight_bytes * (shape.dense_params / shards + (read - shape.dense_params) / expert_shards)
    decode_base = read_bytes / bytes_ms + STEP_MS + step_link_ms
    timing = Timing(
        prefill_quadratic=0.0,
        prefill_linear=2.0 * shape.active_params / shards / flops_ms + token_link_ms,
        prefill_base=PREFILL_STEP_MS + step_link_ms,
        prefill_attention=4.0 * shape.layers * shape.attention_width / shards / flops_ms,
        decode_quadratic=0.0,
        decode_linear=0.0,
        decode_base=decode_base,
        decode_min=min(1.0, decode_base),
        decode_sequence=SEQUENCE_MS + token_link_ms,
        decode_kv_token=kv_bytes / bytes_ms,
        mixed_kv_token=MIXED_SHARE * kv_bytes / bytes_ms,
    )
    return Roofline(timing, _kv_tokens(flags, hardware, shape, weight_bytes, kv_bytes), tuple(guesses))


def _peak_tflops(hardware: str) -> float | None:
    name = re.sub(r"[^a-z0-9]", "", hardware.lower()).removeprefix("nvidia").removeprefix("amd")
    known = [key for key in PEAK_TFLOPS if name.startswith(key)]
    return PEAK_TFLOPS[max(known, key=len)] if known else None


def _weights(flags: EngineFlags, peak_tflops: float) -> tuple[float, float]:
    """Return the bytes of one parameter, and the TFLOP/s in the type in which it is computed."""
    how = (flags.quantization or "").lower()
    if "fp8" in how or "int8" in how or "w8a8" in how:
        return 1.0, 2.0 * peak_tflops
    if "fp4" in how:
        return 0.5, 4.0 * peak_tflops
    if "awq" in how or "gptq" in how or "int4" in how:
        return 0.5, peak_tflops
    return (4.0, peak_tflops / 2.0) if flags.dtype == "float32" else (2.0, peak_tflops)


def _kv_tokens(
    flags: EngineFlags, hardware: RunHardware, shape: ModelShape, weight_bytes: float, kv_bytes: float
) -> int:
    memory = hardware.gpu.npu_mem
    if flags.num_gpu_blocks_override is not None:
        return flags.num_gpu_blocks_override * flags.block_size
    shards = flags.tensor_parallel_size
    expert_shards = shards * (flags.data_parallel_size if flags.enable_expert_parallel else 1)
    dense_params = shape.dense_params + shape.embedding_params
    weights = weight_bytes * (dense_params / shards + shape.expert_params / expert_shards)
    share = flags.gpu_memory_utilization or memory.mem_util
    left = (memory.mem_size * share - OTHER_MEMORY_GIB) * GIB - weights
    if left < kv_bytes * flags.block_size:
        raise ConfigError(
            f"config.json: mem_size: {memory.mem_size:g} GiB on each of {shards} GPUs leave no room for "
            f"KV next to {weights / GIB:.1f} GiB of weights",
            param="mem_size",
        )
    return int(left / kv_bytes)
