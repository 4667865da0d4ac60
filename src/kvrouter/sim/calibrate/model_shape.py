"""The shape of a model: the weights and computation of a step, from its dimensions."""

import re
from pathlib import Path
from typing import NamedTuple

from kvrouter.core.errors import ConfigError
from kvrouter.sim.calibrate.known_models import KNOWN_MODELS, STORED_AS
from kvrouter.sim.calibrate.model_dimensions import AttentionLayers, ModelDimensions, read_dimensions
from kvrouter.sim.calibrate.weight_format import (
    WeightFormat,
    format_in_name,
    format_of_config,
    format_of_method,
)


class ModelShape(NamedTuple):
    """Parameters that steps compute with, outside experts and in them, and what attention needs.

    ``attention_width`` is half of the products that a token's attention to another one takes in a layer that
    computes with all heads; ``decode_width`` is that of a decoding token, which is more in models with latent
    attention. A token has ``kv_heads · kv_values`` values of KV in a layer: GPUs share the heads, but each
    needs one. ``dense_params`` include the ``output_params``, which quantized models keep in 16 bits;
    ``embedding_params`` are looked up, and so take memory alone. ``expert_params`` are those of all
    ``n_experts``, of which a token is computed by ``experts_per_token``.
    """

    layers: int
    hidden: int
    attention_width: int
    decode_width: int
    kv_heads: int
    kv_values: int
    dense_params: float
    attention: AttentionLayers
    output_params: float = 0.0
    expert_params: float = 0.0
    n_experts: int = 1
    experts_per_token: int = 1
    expert_layers: int = 0
    embedding_params: float = 0.0
    weights: WeightFormat | None = None

    @property
    def active_params(self) -> float:
        """The parameters that one token is multiplied with."""
        return self.dense_params + self.expert_params * self.experts_per_token / self.n_experts

    def read_params(self, n_tokens: float) -> float:
        """The parameters that a step of ``n_tokens`` reads, where each token picks its experts at random."""
        missed = float((1.0 - self.experts_per_token / self.n_experts) ** n_tokens)
        return self.dense_params + self.expert_params * (1.0 - missed)


def shape_of(dimensions: ModelDimensions) -> ModelShape:
    """Return the shape of a decoder with gated MLPs, and grouped-query or latent attention."""
    # A token of the output is multiplied with as many parameters as the embedding has, tied or not.
    output = dimensions.vocab_size * dimensions.hidden_size
    n_experts, expert_layers = dimensions.n_experts, dimensions.expert_layers
    expert_mlp = dimensions.moe_intermediate_size or dimensions.intermediate_size
    shared = dimensions.shared_expert_intermediate_size or (dimensions.n_shared_experts or 0) * expert_mlp
    dense_mlp = dimensions.intermediate_size
    if dimensions.intermediate_size_mlp is not None:
        dense_mlp, shared = dimensions.intermediate_size_mlp, expert_mlp
    dense_mlps = (dimensions.num_hidden_layers - expert_layers) * dense_mlp + expert_layers * shared
    shape = _attention_shape(dimensions)
    return shape._replace(
        dense_params=float(shape.dense_params + 3 * dimensions.hidden_size * dense_mlps + output),
        output_params=float(output),
        expert_params=float(3 * dimensions.hidden_size * expert_mlp * expert_layers * n_experts)
        if expert_layers
        else 0.0,
        n_experts=n_experts,
        experts_per_token=min(n_experts, dimensions.num_experts_per_tok or dimensions.experts_per_token or 1),
        expert_layers=expert_layers,
        embedding_params=0.0 if dimensions.tie_word_embeddings else float(output),
        weights=None
        if dimensions.quantization_config is None
        else format_of_config(dimensions.quantization_config),
    )


