"""``kvrouter doctor`` names links, transfers and ranks that are slow."""

import pytest

from kvrouter.cli.doctor.findings import Severity
from kvrouter.core.ids import DpRank, Slot, WorkerId, WorkerRank
from kvrouter.core.workers import KvTransfers, LoadReport, Role
from kvrouter.kernel.placement.link_speeds import TransferSample
from kvrouter.kernel.placement.speeds import LearnedSpeeds, SpeedReading
from kvrouter.kernel.topology.link_table import Link, SharedLink
from kvrouter.router import transfer_speed
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.constants import SetConstants
from tests.testing.doctor import (
    failed_checks,
    findings_of,
    only_finding,
    run_doctor,
    skipped_checks,
    without_data,
)
from tests.testing.frontend_harness import FrontendHarness, running_frontend
from tests.testing.mock_fleet import zoned_fleet
from tests.testing.mock_server import mock_server
from tests.testing.router_harness import card, decode_card, prefill_card

TIME = KvRouterConfig(router_cost="time")
RANK = WorkerRank(WorkerId(2), DpRank(0))


@pytest.mark.parametrize(("seen_s", "is_slow"), [(1.0, True), (0.1, False)])
async def test_doctor_reports_a_link_far_slower_than_its_table(seen_s: float, is_slow: bool) -> None:
    async with mock_server(zoned_fleet(), router=TIME) as here:
        (model,) = here.system.service.models()
        learned = model.placer.transfers.learned
        for at_s in range(40):
            link = SharedLink((("zone", "a"),), "b")
            learned.note(TransferSample(link, Link(1e-3, 1e9), at_s - seen_s, float(at_s), 0.1, seen_s))
            learned.refresh((), now_s=float(at_s))
        report = await run_doctor(here)
    if not is_slow:
        assert report.findings == []
        return
    finding = only_finding(report, "links", Severity.WARNING)
    assert finding.subject == "between two values of zone (mock)"
    assert finding.seen == "KV takes 10 times as long as it should, by 40 transfers: 0.1 GB/s"
    assert failed_checks(report) == {"links"}


async def test_doctor_reports_first_tokens_later_than_transfers_explain() -> None:
    async with running_frontend(prefill_card(1), decode_card(2), config=TIME) as frontend:
        sums = frontend.harness.model.placer.transfers.engine_sums
        for n in range(2):  # a first report may be of long ago
            fetched = KvTransfers(10 * n, 10**9 * n, 1.0 * n)
            frontend.harness.events.load(LoadReport(RANK, 7, 1000, kv_transfers=fetched))
        slot = frontend.harness.model.fleet.slot_of(RANK)
        assert slot is not None
        for _ in range(10):
            sums.observed(Slot(slot), kv_bytes=1e8, seconds=0.3, now_s=frontend.harness.model.clock())
        report = await run_doctor(frontend)
    finding = only_finding(report, "links", Severity.WARNING)
    assert finding.seen.startswith("they come 3 times as late as the engines' own transfers take")


async def test_doctor_skips_links_if_the_router_does_not_learn_them() -> None:
    blocks = KvRouterConfig(router_cost="blocks")
    async with running_frontend(prefill_card(1), decode_card(2), config=blocks) as frontend:
        report = await run_doctor(frontend)
    (why,) = skipped_checks(report, "links")
    assert "--router-cost time alone, and it is blocks" in why
    async with running_frontend(card(1), config=blocks) as frontend:
        assert skipped_checks(await run_doctor(frontend), "links") == []  # nothing travels


async def transferred(frontend: FrontendHarness, *reports: KvTransfers) -> None:
    for fetched in reports:
        frontend.harness.events.load(LoadReport(RANK, 7, 1000, kv_transfers=fetched))
        (await frontend.http.get("/v1/fleet")).raise_for_status()


async def test_doctor_reports_a_rank_with_slow_kv_transfers(set_constants: SetConstants) -> None:
    set_constants(transfer_speed, WINDOW_S=0.0)
    gb = 1_000_000_000
    async with running_frontend(prefill_card(1), decode_card(2)) as frontend:
        fast = [KvTransfers(10 * n, 10 * n * gb, 1.0 * n) for n in range(4)]
        await transferred(frontend, *fast)
        well = await run_doctor(frontend)
        await transferred(
            frontend, *(KvTransfers(30 + 10 * n, (30 + 10 * n) * gb, 3.0 + 20.0 * n) for n in (1, 2))
        )
        report = await run_doctor(frontend)
    assert findings_of(well, "transfers") == []
    finding = only_finding(report, "transfers", Severity.WARNING)
    assert finding.subject.startswith("worker 2 (decode, zone=a), rank 0")
    assert finding.seen.startswith("KV travels to it at 1.")
    assert finding.seen.endswith(" GB/s, and has at 10.0 GB/s")


@pytest.mark.parametrize(("failed", "severity"), [(5, Severity.WARNING), (1, Severity.NOTE)])
async def test_doctor_reports_failing_kv_transfers(failed: int, severity: Severity) -> None:
    async with running_frontend(prefill_card(1), decode_card(2)) as frontend:
        await transferred(frontend, KvTransfers(195, 10**9, 1.0, failed))
        report = await run_doctor(frontend)
    assert f"{failed} of {195 + failed} transfers" in only_finding(report, "transfers", severity).seen


async def test_doctor_reports_a_rank_slower_than_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(_: LearnedSpeeds, slot: Slot) -> SpeedReading:
        slowness = 5.0 if slot == 1 else 2.0
        return SpeedReading(slowness, 1.0, slowness / 2.0, 40, 0.1, 0.25, is_slow=slot == 1)

    monkeypatch.setattr(LearnedSpeeds, "reading", reading)
    async with running_frontend(card(1), card(2), card(3), config=TIME) as frontend:
        report = await run_doctor(frontend)
    finding = only_finding(report, "slow-ranks", Severity.WARNING)
    assert finding.subject.startswith("worker 2 ")
    assert finding.seen == "a prompt takes 2.5 times the median of 2 like ranks"
    assert finding.compared.startswith("3 ranks with 8 requests or more, in 1 group of the same model")
    for others in ((), (card(2),), (card(1, Role.PREFILL), card(3, taints=("gpu=a",)))):
        async with running_frontend(*others, card(4), config=TIME) as frontend:
            report = await run_doctor(frontend)
        assert findings_of(report, "slow-ranks") == [], "a rank without peers is no slow one"
        (why,) = skipped_checks(report, "slow-ranks")
        assert "fewer than 3 ranks of a kind" in why
        assert without_data(report, "slow-ranks") == [], "no traffic makes more of them"
