"""The statistics of the calls that ended: windows, percentiles, hit rates, and their bounds."""

from kvrouter.api.fleet_schema import CacheHits
from kvrouter.frontend import request_stats
from kvrouter.frontend.request_stats import EndedCall, RequestStatistics
from tests.testing.constants import SetConstants


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def answered(ttft_s: float, *, predicted: int | None = None, reported: int | None = None) -> EndedCall:
    return EndedCall(False, ttft_s, 100, 7, predicted, reported)


def test_percentiles_are_measured_times_of_the_last_five_minutes() -> None:
    clock = Clock()
    stats = RequestStatistics(clock)
    stats.ended("m", answered(99.0))
    clock.now_s += 301.0
    for n in range(1, 101):
        stats.ended("m", answered(n / 1000))
    last = stats.reading().all_models.last_5_minutes
    assert (last.ttft_p50_s, last.ttft_p99_s) == (0.05, 0.099)
    assert last.first_tokens == 100


def test_each_window_has_the_calls_that_ended_in_it() -> None:
    clock = Clock()
    stats = RequestStatistics(clock)
    stats.ended("m", answered(1.0))
    clock.now_s += 240.5
    stats.ended("m", answered(1.0))
    clock.now_s += 59.0
    stats.ended(None, EndedCall(True))
    reading = stats.reading().all_models
    windows = (reading.last_minute, reading.last_5_minutes, reading.since_start)
    assert [(each.window_s, each.requests, each.errors) for each in windows] == [
        (60.0, 2, 1),
        (299.5, 3, 1),
        (299.5, 3, 1),
    ]
    assert [each.completion_tokens for each in windows] == [7, 14, 14]
    clock.now_s += 61.0
    idle = stats.reading().all_models
    assert (idle.last_minute.requests, idle.last_minute.ttft_p50_s) == (0, None)
    assert idle.since_start.requests == 3


def test_hit_rates_count_only_requests_with_a_known_number() -> None:
    stats = RequestStatistics(Clock())
    stats.ended("m", answered(1.0, predicted=64, reported=48))
    stats.ended("m", answered(1.0, predicted=16))
    stats.ended("m", answered(1.0, reported=0))
    stats.ended("m", EndedCall(True, None, 100, 0, 100, 100))
    for window in (stats.reading().all_models.last_minute, stats.reading().all_models.since_start):
        assert window.predicted == CacheHits(requests=2, prompt_tokens=200, cached_tokens=80)
        assert window.reported == CacheHits(requests=2, prompt_tokens=200, cached_tokens=48)
        assert window.prompt_tokens == 300, "of requests whose first token came"


def test_models_have_statistics_of_their_own() -> None:
    stats = RequestStatistics(Clock())
    stats.ended("one", answered(1.0, reported=50))
    stats.ended(None, EndedCall(True))
    stats.ended("other", answered(3.0))
    stats.ended("one", EndedCall(True))
    reading = stats.reading()
    found = {name: each.last_minute for name, each in reading.by_model.items()}
    assert {name: (each.requests, each.errors, each.ttft_p99_s) for name, each in found.items()} == {
        "one": (2, 1, 1.0),
        "other": (1, 0, 3.0),
    }
    assert reading.by_model["one"].since_start.reported.cached_tokens == 50
    for window in (reading.all_models.last_minute, reading.all_models.since_start):
        assert (window.requests, window.errors, window.first_tokens) == (4, 2, 2)
    assert reading.all_models.since_start.reported == reading.by_model["one"].since_start.reported


def test_before_the_first_call_all_figures_are_zero() -> None:
    reading = RequestStatistics(Clock()).reading()
    assert (reading.all_models.since_start.requests, reading.by_model) == (0, {})


def test_a_full_record_says_how_far_it_reaches(set_constants: SetConstants) -> None:
    set_constants(request_stats, KEPT_MAX=10)
    clock = Clock()
    stats = RequestStatistics(clock)
    for n in range(25):
        clock.now_s += 1.0
        stats.ended("m", answered(float(n)))
    reading = stats.reading().all_models
    assert (reading.last_minute.requests, reading.last_minute.window_s) == (10, 9.0)
    assert reading.last_5_minutes.ttft_p50_s == 19.0
    assert reading.since_start.requests == 25
