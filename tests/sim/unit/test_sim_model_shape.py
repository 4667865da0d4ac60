"""Shapes of models: those of published sizes, and what layers, experts and weights do to a step."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.timing import Timing
from kvrouter.sim.calibrate.known_models import KNOWN_MODELS
from kvrouter.sim.calibrate.measured_run import MeasuredRun, read_run
from kvrouter.sim.calibrate.model_dimensions import AttentionLayers
from kvrouter.sim.calibrate.model_shape import ModelShape, model_shape, shape_of
from kvrouter.sim.calibrate.roofline import roofline, window_shares
from kvrouter.sim.calibrate.weight_format import WeightFormat
from tests.testing.measured_runs import HARDWARE, META, written_run

H200: dict[str, object] = {"nodes": [{"instances": [{"hardware": "NVIDIA H200"}]}]}

DIMENSIONS: dict[str, object] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1_000,
}

SIZES_B = {
    "qwen2.5-7b": 7.6,
    "qwen2.5-14b": 14.7,
    "qwen3-14b": 14.8,
    "gemma-2-2b": 2.6,
    "gpt-oss-20b": 20.9,
    "deepseek-r1-distill-qwen-7b": 7.6,
    "deepseek-r1-distill-qwen-14b": 14.7,
    "mistral-nemo": 12.2,
    "mistral-small-3.1": 23.6,
    "mistral-small-3.2": 23.6,
    "mistral-large": 123.0,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141.0,
    "llama-4-scout": 109.0,
    "llama-4-maverick": 400.0,
    "phi-3-mini": 3.8,
    "phi-3-medium": 14.0,
    "phi-3.5-moe": 41.9,
    "phi-4": 14.7,
    "phi-4-mini": 3.8,
    "glm-4.5-air": 106.0,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 236.0,
    "deepseek-v2.5": 236.0,
    "deepseek-v3": 671.0,
    "deepseek-v3.1": 671.0,
    "deepseek-r1": 671.0,
    "kimi-k2": 1_026.0,
}
"""Parameters as published, of models whose names do not say them well, in billions."""

ACTIVE_B = {
    "deepseek-v3": 37.0,
    "kimi-k2": 32.0,
    "glm-4.5-air": 12.0,
    "mixtral-8x7b": 12.9,
    "gpt-oss-20b": 3.6,
}


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_known_models_have_their_published_parameter_counts(name: str) -> None:
    shape = shape_of(KNOWN_MODELS[name])
    in_name = re.search(r"(\d+(?:\.\d+)?)b", name)
    size_b = SIZES_B.get(name) or float(in_name[1] if in_name else "nan")
    total_b = (shape.dense_params + shape.expert_params + shape.embedding_params) / 1e9
    # Makers round, and count embeddings or not.
    assert total_b == pytest.approx(size_b, rel=0.03, abs=0.3), name
    active = re.search(r"-a(\d+)b", name)
    if name in ACTIVE_B or active:
        active_b = ACTIVE_B.get(name) or float(active[1] if active else "nan")
        assert shape.active_params / 1e9 == pytest.approx(active_b, rel=0.08)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "deepseek-r1-distill-llama-70b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama-3.1-8b"),
        ("/models/Qwen3-30B-A3B-Instruct-2507-FP8/", "qwen3-30b-a3b"),
        ("microsoft/Phi-4-mini-instruct", "phi-4-mini"),
    ],
)
def test_model_names_are_recognized_with_owner_and_suffix(tmp_path: Path, name: str, known: str) -> None:
    shape, source = model_shape(name, tmp_path)
    assert source == "the model's name"
    assert shape.dense_params == shape_of(KNOWN_MODELS[known]).dense_params


def test_model_configuration_file_takes_precedence_over_the_name(tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    path.write_text(json.dumps(DIMENSIONS))
    shape, source = model_shape("Qwen/Qwen3-32B", tmp_path, path)
    assert (shape.layers, source) == (4, "any.json")
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DIMENSIONS))
    assert model_shape(str(folder), tmp_path)[1] == str(folder / "config.json")
    with pytest.raises(ConfigError, match=r"no\.json: cannot be read"):
        model_shape("Qwen/Qwen3-32B", tmp_path, tmp_path / "no.json")


def test_hugging_face_cache_is_read_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DIMENSIONS))
    asked: list[tuple[str, str]] = []

    def cached(repository: str, name: str) -> str:
        asked.append((repository, name))
        return str(path)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    shape, source = model_shape("someone/thing", tmp_path / "run")
    assert (shape.layers, source) == (4, str(path))
    assert asked == [("someone/thing", "config.json")]
    with pytest.raises(ConfigError, match="--model-config"):
        model_shape("thing", tmp_path / "run")


def read(tmp_path: Path, **others: object) -> ModelShape:
    (tmp_path / "model.json").write_text(json.dumps({**DIMENSIONS, **others}))
    return model_shape("any", tmp_path)[0]


LAYERS: list[tuple[dict[str, object], tuple[int, int, int]]] = [
    ({}, (4, 0, 0)),
    ({"sliding_window": 64}, (0, 4, 64)),
    ({"sliding_window": 64, "use_sliding_window": False}, (4, 0, 0)),
    ({"sliding_window": 64, "sliding_window_pattern": 2}, (2, 2, 64)),
    ({"sliding_window": 64, "model_type": "gemma2"}, (2, 2, 64)),
    ({"sliding_window": 64, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, (1, 3, 64)),
    ({"full_attention_interval": 4}, (1, 0, 0)),
    ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, (1, 0, 0)),
    ({"attention_chunk_size": 64, "model_type": "llama4_text"}, (1, 3, 64)),
]


@pytest.mark.parametrize(("keys", "layers"), LAYERS)
def test_layers_with_sliding_windows_are_read(
    tmp_path: Path, keys: dict[str, object], layers: tuple[int, int, int]
) -> None:
    assert read(tmp_path, **keys).attention == layers


EXPERTS: list[tuple[dict[str, object], int, float]] = [
    ({"num_local_experts": 8, "num_experts_per_tok": 2}, 4, 4 * 8 * 128),
    ({"n_routed_experts": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 1}, 3, 3 * 8 * 16),
    ({"num_experts": 8, "moe_intermediate_size": 16, "decoder_sparse_step": 2}, 2, 2 * 8 * 16),
    ({"num_experts": 8, "moe_intermediate_size": 16, "mlp_only_layers": [0, 3]}, 2, 2 * 8 * 16),
    ({"num_local_experts": 8, "intermediate_size_mlp": 256, "interleave_moe_layer_step": 2}, 2, 2 * 8 * 128),
]


@pytest.mark.parametrize(("keys", "n_layers", "width"), EXPERTS)
def test_layers_with_experts_are_read(
    tmp_path: Path, keys: dict[str, object], n_layers: int, width: float
) -> None:
    shape = read(tmp_path, **keys)
    assert (shape.expert_layers, shape.n_experts) == (n_layers, 8)
    assert shape.expert_params == 3 * 64 * width


def test_vision_language_model_has_the_shape_of_its_text_decoder(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(
        json.dumps({"text_config": DIMENSIONS, "vision_config": {"num_hidden_layers": 99}})
    )
    assert model_shape("any", tmp_path)[0].layers == 4


def test_latent_attention_has_small_kv_and_a_wider_decode(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    shape = read(tmp_path, **latent)
    assert (shape.kv_heads, shape.kv_values) == (1, 40)
    assert shape.attention_width == 4 * (16 + 8 + 16) // 2
    assert shape.decode_width == 4 * (32 + 8 + 32) // 2
    params = 64 * 4 * 24 + 64 * 40 + 32 * 4 * 32 + 4 * 16 * 64
    assert shape.dense_params == 4 * (params + 3 * 64 * 128) + 64_000
    with pytest.raises(ConfigError, match=r"model\.json: v_head_dim: is required with kv_lora_rank"):
        read(tmp_path, **{**latent, "v_head_dim": None})


GROUP = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}

FORMATS: list[tuple[dict[str, object], str, float, str]] = [
    ({"quant_method": "fp8"}, "fp8", 1.0, "fp8"),
    ({"quant_method": "awq", "bits": 4}, "awq", 0.53125, "16bit"),
    ({"quant_method": "gptq", "bits": 8}, "gptq", 1.0625, "16bit"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes", 1.0, "16bit"),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}},
        "compressed-tensors",
        1.0,
        "fp8",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
        "compressed-tensors",
        0.53125,
        "16bit",
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4", 0.53125, "fp4"),
]


@pytest.mark.parametrize(("config", "name", "size", "computed"), FORMATS)
def test_weight_format_is_read_from_the_quantization_config(
    tmp_path: Path, config: dict[str, object], name: str, size: float, computed: str
) -> None:
    weights = read(tmp_path, quantization_config=config).weights
    assert weights is not None
    assert (weights.name, weights.bytes, weights.type) == (name, size, computed)


@pytest.mark.parametrize(
    ("model", "bits"),
    [
        ("Qwen/Qwen3-32B-AWQ", 4.25),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", 8),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", 8.5),
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w8a8", 8),
        ("openai/gpt-oss-20b", 4.25),
        ("deepseek-ai/DeepSeek-V3", 8),
    ],
)
def test_weight_format_is_read_from_the_model_name(tmp_path: Path, model: str, bits: float) -> None:
    weights = model_shape(model, tmp_path)[0].weights
    assert weights is not None
    assert weights.bits == bits
    assert model_shape("Qwen/Qwen3-32B", tmp_path)[0].weights is None


def run_of(
    folder: Path, flags: dict[str, object] | None = None, hardware: dict[str, object] | None = None
) -> MeasuredRun:
    written_run(folder, Timing(), n_requests=12)
    (folder / "meta.json").write_text(json.dumps({**META, "engine_kwargs": {**FLAGS, **(flags or {})}}))
    (folder / "config.json").write_text(json.dumps(hardware or HARDWARE))
    return read_run(folder)


FLAGS: dict[str, object] = {"max_num_seqs": 12, "max_num_batched_tokens": 1_024}


def test_tensor_parallel_gpus_share_kv_heads_down_to_one_each(tmp_path: Path) -> None:
    llama, _ = model_shape("meta-llama/Llama-3.3-70B", tmp_path)
    kv_ms = [
        roofline(run_of(tmp_path, {"tensor_parallel_size": n}, H200), llama).timing.decode_kv_token
        for n in (4, 8, 16)
    ]
    assert kv_ms[0] == pytest.approx(2 * kv_ms[1])
    assert kv_ms[2] == kv_ms[1]
    fp8 = run_of(tmp_path, {"tensor_parallel_size": 4, "kv_cache_dtype": "fp8"}, H200)
    assert roofline(fp8, llama).timing.decode_kv_token == pytest.approx(kv_ms[0] / 2)
    latent, _ = model_shape("deepseek-ai/DeepSeek-V2-Lite", tmp_path)
    tokens = [roofline(run_of(tmp_path, {"tensor_parallel_size": n}, H200), latent).kv_tokens for n in (1, 4)]
    assert tokens[1] < 1.4 * tokens[0]


def test_data_parallel_ranks_share_the_weights_of_experts(tmp_path: Path) -> None:
    shape, _ = model_shape("Qwen/Qwen3-30B-A3B", tmp_path)
    ranks: list[dict[str, object]] = [{}, {"data_parallel_size": 2}]
    tokens = [roofline(run_of(tmp_path, flags), shape).kv_tokens for flags in ranks]
    gained = tokens[1] - tokens[0]
    assert gained == pytest.approx(
        shape.expert_params / (shape.layers * shape.kv_heads * shape.kv_values * 2)
    )


def test_fp8_weights_need_fewer_bytes_but_speed_up_only_gpus_that_support_fp8(tmp_path: Path) -> None:
    shape, _ = model_shape("meta-llama/Llama-3.1-8B", tmp_path)
    fp8 = shape._replace(weights=WeightFormat("fp8", 8, "fp8"))
    a100: dict[str, object] = {"nodes": [{"instances": [{"hardware": "NVIDIA A100-SXM4-80GB"}]}]}
    plain, small = (roofline(run_of(tmp_path, None, a100), each).timing for each in (shape, fp8))
    assert small.decode_base < 0.65 * plain.decode_base
    assert small.prefill_linear >= plain.prefill_linear
    hopper = roofline(run_of(tmp_path, None, H200), fp8)
    assert (
        hopper.timing.prefill_linear
        < 0.6 * roofline(run_of(tmp_path, None, H200), shape).timing.prefill_linear
    )
    assert hopper.guesses == ("quantization: fp8, 8 bits, by the model",)
    said = roofline(run_of(tmp_path, {"quantization": "fancy"}), shape)
    assert said.guesses == ("quantization: nothing is known of 'fancy': 16 bits are assumed",)


def test_window_shares_follow_from_prompt_and_answer_lengths(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    everything = window_shares(run, AttentionLayers(8, 0, 0))
    assert everything == (8.0, 8.0, 8.0)
    assert window_shares(run, AttentionLayers(4, 4, 1 << 20)) == pytest.approx(everything)
    window = 100
    shares = window_shares(run, AttentionLayers(0, 1, window))
    lengths = [
        (np.arange(1, prompt + 1), np.arange(prompt + 1, prompt + answer + 1))
        for prompt, answer in zip(run.input_tokens, run.output_tokens, strict=True)
    ]
    for at, share in ((0, shares.prefill), (1, shares.decode)):
        every = np.concatenate([pair[at] for pair in lengths])
        assert share == pytest.approx(np.minimum(every, window).sum() / every.sum(), rel=0.01)


def test_model_without_kv_layers_has_an_expected_timing(tmp_path: Path) -> None:
    shape = read(tmp_path, layer_types=["linear_attention"] * 4)
    timing = roofline(run_of(tmp_path), shape).timing
    assert timing.decode_kv_token > 0.0
    assert timing.prefill_linear > 0.0
