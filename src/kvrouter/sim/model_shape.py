"""The shape of a model: what a step reads and computes of it, from its dimensions."""

import re
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvrouter.core.errors import ConfigError
from kvrouter.sim.measured_run import read_json

Dimension = Annotated[int, Meta(ge=1, le=1 << 24)]


class ModelDimensions(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a Hugging Face ``config.json`` that say how large a decoder is. Others are not read."""

    num_hidden_layers: Dimension
    hidden_size: Dimension
    num_attention_heads: Dimension
    intermediate_size: Dimension
    vocab_size: Dimension
    num_key_value_heads: Dimension | None = None
    head_dim: Dimension | None = None
    tie_word_embeddings: bool = False
    num_experts: Dimension | None = None
    num_local_experts: Dimension | None = None
    num_experts_per_tok: Dimension | None = None
    moe_intermediate_size: Dimension | None = None


class ModelShape(NamedTuple):
    """Parameters that steps compute with, outside experts and in them, and what attention needs.

    ``embedding_params`` are looked up, and so take memory alone. ``expert_params`` are those of all
    ``n_experts``, of which a token is computed by ``experts_per_token``.
    """

    layers: int
    hidden: int
    attention_width: int
    kv_width: int
    dense_params: float
    expert_params: float = 0.0
    n_experts: int = 1
    experts_per_token: int = 1
    embedding_params: float = 0.0

    @property
    def active_params(self) -> float:
        """The parameters that one token is multiplied with."""
        return self.dense_params + self.expert_params * self.experts_per_token / self.n_experts

    def read_params(self, n_tokens: int) -> float:
        """The parameters that a step of ``n_tokens`` reads, where each token picks its experts at random."""
        missed = (1.0 - self.experts_per_token / self.n_experts) ** n_tokens
        return self.dense_params + self.expert_params * (1.0 - missed)


def shape_of(dimensions: ModelDimensions) -> ModelShape:
    """Return the shape of a decoder with gated MLPs and grouped-query attention."""
    d = dimensions
    head = d.head_dim or d.hidden_size // d.num_attention_heads
    width, kv_width = d.num_attention_heads * head, (d.num_key_value_heads or d.num_attention_heads) * head
    attention = d.hidden_size * (2 * width + 2 * kv_width)
    embedding = d.vocab_size * d.hidden_size  # that of the output, which steps compute with
    n_experts = d.num_experts or d.num_local_experts or 1
    mlp = 3 * d.hidden_size * ((d.moe_intermediate_size or d.intermediate_size) * n_experts)
    shape = ModelShape(
        d.num_hidden_layers,
        d.hidden_size,
        width,
        kv_width,
        0.0,
        embedding_params=0.0 if d.tie_word_embeddings else float(embedding),
    )
    if n_experts == 1:
        return shape._replace(dense_params=float(d.num_hidden_layers * (attention + mlp) + embedding))
    return shape._replace(
        dense_params=float(d.num_hidden_layers * attention + embedding),
        expert_params=float(d.num_hidden_layers * mlp),
        n_experts=n_experts,
        experts_per_token=d.num_experts_per_tok or 1,
    )


def _known(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocab: int,
    *,
    head: int = 128,
    experts: int | None = None,
    per_token: int | None = None,
) -> ModelShape:
    return shape_of(
        ModelDimensions(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=mlp,
            vocab_size=vocab,
            head_dim=head,
            num_experts=experts,
            num_experts_per_tok=per_token,
        )
    )


KNOWN_MODELS = {
    "llama-3.2-1b": _known(16, 2048, 32, 8, 8192, 128_256, head=64),
    "llama-3.2-3b": _known(28, 3072, 24, 8, 8192, 128_256),
    "llama-3.1-8b": _known(32, 4096, 32, 8, 14_336, 128_256),
    "llama-3-8b": _known(32, 4096, 32, 8, 14_336, 128_256),
    "llama-3.1-70b": _known(80, 8192, 64, 8, 28_672, 128_256),
    "llama-3.3-70b": _known(80, 8192, 64, 8, 28_672, 128_256),
    "llama-3-70b": _known(80, 8192, 64, 8, 28_672, 128_256),
    "mistral-7b": _known(32, 4096, 32, 8, 14_336, 32_768),
    "qwen2.5-7b": _known(28, 3584, 28, 4, 18_944, 152_064),
    "qwen2.5-14b": _known(48, 5120, 40, 8, 13_824, 152_064),
    "qwen2.5-32b": _known(64, 5120, 40, 8, 27_648, 152_064),
    "qwen2.5-72b": _known(80, 8192, 64, 8, 29_568, 152_064),
    "qwen3-0.6b": _known(28, 1024, 16, 8, 3072, 151_936),
    "qwen3-1.7b": _known(28, 2048, 16, 8, 6144, 151_936),
    "qwen3-4b": _known(36, 2560, 32, 8, 9728, 151_936),
    "qwen3-8b": _known(36, 4096, 32, 8, 12_288, 151_936),
    "qwen3-14b": _known(40, 5120, 40, 8, 17_408, 151_936),
    "qwen3-32b": _known(64, 5120, 64, 8, 25_600, 151_936),
    "qwen3-30b-a3b": _known(48, 2048, 32, 4, 768, 151_936, experts=128, per_token=8),
    "qwen3-235b-a22b": _known(94, 4096, 64, 4, 1536, 151_936, experts=128, per_token=8),
    "mixtral-8x7b": _known(32, 4096, 32, 8, 14_336, 32_000, experts=8, per_token=2),
    "mixtral-8x22b": _known(56, 6144, 48, 8, 16_384, 32_768, experts=8, per_token=2),
    "phi-3.5-moe": _known(32, 4096, 32, 8, 6400, 32_064, experts=16, per_token=2),
    "phi-4": _known(40, 5120, 40, 10, 17_920, 100_352),
}
"""Shapes of well-known models, by the beginning of their names without the owner."""

_SIZE = re.compile(r"(?<![\d.a-z])(\d+(?:\.\d+)?)b(?![a-z])")
_ACTIVE = re.compile(r"-a(\d+(?:\.\d+)?)b")


def model_shape(model: str, folder: Path) -> tuple[ModelShape, str]:
    """Return the shape of ``model``, and where it is from: ``model.json`` of ``folder``, what is known of the
    name, or a guess by the size that the name says.

    Raises ConfigError where the name says nothing and there is no such file.
    """
    path = folder / "model.json"
    if path.is_file():
        return shape_of(read_json(path, ModelDimensions)), "model.json"
    name = model.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    known = [key for key in KNOWN_MODELS if re.match(re.escape(key) + r"(?![\d.])(?!-a\d)", name)]
    if known:
        return KNOWN_MODELS[max(known, key=len)], "the model's name"
    size = _SIZE.search(name)
    if size is None:
        raise ConfigError(
            f"{folder / 'meta.json'}: model: nothing is known of {model!r}; put its Hugging Face config.json "
            f"into {path}",
            param="model",
        )
    return _guessed(float(size[1]) * 1e9, _ACTIVE.search(name)), f"a guess from the size in {name!r}"


def _guessed(params: float, active: re.Match[str] | None) -> ModelShape:
    """Layers and widths grow with the size as they do from Llama 3's 1 B to its 405 B."""
    scale = params / 8e9
    hidden = 128 * round(32 * scale**0.3)
    shape = ModelShape(round(32 * scale**0.4), hidden, hidden, 1024, params)
    if active is None:
        return shape
    active_params = min(params, float(active[1]) * 1e9)
    return shape._replace(
        dense_params=0.3 * active_params,
        expert_params=params - 0.3 * active_params,
        n_experts=max(1, round(8 * (params - 0.3 * active_params) / (0.7 * active_params))),
        experts_per_token=8,
    )
