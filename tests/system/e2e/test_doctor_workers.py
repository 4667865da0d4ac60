"""``kvrouter doctor`` names what is wrong with workers; a fleet that is well gets no complaint."""

import pytest
from msgspec.structs import replace

from kvrouter.cli.doctor.findings import Severity
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason, KvLoss, Leg
from kvrouter.core.workers import ModelInput, Role
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.transports.records.port import Gone
from tests.testing.doctor import UNTIMED, failed_checks, findings_of, only_finding, run_doctor, send_chats
from tests.testing.frontend_harness import running_frontend, text_answer
from tests.testing.mock_fleet import fleet_file, uniform_fleet, zoned_fleet
from tests.testing.mock_server import mock_server
from tests.testing.router_harness import card, decode_card, prefill_card
from tests.testing.scripted_transport import ScriptedStream
from tests.testing.waits import until


@pytest.mark.parametrize("handoff", ["bootstrap", "synchronous"])
async def test_healthy_pairs_have_no_findings(handoff: str) -> None:
    async with mock_server(zoned_fleet(handoff=handoff), router=UNTIMED) as here:
        assert set(await send_chats(here, n=24)) == {200}
        report = await run_doctor(here)
    assert report.findings == []
    assert not report.has_problems
    (cache,) = report.cache
    assert cache.predicted_tokens == cache.cached_tokens > 0.5 * cache.prompt_tokens


async def test_healthy_workers_have_no_findings() -> None:
    async with mock_server(uniform_fleet(replicas=3, dp_size=2), router=UNTIMED) as here:
        assert set(await send_chats(here, n=12)) == {200}
        assert (await run_doctor(here)).findings == []


async def test_a_just_started_fleet_has_no_findings_beyond_notes() -> None:
    async with mock_server(uniform_fleet(replicas=2)) as here:
        report = await run_doctor(here)
    assert [each for each in report.findings if each.severity is not Severity.NOTE] == []


async def test_doctor_reports_a_refused_worker() -> None:
    async with running_frontend(card(1), replace(card(2), model_input=ModelInput.Text)) as frontend:
        report = await run_doctor(frontend)
    finding = only_finding(report, "refused-workers", Severity.CRITICAL)
    assert finding.subject.startswith("worker 2 ")
    assert "ModelInput.Tokens" in finding.seen
    assert failed_checks(report) == {"refused-workers"}


async def test_doctor_reports_a_worker_that_does_not_answer() -> None:
    async with running_frontend(card(1), card(2)) as frontend:
        frontend.plane.followers[card(2).address](False)
        report = await run_doctor(frontend)
    finding = only_finding(report, "answering", Severity.CRITICAL)
    assert finding.subject.startswith("worker 2 ")
    assert "does not answer on the request plane" in finding.seen
    assert failed_checks(report) == {"answering"}


async def test_doctor_reports_a_worker_with_a_lapsed_lease() -> None:
    async with running_frontend(card(1), card(2)) as frontend:
        frontend.plane.followers[card(2).address](True)
        frontend.harness.discovery.drop(2, why=Gone.EXPIRED)
        report = await run_doctor(frontend)
    assert "lease at discovery ran out" in only_finding(report, "answering", Severity.WARNING).seen


async def test_doctor_reports_a_worker_with_a_silent_engine() -> None:
    async with running_frontend(card(1), replace(card(2), engine_silent=True)) as frontend:
        report = await run_doctor(frontend)
    assert "its engine does not answer it" in only_finding(report, "answering", Severity.CRITICAL).seen


async def test_doctor_reports_a_router_that_knows_no_worker() -> None:
    async with running_frontend() as frontend:
        report = await run_doctor(frontend)
    assert "knows no worker" in only_finding(report, "roles", Severity.CRITICAL).seen


async def test_doctor_notes_a_draining_worker() -> None:
    async with running_frontend(card(1), card(2, draining=True)) as frontend:
        report = await run_doctor(frontend)
    assert only_finding(report, "answering", Severity.NOTE).seen.startswith("it drains")
    assert not report.has_problems


async def test_doctor_notes_a_cordoned_worker_and_reports_the_last_one() -> None:
    async with running_frontend(card(1), card(2)) as frontend:
        cordon = {"level": "worker", "name": "2", "reason": "new memory", "by": "ops"}
        assert (await frontend.http.post("/v1/cordons", json=cordon)).status_code == 200
        noted = await run_doctor(frontend)
        last = {"level": "worker", "name": "1", "force": True}
        assert (await frontend.http.post("/v1/cordons", json=last)).status_code == 200
        nobody = await run_doctor(frontend)
    finding = only_finding(noted, "answering", Severity.NOTE)
    assert finding.seen == "worker 2 is cordoned by ops: new memory"
    assert "kvrouter uncordon worker 2" in finding.remedy
    assert not noted.has_problems
    assert "none takes requests" in only_finding(nobody, "roles", Severity.CRITICAL).seen


async def test_doctor_reports_an_open_circuit_of_a_failing_engine() -> None:
    config = KvRouterConfig(circuit_open_s=600.0, circuit_open_max_s=600.0)
    async with mock_server(uniform_fleet(replicas=2), router=config) as here:
        await here.system.fleet.workers[WorkerId(1)].engine.stop()  # its worker answers, and takes nothing
        (model,) = here.system.service.models()
        await send_chats(here, n=8, backend_instance_id=1)
        await until(lambda: model.placer.circuits.state_of(WorkerId(1), now_s=model.clock()).value == "open")
        report = await run_doctor(here)
    finding = only_finding(report, "circuits", Severity.WARNING)
    assert finding.subject.startswith("worker 1 ")
    assert "circuit is open" in finding.seen


