"""What calibration predicts of two real engines' requests that it did not see."""

from pathlib import Path

import pytest

from kvrouter.sim.calibrate.calibration import calibrate, compare, missed
from kvrouter.sim.calibrate.measured_run import read_run
from kvrouter.sim.calibrate.model_shape import model_shape

DATA = Path(__file__).parents[3] / "data"
UNSEEN_MOST = {"time per output token": 0.15, "service TTFT": 0.2}


@pytest.mark.parametrize("name", ["vllm-llama3.1-8b", "vllm-qwen3-32b"])
def test_predictions_of_unseen_requests_stay_within_their_bars(name: str) -> None:
    run = read_run(DATA / name)
    calibrated = calibrate(run, model_shape(run.meta.model, DATA / name)[0], n_fitted=30)
    compared = compare(run, calibrated)
    rows = compared.unseen
    assert len(rows) == 12
    assert missed(rows) == []
    for row in rows:
        assert row.error is not None
        assert abs(row.error) <= (0.2 if row.percentile == 99 else 0.1), row
        if row.quantity in UNSEEN_MOST:
            assert row.expected_error is not None
            assert abs(row.expected_error) <= UNSEEN_MOST[row.quantity], row
    assert missed(compared.seen) == []
    assert calibrated.kv.source == "unknown"
