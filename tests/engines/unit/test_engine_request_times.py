"""What metrics pages say of requests' times and of the cache, under each engine's names."""

import pytest

from kvrouter.core.errors import ProtocolError
from kvrouter.core.workers import ENGINE_SIZE_MAX
from kvrouter.engines.openai.request_times import (
    CacheSize,
    OwnTimes,
    TimeSum,
    read_cache_size,
    read_own_times,
    read_request_times,
    read_running,
    times_between,
)
from tests.testing.scripted_engine import page

VLLM = page("vllm-0.32.0-metrics.txt")


def test_vllm_page_gives_every_request_time_and_the_cache_size() -> None:
    times = read_request_times(VLLM)
    assert times.queue is not None
    assert times.queue.count == 10
    assert times.queue.seconds == pytest.approx(0.000273698)
    assert times.prefill == TimeSum(pytest.approx(0.25485368), 10)  # type: ignore[arg-type]
    assert times.ttft == TimeSum(pytest.approx(0.51563215), 10)  # type: ignore[arg-type]
    assert times.token == TimeSum(pytest.approx(2.55301728), 110)  # type: ignore[arg-type]
    assert times.token is not None
    assert times.token.mean_s == pytest.approx(2.55301728 / 110)
    assert read_cache_size(VLLM) == CacheSize(block_size=32, blocks=200, n_ranks=1)


def test_sglang_page_gives_request_times_with_prefill_from_its_stages() -> None:
    times = read_request_times(page("sglang-0.5.23-metrics.txt"))
    assert times.queue == TimeSum(pytest.approx(0.05959652), 65)  # type: ignore[arg-type]
    assert times.prefill == TimeSum(pytest.approx(2.21614992), 65)  # type: ignore[arg-type]
    assert times.ttft == TimeSum(pytest.approx(3.88563122), 64)  # type: ignore[arg-type]
    assert times.token is not None
    assert times.token.count == 2801


def test_running_and_waiting_requests_are_counted_if_the_page_has_them() -> None:
    assert read_running(VLLM) == 0
    assert read_running(b"vllm:num_requests_running 2\nvllm:num_requests_waiting 3\n") == 5
    assert read_running(page("sglang-0.5.23-metrics.txt")) is None


def test_own_times_of_an_answer_are_read_from_its_last_event() -> None:
    events = [
        line.removeprefix(b"data: ")
        for line in page("vllm-0.32.0-completion-times.sse").splitlines()
        if line.startswith(b"data: {")
    ]
    found = [read_own_times(event) for event in events]
    assert found[:-1] == [None, None]
    assert found[-1] == OwnTimes(pytest.approx(2.910800e-05), pytest.approx(0.00643561))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "metrics",
    [
        "null",
        "{}",
        '"fast"',
        '{"queue_time_ms": null, "time_to_first_token_ms": 3}',
        '{"queue_time_ms": -1, "time_to_first_token_ms": 3}',
        '{"queue_time_ms": 1, "time_to_first_token_ms": 0}',
        '{"queue_time_ms": 1',
    ],
)
def test_unknown_metrics_field_gives_no_own_times(metrics: str) -> None:
    assert read_own_times(f'{{"choices": [], "metrics": {metrics}}}'.encode()) is None


def test_other_metric_prefixes_are_read_and_ranks_summed() -> None:
    text = b"""
sglang:queue_time_seconds_sum{dp_rank="0"} 1.5
sglang:queue_time_seconds_sum{dp_rank="1"} 0.5
sglang:queue_time_seconds_count{dp_rank="0"} 3
sglang:queue_time_seconds_count{dp_rank="1"} 1
vllm:time_per_output_token_seconds_sum 4
vllm:time_per_output_token_seconds_count 2
"""
    times = read_request_times(text)
    assert times.queue == TimeSum(2.0, 4)
    assert times.token == TimeSum(4.0, 2)
    assert times.prefill is None
    assert times.ttft is None
    assert read_cache_size(text) is None


def test_times_between_two_pages_are_the_growth_of_their_sums() -> None:
    before = read_request_times(VLLM)
    grown = VLLM.replace(
        b'vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny"} 0.2548536799986323',
        b'vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny"} 0.3548536799986323',
    ).replace(
        b'vllm:request_prefill_time_seconds_count{engine="0",model_name="tiny"} 10.0',
        b'vllm:request_prefill_time_seconds_count{engine="0",model_name="tiny"} 11.0',
    )
    between = times_between(before, read_request_times(grown))
    assert between.prefill == TimeSum(pytest.approx(0.1), 1)  # type: ignore[arg-type]
    assert between.queue == TimeSum(0.0, 0)
    assert between.queue is not None
    assert between.queue.mean_s is None
    assert times_between(before, read_request_times(b"")).queue is None


def test_cache_size_that_is_not_a_number_from_1_to_its_limit_is_refused() -> None:
    for wrong in ("None", "0", "many", str(ENGINE_SIZE_MAX + 1), "9" * 5_000, "-1"):
        text = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{wrong}"}} 1\n'.encode()
        with pytest.raises(ProtocolError, match="num_gpu_blocks must be a number from 1 to 1048576, not"):
            read_cache_size(text)
