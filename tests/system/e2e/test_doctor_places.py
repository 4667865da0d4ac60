"""``kvrouter doctor`` names zones without a role, workers without labels, KV that leaves its domain."""

import pytest
from msgspec.structs import replace

from kvrouter.cli.doctor.findings import Severity
from kvrouter.core.constraints import NearEnforcement
from kvrouter.core.workers import Enforcement, KvFormat, Role, WorkerCard
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.doctor import failed_checks, findings_of, only_finding, run_doctor, send_chats
from tests.testing.frontend_harness import running_frontend
from tests.testing.mock_fleet import zoned_fleet
from tests.testing.mock_server import mock_server
from tests.testing.router_harness import card, decode_card, prefill_card


@pytest.mark.parametrize(
    ("enforcement", "severity"),
    [
        ("required", Severity.CRITICAL),
        ("fallback", Severity.WARNING),
        ("preferred", Severity.NOTE),
    ],
)
async def test_doctor_reports_a_zone_without_decode_workers(enforcement: str, severity: Severity) -> None:
    async with mock_server(zoned_fleet(enforcement=enforcement)) as here:
        for worker_id in (2, 3):
            await here.kill(worker_id)
        report = await run_doctor(here)
    finding = only_finding(report, "zones", severity)
    assert finding.subject == "zone=a (mock)"
    assert f"the transfer policy is {enforcement} on zone" in finding.seen
    assert failed_checks(report) == {"zones"}


async def test_doctor_reports_a_zone_without_prefill_workers() -> None:
    async with mock_server(zoned_fleet()) as here:
        await here.kill(4)
        report = await run_doctor(here)
    finding = only_finding(report, "zones", Severity.WARNING)
    assert finding.subject == "zone=b (mock)"
    assert "no prefill worker does" in finding.seen


async def test_doctor_accepts_pairs_across_zones_without_a_policy() -> None:
    async with running_frontend(card(1, Role.PREFILL, zone="a"), card(2, Role.DECODE, zone="b")) as frontend:
        assert findings_of(await run_doctor(frontend), "zones") == []


async def test_doctor_reports_a_worker_without_its_required_label() -> None:
    lost = card(3, Role.DECODE)
    async with running_frontend(prefill_card(1), decode_card(2), lost) as frontend:
        report = await run_doctor(frontend)
    finding = only_finding(report, "labels", Severity.CRITICAL)
    assert finding.subject.startswith("worker 3 ")
    assert finding.seen == "it publishes no zone"


def of_version(base: WorkerCard, version: str) -> WorkerCard:
    return replace(base, runtime_config=replace(base.runtime_config, kv_format=KvFormat(version=version)))


async def test_doctor_reports_workers_without_a_partner_for_their_kv() -> None:
    pair = of_version(prefill_card(1), "0.31.0"), of_version(decode_card(2), "0.31.0")
    async with running_frontend(*pair, of_version(decode_card(3), "0.32.0")) as frontend:
        report = await run_doctor(frontend)
    alone, cost = findings_of(report, "formats")
    assert (alone.severity, cost.severity) == (Severity.WARNING, Severity.NOTE)
    assert alone.subject.startswith("worker 3 ")
    assert "no prefill worker that takes requests can hand it KV: its own is version 0.32.0" in alone.seen
    assert "leave 50% of the capacity" in cost.seen
    async with running_frontend(*pair) as frontend:
        assert findings_of(await run_doctor(frontend), "formats") == []


async def test_doctor_warns_of_a_worker_without_a_label_under_fallback() -> None:
    cards = (
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.FALLBACK),
        card(2, Role.DECODE, zone="a"),
        card(3, Role.DECODE),
    )
    async with running_frontend(*cards) as frontend:
        only_finding(await run_doctor(frontend), "labels", Severity.WARNING)


async def test_doctor_warns_of_an_unlabelled_worker_among_labelled_ones() -> None:
    async with running_frontend(card(1, zone="a"), card(2, zone="a"), card(3)) as frontend:
        report = await run_doctor(frontend)
    finding = only_finding(report, "labels", Severity.WARNING)
    assert "other workers of its model do" in finding.seen


async def test_doctor_reports_labels_missing_for_the_routers_own_policy() -> None:
    config = KvRouterConfig(kv_transfer_topology_level="rack")
    async with running_frontend(card(1, Role.PREFILL), card(2, Role.DECODE), config=config) as frontend:
        report = await run_doctor(frontend)
    assert [each.seen for each in findings_of(report, "labels")] == ["it publishes no rack"] * 2


async def test_doctor_reports_kv_that_leaves_its_domain() -> None:
    async with mock_server(zoned_fleet(enforcement="fallback")) as here:
        for worker_id in (2, 3):
            await here.kill(worker_id)
        assert set(await send_chats(here, n=4, prefill_worker_id=1)) == {200}
        report = await run_doctor(here)
    finding = only_finding(report, "crossings", Severity.WARNING)
    assert "4 of 4 handoffs left their zone" in finding.seen


@pytest.mark.parametrize(
    ("enforcement", "severity"),
    [(NearEnforcement.REQUIRED, Severity.CRITICAL), (NearEnforcement.PREFERRED, Severity.WARNING)],
)
@pytest.mark.parametrize(
    ("place", "seen"), [({"zone": "b"}, "none is in zone=b"), ({}, "its own is not known")]
)
async def test_doctor_reports_near_prefill_without_workers_in_the_zone(
    place: dict[str, str], seen: str, enforcement: NearEnforcement, severity: Severity
) -> None:
    config = KvRouterConfig(router_prefill_level="zone", router_prefill_enforcement=enforcement)
    async with running_frontend(card(1, zone="a"), card(2, zone="a"), config=config, place=place) as frontend:
        report = await run_doctor(frontend)
    assert seen in only_finding(report, "zones", severity).seen


async def test_doctor_accepts_near_prefill_with_workers_in_the_zone() -> None:
    config = KvRouterConfig(router_prefill_level="zone")
    async with running_frontend(card(1, zone="a"), config=config, place={"zone": "a"}) as frontend:
        assert findings_of(await run_doctor(frontend), "zones") == []
