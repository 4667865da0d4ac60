"""Dimensions of well-known models, by the beginning of their names without the owner."""

from functools import partial

from kvrouter.sim.calibrate.model_dimensions import ModelDimensions


def _model(
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
    expert_mlp: int | None = None,
    shared: int | None = None,
    dense_first: int = 0,
    moe_step: int | None = None,
    window: int | None = None,
    window_pattern: int | None = None,
    tied: bool = False,
    mla: tuple[int | None, int] | None = None,
) -> ModelDimensions:
    """``mla``: ranks of query and KV. ``window_pattern``: one layer in so many attends to everything."""
    return ModelDimensions(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp,
        vocab_size=vocab,
        head_dim=head,
        tie_word_embeddings=tied,
        num_experts=experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=expert_mlp,
        n_shared_experts=shared,
        first_k_dense_replace=dense_first,
        interleave_moe_layer_step=moe_step,
        sliding_window=window,
        sliding_window_pattern=window_pattern,
        q_lora_rank=mla[0] if mla else None,
        kv_lora_rank=mla[1] if mla else None,
        qk_nope_head_dim=128 if mla else None,
        qk_rope_head_dim=64 if mla else None,
        v_head_dim=128 if mla else None,
    )


_LLAMA_8B = _model(32, 4096, 32, 8, 14_336, 128_256)
_LLAMA_70B = _model(80, 8192, 64, 8, 28_672, 128_256)
_QWEN25_7B = _model(28, 3584, 28, 4, 18_944, 152_064)
_QWEN25_14B = _model(48, 5120, 40, 8, 13_824, 152_064)
_QWEN25_32B = _model(64, 5120, 40, 8, 27_648, 152_064)
_QWEN3_8B = _model(36, 4096, 32, 8, 12_288, 151_936)
_QWEN_MOE = partial(_model, vocab=151_936, experts=128, per_token=8)
_QWEN3_30B = _QWEN_MOE(48, 2048, 32, 4, 6144, expert_mlp=768)
_DEEPSEEK = partial(_model, mla=(1536, 512), per_token=8, shared=1, expert_mlp=2048)
_DEEPSEEK_V3 = _DEEPSEEK(61, 7168, 128, 128, 18_432, 129_280, experts=256, dense_first=3)
_DEEPSEEK_V2 = partial(_model, mla=(1536, 512), per_token=6, shared=2, dense_first=1, vocab=102_400)
_GEMMA2 = partial(_model, vocab=256_000, window=4096, window_pattern=2, tied=True)
_GEMMA3 = partial(_model, vocab=262_208, window=1024, window_pattern=6, tied=True)
_GPT_OSS = partial(
    _model,
    hidden=2880,
    heads=64,
    kv_heads=8,
    mlp=2880,
    vocab=201_088,
    head=64,
    per_token=4,
    window=128,
    window_pattern=2,
)
_LLAMA4 = partial(_model, 48, 5120, 40, 8, vocab=202_048, per_token=1, shared=1, expert_mlp=8192)

