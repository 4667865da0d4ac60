"""Calibration: a run of a mock engine gives its timing back; what no engine can have measured is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError
from kvrouter.core.timing import Timing
from kvrouter.sim.calibrate import calibration
from kvrouter.sim.calibrate.calibration import Comparison, calibrate, compare, quantities
from kvrouter.sim.calibrate.engine_run import engine_config, simulate
from kvrouter.sim.calibrate.measured_run import MeasuredRun, read_run
from kvrouter.sim.calibrate.model_shape import model_shape
from kvrouter.sim.calibrate.roofline import roofline
from tests.testing.measured_runs import HARDWARE, META, MODEL, written_run

TRUTHS = {
    "slower at prefill": {"prefill_linear": 1.3, "prefill_base": 1.4, "decode_base": 0.9},
    "slower at decoding": {"decode_base": 1.35, "decode_kv_token": 1.2, "prefill_linear": 0.85},
}


def expected_timing(tmp_path: Path) -> Timing:
    run = written_run(tmp_path / "any", Timing())
    return roofline(run, model_shape(MODEL, tmp_path)[0]).timing


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
def test_calibration_recovers_step_times_of_a_mock_engine_run(
    tmp_path: Path, truth: dict[str, float]
) -> None:
    expected = expected_timing(tmp_path)
    timing = replace(expected, **{name: getattr(expected, name) * factor for name, factor in truth.items()})
    run = written_run(tmp_path / "run", timing)
    calibrated = calibrate(run, model_shape(MODEL, tmp_path)[0], n_fitted=30)
    fitted = calibrated.fitted.timing
    assert calibrated.expected.timing == expected
    # Figures that are small against others cannot be separated; what steps take can be found.
    for of in (fitted, expected):
        errors = [
            of.prefill_ms(1024, 1024 * 512) / timing.prefill_ms(1024, 1024 * 512) - 1.0,
            of.decode_ms(0.0, 12, 12_000) / timing.decode_ms(0.0, 12, 12_000) - 1.0,
        ]
        if of is fitted:
            assert errors == pytest.approx([0.0, 0.0], abs=0.03)
        else:
            assert max(map(abs, errors)) > 0.05
    for row in compare(run, calibrated).unseen:
        if row.quantity != "queue":
            assert row.error == pytest.approx(0.0, abs=0.05), row


def test_calibration_reads_only_arrivals_and_lengths_of_later_requests(tmp_path: Path) -> None:
    run = written_run(tmp_path, Timing(decode_kv_token=1e-4), n_requests=20)
    later = np.arange(20) >= 8
    stamps = run.stamps
    moved = replace(
        run,
        stamps=replace(
            stamps,
            queued=stamps.queued + 5.0 * later,
            scheduled=stamps.scheduled + 6.0 * later,
            first=stamps.first + 7.0 * later,
            last=stamps.last + 9.0 * later,
        ),
    )
    shape, _ = model_shape(MODEL, tmp_path)
    assert calibrate(moved, shape, n_fitted=8) == calibrate(run, shape, n_fitted=8)


def test_timing_fitted_to_no_requests_is_the_expected_timing(tmp_path: Path) -> None:
    run = written_run(tmp_path, Timing(), n_requests=10)
    calibrated = calibrate(run, model_shape(MODEL, tmp_path)[0], n_fitted=0)
    assert calibrated.fitted == calibrated.expected
    rows = compare(run, calibrated).unseen
    assert {row.quantity for row in rows} == {"queue", "service TTFT", "time per output token", "end to end"}
    assert all(row.error == row.expected_error for row in rows)


def test_requests_seen_and_unseen_are_predicted_by_the_same_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written_run(tmp_path, Timing(), n_requests=20)
    calibrated = calibrate(run, model_shape(MODEL, tmp_path)[0], n_fitted=8)
    simulated = Mock(wraps=simulate)
    monkeypatch.setattr(calibration, "simulate", simulated)
    compared = compare(run, calibrated)
    assert simulated.call_count == 2 * calibration.SIMULATIONS
    ended_s = run.stamps.last - run.stamps.arrival
    for rows, which in ((compared.seen, ended_s[:8]), (compared.unseen, ended_s[8:])):
        measured = [row.measured_s for row in rows if row.quantity == "end to end"]
        assert measured == pytest.approx(np.percentile(which, calibration.PERCENTILES))


def test_mock_engine_config_follows_the_engine_flags_of_a_run(tmp_path: Path) -> None:
    flags: dict[str, object] = {
        "max_num_seqs": 7,
        "enable_chunked_prefill": False,
        "data_parallel_size": 2,
        "block_size": 32,
    }
    flags |= {"max_num_batched_tokens": 4_096}
    run = changed(tmp_path, meta={"engine_kwargs": flags, "vllm_version": "0.13.1"})
    config = engine_config(run, 3_210)
    assert (config.max_num_seqs, config.dp_size, config.block_size) == (7, 2, 32)
    assert config.max_num_batched_tokens == 4_096
    assert (config.total_kv_blocks, config.chunked_prefill, config.async_scheduling) == (100, False, False)
    assert engine_config(changed(tmp_path, meta={}), 1).async_scheduling
    explicit = changed(tmp_path, meta={"engine_kwargs": {"async_scheduling": False}})
    assert not engine_config(explicit, 1).async_scheduling


def test_requests_are_spread_over_data_parallel_ranks(tmp_path: Path) -> None:
    timing = Timing(decode_linear=0.0)
    took_s = []
    for n_ranks in (1, 2):
        run = changed(tmp_path, meta={"engine_kwargs": {"max_num_seqs": 2, "data_parallel_size": n_ranks}})
        stamps = simulate(run, replace(engine_config(run, 500_000), timing=timing))
        took_s.append(quantities(run, stamps)["queue"].max())
    assert took_s[1] < 0.6 * took_s[0]


def test_expected_timing_follows_gpu_count_quantization_and_eager_mode(tmp_path: Path) -> None:
    shape, source = model_shape("Qwen/Qwen3-32B", tmp_path)
    assert source == "the model's name"
    assert shape.active_params == pytest.approx(32e9, rel=0.01)
    half = roofline(changed(tmp_path, meta={}), shape).timing
    fp8 = roofline(changed(tmp_path, meta={"engine_kwargs": {"quantization": "fp8"}}), shape).timing
    two = roofline(changed(tmp_path, meta={"engine_kwargs": {"tensor_parallel_size": 2}}), shape).timing
    # All but the output has half of the bytes, and a step of few tokens reads rather than computes.
    assert fp8.prefill_linear == pytest.approx(half.prefill_linear / 2, rel=0.15)
    assert fp8.decode_base - 1.0 == pytest.approx((half.decode_base - 1.0) / 2, rel=0.05)
    assert two.decode_kv_token == pytest.approx(half.decode_kv_token / 2)
    assert two.decode_sequence > half.decode_sequence
    eager = roofline(changed(tmp_path, meta={"engine_kwargs": {"enforce_eager": True}}), shape)
    assert "enforce_eager: 12.8 ms to launch the 64 layers" in eager.guesses[0]


def test_unknown_gpu_is_a_named_guess_and_an_unknown_model_is_looked_up(tmp_path: Path) -> None:
    gpu = {"hardware": "TURBO-9000", "npu_mem": {"mem_size": 96, "mem_bw": 1000}}
    run = changed(tmp_path, hardware={"nodes": [{"instances": [gpu]}]})
    shape, source = model_shape("someone/thing-7b-instruct", tmp_path)
    assert source == "a guess from the size in 'thing-7b-instruct'"
    (guess,) = roofline(run, shape).guesses
    assert "TURBO-9000: nothing is known of this GPU: peak_tflops: 300" in guess
    said = changed(tmp_path, hardware={"nodes": [{"instances": [{**gpu, "peak_tflops": 250.0}]}]})
    assert roofline(said, shape).guesses == ()
    with pytest.raises(ConfigError, match="nothing is known of 'someone/thing'"):
        model_shape("someone/thing", tmp_path)
    dimensions = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    (tmp_path / "model.json").write_text(json.dumps(dimensions))
    with pytest.raises(ConfigError, match=r"model\.json: vocab_size: is required"):
        model_shape("someone/thing", tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({**dimensions, "vocab_size": 1_000}))
    found, source = model_shape("someone/thing", tmp_path)
    assert source == "model.json"
    assert found.dense_params == 2 * (64 * 4 * 64 + 3 * 64 * 128) + 64_000


def test_expert_parameters_read_in_a_step_grow_with_its_tokens(tmp_path: Path) -> None:
    shape, _ = model_shape("Qwen/Qwen3-30B-A3B-Instruct-2507", tmp_path)
    assert shape.active_params == pytest.approx(3.1e9, rel=0.1)
    assert shape.read_params(1) == pytest.approx(shape.active_params)
    assert shape.read_params(1_000) == pytest.approx(shape.dense_params + shape.expert_params)


def test_kv_tokens_are_the_memory_that_weights_leave_or_the_stated_blocks(tmp_path: Path) -> None:
    shape, _ = model_shape(MODEL, tmp_path)
    # Programs see 95 of 96 GiB. 95 GiB · 0.9, less 0.3 GiB, 8.03 billion parameters of 2 bytes, values of
    # 1,024 tokens in a layer and the scores of 12 requests, over 131,072 bytes a token.
    values = 2 * 1_024 * 6.98e9 / (32 * 4_096) + 8 * 12 * 128_256
    tokens = ((95 * 0.9 - 0.3) * 2**30 - 2 * 8.03e9 - values) / 131_072
    assert roofline(changed(tmp_path, meta={}), shape).kv_tokens == pytest.approx(tokens, rel=1e-3)
    said = changed(tmp_path, meta={"engine_kwargs": {"num_gpu_blocks_override": 200}})
    assert roofline(said, shape).kv_tokens == 3_200


def test_model_that_leaves_no_memory_for_kv_is_refused(tmp_path: Path) -> None:
    shape, _ = model_shape("meta-llama/Llama-3.1-70B", tmp_path)
    with pytest.raises(ConfigError, match="no room for KV") as caught:
        roofline(changed(tmp_path, meta={}), shape)
    assert caught.value.param == "mem_size"


@pytest.mark.parametrize(("n_fitted", "why"), [(3, "too few to fit"), (9, "leave none to predict")])
def test_too_few_requests_to_fit_or_to_predict_are_refused(tmp_path: Path, n_fitted: int, why: str) -> None:
    run = written_run(tmp_path, Timing(), n_requests=9)
    with pytest.raises(ConfigError, match=why) as caught:
        calibrate(run, model_shape(MODEL, tmp_path)[0], n_fitted=n_fitted)
    assert caught.value.param == "requests"


ROW = {
    "request_id": "r0",
    "input_toks": 10,
    "output_toks": 5,
    "arrival_time": 1.0,
    "queued_ts": 2.0,
    "scheduled_ts": 3.0,
    "first_token_ts": 4.0,
    "last_token_ts": 5.0,
}


@pytest.mark.parametrize(
    ("wrong", "field", "why"),
    [
        ({"queued_ts": float("nan")}, "queued_ts", "finite"),
        ({"last_token_ts": float("inf")}, "last_token_ts", "finite"),
        ({"arrival_time": -1.0}, "arrival_time", ">= 0"),
        ({"scheduled_ts": 1.5}, "scheduled_ts", "before queued_ts"),
        ({"first_token_ts": 3.0}, "first_token_ts", "no step takes no time"),
        ({"last_token_ts": 4.0}, "last_token_ts", "there are 5 tokens"),
        ({"output_toks": 0}, "output_toks", ">= 1"),
        ({"input_toks": "many"}, "input_toks", "expected `int`"),
    ],
)
def test_impossible_request_row_is_refused_with_its_line_and_field(
    tmp_path: Path, wrong: dict[str, object], field: str, why: str
) -> None:
    refused(tmp_path, lambda folder: write(folder, [ROW, {**ROW, **wrong}]), field, f":2: {field}: .*{why}")


def test_missing_or_wrong_run_files_are_refused_by_name(tmp_path: Path) -> None:
    without = {name: value for name, value in ROW.items() if name != "queued_ts"}
    refused(tmp_path, lambda folder: write(folder, [without]), "queued_ts", "jsonl:1: queued_ts: is required")
    refused(tmp_path, lambda folder: write(folder, []), None, "has no requests")
    refused(tmp_path, lambda folder: (folder / "requests.jsonl").write_text("{\n"), None, ":1: not JSON")
    write(tmp_path, [ROW])
    refused(tmp_path, lambda folder: (folder / "meta.json").unlink(), None, r"meta\.json: cannot be read")
    (tmp_path / "meta.json").write_text(json.dumps(META))
    refused(tmp_path, lambda folder: (folder / "config.json").write_text("{}"), "nodes", "nodes: is required")
    refused(tmp_path, lambda folder: (folder / "requests.jsonl").unlink(), None, "cannot be read")


FLAGS_REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "2: engines whose stages"),
    (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        "max_num_batched_tokens",
        "64: a prompt has",
    ),
    ({"num_gpu_blocks_override": 3}, "num_gpu_blocks_override", "3: a request has"),
    ({"max_num_seqs": "many"}, "max_num_seqs", "expected `int`"),
]


@pytest.mark.parametrize(("flags", "field", "why"), FLAGS_REFUSED)
def test_impossible_engine_flags_are_refused_by_name(
    tmp_path: Path, flags: dict[str, object], field: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"meta\.json: engine_kwargs\.{field}: {why}") as caught:
        changed(tmp_path, meta={"engine_kwargs": flags})
    assert caught.value.param == f"engine_kwargs.{field}"


def test_assumed_flags_and_hardware_are_noted(tmp_path: Path) -> None:
    run = changed(tmp_path, meta={"engine_kwargs": {}, "vllm_version": None})
    assert [note.split(":")[0] for note in run.notes] == [
        "max_num_seqs",
        "max_num_batched_tokens",
        "vllm_version",
        "num_cached_tokens",
    ]
    flags = run.meta.engine_kwargs
    assert (flags.max_num_seqs, flags.max_num_batched_tokens, flags.async_scheduling) == (1_024, 8_192, True)
    small: dict[str, object] = {"nodes": [{"instances": [{"hardware": "NVIDIA L4", "tp_size": 2}]}]}
    run = changed(tmp_path, meta={"engine_kwargs": {}}, hardware=small)
    flags = run.meta.engine_kwargs
    assert (flags.max_num_seqs, flags.max_num_batched_tokens) == (256, 2_048)
    assert flags.tensor_parallel_size == 2
    assert run.notes[0] == "npu_mem: not in config.json: 22 GiB at 300 GB/s, which L4 has"
    assert run.hardware is not None
    assert run.hardware.gpu.memory.mem_bw == 300
    two = changed(tmp_path, meta={"engine_kwargs": {"tensor_parallel_size": 1}}, hardware=small)
    assert any("tensor_parallel_size: 1 of meta.json, though tp_size" in note for note in two.notes)


def test_unmodelled_engine_features_are_noted(tmp_path: Path) -> None:
    flags = {"speculative-config": {"method": "ngram"}, "enable_lora": True, "cpu_offload_gb": 4}
    notes = changed(tmp_path, meta={"engine_kwargs": flags}).notes
    for name in ("speculative_config", "enable_lora", "cpu_offload_gb"):
        assert any(note.startswith(f"{name}: ") for note in notes), name
    off = changed(tmp_path, meta={"engine_kwargs": {"enable_prefix_caching": False}}).notes
    assert not any(note.startswith("num_cached_tokens") for note in off)


def test_unknown_gpu_without_stated_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="npu_mem: is required: nothing is known of the GPU 'TURBO'"):
        changed(tmp_path, hardware={"nodes": [{"instances": [{"hardware": "TURBO"}]}]})


@pytest.mark.parametrize(
    "failed", [{"error": "aborted"}, {"success": False}, {"first_token_ts": None, "output_toks": None}]
)
def test_failed_requests_are_left_out_and_counted(tmp_path: Path, failed: dict[str, object]) -> None:
    write(tmp_path, [ROW, {**ROW, **failed}, ROW])
    run = read_run(tmp_path)
    assert run.n_requests == 2
    assert run.notes[0].startswith("1 of 3 requests failed")
    refused(tmp_path, lambda folder: write(folder, [{**ROW, **failed}]), None, "all 1 failed")


def test_drafted_tokens_may_arrive_in_one_step(tmp_path: Path) -> None:
    run = written_run(tmp_path, Timing(decode_kv_token=1e-4), n_requests=20)
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    for row in rows[:3]:
        row["last_token_ts"] = row["first_token_ts"]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="last_token_ts"):
        read_run(tmp_path)
    drafts = {"engine_kwargs": {"max_num_seqs": 12, "speculative_config": '{"method": "ngram"}'}}
    (tmp_path / "meta.json").write_text(json.dumps({**META, **drafts}))
    calibrated = calibrate(read_run(tmp_path), model_shape(MODEL, tmp_path)[0], n_fitted=10)
    assert calibrated.fitted.timing.decode_base == pytest.approx(
        calibrate(run, model_shape(MODEL, tmp_path)[0], n_fitted=10).fitted.timing.decode_base, rel=0.3
    )


def test_cached_tokens_shorten_prefill_but_are_read_in_decoding(tmp_path: Path) -> None:
    timing = Timing(decode_linear=0.0, decode_kv_token=1e-3)
    run = written_run(tmp_path, timing, n_requests=12)
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    for row in rows:
        row["num_cached_tokens"] = row["input_toks"] // 32 * 16
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    half = read_run(tmp_path)
    assert any("prompt tokens came from the prefix cache" in note for note in half.notes)
    took_s = [
        quantities(each, simulate(each, replace(engine_config(each, 500_000), timing=timing)))
        for each in (run, half)
    ]
    at = int(np.argmax(run.input_tokens))
    assert took_s[1]["service TTFT"][at] < 0.8 * took_s[0]["service TTFT"][at]
    # A request alone: every step reads all KV, cached or not.
    assert took_s[1]["time per output token"].min() > 5.0e-3 + 1e-6 * run.input_tokens.min()
    rows[0]["num_cached_tokens"] = rows[0]["input_toks"]
    write(tmp_path, rows)
    with pytest.raises(ConfigError, match=r":1: num_cached_tokens: "):
        read_run(tmp_path)


def test_queue_shorter_than_a_step_has_no_relative_error(tmp_path: Path) -> None:
    run = written_run(tmp_path, Timing(decode_linear=0.0), n_requests=20)
    # A scheduler takes some microseconds to look at a request.
    run = replace(run, stamps=replace(run.stamps, scheduled=run.stamps.scheduled + 1e-5))
    shape, _ = model_shape(MODEL, tmp_path)
    rows = {
        (row.quantity, row.percentile): row for row in compare(run, calibrate(run, shape, n_fitted=0)).unseen
    }
    queue = rows["queue", 50]
    assert 0.0 < queue.measured_s < queue.step_s == rows["time per output token", 50].measured_s
    assert queue.error is None
    assert queue.expected_error is None
    assert rows["service TTFT", 50].error is not None


def test_fit_finds_a_timing_far_from_the_expected_one(tmp_path: Path) -> None:
    expected = expected_timing(tmp_path)
    factors = {"prefill_linear": 0.5, "prefill_attention": 0.5, "decode_base": 1.6, "decode_kv_token": 1.6}
    truth = replace(expected, **{name: factor * getattr(expected, name) for name, factor in factors.items()})
    run = written_run(tmp_path / "run", truth)
    fitted = calibrate(run, model_shape(MODEL, tmp_path)[0], n_fitted=30).fitted.timing
    # From the expectation alone the fit ends 23 % away.
    assert fitted.prefill_ms(1024, 1024 * 512) == pytest.approx(truth.prefill_ms(1024, 1024 * 512), rel=0.07)
    assert fitted.decode_ms(0.0, 12, 12_000) == pytest.approx(truth.decode_ms(0.0, 12, 12_000), rel=0.03)


def changed(
    folder: Path, *, meta: dict[str, object] | None = None, hardware: dict[str, object] | None = None
) -> MeasuredRun:
    """A run with another ``meta.json`` or ``config.json``."""
    written_run(folder, Timing(), n_requests=12)
    (folder / "meta.json").write_text(json.dumps({**META, **(meta or {})}))
    (folder / "config.json").write_text(json.dumps({**HARDWARE, **(hardware or {})}))
    return read_run(folder)


def write(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / "meta.json").write_text(json.dumps(META))
    (folder / "config.json").write_text(json.dumps(HARDWARE))
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def refused(folder: Path, spoil: Callable[[Path], object], field: str | None, why: str) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=why) as caught:
        read_run(folder)
    if field is not None:
        assert caught.value.param == field


def test_time_of_microseconds_has_no_relative_error() -> None:
    hardly = Comparison("queue", 50, measured_s=2e-5, calibrated_s=0.0, expected_s=0.0)
    assert (hardly.error, hardly.expected_error) == (None, None)
    much = Comparison("queue", 50, measured_s=2.0, calibrated_s=1.0, expected_s=3.0)
    assert (much.error, much.expected_error) == (-0.5, 0.5)
