"""Calibration from what a client saw of an engine: the stamps, and the timing that they give back."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from kvrouter.core.errors import ConfigError
from kvrouter.core.timing import Timing
from kvrouter.sim.calibrate.calibration import calibrate_from, compare, quantities
from kvrouter.sim.calibrate.client_run import AT_ONCE_SHARE, ClientRequest, client_run
from kvrouter.sim.calibrate.engine_load import engine_load
from kvrouter.sim.calibrate.lone_requests import LONE_SPREADS, lone_timing
from kvrouter.sim.calibrate.measured_run import MeasuredRun
from kvrouter.sim.calibrate.model_shape import model_shape
from kvrouter.sim.calibrate.roofline import roofline
from tests.testing.client_measurements import META, client_requests

FORM = Timing(prefill_quadratic=0.0, decode_quadratic=0.0, decode_linear=0.0)
TRUTHS = {
    "a small model": replace(
        FORM,
        prefill_linear=0.03,
        prefill_base=6.0,
        prefill_attention=1e-6,
        decode_base=12.0,
        decode_sequence=0.05,
        decode_kv_token=1e-4,
        mixed_kv_token=7e-5,
    ),
    "a large one": replace(
        FORM,
        prefill_linear=0.1,
        prefill_base=2.0,
        prefill_attention=5e-6,
        decode_base=30.0,
        decode_sequence=0.3,
        decode_kv_token=5e-4,
        mixed_kv_token=2e-4,
    ),
}
ALONE = ClientRequest(100, 11, sent_s=5.0, first_s=5.5, last_s=6.5)


def measured(timing: Timing, *, way_s: float, with_times: bool) -> MeasuredRun:
    load = engine_load(30, context_tokens=16_384, kv_tokens=320_000)
    requests = client_requests(load, timing, way_s=way_s, with_times=with_times)
    return client_run(META, None, requests, round_trip_s=0.0 if with_times else way_s)


@pytest.mark.parametrize("with_times", [False, True], ids=["client alone", "with metrics"])
@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
def test_client_stamps_of_a_mock_engine_give_its_timing_back(truth: Timing, with_times: bool) -> None:
    run = measured(truth, way_s=0.003, with_times=with_times)
    calibrated = calibrate_from(run, lone_timing(run, 30), n_fitted=30, spreads=LONE_SPREADS)
    fitted = calibrated.fitted.timing
    for n_tokens in (1_024, 8_192):
        attended = n_tokens * n_tokens / 2.0
        assert fitted.prefill_ms(n_tokens, attended) == pytest.approx(
            truth.prefill_ms(n_tokens, attended), rel=0.05
        )
    for n_requests in (1, 12):
        kv_tokens = 500 * n_requests
        assert fitted.decode_ms(0.0, n_requests, kv_tokens) == pytest.approx(
            truth.decode_ms(0.0, n_requests, kv_tokens), rel=0.05
        )
    rows = compare(run, calibrated).unseen
    assert {row.quantity for row in rows} == {"TTFT", "time per output token", "end to end"}
    assert [row.error for row in rows] == pytest.approx([0.0] * len(rows), abs=0.05)


def test_network_delay_without_engine_times_is_the_round_trip_time() -> None:
    run = client_run(
        META, None, [ALONE, ALONE._replace(sent_s=8.0, first_s=8.2, last_s=9.0)], round_trip_s=0.1
    )
    assert run.stamps.arrival.tolist() == pytest.approx([0.0, 3.0])
    assert run.stamps.first.tolist() == pytest.approx([0.4, 3.1])
    assert run.stamps.last.tolist() == pytest.approx([1.4, 3.9])
    assert np.isnan(run.stamps.queued).all()
    assert np.isnan(run.stamps.scheduled).all()
    assert not run.knows_scheduler
    assert list(quantities(run, run.stamps)) == ["TTFT", "time per output token", "end to end"]
    assert run.input_tokens.tolist() == [100, 100]
    assert run.output_tokens.tolist() == [11, 11]


def test_engine_times_set_its_stamps_and_the_network_delay_of_others() -> None:
    known = ALONE._replace(queue_s=0.05, prefill_s=0.25)
    other = ALONE._replace(sent_s=8.0, first_s=9.0, last_s=9.5)
    run = client_run(META, None, [known, other], round_trip_s=7.0)
    # Sent at 5, first token at 5.5: in 0.25 s of these it prefilled, in 0.05 s it waited, and 0.2 s were way.
    assert run.stamps.arrival.tolist() == pytest.approx([0.0, 3.0])
    assert run.stamps.queued[0] == pytest.approx(0.0)
    assert run.stamps.scheduled[0] == pytest.approx(0.05)
    assert run.stamps.first[0] == pytest.approx(0.3)
    assert np.isnan(run.stamps.scheduled[1])
    alone = client_run(META, None, [known], round_trip_s=7.0)
    assert alone.knows_scheduler
    assert "queue" in quantities(alone, alone.stamps)


def test_requests_that_ran_together_share_the_network_delay_of_the_sums() -> None:
    together = [
        ALONE._replace(sent_s=8.0, first_s=9.0, last_s=9.5, way_share=0.8),
        ALONE._replace(sent_s=8.0, first_s=8.5, last_s=9.5, way_share=0.8),
    ]
    run = client_run(META, None, together, round_trip_s=0.0)
    assert sorted(run.stamps.first - run.stamps.arrival) == pytest.approx([0.1, 0.2])
    assert not run.knows_scheduler


def test_network_delay_is_at_most_half_of_the_wait() -> None:
    run = client_run(
        META, None, [ALONE, ALONE._replace(sent_s=8.0, first_s=8.1, last_s=9.0)], round_trip_s=0.4
    )
    assert (run.stamps.first - run.stamps.arrival).tolist() == pytest.approx([0.25, 0.05])


def test_engine_times_longer_than_the_client_waited_are_cut() -> None:
    run = client_run(META, None, [ALONE._replace(queue_s=3.0, prefill_s=4.0)], round_trip_s=0.0)
    assert run.stamps.arrival[0] == run.stamps.queued[0] == run.stamps.scheduled[0] == 0.0
    assert run.stamps.first[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("wrong", "param", "why"),
    [
        ({"prompt_tokens": 0}, "usage", "usage says 0 prompt"),
        ({"answer_tokens": 0}, "usage", "0 answer tokens"),
        ({"first_s": 5.0}, "first_s", "before it was sent"),
    ],
)
def test_impossible_stream_stamps_and_usage_are_refused(
    wrong: dict[str, float], param: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"request 2: .*{why}") as caught:
        client_run(META, None, [ALONE, ALONE._replace(**wrong)], round_trip_s=0.0)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_answers_that_came_at_once_are_left_out_of_decoding_and_many_refused() -> None:
    truth = TRUTHS["a small model"]
    load = engine_load(30, context_tokens=16_384, kv_tokens=320_000)
    requests = client_requests(load, truth, with_times=True)
    n_may = int(AT_ONCE_SHARE * len(requests))

    def held_back(n: int) -> list[ClientRequest]:
        return [each._replace(first_s=each.last_s) for each in requests[-n:]]

    run = client_run(META, None, [*requests[:-n_may], *held_back(n_may)], round_trip_s=0.0)
    assert np.count_nonzero(~run.decodes) == n_may
    assert np.count_nonzero(np.isnan(quantities(run, run.stamps)["time per output token"])) == n_may
    # One of those to fit to: the others still say how long a step is.
    seen = client_run(
        META,
        None,
        [*requests[:20], requests[20]._replace(first_s=requests[20].last_s), *requests[21:]],
        round_trip_s=0.0,
    )
    fitted = calibrate_from(seen, lone_timing(seen, 30), n_fitted=30, spreads=LONE_SPREADS).fitted.timing
    assert fitted.decode_ms(0.0, 12, 6_000) == pytest.approx(truth.decode_ms(0.0, 12, 6_000), rel=0.1)
    more = n_may + 1
    with pytest.raises(ConfigError, match=f"the tokens of {more} of {len(requests)} answers came at once"):
        client_run(META, None, [*requests[:-more], *held_back(more)], round_trip_s=0.0)


def test_fit_begins_at_the_times_of_requests_that_ran_alone() -> None:
    truth = TRUTHS["a large one"]
    run = measured(truth, way_s=0.0, with_times=True)
    begun = lone_timing(run, 30)
    assert begun.kv_tokens == 320_000
    assert begun.guesses == ()
    assert begun.timing.prefill_linear == pytest.approx(truth.prefill_linear, rel=0.2)
    assert begun.timing.decode_base == pytest.approx(truth.decode_base, rel=0.2)
    unsaid = replace(
        run,
        meta=replace(run.meta, engine_kwargs=replace(run.meta.engine_kwargs, num_gpu_blocks_override=None)),
    )
    assert "does not say how many" in lone_timing(unsaid, 30).guesses[0]
    assert lone_timing(unsaid, 30).kv_tokens >= run.input_tokens.sum() + run.output_tokens.sum()


def test_requests_that_never_ran_alone_are_refused_as_a_start() -> None:
    together = [ALONE._replace(sent_s=5.0 + 0.01 * at) for at in range(8)]
    with pytest.raises(ConfigError, match="0 of 6 ran alone"):
        lone_timing(client_run(META, None, together, round_trip_s=0.0), 6)
    single = [
        ClientRequest(100 + at, 1, sent_s=float(at), first_s=at + 0.5, last_s=at + 0.5) for at in range(8)
    ]
    with pytest.raises(ConfigError, match="no answer has more than one token"):
        lone_timing(client_run(META, None, single, round_trip_s=0.0), 6)


def test_expected_timing_without_hardware_is_refused(tmp_path: Path) -> None:
    run = client_run(META, None, [ALONE], round_trip_s=0.0)
    shape, _ = model_shape("meta-llama/Llama-3.1-8B", tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json: is needed"):
        roofline(run, shape)
