"""The timing that a model's size and a GPU's figures lead one to expect, with no request seen."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError
from kvrouter.core.timing import Timing
from kvrouter.sim.calibrate.engine_run import engine_config, simulate
from kvrouter.sim.calibrate.gpus import LINK_GB_S, known_gpu
from kvrouter.sim.calibrate.measured_run import (
    F64,
    EngineFlags,
    GpuInstance,
    MeasuredRun,
    RunHardware,
    RunMeta,
    Stamps,
)
from kvrouter.sim.calibrate.model_dimensions import AttentionLayers
from kvrouter.sim.calibrate.model_shape import ModelShape
from kvrouter.sim.calibrate.weight_format import WeightFormat, format_of_method

FLOPS_PER_BYTE = 300.0
"""FLOPs of an unknown GPU for each byte of its memory bandwidth."""

COMPUTE_SHARE = 0.7
"""The share of a GPU's peak that large matrix products reach."""

BANDWIDTH_SHARE = 0.85
"""The share of a GPU's memory bandwidth that a step reaches."""

STEP_MS = 1.0
"""The fixed time of a step: its launch, its sampling, its bookkeeping."""

PREFILL_STEP_MS = 2.0
"""The extra time of a step with prefill, which cannot be launched as one recorded graph."""

SEQUENCE_MS = 0.02
"""The time of sampling one token."""

MIXED_SHARE = 0.7
"""How much longer the reading of KV takes in a step that prefills too."""

EAGER_LAYER_MS = 0.2
"""The time of launching the kernels of a layer if steps are not recorded graphs."""

OVERLAP = 4.0
"""How fully reading weights and computing with them overlap: the exponent of their sum, infinite if the
shorter one costs nothing."""

COMPUTE_SHARE_LEAST = 0.25
"""The share of its computing that a prompt token takes at least, though weights are read meanwhile."""

LAYERS_LEAST = 0.01
"""Layers that attend to all tokens, at least: a figure of 0 could not be fitted."""

POINTS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The quantiles that represent a distribution."""

ROUNDS = 2
"""How often the batches are looked for."""

ROUNDED_LESS_THAN = 1.15
"""A stated GPU memory above the known one by less than this factor is the size that it is sold with."""

BLOCKS_MAX = 1 << 31
"""More blocks no mock engine has; what models of next to no KV could have would be without end."""

GIB = 1 << 30

OTHER_MEMORY_GIB = 0.3
"""Memory of each GPU that holds neither weights, KV nor activations: the engine's own."""

LOGIT_BYTES = 8
"""The memory of a score of one token of the vocabulary while a request's next token is drawn."""


class Roofline(NamedTuple):
    """The expected timing, tokens of KV that fit into memory, and what of it is a guess."""

    timing: Timing
    kv_tokens: int
    guesses: tuple[str, ...]


def roofline(run: MeasuredRun, shape: ModelShape) -> Roofline:
    """Return the expected timing of ``run`` from its model and hardware alone.

    Raises ConfigError if the model does not fit into the memory of its GPUs, and if these are unknown.
    """
    if run.hardware is None:
        raise ConfigError("config.json: is needed: it says on what GPUs the engine runs", param="hardware")
    guesses: list[str] = []
    costs = _costs(run, run.hardware, shape, guesses)
    flags = run.meta.engine_kwargs
    kv_bytes = _kv_bytes(flags, shape, costs.windows.kept)
    kv_tokens = _kv_tokens(run, run.hardware, shape, costs, kv_bytes, guesses)
    # What weights cost depends on the batches, and batches depend on what steps cost.
    half = max(1.0, flags.max_num_seqs / 2)
    batches = _Batches(
        decoding=np.full(len(POINTS), half),
        prefilled=np.full(len(POINTS), float(flags.max_num_batched_tokens)),
        alone=0.0,
    )
    for _ in range(ROUNDS):
        timing = costs.timing(batches)
        config = replace(engine_config(run, kv_tokens), timing=timing)
        batches = _batches_of(run, simulate(run, config), flags.data_parallel_size)
    return Roofline(costs.timing(batches), kv_tokens, tuple(guesses))


