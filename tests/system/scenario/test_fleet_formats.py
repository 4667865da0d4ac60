"""A fleet of mock engines of two versions over two zones: no KV goes between versions."""

import pytest

from kvrouter.core.constraints import PdSelection
from kvrouter.core.errors import NoEligibleWorker, Reason
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import Leg
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.mock_fleet import MockFleetHarness, fleet_file, prompt, running_mock_fleet

BLOCKS, TIME = KvRouterConfig(router_cost="blocks"), KvRouterConfig(router_cost="time")
JOINT = KvRouterConfig(router_cost="time", router_pd_selection=PdSelection.JOINT)
EVERY_COST = pytest.mark.parametrize("config", [BLOCKS, TIME, JOINT], ids=["blocks", "time", "joint"])

FLEET = """
version: 1
models: [{{name: mock, block_size: 16, context_length: 4096}}]
topology: {{levels: [zone]}}
{policy}
workers:
  - {{name: p-a, role: prefill, domains: {{zone: a}}, kv_format: {{version: {p_a}}}}}
  - {{name: d-a, role: decode, domains: {{zone: a}}, kv_format: {{version: {d_a}}}}}
  - {{name: p-b, role: prefill, domains: {{zone: b}}, kv_format: {{version: {p_b}}}}}
  - {{name: d-b, role: decode, domains: {{zone: b}}, kv_format: {{version: {d_b}}}}}
speedup: 1000
"""
P_A, D_A, P_B, D_B = map(WorkerId, (1, 2, 3, 4))


def two_versions(versions: str, enforcement: str | None = None) -> FleetFile:
    """``versions`` are those of prefill and decode in zone a, then in zone b."""
    p_a, d_a, p_b, d_b = (f'"0.3{version}"' for version in versions)
    weight = ", preferred_weight: 0.9" if enforcement == "preferred" else ""
    policy = f"kv_transfer: {{domain: zone, enforcement: {enforcement}{weight}}}" if enforcement else ""
    return fleet_file(FLEET.format(policy=policy, p_a=p_a, d_a=d_a, p_b=p_b, d_b=d_b))


async def serve(harness: MockFleetHarness, n: int = 12) -> set[tuple[WorkerId | None, WorkerId]]:
    """The pairs that served so many requests; None where one worker served alone."""
    seen = set()
    for number in range(n):
        tokens, generation = await harness.read(harness.request(prompt(first=number)))
        assert len(tokens) == 8
        assert generation.placement is not None
        decision = generation.placement.decision
        first = None if decision.prefill is None else decision.prefill.rank.worker_id
        seen.add((first, decision.decode.rank.worker_id))
    return seen


@EVERY_COST
async def test_an_upgrade_across_zones_pairs_each_version_with_itself(config: KvRouterConfig) -> None:
    """Zone a decodes with the old version what zone b prefills, and the other way round."""
    async with running_mock_fleet(two_versions("1221"), config) as harness:
        assert {pair for pair in await serve(harness) if pair[0]} <= {(P_A, D_B), (P_B, D_A)}
    async with running_mock_fleet(two_versions("1122"), config) as harness:
        assert {pair for pair in await serve(harness) if pair[0]} <= {(P_A, D_A), (P_B, D_B)}


async def test_prefill_goes_where_its_kv_can_be_taken() -> None:
    async with running_mock_fleet(two_versions("1222"), BLOCKS) as harness:
        assert {first for first, _ in await serve(harness)} == {P_B}


async def test_required_refuses_before_prefill_where_versions_differ() -> None:
    async with running_mock_fleet(two_versions("1221", "required"), BLOCKS) as harness:
        with pytest.raises(NoEligibleWorker) as refused:
            await harness.read(harness.request())
        assert refused.value.refusals == {Reason.CANNOT_TRANSFER: 2}
        assert refused.value.domain == "zone"
        assert harness.plane.opened == []
        assert harness.telemetry.refusals.value("cannot_transfer", "decode") == 2


@pytest.mark.parametrize("enforcement", ["fallback", "preferred"])
async def test_soft_policies_cross_zones_rather_than_versions(enforcement: str) -> None:
    async with running_mock_fleet(two_versions("1221", enforcement), BLOCKS) as harness:
        assert await serve(harness) == {(P_A, D_B), (P_B, D_A)}


@pytest.mark.parametrize("enforcement", [None, "fallback", "preferred"])
async def test_decode_workers_serve_alone_where_no_pair_can_talk(enforcement: str | None) -> None:
    async with running_mock_fleet(two_versions("1212", enforcement), BLOCKS) as harness:
        await serve(harness, 4)
        await harness.fleet.kill(P_B)
        await harness.fleet.kill(D_B)
        assert await serve(harness, 4) == {(None, D_A)}
        assert harness.legs(Leg.AGGREGATED)
