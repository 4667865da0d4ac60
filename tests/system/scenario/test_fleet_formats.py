"""A fleet of mock engines of two versions over two zones: no KV goes between versions."""

import asyncio
import logging

import pytest

from kvrouter.core.constraints import PdSelection
from kvrouter.core.errors import NoEligibleWorker, Reason
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import Leg
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.frontend.fleet_state import fleet_state
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.log_events import event_of
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


REFUSING = """
version: 1
models: [{{name: mock, block_size: 16, context_length: 4096}}]
topology: {{levels: [zone]}}
{policy}
workers:
  - {{name: p-old, role: prefill, domains: {{zone: a}}, engine: {{handshake: old, handoff: {handoff}}}}}
  - {{name: d-old, role: decode, domains: {{zone: a}}, engine: {{handshake: old}}}}
  - {{name: p-new, role: prefill, domains: {{zone: b}}, engine: {{handshake: new, handoff: {handoff}}}}}
  - {{name: d-new, role: decode, domains: {{zone: b}}, engine: {{handshake: {last}}}}}
speedup: 1000
"""
"""Engines that refuse each other, of which the router knows nothing before."""


def refusing(last: str = "new", handoff: str = "synchronous", enforcement: str | None = None) -> FleetFile:
    policy = f"kv_transfer: {{domain: zone, enforcement: {enforcement}}}" if enforcement else ""
    return fleet_file(REFUSING.format(last=last, handoff=handoff, policy=policy))


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


def lost(harness: MockFleetHarness) -> int:
    """How many handoffs were refused; each of another pair."""
    counts = harness.telemetry.kv_lost.counts()
    assert all(labels[3] == "refused" and n == 1 for labels, n in counts.items())
    return len(counts)


def fields_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    return [record.__dict__["kvrouter_fields"] for record in caplog.records if event_of(record) == event]


async def answers(fleet: FleetFile, n: int) -> list[list[int]]:
    async with running_mock_fleet(fleet, BLOCKS) as harness:
        return [(await harness.read(harness.request(prompt(first=number))))[0] for number in range(n)]


@pytest.mark.parametrize("handoff", ["synchronous", "bootstrap"])
async def test_each_pair_whose_handshake_is_refused_is_tried_once(
    handoff: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrouter")
    expected = await answers(two_versions("1111"), 40)
    async with running_mock_fleet(refusing(handoff=handoff), BLOCKS) as harness:
        for number in range(40):
            tokens, _ = await harness.read(harness.request(prompt(first=number)))
            assert tokens == expected[number]
        assert 1 <= lost(harness) <= 2
        assert {pair for pair in await serve(harness, 20) if pair[0]} == {(P_A, D_A), (P_B, D_B)}
        assert lost(harness) <= 2
        (model,) = fleet_state(harness.service).models
        assert {(pair.circuit, pair.reason) for pair in model.parted_pairs} == {("open", "cannot_transfer")}
        assert len(model.parted_pairs) == lost(harness)
        assert {each["reason"] for each in fields_of(caplog, "circuit_opened")} == {"cannot_transfer"}
        details = {each["detail"] for each in fields_of(caplog, "kv_lost")}
        assert details <= {
            "KV transfer failed: handshake refused: old here, new there",
            "KV transfer failed: handshake refused: new here, old there",
        }


async def test_workers_serve_alone_where_every_handshake_is_refused() -> None:
    async with running_mock_fleet(refusing(last="other"), BLOCKS) as harness:
        await harness.fleet.kill(D_A)
        seen = await serve(harness, 8)
        assert seen == {(None, D_B)}, "the tries that lost KV ended there too"
        assert lost(harness) <= 2
        (model,) = fleet_state(harness.service).models
        assert model.pair_capacity == 0.0


async def test_required_serves_alone_rather_than_across_where_its_zone_refuses() -> None:
    async with running_mock_fleet(refusing(last="old", enforcement="required"), BLOCKS) as harness:
        seen = await serve(harness, 20)
        assert seen == {(P_A, D_A)}
        assert lost(harness) <= 1


IN_PREFILL = """
version: 1
models: [{name: mock, block_size: 16, context_length: 4096}]
workers:
  - {name: p, role: prefill, engine: {handshake: old, handoff: synchronous}}
  - {name: d, role: decode, engine: {handshake: new}}
speedup: 20
"""


async def test_requests_in_prefill_when_their_pair_is_refused_are_answered() -> None:
    texts = [prompt(tokens=2000, first=3000 * number) for number in range(8)]
    async with running_mock_fleet(fleet_file(IN_PREFILL.replace("old", "new")), BLOCKS) as harness:
        expected = [(await harness.read(harness.request(text)))[0] for text in texts]
    async with running_mock_fleet(fleet_file(IN_PREFILL), BLOCKS) as harness:
        read = await asyncio.gather(*(harness.read(harness.request(text)) for text in texts))
        assert [tokens for tokens, _ in read] == expected
        assert harness.booked() == 0
