"""``kvrouter doctor`` names requests that wait or are refused, and why."""

import asyncio

import pytest

from kvrouter.cli.doctor.findings import Severity
from kvrouter.cli.doctor.flags import DoctorOptions
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.settings.router_settings import KvRouterConfig
from tests.support.examined import (
    chats,
    examined,
    found,
    names_of,
    the_finding,
)
from tests.support.fleets import MODEL, card, decode_card, prefill_card
from tests.support.front import House, open_house, says, takeover_instructions, zoned_pairs
from tests.support.mock_fleets import alike
from tests.support.served import served, words
from tests.support.waits import until


async def test_a_queue_that_is_full() -> None:
    config = KvRouterConfig(
        router_cost="blocks",
        active_decode_blocks_threshold=0.0,
        admission_queue_max=1,
        admission_wait_s=300.0,
    )
    async with served(alike(replicas=1, speedup=1.0), router=config) as here:
        stream = await here.openai.completions.create(
            model="mock", prompt=words(), max_tokens=100_000, stream=True
        )
        await anext(stream)
        (model,) = here.system.service.models()
        waiting = asyncio.create_task(chats(here, n=1))
        await until(lambda: len(model.placer.waiting) == 1)
        assert await chats(here, n=2) == [503, 503]
        report = await examined(here)
        await stream.close()
        assert await waiting == [200]
    warned = [each.seen for each in found(report, "queue", Severity.WARNING)]
    assert "the queue refused requests since the router began: full 2" in warned
    assert "1 worker may take requests, and each is above its busy threshold" in warned
    (noted,) = found(report, "queue", Severity.NOTE)
    assert noted.seen == "1 request in line for a worker that is not busy"
    refused = the_finding(report, "refusals", Severity.WARNING)
    assert "all_workers_busy 2" in refused.seen
    assert "busy (" in refused.remedy
    assert names_of(report) == {"queue", "refusals"}


async def test_workers_that_are_all_busy_by_tokens_that_wait() -> None:
    config = KvRouterConfig(active_prefill_tokens_threshold=100)
    async with open_house(card(1), card(2), config=config) as house:
        for worker_id in (1, 2):
            rank = WorkerRank(WorkerId(worker_id), DpRank(0))
            house.bench.model.fleet.report(LoadReport(rank, 7, 1000, active_prefill_tokens=101))
        report = await examined(house)
    assert "above its busy threshold" in the_finding(report, "queue", Severity.WARNING).seen


async def test_decode_workers_that_are_all_busy_while_prefill_workers_are_idle() -> None:
    config = KvRouterConfig(active_decode_blocks_threshold=0.5)
    async with open_house(prefill_card(1), decode_card(2), config=config) as house:
        rank = WorkerRank(WorkerId(2), DpRank(0))
        house.bench.model.fleet.report(LoadReport(rank, 1000, 1000))
        report = await examined(house)
    warned = the_finding(report, "queue", Severity.WARNING)
    assert warned.seen == "1 worker may decode, and each is above its busy threshold"


async def test_requests_that_no_worker_may_take_with_each_reason() -> None:
    async with open_house(*zoned_pairs(), script=takeover_instructions) as house:
        assert (await house.chat()).status_code == 200
        taints = {"required_taints": ["gpu=h200"]}
        assert (await house.chat(nvext={"routing_constraints": taints})).status_code == 503
        report = await examined(house)
    finding = the_finding(report, "refusals", Severity.WARNING)
    assert "1 of 2 requests" in finding.seen
    assert "no_eligible_worker 1" in finding.seen
    assert "taint_missing" in finding.remedy


async def test_calls_that_are_refused_for_their_own_fault_are_no_problem() -> None:
    async with open_house(card(1), script=says("ok")) as house:
        assert (await house.chat(temperature=9)).status_code == 400
        assert (await house.http.post("/v1/completions", json={"model": "no"})).status_code in (400, 404)
        house.bench.telemetry.errors.inc("unknown", "not_ready")  # probed while it started
        assert found(await examined(house), "refusals") == []


async def refused(house: House, n: int, *, of: int) -> None:
    house.bench.telemetry.requests.inc("/v1/completions", MODEL, "200", by=of - n)
    house.bench.telemetry.requests.inc("/v1/completions", MODEL, "503", by=n)
    house.bench.telemetry.errors.inc(MODEL, "no_eligible_worker", by=n)


@pytest.mark.parametrize(("n", "severity"), [(1, Severity.NOTE), (2, Severity.WARNING)])
async def test_rare_refusals_are_noted(n: int, severity: Severity) -> None:
    async with open_house(card(1)) as house:
        await refused(house, n, of=200)
        report = await examined(house)
    the_finding(report, "refusals", severity)
    assert report.has_problems is (severity is Severity.WARNING)


async def test_what_happened_before_does_not_count_where_only_this_time_is_wanted() -> None:
    async with open_house(card(1)) as house:
        await refused(house, 100, of=200)
        report = await examined(house, options=DoctorOptions(over_s=0.05))
        assert found(report, "refusals") == []

        async def while_it_looks() -> None:
            await asyncio.sleep(0.3)  # between its two readings
            await refused(house, 3, of=6)

        options = DoctorOptions(over_s=1.0)
        report, _ = await asyncio.gather(examined(house, options=options), while_it_looks())
    assert (
        "3 of 6 requests were answered with an error in 1 s"
        in the_finding(report, "refusals", Severity.WARNING).seen
    )
