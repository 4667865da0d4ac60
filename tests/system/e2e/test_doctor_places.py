"""``kvrouter doctor`` names zones without a role, workers without labels, KV that leaves its domain."""

import pytest

from kvrouter.cli.doctor.findings import Severity
from kvrouter.core.constraints import NearEnforcement
from kvrouter.core.workers import Enforcement, Role
from kvrouter.settings.router_settings import KvRouterConfig
from tests.support.examined import chats, examined, found, names_of, the_finding
from tests.support.fleets import card, decode_card, prefill_card
from tests.support.front import open_house
from tests.support.mock_fleets import pairs
from tests.support.served import served


@pytest.mark.parametrize(
    ("enforcement", "severity"),
    [
        ("required", Severity.CRITICAL),
        ("fallback", Severity.WARNING),
        ("preferred", Severity.NOTE),
    ],
)
async def test_a_zone_with_prefill_and_without_decode_workers(enforcement: str, severity: Severity) -> None:
    async with served(pairs(enforcement=enforcement)) as here:
        for worker_id in (2, 3):
            await here.kill(worker_id)
        report = await examined(here)
    finding = the_finding(report, "zones", severity)
    assert finding.subject == "zone=a (mock)"
    assert f"the transfer policy is {enforcement} on zone" in finding.seen
    assert names_of(report) == {"zones"}


async def test_a_zone_with_decode_and_without_prefill_workers() -> None:
    async with served(pairs()) as here:
        await here.kill(4)
        report = await examined(here)
    finding = the_finding(report, "zones", Severity.WARNING)
    assert finding.subject == "zone=b (mock)"
    assert "no prefill worker does" in finding.seen


async def test_pairs_without_a_policy_may_be_in_different_zones() -> None:
    async with open_house(card(1, Role.PREFILL, zone="a"), card(2, Role.DECODE, zone="b")) as house:
        assert found(await examined(house), "zones") == []


async def test_a_worker_without_the_label_that_is_required() -> None:
    lost = card(3, Role.DECODE)
    async with open_house(prefill_card(1), decode_card(2), lost) as house:
        report = await examined(house)
    finding = the_finding(report, "labels", Severity.CRITICAL)
    assert finding.subject.startswith("worker 3 ")
    assert finding.seen == "it publishes no zone"


async def test_a_worker_without_a_label_under_fallback() -> None:
    cards = (
        card(1, Role.PREFILL, zone="a", enforcement=Enforcement.FALLBACK),
        card(2, Role.DECODE, zone="a"),
        card(3, Role.DECODE),
    )
    async with open_house(*cards) as house:
        the_finding(await examined(house), "labels", Severity.WARNING)


async def test_a_worker_without_labels_among_others_with_them() -> None:
    async with open_house(card(1, zone="a"), card(2, zone="a"), card(3)) as house:
        report = await examined(house)
    finding = the_finding(report, "labels", Severity.WARNING)
    assert "other workers of its model do" in finding.seen


async def test_the_routers_own_policy_needs_labels_too() -> None:
    config = KvRouterConfig(kv_transfer_topology_level="rack")
    async with open_house(card(1, Role.PREFILL), card(2, Role.DECODE), config=config) as house:
        report = await examined(house)
    assert [each.seen for each in found(report, "labels")] == ["it publishes no rack"] * 2


async def test_kv_that_leaves_its_domain() -> None:
    async with served(pairs(enforcement="fallback")) as here:
        for worker_id in (2, 3):
            await here.kill(worker_id)
        assert set(await chats(here, n=4, prefill_worker_id=1)) == {200}
        report = await examined(here)
    finding = the_finding(report, "crossings", Severity.WARNING)
    assert "4 of 4 handoffs left their zone" in finding.seen


@pytest.mark.parametrize(
    ("enforcement", "severity"),
    [(NearEnforcement.REQUIRED, Severity.CRITICAL), (NearEnforcement.PREFERRED, Severity.WARNING)],
)
@pytest.mark.parametrize(
    ("place", "seen"), [({"zone": "b"}, "none is in zone=b"), ({}, "its own is not known")]
)
async def test_prefill_that_keeps_near_a_frontend_in_a_zone_without_workers(
    place: dict[str, str], seen: str, enforcement: NearEnforcement, severity: Severity
) -> None:
    config = KvRouterConfig(router_prefill_level="zone", router_prefill_enforcement=enforcement)
    async with open_house(card(1, zone="a"), card(2, zone="a"), config=config, place=place) as house:
        report = await examined(house)
    assert seen in the_finding(report, "zones", severity).seen


async def test_prefill_that_keeps_near_a_frontend_with_workers_in_its_zone() -> None:
    config = KvRouterConfig(router_prefill_level="zone")
    async with open_house(card(1, zone="a"), config=config, place={"zone": "a"}) as house:
        assert found(await examined(house), "zones") == []
