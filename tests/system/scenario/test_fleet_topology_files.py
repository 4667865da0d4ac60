"""Workers of a fleet file that read their place from files, as a kubelet writes them."""

import asyncio
from pathlib import Path

import pytest

from kvrouter.app.mock_fleet import MockFleet
from kvrouter.app.router_build import build_service
from kvrouter.core.errors import NoEligibleWorker, TopologyUnavailable
from kvrouter.core.ids import ModelName
from kvrouter.core.workers import Role, WorkerCard
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.router.router_service import RouterService
from kvrouter.settings.problems import parse_document
from kvrouter.settings.router_settings import KvRouterConfig
from tests.testing.router_harness import generate_request

FLEET = """
version: 1
models: [{{name: mock, block_size: 16}}]
topology: {{levels: [zone]}}
workers:
  - name: p
    role: prefill
    topology_env: {{DYN_TOPOLOGY_ENABLED: "true", DYN_KV_TRANSFER_DOMAIN: zone,
      DYN_TOPOLOGY_MOUNT_PATH: {prefill}, DYN_TOPOLOGY_POLL_S: "0.01", DYN_TOPOLOGY_TIMEOUT_S: "0.05"}}
  - name: d
    role: decode
    topology_env: {{DYN_TOPOLOGY_ENABLED: "true", DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL: zone,
      DYN_TOPOLOGY_MOUNT_PATH: {decode}, DYN_TOPOLOGY_POLL_S: "0.01", DYN_TOPOLOGY_TIMEOUT_S: "0.05"}}
speedup: 100
"""


def kubelet_writes(folder: Path, zone: str, *, version: int = 1) -> None:
    """A Downward API volume: files are links through ``..data``, which is swapped in one rename."""
    data = folder / f"..2026_11_21.{version}"
    data.mkdir(parents=True)
    (data / "zone").write_text(f"{zone}\n")
    link = folder / "..data_tmp"
    link.symlink_to(data.name)
    link.rename(folder / "..data")
    if not (folder / "zone").exists():
        (folder / "zone").symlink_to("..data/zone")


def fleet_in(folder: Path) -> FleetFile:
    text = FLEET.format(prefill=folder / "prefill", decode=folder / "decode")
    return load_fleet(parse_document(text, "fleet.yaml")).fleet


def _tell(card: WorkerCard, changed: asyncio.Event) -> None:
    if card.role is Role.DECODE and card.runtime_config.topology_domains == {"zone": "b"}:
        changed.set()


async def tokens_of(service: RouterService, request_id: str) -> int:
    async with service.requests.generate(generate_request(max_tokens=2, request_id=request_id)) as generation:
        return sum([len(chunk.token_ids) async for chunk in generation])


async def test_a_worker_with_an_unknown_place_does_not_start(tmp_path: Path) -> None:
    kubelet_writes(tmp_path / "prefill", "a")
    with pytest.raises(TopologyUnavailable, match="zone") as failed:
        async with MockFleet(fleet_in(tmp_path)):
            pytest.fail("the fleet started")
    assert str(tmp_path / "decode") in failed.value.message


async def test_a_later_label_change_changes_the_allowed_pairs(tmp_path: Path) -> None:
    kubelet_writes(tmp_path / "prefill", "a")
    kubelet_writes(tmp_path / "decode", "a")
    async with MockFleet(fleet_in(tmp_path)) as fleet:
        service = build_service(
            KvRouterConfig(router_domain_wait_s=30.0),
            request_transport=fleet.requests,
            discovery=fleet.discovery,
            subscriber=fleet.events,
        )
        await service.start()
        assert await tokens_of(service, "r1") == 2
        kubelet_writes(tmp_path / "decode", "b", version=2)
        decode = next(worker for worker in fleet.workers.values() if worker.card.role == "decode")
        changed = asyncio.Event()
        stop = await fleet.discovery.watch(lambda card: _tell(card, changed), lambda *_: None)
        await asyncio.wait_for(changed.wait(), 30)
        stop()
        assert service.model(ModelName("mock")).fleet.card(decode.card.worker_id) == decode.card
        with pytest.raises(NoEligibleWorker):
            service.model(ModelName("mock")).explain(generate_request(request_id="r2"))
        service.stop()
