"""``kvrouter doctor`` names what is wrong with routers: discovery, replicas, the recording."""

import asyncio
import shutil
from pathlib import Path

import pytest

from kvrouter.cli.doctor.findings import Severity
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import KvrouterError
from kvrouter.settings.recording_settings import RecordingSettings
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.doctor import (
    UNTIMED,
    failed_checks,
    findings_of,
    only_finding,
    run_doctor,
    send_chats,
    skipped_checks,
    url_of,
)
from tests.testing.frontend_harness import running_frontend
from tests.testing.mock_fleet import uniform_fleet
from tests.testing.mock_server import mock_server
from tests.testing.nats_server import NatsServer
from tests.testing.processes import eventually, fleet
from tests.testing.router_harness import card


async def test_doctor_reports_unreachable_discovery() -> None:
    async with running_frontend(card(1)) as frontend:
        assert frontend.harness.discovery.on_store is not None
        frontend.harness.discovery.on_store(False, "the directory is gone")
        report = await run_doctor(frontend)
    finding = only_finding(report, "router", Severity.CRITICAL)
    assert finding.seen == "it cannot be reached: the directory is gone"


async def test_doctor_reports_a_draining_router() -> None:
    async with running_frontend(card(1)) as frontend:
        await frontend.harness.service.requests.drain(0.0)
        report = await run_doctor(frontend)
    assert only_finding(report, "router", Severity.WARNING).seen == "this router drains"


@pytest.mark.parametrize(("n", "severity"), [(10, Severity.WARNING), (9, Severity.NOTE)])
async def test_doctor_reports_refused_peers_and_connections(n: int, severity: Severity) -> None:
    async with running_frontend(card(1)) as frontend:
        frontend.harness.telemetry.planes_refused.inc("zmq", by=n)
        frontend.harness.telemetry.http_events.inc("connection_refused", by=n)
        report = await run_doctor(frontend)
    peers, connections = findings_of(report, "router", severity)
    assert f"zmq {n}" in peers.seen
    assert f"{n} connections refused" in connections.seen


async def test_doctor_reports_a_recording_whose_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    settings = RecordingSettings(folder=str(folder))
    async with mock_server(uniform_fleet(), router=UNTIMED, recording=settings) as here:
        await send_chats(here, n=1)
        well = await run_doctor(here)
        shutil.rmtree(folder)
        traffic = here.system.service.requests.traffic
        assert traffic is not None

        async def has_ended() -> bool:
            await send_chats(here, n=1)
            return not traffic.is_recording

        await eventually(has_ended)
        report = await run_doctor(here)
    assert well.findings == []
    finding = only_finding(report, "recording", Severity.WARNING)
    assert "(--record) has ended" in finding.seen
    assert failed_checks(report) == {"recording"}


async def test_doctor_skips_replicas_without_a_replica_url() -> None:
    async with running_frontend(card(1)) as frontend:
        report = await run_doctor(frontend)
    (why,) = skipped_checks(report, "replicas")
    assert why.endswith("--replica URL")


async def test_doctor_reports_routers_that_do_not_share_their_bookings() -> None:
    async with running_frontend(card(1)) as one, running_frontend(card(1)) as two:
        report = await run_doctor(one, url_of(two))
    assert [each.seen for each in findings_of(report, "replicas", Severity.WARNING)] == [
        "it shares nothing with 1 other router"
    ] * 2


async def test_doctor_reports_routers_with_other_workers_or_settings() -> None:
    config = KvRouterConfig(router_mode=RouterMode.RANDOM)
    async with running_frontend(card(1), card(2)) as one, running_frontend(card(1), config=config) as two:
        report = await run_doctor(one, url_of(two))
    seen = {each.seen: each.subject for each in findings_of(report, "replicas", Severity.WARNING)}
    assert seen["it does not know the workers 2, which the other router knows"] == url_of(two)
    (differs,) = (each for each in seen if each.startswith("it routes mock otherwise"))
    assert "mode random" in differs


async def test_doctor_skips_a_replica_that_does_not_answer() -> None:
    async with running_frontend(card(1)) as frontend:
        report = await run_doctor(frontend, "http://127.0.0.1:1")
    assert any(each.startswith("http://127.0.0.1:1: ") for each in skipped_checks(report, "replicas"))


async def test_doctor_fails_if_the_router_does_not_answer() -> None:
    with pytest.raises(KvrouterError, match="no answer"):
        await run_doctor("http://127.0.0.1:1")


async def test_doctor_reports_replicas_that_do_not_see_each_other(shared_nats: NatsServer) -> None:
    settings = {"NATS_SERVER": shared_nats.url, "DYN_ROUTER_REPLICA_SYNC": "true"}
    async with fleet(settings) as processes:
        first, second, _ = await asyncio.gather(
            processes.frontend(), processes.frontend(), processes.worker()
        )
        one, two = first.url, second.url

        async def are_well() -> bool:
            serve = await first.serves(1) and await second.serves(1)
            return serve and findings_of(await run_doctor(one, two), "replicas") == []

        await eventually(are_well)
        elsewhere = (await processes.frontend(environ={"DYN_NAMESPACE": "elsewhere"})).url
        report = await run_doctor(one, two, elsewhere)
    seen = [(each.subject, each.seen) for each in findings_of(report, "replicas", Severity.WARNING)]
    assert (one, "it sees 1 of 2 other routers") in seen
    assert (elsewhere, "it sees 0 of 2 other routers") in seen
    assert any(subject == elsewhere and "does not know the workers" in words for subject, words in seen)
