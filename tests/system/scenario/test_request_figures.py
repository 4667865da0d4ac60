"""The figures that the web page shows first equal ``/metrics`` and the engines' own counts."""

from bisect import bisect_left

import msgspec
import pytest

from kvrouter.api.decision_schema import LastDecisions
from kvrouter.api.fleet_schema import Fleet, ServedRequests
from kvrouter.core.requests import Leg
from kvrouter.engines.mock_engine.sequence import LegStamps
from kvrouter.fleetfile.fleet_file import FleetFile
from tests.testing.mock_fleet import uniform_fleet, zoned_fleet
from tests.testing.mock_server import MODEL, Metrics, MockServer, mock_server, user, words

TTFT = "time_to_first_token_seconds"


async def send_mix(house: MockServer) -> None:
    """Send prompts that are new, repeated and extended, one that nobody may take, and one that is wrong."""
    for first, n in ((1, 200), (2, 700), (1, 200), (1, 450), (2, 700), (3, 64)):
        await house.openai.chat.completions.create(
            model=MODEL, messages=user(words(first=first, n=n)), max_tokens=5 + first
        )
    nowhere = {"routing_constraints": {"required_taints": ["gpu=none"]}}
    body = {"model": MODEL, "messages": user("hello"), "nvext": nowhere}
    assert (await house.http.post("/v1/chat/completions", json=body)).status_code == 503
    assert (await house.http.post("/v1/completions", json={"model": MODEL})).status_code == 400


def rank_bucket(metrics: Metrics, bounds: list[str], share: float) -> int:
    """The bucket of the histogram that holds a percentile by nearest rank."""
    counts = [metrics.value(f"{TTFT}_bucket", le=bound) for bound in bounds]
    return bisect_left(counts, share * counts[-1])


@pytest.mark.parametrize("fleet", [uniform_fleet(), zoned_fleet()], ids=["plain", "two-zones"])
async def test_figures_equal_the_metrics_and_the_counts_of_the_engines(fleet: FleetFile) -> None:
    legs: list[LegStamps] = []
    async with mock_server(fleet) as house:
        house.system.fleet.cluster.watch_legs(legs.append)
        await send_mix(house)
        await house.until_quiet()
        metrics = await house.metrics()
        answer = await house.http.get("/v1/fleet")
        latest = (await house.http.get("/v1/decisions")).content
    state = msgspec.json.decode(answer.content, type=Fleet)
    stats = state.request_stats
    assert stats is not None
    for window in (stats.last_minute, stats.last_5_minutes, stats.since_start):
        check_counts(window, metrics)
        prefills = [each for each in legs if each.leg is not Leg.DECODE]
        assert window.reported.cached_tokens == sum(each.cached_tokens for each in prefills) > 0
    assert state.models[0].request_stats is not None
    check_counts(state.models[0].request_stats.since_start, metrics)
    check_percentiles(stats.last_5_minutes, metrics)
    decisions = msgspec.json.decode(latest, type=LastDecisions).decisions
    assert sum(each.isl_tokens for each in decisions) == stats.since_start.prompt_tokens
    assert sum(each.cached_tokens or 0 for each in decisions) == stats.since_start.reported.cached_tokens
    expected = sum(each.expected_cached_tokens or 0 for each in decisions)
    assert expected == stats.since_start.predicted.cached_tokens
    seen_ms = sum(each.ttft_ms or 0.0 for each in decisions)
    assert seen_ms == pytest.approx(1e3 * metrics.value(f"{TTFT}_sum"), abs=0.1)


def check_counts(window: ServedRequests, metrics: Metrics) -> None:
    assert window.requests == metrics.value("requests_total") == 8
    assert window.errors == metrics.value("errors_total") == 2
    assert window.first_tokens == metrics.value(f"{TTFT}_count") == 6
    assert window.prompt_tokens == metrics.value("prompt_tokens_total")
    assert window.completion_tokens == metrics.value("completion_tokens_total")
    assert window.reported.requests == window.first_tokens
    assert window.reported.cached_tokens == metrics.value("cached_tokens_total")
    assert window.predicted.cached_tokens == metrics.value("overlap_tokens_total")
    assert window.predicted.prompt_tokens == window.reported.prompt_tokens == window.prompt_tokens


def check_percentiles(window: ServedRequests, metrics: Metrics) -> None:
    bounds = metrics.bounds(TTFT)
    upper = [float(bound) for bound in bounds]
    for share, seconds in ((0.5, window.ttft_p50_s), (0.99, window.ttft_p99_s)):
        assert seconds is not None
        assert bisect_left(upper, seconds) == rank_bucket(metrics, bounds, share)


async def test_a_running_request_shows_its_first_token_before_its_end() -> None:
    async with mock_server(uniform_fleet(speedup=10.0)) as house:
        stream = await house.openai.chat.completions.create(
            model=MODEL, messages=user(words(n=100)), max_tokens=400, stream=True
        )
        await anext(aiter(stream))
        (row,) = (await house.http.get("/v1/decisions")).json()["decisions"]
        stats = (await house.http.get("/v1/fleet")).json()["request_stats"]
        assert row["ttft_ms"] > 0
        assert row["isl_tokens"] >= 100
        assert row["expected_cached_tokens"] == 0
        assert stats["since_start"]["requests"] == 0
        await stream.close()


async def test_the_expected_cache_is_that_of_the_worker_that_prefills() -> None:
    async with mock_server(zoned_fleet()) as house:
        for _ in range(2):
            await house.openai.chat.completions.create(model=MODEL, messages=user(words(n=200)), max_tokens=4)
            latest = msgspec.json.decode((await house.http.get("/v1/decisions")).content, type=LastDecisions)
            row = latest.decisions[0]
            assert row.decode is not None
            await house.kill(row.decode.worker_id)  # the next decode worker has nothing of the prompt
        await house.until_quiet()
        metrics = await house.metrics()
    assert row.decode is not None
    assert row.decode.overlap_blocks == 0
    assert row.expected_cached_tokens == row.cached_tokens == metrics.value("overlap_tokens_total") > 0
