"""KV blocks of a measured engine: read, inferred from its requests, or said to be unknown."""

import json
from pathlib import Path

import pytest

from kvrouter.core.timing import Timing
from kvrouter.sim.calibrate.calibration import Calibrated, calibrate, compare, missed
from kvrouter.sim.calibrate.kv_blocks import KvBlocks, block_bounds
from kvrouter.sim.calibrate.measured_run import read_run
from kvrouter.sim.calibrate.model_shape import model_shape
from tests.testing.measured_runs import META, MODEL, written_run

TIMING = Timing(
    decode_base=25.0,
    decode_linear=0.0,
    decode_quadratic=0.0,
    prefill_linear=0.03,
    prefill_base=2.0,
    decode_kv_token=1e-4,
)


def calibrated(folder: Path, n_fitted: int, blocks: int) -> Calibrated:
    run = written_run(folder, TIMING, blocks=blocks)
    return calibrate(run, model_shape(MODEL, folder)[0], n_fitted=n_fitted)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("blocks", [250, 400, 700])
def test_bounds_of_kv_blocks_hold_the_true_number(tmp_path: Path, blocks: int, seed: int) -> None:
    run = written_run(tmp_path, TIMING, blocks=blocks, seed=seed)
    least, most = block_bounds(run, 40)
    assert least is not None
    assert blocks / 3 < least <= blocks
    assert most is None or blocks <= most < 2 * blocks
    assert blocks > 400 or most is not None


@pytest.mark.parametrize(("memory_gib", "assumed"), [(96, "too many"), (17.62, "too few")])
def test_kv_blocks_are_inferred_where_memory_says_another_number(
    tmp_path: Path, memory_gib: float, assumed: str
) -> None:
    run = written_run(tmp_path, TIMING, blocks=400, memory_gib=memory_gib)
    found = calibrate(run, model_shape(MODEL, tmp_path)[0], n_fitted=30)
    assert (found.expected.total_kv_blocks > 400) == (assumed == "too many")
    assert abs(found.expected.total_kv_blocks / 400 - 1.0) > 0.3
    assert found.kv.source == "inferred"
    assert found.kv.blocks == found.fitted.total_kv_blocks == pytest.approx(400, rel=0.1)
    assert found.kv.line.startswith(f"KV blocks: inferred (at least {found.kv.at_least}")
    assert missed(compare(run, found).unseen) == []


def test_kv_blocks_are_unknown_where_no_request_depends_on_them(tmp_path: Path) -> None:
    ample = calibrated(tmp_path, 30, 30_000)
    assert ample.kv == KvBlocks(ample.expected.total_kv_blocks, "unknown", ample.kv.at_least)
    assert f"are assumed; the requests seen say at least {ample.kv.at_least};" in ample.kv.line
    none = calibrated(tmp_path, 0, 400)
    assert none.kv == KvBlocks(none.expected.total_kv_blocks, "unknown")
    assert "are assumed; metrics.txt or num_gpu_blocks_override" in none.kv.line


def test_kv_blocks_that_a_run_states_are_read(tmp_path: Path) -> None:
    written_run(tmp_path, TIMING, blocks=400)
    flags = {**META["engine_kwargs"], "num_gpu_blocks_override": 410}  # type: ignore[dict-item]
    (tmp_path / "meta.json").write_text(json.dumps({**META, "engine_kwargs": flags}))
    found = calibrate(read_run(tmp_path), model_shape(MODEL, tmp_path)[0], n_fitted=10)
    assert found.kv == KvBlocks(410, "read")
    assert found.fitted.total_kv_blocks == 410
    assert found.kv.line == "KV blocks: read: 410"