def _attention_shape(dimensions: ModelDimensions) -> ModelShape:
    """Return the shape of a decoder that has attention alone."""
    heads, hidden = dimensions.num_attention_heads, dimensions.hidden_size
    if dimensions.kv_lora_rank is not None:
        nope, rope, value = (
            dimensions.qk_nope_head_dim or 0,
            dimensions.qk_rope_head_dim or 0,
            dimensions.v_head_dim or 0,
        )
        query = heads * (nope + rope)
        query_params = (
            hidden * query if dimensions.q_lora_rank is None else dimensions.q_lora_rank * (hidden + query)
        )
        kv_params = hidden * (dimensions.kv_lora_rank + rope) + dimensions.kv_lora_rank * heads * (
            nope + value
        )
        params = query_params + kv_params + heads * value * hidden
        # Prefill attends with full keys and values; decoding with the latent ones, which are larger.
        width = heads * (nope + rope + value) // 2
        decode_width = heads * (2 * dimensions.kv_lora_rank + rope) // 2
        kv_heads, kv_values = 1, dimensions.kv_lora_rank + rope
    else:
        head = dimensions.head_dim or hidden // heads
        kv_heads = dimensions.num_key_value_heads or heads
        width = decode_width = heads * head
        kv_values = 2 * head
        params = hidden * (2 * width + kv_heads * kv_values)
    return ModelShape(
        layers=dimensions.num_hidden_layers,
        hidden=hidden,
        attention_width=width,
        decode_width=decode_width,
        kv_heads=kv_heads,
        kv_values=kv_values,
        dense_params=float(dimensions.num_hidden_layers * params),
        attention=dimensions.attention,
    )


_SIZE = re.compile(r"(?<![\d.a-z])(\d+(?:\.\d+)?)b(?![a-z])")
_ACTIVE = re.compile(r"-a(\d+(?:\.\d+)?)b")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def model_shape(model: str, folder: Path, config: Path | None = None) -> tuple[ModelShape, str]:
    """Return the shape of ``model``, and its source: ``config``, ``model.json`` of ``folder``, the
    ``config.json`` of a model that is a folder, the known models by name, the local cache of Hugging Face, or
    a guess by the size in the name. Nothing is downloaded.

    Raises ConfigError if the name has no size and there is no such file.
    """
    name = model.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for path in (config, folder / "model.json", Path(model) / "config.json"):
        if path is not None and (path is config or path.is_file()):
            source = path.name if path.parent == folder else str(path)
            return _with_weights(shape_of(read_dimensions(path)), model), source
    known = [key for key in KNOWN_MODELS if re.match(re.escape(key) + r"(?![\d.])(?!-a\d)", name)]
    if known:
        key = max(known, key=len)
        shape = _with_weights(shape_of(KNOWN_MODELS[key]), model)
        if shape.weights is None and key in STORED_AS:
            shape = shape._replace(weights=format_of_method(STORED_AS[key]))
        return shape, "the model's name"
    cached = _cached_config(model)
    if cached is not None:
        return _with_weights(shape_of(read_dimensions(cached)), model), str(cached)
    size = _SIZE.search(name)
    if size is None:
        raise ConfigError(
            f"model: nothing is known of {model!r}; give its config.json from Hugging Face with "
            f"--model-config, or put it into {folder / 'model.json'}",
            param="model",
        )
    guess = _guessed(float(size[1]) * 1e9, _ACTIVE.search(name))
    return _with_weights(guess, model), f"a guess from the size in {name!r}"


def _with_weights(shape: ModelShape, model: str) -> ModelShape:
    return shape if shape.weights is not None else shape._replace(weights=format_in_name(model))


def _cached_config(model: str) -> Path | None:
    """Return the ``config.json`` of a repository in the local cache of Hugging Face; None without one."""
    if not _REPOSITORY.fullmatch(model):
        return None
    # An import that takes long, of what few runs need.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    found = try_to_load_from_cache(model, "config.json")
    return Path(found) if isinstance(found, str) else None


def _guessed(params: float, active: re.Match[str] | None) -> ModelShape:
    """Layers and widths grow with the size as they do from Llama 3's 1 B to its 405 B."""
    scale = params / 8e9
    hidden, layers = 128 * round(32 * scale**0.3), round(32 * scale**0.4)
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        attention_width=hidden,
        decode_width=hidden,
        kv_heads=8,
        kv_values=256,
        dense_params=params,
        attention=AttentionLayers(layers, 0, 0),
    )
    if active is None:
        return shape
    active_params = min(params, float(active[1]) * 1e9)
    return shape._replace(
        dense_params=0.3 * active_params,
        expert_params=params - 0.3 * active_params,
        n_experts=max(1, round(8 * (params - 0.3 * active_params) / (0.7 * active_params))),
        experts_per_token=8,
        expert_layers=layers,
    )
