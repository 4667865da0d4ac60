"""The dimensions of a decoder in a Hugging Face ``config.json``."""

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvrouter.core.errors import ConfigError
from kvrouter.sim.calibrate.measured_run import convert_json, read_json
from kvrouter.sim.calibrate.weight_format import QuantizationConfig

Dimension = Annotated[int, Meta(ge=1, le=1 << 24)]
Number = Annotated[int, Meta(ge=0, le=1 << 24)]

WINDOWED = frozenset({"sliding_attention", "chunked_attention"})
"""Entries of ``layer_types`` that attend to the last tokens alone."""

LINEAR = frozenset({"linear_attention", "mamba", "recurrent", "conv"})
"""Entries of ``layer_types`` that keep a state of fixed size."""

WINDOW_PATTERNS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
    "llama4": 4,
    "llama4_text": 4,
}
"""Models without ``layer_types`` in which one layer in this many attends to everything."""


DECODER_KEYS = ("text_config", "llm_config", "language_config")
"""Where a model of several parts has its decoder."""


class ModelDimensions(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a Hugging Face ``config.json`` with the sizes of a decoder. Others are not read."""

    num_hidden_layers: Dimension
    hidden_size: Dimension
    num_attention_heads: Dimension
    intermediate_size: Dimension
    vocab_size: Dimension
    model_type: str = ""
    num_key_value_heads: Dimension | None = None
    head_dim: Dimension | None = None
    tie_word_embeddings: bool = False
    quantization_config: QuantizationConfig | None = None
    # Latent attention
    q_lora_rank: Dimension | None = None
    kv_lora_rank: Dimension | None = None
    qk_nope_head_dim: Dimension | None = None
    qk_rope_head_dim: Dimension | None = None
    v_head_dim: Dimension | None = None
    # Layers that do not attend to everything
    sliding_window: Number | None = None
    use_sliding_window: bool = True
    sliding_window_pattern: Dimension | None = None
    attention_chunk_size: Dimension | None = None
    layer_types: list[str] | None = None
    full_attention_interval: Dimension | None = None
    # Experts
    num_experts: Number | None = None
    num_local_experts: Number | None = None
    n_routed_experts: Number | None = None
    num_experts_per_tok: Dimension | None = None
    experts_per_token: Dimension | None = None
    moe_intermediate_size: Dimension | None = None
    intermediate_size_mlp: Dimension | None = None
    n_shared_experts: Number | None = None
    shared_expert_intermediate_size: Number | None = None
    first_k_dense_replace: Number = 0
    interleave_moe_layer_step: Dimension | None = None
    decoder_sparse_step: Dimension | None = None
    mlp_only_layers: list[Number] = []

    @property
    def n_experts(self) -> int:
        """Experts of a layer that has some; 1 where all is dense."""
        return self.num_experts or self.num_local_experts or self.n_routed_experts or 1

    @property
    def attention(self) -> "AttentionLayers":
        """How many layers attend to everything, to a window, and to a state."""
        layers, window = self.num_hidden_layers, self.sliding_window or self.attention_chunk_size
        if self.layer_types is not None:
            linear = sum(each in LINEAR for each in self.layer_types)
            windowed = sum(each in WINDOWED for each in self.layer_types) if window else 0
            return AttentionLayers(layers - linear - windowed, windowed, window or 0)
        if self.full_attention_interval is not None:
            return AttentionLayers(layers // self.full_attention_interval, 0, 0)
        if not window or not self.use_sliding_window:
            return AttentionLayers(layers, 0, 0)
        pattern = self.sliding_window_pattern or WINDOW_PATTERNS.get(self.model_type)
        full = layers // pattern if pattern else 0
        return AttentionLayers(full, layers - full, window)

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        if self.n_experts == 1:
            return 0
        step = self.interleave_moe_layer_step or self.decoder_sparse_step or 1
        sparse = range(self.first_k_dense_replace, self.num_hidden_layers)
        return sum((at + 1) % step == 0 and at not in self.mlp_only_layers for at in sparse)


class AttentionLayers(NamedTuple):
    """Layers that attend to everything, and those that attend to the last ``window`` tokens."""

    full: int
    windowed: int
    window: int


def read_dimensions(path: Path) -> ModelDimensions:
    """Read a model's ``config.json``; of a multimodal model, the part on the decoder.

    Raises ConfigError that names file and field.
    """
    content = read_json(path, dict[str, object])
    for key in DECODER_KEYS:
        part = content.get(key)
        if isinstance(part, dict):
            content |= part
    dimensions = convert_json(path, content, ModelDimensions)
    if dimensions.head_dim is None and dimensions.hidden_size < dimensions.num_attention_heads:
        raise ConfigError(
            f"{path}: num_attention_heads: is more than hidden_size", param="num_attention_heads"
        )
    if dimensions.kv_lora_rank is not None:
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(dimensions, name) is None:
                raise ConfigError(f"{path}: {name}: is required with kv_lora_rank", param=name)
    return dimensions
