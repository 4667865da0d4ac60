"""``kvrouter doctor`` names requests that wait or are refused, and why."""

import asyncio

import pytest

from kvrouter.cli.doctor import diagnosis
from kvrouter.cli.doctor.findings import Severity
from kvrouter.cli.doctor.flags import DoctorOptions
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.workers import LoadReport
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.calls import WatchCalls
from tests.testing.doctor import (
    failed_checks,
    findings_of,
    only_finding,
    run_doctor,
    send_chats,
)
from tests.testing.frontend_harness import (
    FrontendHarness,
    handoff_script,
    running_frontend,
    text_answer,
    zoned_cards,
)
from tests.testing.mock_fleet import uniform_fleet
from tests.testing.mock_server import mock_server, words
from tests.testing.router_harness import MODEL, card, decode_card, prefill_card
from tests.testing.waits import until


async def test_doctor_reports_a_full_queue() -> None:
    config = KvRouterConfig(
        router_cost="blocks",
        active_decode_blocks_threshold=0.0,
        admission_queue_max=1,
        admission_wait_s=300.0,
    )
    async with mock_server(uniform_fleet(replicas=1, speedup=1.0), router=config) as here:
        stream = await here.openai.completions.create(
            model="mock", prompt=words(), max_tokens=100_000, stream=True
        )
        await anext(stream)
        (model,) = here.system.service.models()
        waiting = asyncio.create_task(send_chats(here, n=1))
        await until(lambda: len(model.placer.waiting) == 1)
        assert await send_chats(here, n=2) == [503, 503]
        report = await run_doctor(here)
        await stream.close()
        assert await waiting == [200]
    warned = [each.seen for each in findings_of(report, "queue", Severity.WARNING)]
    assert "the queue refused requests since the router began: full 2" in warned
    assert "1 worker may take requests, and each is above its busy threshold" in warned
    (noted,) = findings_of(report, "queue", Severity.NOTE)
    assert noted.seen == "1 request in line for a worker that is not busy"
    refused = only_finding(report, "refusals", Severity.WARNING)
    assert "all_workers_busy 2" in refused.seen
    assert "busy (" in refused.remedy
    assert failed_checks(report) == {"queue", "refusals"}


async def test_doctor_reports_workers_all_over_the_prefill_token_threshold() -> None:
    config = KvRouterConfig(active_prefill_tokens_threshold=100)
    async with running_frontend(card(1), card(2), config=config) as frontend:
        for worker_id in (1, 2):
            rank = WorkerRank(WorkerId(worker_id), DpRank(0))
            frontend.harness.model.fleet.report(LoadReport(rank, 7, 1000, active_prefill_tokens=101))
        report = await run_doctor(frontend)
    assert "above its busy threshold" in only_finding(report, "queue", Severity.WARNING).seen


async def test_doctor_reports_decode_workers_that_are_all_busy() -> None:
    config = KvRouterConfig(active_decode_blocks_threshold=0.5)
    async with running_frontend(prefill_card(1), decode_card(2), config=config) as frontend:
        rank = WorkerRank(WorkerId(2), DpRank(0))
        frontend.harness.model.fleet.report(LoadReport(rank, 1000, 1000))
        report = await run_doctor(frontend)
    warned = only_finding(report, "queue", Severity.WARNING)
    assert warned.seen == "1 worker may decode, and each is above its busy threshold"


async def test_doctor_reports_requests_without_an_eligible_worker() -> None:
    async with running_frontend(*zoned_cards(), script=handoff_script) as frontend:
        assert (await frontend.chat()).status_code == 200
        taints = {"required_taints": ["gpu=h200"]}
        assert (await frontend.chat(nvext={"routing_constraints": taints})).status_code == 503
        report = await run_doctor(frontend)
    finding = only_finding(report, "refusals", Severity.WARNING)
    assert "1 of 2 requests" in finding.seen
    assert "no_eligible_worker 1" in finding.seen
    assert "taint_missing" in finding.remedy


async def test_doctor_ignores_calls_refused_for_client_errors() -> None:
    async with running_frontend(card(1), script=text_answer("ok")) as frontend:
        assert (await frontend.chat(temperature=9)).status_code == 400
        assert (await frontend.http.post("/v1/completions", json={"model": "no"})).status_code in (400, 404)
        frontend.harness.telemetry.errors.inc("unknown", "not_ready")  # probed while it started
        assert findings_of(await run_doctor(frontend), "refusals") == []


async def refused(frontend: FrontendHarness, n: int, *, of: int) -> None:
    frontend.harness.telemetry.requests.inc("/v1/completions", MODEL, "200", by=of - n)
    frontend.harness.telemetry.requests.inc("/v1/completions", MODEL, "503", by=n)
    frontend.harness.telemetry.errors.inc(MODEL, "no_eligible_worker", by=n)


@pytest.mark.parametrize(("n", "severity"), [(1, Severity.NOTE), (2, Severity.WARNING)])
async def test_doctor_notes_rare_and_warns_of_frequent_refusals(n: int, severity: Severity) -> None:
    async with running_frontend(card(1)) as frontend:
        await refused(frontend, n, of=200)
        report = await run_doctor(frontend)
    only_finding(report, "refusals", severity)
    assert report.has_problems is (severity is Severity.WARNING)


async def test_refusals_before_the_examined_period_do_not_count(watch_calls: WatchCalls) -> None:
    read = watch_calls(diagnosis, "_samples")
    async with running_frontend(card(1)) as frontend:
        await refused(frontend, 100, of=200)
        report = await run_doctor(frontend, options=DoctorOptions(over_s=0.05))
        assert findings_of(report, "refusals") == []

        n_read = len(read)

        async def while_it_looks() -> None:
            await until(lambda: len(read) > n_read)
            await refused(frontend, 3, of=6)

        options = DoctorOptions(over_s=1.0)
        report, _ = await asyncio.gather(run_doctor(frontend, options=options), while_it_looks())
    assert (
        "3 of 6 requests were answered with an error in 1 s"
        in only_finding(report, "refusals", Severity.WARNING).seen
    )