KNOWN_MODELS = {
    "llama-2-7b": _model(32, 4096, 32, 32, 11_008, 32_000),
    "llama-2-13b": _model(40, 5120, 40, 40, 13_824, 32_000),
    "llama-2-70b": _model(80, 8192, 64, 8, 28_672, 32_000),
    "llama-3.2-1b": _model(16, 2048, 32, 8, 8192, 128_256, head=64, tied=True),
    "llama-3.2-3b": _model(28, 3072, 24, 8, 8192, 128_256, tied=True),
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3-8b": _LLAMA_8B,
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.3-70b": _LLAMA_70B,
    "llama-3-70b": _LLAMA_70B,
    "llama-3.1-405b": _model(126, 16_384, 128, 8, 53_248, 128_256),
    "llama-4-scout": _LLAMA4(mlp=16_384, experts=16),
    "llama-4-maverick": _LLAMA4(mlp=16_384, experts=128, moe_step=2),
    "mistral-7b": _model(32, 4096, 32, 8, 14_336, 32_768),
    "mistral-nemo": _model(40, 5120, 32, 8, 14_336, 131_072),
    "mistral-small-24b": _model(40, 5120, 32, 8, 32_768, 131_072),
    "mistral-small-3.1": _model(40, 5120, 32, 8, 32_768, 131_072),
    "mistral-small-3.2": _model(40, 5120, 32, 8, 32_768, 131_072),
    "mistral-large": _model(88, 12_288, 96, 8, 28_672, 32_768),
    "mixtral-8x7b": _model(32, 4096, 32, 8, 14_336, 32_000, experts=8, per_token=2),
    "mixtral-8x22b": _model(56, 6144, 48, 8, 16_384, 32_768, experts=8, per_token=2),
    "qwen2.5-0.5b": _model(24, 896, 14, 2, 4864, 151_936, head=64, tied=True),
    "qwen2.5-1.5b": _model(28, 1536, 12, 2, 8960, 151_936, tied=True),
    "qwen2.5-3b": _model(36, 2048, 16, 2, 11_008, 151_936, tied=True),
    "qwen2.5-7b": _QWEN25_7B,
    "qwen2.5-14b": _QWEN25_14B,
    "qwen2.5-32b": _QWEN25_32B,
    "qwen2.5-72b": _model(80, 8192, 64, 8, 29_568, 152_064),
    "qwq-32b": _QWEN25_32B,
    "qwen3-0.6b": _model(28, 1024, 16, 8, 3072, 151_936, tied=True),
    "qwen3-1.7b": _model(28, 2048, 16, 8, 6144, 151_936, tied=True),
    "qwen3-4b": _model(36, 2560, 32, 8, 9728, 151_936, tied=True),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-14b": _model(40, 5120, 40, 8, 17_408, 151_936),
    "qwen3-32b": _model(64, 5120, 64, 8, 25_600, 151_936),
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen3-coder-30b-a3b": _QWEN3_30B,
    "qwen3-235b-a22b": _QWEN_MOE(94, 4096, 64, 4, 12_288, expert_mlp=1536),
    "qwen3-coder-480b-a35b": _model(
        62, 6144, 96, 8, 8192, 151_936, experts=160, per_token=8, expert_mlp=2560
    ),
    "gemma-2-2b": _GEMMA2(26, 2304, 8, 4, 9216, head=256),
    "gemma-2-9b": _GEMMA2(42, 3584, 16, 8, 14_336, head=256),
    "gemma-2-27b": _GEMMA2(46, 4608, 32, 16, 36_864),
    "gemma-3-1b": _model(26, 1152, 4, 1, 6912, 262_144, head=256, window=512, window_pattern=6, tied=True),
    "gemma-3-4b": _GEMMA3(34, 2560, 8, 4, 10_240, head=256),
    "gemma-3-12b": _GEMMA3(48, 3840, 16, 8, 15_360, head=256),
    "gemma-3-27b": _GEMMA3(62, 5376, 32, 16, 21_504),
    "phi-3-mini": _model(32, 3072, 32, 32, 8192, 32_064, head=96),
    "phi-3-medium": _model(40, 5120, 40, 10, 17_920, 32_064),
    "phi-3.5-moe": _model(32, 4096, 32, 8, 6400, 32_064, experts=16, per_token=2),
    "phi-4": _model(40, 5120, 40, 10, 17_920, 100_352),
    "phi-4-mini": _model(32, 3072, 24, 8, 8192, 200_064, tied=True),
    "gpt-oss-20b": _GPT_OSS(24, experts=32),
    "gpt-oss-120b": _GPT_OSS(36, experts=128),
    "glm-4.5-air": _model(
        46,
        4096,
        96,
        8,
        10_944,
        151_552,
        experts=128,
        per_token=8,
        expert_mlp=1408,
        shared=1,
        dense_first=1,
    ),
    "deepseek-v2-lite": _DEEPSEEK_V2(27, 2048, 16, 16, 10_944, experts=64, expert_mlp=1408, mla=(None, 512)),
    "deepseek-v2": _DEEPSEEK_V2(60, 5120, 128, 128, 12_288, experts=160, expert_mlp=1536),
    "deepseek-v2.5": _DEEPSEEK_V2(60, 5120, 128, 128, 12_288, experts=160, expert_mlp=1536),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3.1": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "deepseek-r1-distill-llama-8b": _LLAMA_8B,
    "deepseek-r1-distill-llama-70b": _LLAMA_70B,
    "deepseek-r1-distill-qwen-1.5b": _model(28, 1536, 12, 2, 8960, 151_936),
    "deepseek-r1-distill-qwen-7b": _QWEN25_7B,
    "deepseek-r1-distill-qwen-14b": _QWEN25_14B,
    "deepseek-r1-distill-qwen-32b": _QWEN25_32B,
    "deepseek-r1-0528-qwen3-8b": _QWEN3_8B,
    "kimi-k2": _DEEPSEEK(61, 7168, 64, 64, 18_432, 163_840, experts=384, dense_first=1),
}

STORED_AS = {
    "gpt-oss-20b": "mxfp4",
    "gpt-oss-120b": "mxfp4",
    "deepseek-v3": "fp8",
    "deepseek-v3.1": "fp8",
    "deepseek-r1": "fp8",
    "kimi-k2": "fp8",
}
"""Quantizations of models that are published quantized, under names that do not show it."""