class _Batches(NamedTuple):
    """The contents of a run's steps.

    ``decoding`` are quantiles of the sequences that decode in a step, over all tokens; ``prefilled`` are
    quantiles of the prompt tokens that a step computes, over all requests. ``alone`` is the share of prefills
    in steps without decoding.
    """

    decoding: F64
    prefilled: F64
    alone: float


def _batches_of(run: MeasuredRun, stamps: Stamps, n_ranks: int = 1) -> _Batches:
    """Return the batches of requests with these stamps, on one of the engine's ``n_ranks``."""
    ended = np.where(np.isnan(stamps.last), stamps.first, stamps.last)
    times = np.concatenate((stamps.first, ended))
    changes = np.concatenate((np.ones(run.n_requests), -np.ones(run.n_requests)))
    order = np.argsort(times, kind="stable")
    lasts = np.diff(times[order])
    running = np.cumsum(changes[order])[:-1]
    found = np.searchsorted(np.sort(stamps.first), stamps.scheduled, side="right") - np.searchsorted(
        np.sort(ended), stamps.scheduled, side="right"
    )
    limit = run.meta.engine_kwargs.max_num_batched_tokens
    return _Batches(
        decoding=np.maximum(1.0, _quantiles(running, lasts * running) / n_ranks),
        prefilled=np.quantile(np.minimum(run.computed_tokens, limit), POINTS),
        alone=float(np.mean(found < n_ranks)),
    )


def _quantiles(values: F64, weights: F64) -> F64:
    order = np.argsort(values, kind="stable")
    shares = np.cumsum(weights[order])
    if not len(values) or shares[-1] <= 0.0:
        return np.ones(len(POINTS))
    at = np.searchsorted(shares, np.array(POINTS) * shares[-1])
    found: F64 = values[order][at]
    return found


class _Costs(NamedTuple):
    """Costs of the parts of a step, in milliseconds: reading weights, products with them for each token,
    fixed costs of each step, the links, the pairs of attention and the KV that is read.
    """

    shape: ModelShape
    weights: WeightFormat
    split: "_Split"
    windows: "WindowShares"
    byte_ms: float
    product_ms: float
    step_ms: float
    step_launch_ms: float
    step_link_ms: float
    token_link_ms: float
    pair_ms: float
    kv_token_ms: float

    def matrices_ms(self, n_tokens: float) -> float:
        """Return what products with weights take: reading these or computing, whichever takes longer."""
        read = _step_bytes(self.shape, self.weights, self.split, n_tokens) * self.byte_ms
        longer = float((read**OVERLAP + (self.product_ms * n_tokens) ** OVERLAP) ** (1.0 / OVERLAP))
        return max(longer, self.step_launch_ms)

    def timing(self, batches: _Batches) -> Timing:
        """Return the timing with the same costs for steps with these batches."""
        base, sequence = _line(
            batches.decoding, [self.matrices_ms(n) for n in batches.decoding], least=self.matrices_ms(1.0)
        )
        decoding = float(batches.decoding.mean())
        # A step that decodes anyway reads weights once for both.
        shared = (1.0 - batches.alone) * self.matrices_ms(decoding)
        chunks = batches.prefilled
        if chunks.min() == chunks.max():
            chunks = chunks * np.linspace(0.5, 1.0, len(chunks))
        first, linear = _line(chunks, [self.matrices_ms(decoding + n) - shared for n in chunks])
        linear = max(linear, COMPUTE_SHARE_LEAST * self.product_ms)
        decode_base = base + self.step_ms + self.step_link_ms
        return Timing(
            prefill_quadratic=0.0,
            prefill_linear=linear + self.token_link_ms,
            prefill_base=first + PREFILL_STEP_MS + self.step_link_ms,
            prefill_attention=self.pair_ms,
            decode_quadratic=0.0,
            decode_linear=0.0,
            decode_base=decode_base,
            decode_min=min(1.0, decode_base),
            decode_sequence=sequence + SEQUENCE_MS + self.token_link_ms,
            decode_kv_token=self.kv_token_ms,
            mixed_kv_token=MIXED_SHARE * self.kv_token_ms,
        )


