"""Prefill near the frontend: what is asked of workers, and how a frontend knows where it is."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from kvrouter.app.frontend_place import following_place, read_place
from kvrouter.core.constraints import NearEnforcement, PdSelection
from kvrouter.core.errors import ConfigError, NoEligibleWorker, Reason, TopologyUnavailable
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.kernel.placement.placement import Draw
from kvrouter.kernel.routing import Decision
from kvrouter.router.router_service import RouterService
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.router_harness import RouterHarness, card, generate_request
from tests.testing.scripted_transport import ScriptedTransport

NEAR = KvRouterConfig(router_prefill_level="zone", router_prefill_weight=1.0)
REQUIRED = KvRouterConfig(router_prefill_level="zone", router_prefill_enforcement=NearEnforcement.REQUIRED)
JOINT = KvRouterConfig(
    router_prefill_level="zone",
    router_prefill_enforcement=NearEnforcement.REQUIRED,
    router_cost="time",
    router_pd_selection=PdSelection.JOINT,
)


def pairs() -> tuple[WorkerCard, ...]:
    """In each of two zones a prefill worker, 1 or 2, and a decode worker, 3 or 4."""
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    return tuple(card(number, role, zone="ab"[number % 2]) for number, role in enumerate(roles, start=1))


async def harness(config: KvRouterConfig, place: Mapping[str, str], *cards: WorkerCard) -> RouterHarness:
    found = RouterHarness(ScriptedTransport(None), config, place=place)
    await found.start(*cards)
    return found


def decided(of: RouterHarness) -> Decision:
    request = generate_request(request_id="r")
    return of.model.placer.explain(request, Draw(0, 0, 0), now_s=0.0)


@pytest.mark.parametrize("config", [REQUIRED, JOINT])
async def test_required_near_prefill_stays_near_the_frontend(config: KvRouterConfig) -> None:
    here = await harness(config, {"zone": "a"}, *pairs())
    try:
        first = decided(here)
        prefills = first.decode if first.prefill is None else first.prefill
        assert prefills.rank.worker_id in (2, 4)
        far = [row for row in first.rows if row.refused is Reason.FAR_FROM_FRONTEND]
        assert {row.rank.worker_id for row in far} <= {1, 3}
        assert any(row.rank.worker_id == 1 for row in far)
        here.service.moved({"zone": "b"})
        moved = decided(here)
        prefills = moved.decode if moved.prefill is None else moved.prefill
        assert prefills.rank.worker_id in (1, 3)
        for nowhere in ({"zone": "c"}, {}):
            here.service.moved(nowhere)
            with pytest.raises(NoEligibleWorker) as refused:
                decided(here)
            assert refused.value.refusals == {Reason.FAR_FROM_FRONTEND: 2}
    finally:
        here.service.stop()


async def test_preferred_near_prefill_costs_less_near_the_frontend() -> None:
    here = await harness(NEAR, {"zone": "b"}, *pairs())
    try:
        decision = decided(here)
        assert decision.prefill is not None
        assert decision.prefill.rank.worker_id == 1
        rows = {int(row.rank.worker_id): row for row in decision.rows}
        assert rows[1].multiplier == pytest.approx(0.467, abs=1e-3)
        assert [rows[number].multiplier for number in (2, 3, 4)] == [1.0, 1.0, 1.0]
    finally:
        here.service.stop()


async def test_a_model_joining_later_knows_the_frontends_place() -> None:
    here = await harness(REQUIRED, {"zone": "a"})
    try:
        here.service.moved({"zone": "b"})
        here.discovery.put(*(card(number, zone="ab"[number % 2]) for number in (1, 2)))
        assert decided(here).decode.rank.worker_id == 1
    finally:
        here.service.stop()


def test_a_router_without_a_frontend_has_no_place() -> None:
    with pytest.raises(ConfigError, match="only a frontend has a place") as refused:
        RouterHarness(ScriptedTransport(None), NEAR)
    assert refused.value.param == "router_prefill_level"


async def test_a_frontend_reads_its_place_from_files_and_follows_changes(tmp_path: Path) -> None:
    environ = {
        "DYN_TOPOLOGY_ENABLED": "true",
        "DYN_TOPOLOGY_MOUNT_PATH": str(tmp_path),
        "DYN_TOPOLOGY_POLL_S": "0.01",
        "DYN_TOPOLOGY_TIMEOUT_S": "0",
        "DYN_KV_TRANSFER_DOMAIN": "rack",
    }
    with pytest.raises(TopologyUnavailable, match="zone has no value"):
        await read_place(NEAR, environ)
    (tmp_path / "zone").write_text("a\n")
    place = await read_place(NEAR, environ)
    assert place.domains == {"zone": "a"}
    moves: asyncio.Queue[Mapping[str, str]] = asyncio.Queue()

    class Service:
        def moved(self, domains: Mapping[str, str]) -> None:
            moves.put_nowait(dict(domains))

    async with following_place(place, cast("RouterService", cast("Any", Service()))):
        (tmp_path / "zone").write_text("b\n")
        assert await asyncio.wait_for(moves.get(), 60.0) == {"zone": "b"}
        (tmp_path / "zone").unlink()
        assert await asyncio.wait_for(moves.get(), 60.0) == {}


async def test_the_frontends_place_is_read_only_for_near_prefill() -> None:
    nowhere = await read_place(KvRouterConfig(), {"DYN_TOPOLOGY_ENABLED": "nonsense"})
    assert (nowhere.domains, nowhere.env) == ({}, None)
    with pytest.raises(ConfigError, match="set DYN_TOPOLOGY_ENABLED to true") as refused:
        await read_place(REQUIRED, {})
    assert refused.value.param == "router_prefill_level"
