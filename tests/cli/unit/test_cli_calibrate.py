"""``kvrouter calibrate`` as its user types it."""

import json
from pathlib import Path

import pytest
import yaml

from kvrouter.cli import main
from kvrouter.core.timing import Timing
from kvrouter.fleetfile.timing_file import read_timing
from tests.testing.measured_runs import written_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    written_run(folder, Timing(decode_linear=0.0, decode_kv_token=1e-4), n_requests=12)
    return folder


def test_written_timing_file_is_read_by_a_replay(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timing.yaml"
    assert main(["calibrate", str(run), "--requests", "6", "--write-timing", str(path)]) == 0
    timing = read_timing(path)
    assert timing.decode_kv_token > 0.0
    assert set(yaml.safe_load(path.read_text())) == set(Timing.__struct_fields__)
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert "Llama-3.1-8B by the first 6 requests of run" in comments[0]
    assert "max_num_seqs: 12, max_num_batched_tokens: 1024" in comments[1]
    assert "Llama-3.1-8B: dimensions from the model's name" in comments[3]
    assert "num_cached_tokens: not in requests.jsonl" in comments[4]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        json.dumps({"timestamp": 0, "input_length": 60, "output_length": 4, "hash_ids": [1]}) + "\n"
    )
    assert main(["replay", str(trace), "--timing", str(path)]) == 0
    output = capsys.readouterr().out
    assert "6 requests, predicted from 6" in output
    for words in ("service TTFT", "time per output token", "end to end", "no request seen"):
        assert words in output


def test_calibrate_from_zero_requests_predicts_all_and_writes_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = set(run.parent.rglob("*"))
    assert main(["calibrate", str(run), "--requests", "0"]) == 0
    output = capsys.readouterr().out
    assert "12 requests, predicted from 0" in output
    assert "no request was seen: expect errors of 10 to 90 %" in output
    assert "KV blocks: unknown:" in output
    assert set(run.parent.rglob("*")) == files