@pytest.mark.parametrize("loss", [KvLoss.UNREACHABLE, KvLoss.REFUSED])
async def test_doctor_reports_a_pair_that_loses_its_kv(loss: KvLoss) -> None:
    def lose(stream: ScriptedStream) -> None:
        if stream.request.leg is Leg.PREFILL:
            block = {"block": 7}
            stream.feed(EngineChunk(token_ids=(9,), finish=FinishReason.LENGTH, kv_transfer_params=block))
        elif stream.request.leg is Leg.DECODE:
            stream.feed(EngineChunk(finish=FinishReason.ERROR, error="no way", kv_lost=loss))
        else:
            text_answer("ok")(stream)

    async with running_frontend(prefill_card(1), decode_card(2), script=lose) as frontend:
        for _ in range(4):
            await frontend.chat()
        report = await run_doctor(frontend)
    lost = only_finding(report, "transfers", Severity.WARNING)
    assert f"({loss})" in lost.seen
    assert lost.subject == "workers 1 and 2"
    if loss is KvLoss.UNREACHABLE:
        assert failed_checks(report) == {"transfers", "circuits"}
        assert only_finding(report, "circuits", Severity.WARNING).subject == "workers 1 and 2 (mock)"
        return
    assert failed_checks(report) == {"transfers", "formats", "refusals", "accepting"}
    seen = {each.subject: each.seen for each in findings_of(report, "formats")}
    assert "their engines refuse each other's KV" in seen["workers 1 and 2 (mock)"]
    assert "leave 0% of the capacity" in seen["model mock"]


async def test_doctor_reports_a_worker_without_a_known_capacity() -> None:
    unknown = replace(card(2), runtime_config=replace(card(2).runtime_config, total_kv_blocks=None))
    async with running_frontend(card(1), unknown) as frontend:
        report = await run_doctor(frontend)
    finding = only_finding(report, "capacity", Severity.WARNING)
    assert finding.subject.startswith("worker 2 ")
    assert "how many KV blocks" in finding.seen
    assert failed_checks(report) == {"capacity"}


async def test_doctor_reports_workers_with_different_context_lengths() -> None:
    async with running_frontend(card(1), card(2), replace(card(3), context_length=1024)) as frontend:
        report = await run_doctor(frontend)
    assert (
        "4096 tokens at some workers, 1024 tokens at 3"
        in only_finding(report, "capacity", Severity.WARNING).seen
    )


async def test_doctor_reports_a_model_whose_workers_all_left() -> None:
    async with running_frontend(card(1), card(2)) as frontend:
        for worker_id in (1, 2):
            frontend.harness.discovery.drop(worker_id)
        report = await run_doctor(frontend)
    finding = only_finding(report, "roles", Severity.CRITICAL)
    assert (finding.subject, finding.seen) == ("model mock", "of 0 workers none takes requests")


async def test_doctor_reports_a_fleet_without_decode_workers() -> None:
    async with mock_server(zoned_fleet()) as here:
        for worker_id in (2, 3, 5, 6):
            await here.kill(worker_id)
        report = await run_doctor(here)
    assert "no worker decodes" in only_finding(report, "roles", Severity.CRITICAL).seen


async def test_doctor_reports_a_fleet_whose_prefill_workers_drain() -> None:
    draining = replace(prefill_card(1), draining=True)
    async with running_frontend(draining, decode_card(2)) as frontend:
        report = await run_doctor(frontend)
    assert "no worker of another role" in only_finding(report, "roles", Severity.CRITICAL).seen


async def test_doctor_warns_of_decode_workers_without_prefill_workers() -> None:
    async with running_frontend(card(1, Role.DECODE), card(2, Role.DECODE)) as frontend:
        report = await run_doctor(frontend)
    only_finding(report, "roles", Severity.WARNING)


async def test_doctor_reports_a_model_without_a_tokenizer() -> None:
    async with running_frontend(card(1), card(2, model="other")) as frontend:
        report = await run_doctor(frontend)
    finding = only_finding(report, "roles", Severity.CRITICAL)
    assert finding.subject == "model other"
    assert "no tokenizer" in finding.seen


async def test_doctor_reports_a_fleet_file_engine_that_is_not_up() -> None:
    file = (
        "version: 1\nmodels: [{name: mock}, {name: tiny, tokenizer: mock}]\nworkers:\n"
        "  - {name: m, model: mock}\n"
        "  - {name: v, model: tiny, engine: {kind: vllm, url: 'http://127.0.0.1:1', kv_events: false}}\n"
    )
    async with mock_server(fleet_file(file)) as here:
        report = await run_doctor(here)
    finding = only_finding(report, "expected-engines", Severity.WARNING)
    assert finding.subject == "http://127.0.0.1:1 (workers[1].engine.url)"
    assert finding.seen.startswith("it has no worker yet: ")
    assert finding.compared == "0 of 1 expected engine joined"
    assert findings_of(report, "refusals") == []