def _line(x: F64, y: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """Return the least-squares line through points, where it is at x = 0, ``least`` or more, and its slope, 0
    or more.
    """
    values = np.array(y)
    away = x - x.mean()
    spread = float(away @ away)
    slope = max(0.0, float(away @ values) / spread) if spread > 0.0 else 0.0
    start = float(values.mean()) - slope * float(x.mean())
    if start < least:
        start, slope = least, max(0.0, float(x @ (values - least)) / float(x @ x))
    return start, slope


def _costs(run: MeasuredRun, hardware: RunHardware, shape: ModelShape, guesses: list[str]) -> _Costs:
    flags, memory = run.meta.engine_kwargs, hardware.gpu.memory
    peak = _peak_tflops(hardware.gpu, guesses)
    weights = _weights(flags, shape, guesses)
    split = _Split.of(flags)
    windows = window_shares(run, shape.attention)
    flop_ms = 1.0 / (peak * COMPUTE_SHARE * 1e9)
    byte_ms = 1.0 / (memory.mem_bw * BANDWIDTH_SHARE * 1e6)
    # The output is computed of the last token alone. Each rank sends its tokens to the experts of all, and
    # computes as many of the others' in turn.
    params = shape.dense_params - shape.output_params
    params += shape.expert_params * shape.experts_per_token / shape.n_experts
    launch_ms = EAGER_LAYER_MS * shape.layers if flags.enforce_eager else 0.0
    if flags.enforce_eager:
        guesses.append(f"enforce_eager: {launch_ms:g} ms to launch the {shape.layers} layers of a step")
    if shape.attention.windowed:
        guesses.append(
            f"{shape.attention.windowed} of {shape.layers} layers attend to {shape.attention.window} tokens: "
            "what attention and KV take is that of this run's lengths"
        )
    link_byte_ms = 1.0 / ((hardware.link_bw or LINK_GB_S) * 1e6)
    return _Costs(
        shape,
        weights,
        split,
        windows,
        byte_ms=byte_ms,
        product_ms=2.0 * params / split.tensor * flop_ms / _speedup(hardware.gpu, weights),
        step_ms=STEP_MS,
        step_launch_ms=launch_ms,
        step_link_ms=split.n_links(shape) * (hardware.link_latency or 0.0) / 1e6,
        token_link_ms=2.0 * shape.hidden * split.link_shares(shape) * link_byte_ms,
        pair_ms=4.0 * windows.prefill * shape.attention_width / split.tensor * flop_ms,
        kv_token_ms=max(
            _kv_bytes(flags, shape, windows.decode) * byte_ms,
            4.0 * windows.decode * shape.decode_width / split.tensor * flop_ms,
        ),
    )


class _Split(NamedTuple):
    """How many GPUs attention, dense layers and experts are split among."""

    tensor: int
    experts: int

    @classmethod
    def of(cls, flags: EngineFlags) -> "_Split":
        """As vLLM does it: experts over the data-parallel ranks too, with expert parallelism or without."""
        return cls(flags.tensor_parallel_size, flags.tensor_parallel_size * flags.data_parallel_size)

    def link_shares(self, shape: ModelShape) -> float:
        """How often the hidden states of a token go over a link, in all layers."""
        # Two sums over all shards a layer; each shard sends and receives its part of the hidden states twice.
        shares = 2 * shape.layers * 2 * (self.tensor - 1) / self.tensor
        # Before the experts all ranks are sent the token, after them it is sent back.
        ranks = self.experts // self.tensor
        return shares + 2 * shape.expert_layers * (ranks - 1) / self.tensor

    def n_links(self, shape: ModelShape) -> int:
        """How often a step waits for a link."""
        return (2 * shape.layers if self.tensor > 1 else 0) + (
            2 * shape.expert_layers if self.experts > self.tensor else 0
        )


class WindowShares(NamedTuple):
    """The share of work left by layers with a window, of layers that attend to everything, over all layers:
    of KV that decoding reads, of pairs that prefill computes, and of KV that is kept.
    """

    decode: float
    prefill: float
    kept: float


def window_shares(run: MeasuredRun, attention: AttentionLayers) -> WindowShares:
    """Return layers, those with a window counted by their share of the run's lengths."""
    prompt = run.input_tokens.astype(np.float64)
    whole = prompt + run.output_tokens
    window = float(attention.window or np.inf)

    def pairs(tokens: F64, window: float) -> F64:
        beyond = np.maximum(tokens - window, 0.0)
        return (np.square(tokens) - np.square(beyond)) / 2.0

    every, last = (
        np.array(
            [
                float(np.sum(pairs(whole, size) - pairs(prompt, size))),
                float(np.sum(pairs(prompt, size))),
                float(np.sum(np.minimum(whole, size))),
            ]
        )
        for size in (np.inf, window)
    )
    layers = np.maximum(LAYERS_LEAST, attention.full + attention.windowed * last / np.maximum(every, 1.0))
    return WindowShares(*layers.tolist())


def _peak_tflops(gpu: GpuInstance, guesses: list[str]) -> float:
    if gpu.peak_tflops is not None:
        return gpu.peak_tflops
    known = known_gpu(gpu.hardware, gpu.memory.mem_size)
    if known is not None:
        return known.tflops
    peak_tflops = FLOPS_PER_BYTE * gpu.memory.mem_bw / 1e3
    guesses.append(
        f"{gpu.hardware}: nothing is known of this GPU: peak_tflops: {peak_tflops:g} from its bandwidth"
    )
    return peak_tflops


def _weights(flags: EngineFlags, shape: ModelShape, guesses: list[str]) -> WeightFormat:
    """Return how weights are stored: the flags win over the model, except for the number of bits."""
    found = shape.weights
    if flags.quantization is not None:
        stated = format_of_method(flags.quantization)
        if found is None or not (stated.is_guess or stated.type == found.type == "16bit"):
            found = stated
    if found is None:
        bits = 32 if flags.dtype in ("float32", "float") else 16
        return WeightFormat(flags.dtype, bits)
    if found.is_guess:
        guesses.append(f"quantization: nothing is known of {found.name!r}: {found.bits:g} bits are assumed")
    elif flags.quantization is None:
        guesses.append(f"quantization: {found.name}, {found.bits:g} bits, by the model")
    return found


def _speedup(gpu: GpuInstance, weights: WeightFormat) -> float:
    """Return the speed of products relative to 16 bits."""
    known = known_gpu(gpu.hardware)
    if weights.bits >= 32:
        return 0.5
    if weights.type == "int8":
        return 2.0
    if weights.type == "fp8":
        return 2.0 if known is None or known.fp8 else 1.0
    if weights.type in ("fp4", "int4"):
        return 4.0 if known is None or known.fp4 else 1.0
    return 1.0


def _step_bytes(shape: ModelShape, weights: WeightFormat, split: _Split, n_tokens: float) -> float:
    """Return the bytes of weights that a step reads, on each GPU, if each rank has ``n_tokens`` tokens."""
    experts = shape.read_params(n_tokens * split.experts / split.tensor) - shape.dense_params
    dense = 2.0 * shape.output_params + _dense_bytes(weights) * (shape.dense_params - shape.output_params)
    return dense / split.tensor + weights.bytes * experts / split.experts


def _dense_bytes(weights: WeightFormat) -> float:
    return 2.0 if weights.experts_only else weights.bytes


def _kv_bytes(flags: EngineFlags, shape: ModelShape, layers: float) -> float:
    """Return the bytes of a token's KV in ``layers`` layers, on each GPU."""
    heads = -(-shape.kv_heads // flags.tensor_parallel_size)
    return layers * heads * shape.kv_values * (1 if flags.kv_cache_dtype.startswith(("fp8", "int8")) else 2)


def check_weights(meta: RunMeta, hardware: RunHardware, shape: ModelShape) -> None:
    """Raise ConfigError where weights leave no memory for KV."""
    flags = meta.engine_kwargs
    if flags.num_gpu_blocks_override is None:
        weights = _weights(flags, shape, [])
        _left_bytes(flags, hardware, shape, weights, _Split.of(flags), least=0.0)


def _kv_tokens(
    run: MeasuredRun,
    hardware: RunHardware,
    shape: ModelShape,
    costs: _Costs,
    kv_bytes: float,
    guesses: list[str],
) -> int:
    flags = run.meta.engine_kwargs
    if flags.num_gpu_blocks_override is not None:
        return flags.num_gpu_blocks_override * flags.block_size
    least = kv_bytes * flags.block_size
    left = _left_bytes(flags, hardware, shape, costs.weights, costs.split, least=least)
    longest = int((run.input_tokens + run.output_tokens).max()) + flags.block_size
    tokens = min(int(left / kv_bytes), BLOCKS_MAX * flags.block_size)
    if tokens < longest:
        guesses.append(
            f"the engine's KV: {longest} tokens, those of the longest request; memory would leave {tokens}"
        )
    return max(tokens, longest)


def _activation_bytes(flags: EngineFlags, shape: ModelShape) -> float:
    """Return the memory of the largest step: a layer's values of all its tokens in 16 bits, and the scores of
    all requests.
    """
    widths = (shape.active_params - shape.output_params) / (shape.layers * shape.hidden)
    vocabulary = shape.output_params / shape.hidden
    values = 2.0 * flags.max_num_batched_tokens * widths / flags.tensor_parallel_size
    return values + LOGIT_BYTES * flags.max_num_seqs * vocabulary


def _left_bytes(
    flags: EngineFlags,
    hardware: RunHardware,
    shape: ModelShape,
    weights: WeightFormat,
    split: _Split,
    *,
    least: float,
) -> float:
    """Return the bytes of each GPU that weights leave for KV. Raises ConfigError where they are fewer than
    ``least``.
    """
    memory = hardware.gpu.memory
    dense = _dense_bytes(weights) * (shape.dense_params - shape.output_params)
    in_16_bits = 2.0 * (shape.output_params + shape.embedding_params)
    weight_bytes = (dense + in_16_bits) / split.tensor + weights.bytes * shape.expert_params / split.experts
    share = flags.gpu_memory_utilization or memory.mem_util
    known = known_gpu(hardware.gpu.hardware, memory.mem_size)
    # What is sold as 24 GB is less to a program; the name says how much.
    is_rounded = known is not None and 1.0 < memory.mem_size / known.memory_gib < ROUNDED_LESS_THAN
    mem_size = known.memory_gib if known is not None and is_rounded else memory.mem_size
    left = (mem_size * share - OTHER_MEMORY_GIB) * GIB - weight_bytes - _activation_bytes(flags, shape)
    if left < least:
        raise ConfigError(
            f"config.json: mem_size: {memory.mem_size:g} GiB on each of {split.tensor} GPUs leave no room "
            f"for KV next to {weight_bytes / GIB:.1f} GiB of weights; is the model's quantization said? "
            "num_gpu_blocks_override in meta.json says the KV instead",
            param="mem_size",
        )
    return left