def test_the_result_as_json_has_the_engine_and_each_figure(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(run), "--requests", "6", "--output", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["seen_requests"] == 6
    assert report["timing"]["prefill_linear"] >= 0
    assert report["figures"][0].keys() >= {"quantity", "percentile", "measured_s", "calibrated_error"}
    assert "dimensions from" in report["notes"][0]
    assert report["kv_blocks"].keys() == {"blocks", "source", "at_least", "at_most"}
    assert report["kv_blocks"]["source"] == "unknown"
    assert report["kv_blocks"]["blocks"] == report["total_kv_blocks"]


def test_a_prediction_that_misses_names_each_row_and_by_how_much(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    for row in rows[6:]:
        row["last_token_ts"] += row["last_token_ts"] - row["first_token_ts"]
    (run / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["calibrate", str(run), "--requests", "6", "--output", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    missed = {(miss["requests"], miss["quantity"], miss["percentile"]): miss for miss in report["misses"]}
    miss = missed["predicted", "time per output token", 50]
    assert miss["error"] == pytest.approx(-0.5, abs=0.1)
    assert miss["calibrated_s"] / miss["measured_s"] - 1.0 == pytest.approx(miss["error"])
    assert ("seen", "time per output token", 50) not in missed
    assert all(abs(each["error"]) > 0.1 and each["percentile"] < 99 for each in report["misses"])
    (line,) = (note for note in report["notes"] if note.startswith("MISSES by more than 10%: "))
    error = f"{100 * miss['error']:+.1f} %"
    assert f"time per output token p50 of requests predicted {error}" in line
    assert line.endswith("do not rely on this timing")


def test_kv_blocks_are_read_from_a_metrics_page_of_the_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="%s"} 1.0\n'
    (run / "metrics.txt").write_text(page % 420)
    assert main(["calibrate", str(run), "--requests", "0"]) == 0
    assert "KV blocks: read: 420" in capsys.readouterr().out
    for wrong, why in (
        (page % "many", "num_gpu_blocks must be a number from 1 to 1048576, not 'many'"),
        (
            page % ("9" * 5_000),
            "num_gpu_blocks must be a number from 1 to 1048576, not '99999999999999999999'",
        ),
        ("", "vllm:cache_config_info: is required"),
        (page % 3, "metrics.txt: num_gpu_blocks: 3: a request has"),
    ):
        (run / "metrics.txt").write_text(wrong)
        assert main(["calibrate", str(run), "--requests", "0"]) == 2
        assert why in capsys.readouterr().err


def test_unknown_model_is_described_by_a_model_config_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = json.loads((run / "meta.json").read_text())
    (run / "meta.json").write_text(json.dumps({**meta, "model": "someone/thing"}))
    assert main(["calibrate", str(run), "--requests", "0"]) == 2
    assert "nothing is known of 'someone/thing'" in capsys.readouterr().err
    dimensions = {
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "num_attention_heads": 4,
        "intermediate_size": 1_024,
        "vocab_size": 1_000,
        "quantization_config": {"quant_method": "awq", "bits": 4},
    }
    path = tmp_path / "thing.json"
    path.write_text(json.dumps(dimensions))
    assert main(["calibrate", str(run), "--requests", "0", "--model-config", str(path)]) == 0
    output = capsys.readouterr().out
    assert f"someone/thing: dimensions from {path}" in output.replace("\n", "")
    assert "guessed: quantization: awq, 4.25 bits, by the model" in output


def test_a_queue_of_less_than_a_step_is_compared_in_milliseconds(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(run), "--requests", "0"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "queue" in line and "p50" in line)
    assert line.count(" ms ") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "2"], "2 are too few to fit to"),
        (["--requests", "12"], "12 of 12 leave none to predict"),
        (["--write-timing", "no/such/timing.yaml"], "is no folder"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = set(run.parent.rglob("*"))
    assert main(["calibrate", str(run), "--write-timing", str(run.parent / "t.yaml"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert set(run.parent.rglob("*")) == files


def test_a_wrong_row_is_named_by_file_line_and_field(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (run / "requests.jsonl").read_text().splitlines()
    rows[4] = json.dumps({**json.loads(rows[4]), "first_token_ts": float("nan")})
    (run / "requests.jsonl").write_text("\n".join(rows))
    assert main(["calibrate", str(run)]) == 2
    assert "requests.jsonl:5: first_token_ts: must be a finite number" in capsys.readouterr().err
    rows[4] = json.dumps({**json.loads(rows[3]), "input_toks": 3_000_000})
    (run / "requests.jsonl").write_text("\n".join(rows))
    meta = json.loads((run / "meta.json").read_text())
    meta["engine_kwargs"]["num_gpu_blocks_override"] = 30_000
    (run / "meta.json").write_text(json.dumps(meta))
    assert main(["calibrate", str(run), "--requests", "0"]) == 2
    assert "num_gpu_blocks_override: 30000: a request has 187502 blocks of 16" in capsys.readouterr().err
    assert main(["calibrate", str(run / "nowhere")]) == 2
    assert "nowhere/requests.jsonl: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--url", "http://127.0.0.1:1"], "give either RUN or --url"),
        ([], "give either RUN or --url"),
        (["run", "--model", "m"], "only with --url"),
        (["run", "--engine", "folder"], "only with --url"),
        (["--url", "ftp://host"], "--url: ftp://host: must be http://HOST:PORT"),
        (["--url", "http://host:80/v1"], "without /v1"),
        (["--url", "http://name:secret@host:80"], "KVROUTER_ENGINE_API_KEY"),
        (["--url", "http://host:80", "--model-config", "m.json"], "needs --engine with a config.json"),
        (["--url", "http://host:80", "--write-timing", "no/such/timing.yaml"], "is no folder"),
        (["--url", "http://host:80", "--request-limit-s", "0"], "--request-limit-s"),
    ],
)
def test_mistakes_about_a_live_engine_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err
