"""GET /metrics: rendered in steps, once for all who ask meanwhile, and for a bounded share of the time."""

import asyncio
import time
from itertools import pairwise

from kvrouter.frontend.public_pages import METRICS_TIME_SHARE, MetricsRenderer
from kvrouter.telemetry import MetricsFormat, Telemetry


async def test_concurrent_scrapes_share_the_next_fresh_page() -> None:
    telemetry = Telemetry()
    renderer = MetricsRenderer(telemetry)
    began = asyncio.Event()
    rendered: list[None] = []

    def on_begin() -> None:
        rendered.append(None)
        began.set()

    telemetry.before_scrape(on_begin)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(renderer.render(MetricsFormat.TEXT))
        await began.wait()
        telemetry.resumes.inc("m")
        later = [tasks.create_task(renderer.render(MetricsFormat.TEXT)) for _ in range(20)]
    assert len(rendered) == 2
    for asked in later:
        assert b'kvrouter_resumes_total{model="m"} 1.0' in asked.result()
    assert first.result().count(b"# TYPE") == later[0].result().count(b"# TYPE")


async def test_the_event_loop_runs_between_metric_families() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    await MetricsRenderer(Telemetry()).render(MetricsFormat.TEXT)
    task.cancel()
    assert turns >= len(Telemetry.SPECS)


async def test_frequent_scrapes_take_a_bounded_share_of_the_loop() -> None:
    refresh_s = 0.02
    telemetry = Telemetry()
    renderer = MetricsRenderer(telemetry)
    rendered: list[float] = []

    def slow_refresh() -> None:
        rendered.append(time.monotonic())
        time.sleep(refresh_s)

    telemetry.before_scrape(slow_refresh)
    while len(rendered) < 4:
        await renderer.render(MetricsFormat.TEXT)
    waits_s = [later - earlier for earlier, later in pairwise(rendered)]
    assert min(waits_s) >= refresh_s / METRICS_TIME_SHARE


async def test_the_page_is_rendered_for_others_when_one_scraper_leaves() -> None:
    renderer = MetricsRenderer(Telemetry())
    leaves, stays = (
        asyncio.create_task(renderer.render(MetricsFormat.TEXT)),
        asyncio.create_task(renderer.render(MetricsFormat.TEXT)),
    )
    await asyncio.sleep(0)
    leaves.cancel()
    assert b"# TYPE kvrouter_requests_total counter" in await stays


async def test_each_format_has_a_page_of_its_own() -> None:
    renderer = MetricsRenderer(Telemetry())
    text, openmetrics = await asyncio.gather(*map(renderer.render, MetricsFormat))
    assert b"# EOF" not in text
    assert openmetrics.endswith(b"# EOF\n")
    assert openmetrics.count(b"# EOF") == 1
    assert text.count(b"# TYPE") == openmetrics.count(b"# TYPE")


def test_openmetrics_is_served_when_accepted() -> None:
    assert MetricsFormat.accepted_by(None) is MetricsFormat.TEXT
    assert MetricsFormat.accepted_by("*/*") is MetricsFormat.TEXT
    prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.1"
    assert MetricsFormat.accepted_by(prometheus) is MetricsFormat.OPENMETRICS
