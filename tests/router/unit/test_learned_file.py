"""The file in which what was learned of links is kept over restarts."""

import logging
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from kvrouter.app import learned_file
from kvrouter.app.learned_file import keeping_learned_links
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import RouterId
from kvrouter.core.replica_messages import LinkName, LinkSample, LinkUpdate
from kvrouter.core.workers import ModelRuntimeConfig
from kvrouter.kernel.placement.link_speeds import FORGET_S
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.router.router_service import RECALLED_S, RouterService
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Event
from tests.testing.calls import MakeFail
from tests.testing.log_events import events_of
from tests.testing.router_harness import MODEL, RouterHarness, card
from tests.testing.scripted_transport import ScriptedTransport
from tests.testing.waits import until

LINK = LinkName((("zone", "a"),), "b")


def news(n: int = 8, *, slowness: float = 10.0, table: str | None = None) -> LinkUpdate:
    seen = [
        LinkSample(RouterId("x"), each, LINK, 2e-3, 3.125e9, float(n - each), 0.1, 0.1 * slowness)
        for each in range(n)
    ]
    return LinkUpdate(RouterId("x"), MODEL, table or LinkTable().digest(), tuple(seen))


async def a_bench(path: Path | None) -> tuple[RouterHarness, KvRouterConfig]:
    kept = None if path is None else str(path)
    config = KvRouterConfig(router_cost="time", router_learned_file=kept)
    harness = RouterHarness(ScriptedTransport(None), config)
    await harness.start()
    return harness, config


def slowness(service: RouterService) -> list[float]:
    """Of what is known of each kind of link, after a look at it."""
    model = service.model(MODEL)
    transfers = model.placer.transfers
    transfers.learned.refresh((), now_s=model.clock())
    return [reading.slowness for reading in transfers.learned.readings()]


async def test_learned_links_survive_a_restart_and_fade_with_its_duration(
    tmp_path: Path,
) -> None:
    path = tmp_path / "learned.json"
    now_s = [1e9]
    harness, config = await a_bench(path)
    async with keeping_learned_links(config, harness.service, clock=lambda: now_s[0]):
        harness.discovery.put(card(1))
        harness.model.placer.transfers.on_link_update(news(), now_s=harness.model.clock(), aged_s=0.0)
        assert slowness(harness.service)[0] > 9.0
    harness.service.stop()
    for away_s, least, most in ((1.0, 9.0, 10.0), (FORGET_S, 2.9, 3.2), (20 * FORGET_S, 1.0, 1.01)):
        later, config = await a_bench(path)
        async with keeping_learned_links(config, later.service, clock=lambda away_s=away_s: 1e9 + away_s):  # type: ignore[misc]
            later.discovery.put(card(1))
            assert least <= slowness(later.service)[0] <= most
            later.service.stop()
            kept = path.read_bytes()
        path.write_bytes(kept)  # as it was at the first end, for the next


async def test_learned_links_of_absent_models_are_kept_with_a_higher_age(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(msgspec.json.encode({"version": 1, "saved_at_s": 100.0, "links": (news(),)}))
    harness, config = await a_bench(path)
    async with keeping_learned_links(config, harness.service, clock=lambda: 150.0):
        pass
    harness.service.stop()
    kept = msgspec.json.decode(path.read_bytes())
    assert kept["saved_at_s"] == 150.0
    ages = [seen[5] for seen in kept["links"][0][4]]
    assert ages == pytest.approx([each.age_s + 50.0 for each in news().seen], abs=5.0)


async def test_present_models_recall_links_and_restarts_do_not_grow_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(msgspec.json.encode({"version": 1, "saved_at_s": 100.0, "links": (news(64),)}))
    for _ in range(3):
        harness, config = await a_bench(path)
        harness.discovery.put(card(1))
        async with keeping_learned_links(config, harness.service, clock=lambda: 101.0):
            assert slowness(harness.service)[0] > 9.0
        harness.service.stop()
        links = msgspec.json.decode(path.read_bytes())["links"]
        assert sum(len(each[4]) for each in links) == 64


async def test_a_refused_card_does_not_use_up_the_learned_links(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(msgspec.json.encode({"version": 1, "saved_at_s": 100.0, "links": (news(),)}))
    harness, config = await a_bench(path)
    async with keeping_learned_links(config, harness.service, clock=lambda: 101.0):
        wrong = structs.replace(card(1), runtime_config=ModelRuntimeConfig(kv_transfer_domain="zone "))
        harness.discovery.put(structs.replace(wrong, dp_size=0))
        harness.discovery.put(card(1))
        assert slowness(harness.service)[0] > 9.0
    harness.service.stop()


async def test_old_learned_links_of_absent_models_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.write_bytes(msgspec.json.encode({"version": 1, "saved_at_s": 100.0, "links": (news(),)}))
    harness, config = await a_bench(path)
    async with keeping_learned_links(config, harness.service, clock=lambda: 101.0 + RECALLED_S):
        pass
    harness.service.stop()
    assert msgspec.json.decode(path.read_bytes())["links"] == []


async def test_the_learned_file_is_written_while_the_router_runs(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    harness, config = await a_bench(path)
    async with keeping_learned_links(config, harness.service, save_s=0.01):
        await until(path.exists)
    harness.service.stop()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"version": 2, "saved_at_s": 1, "links": []}', b'{"version":1}', b"\xff"],
)
async def test_an_invalid_learned_file_is_reported_and_ignored(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrouter.router")
    path = tmp_path / "learned.json"
    path.write_bytes(content)
    harness, config = await a_bench(path)
    async with keeping_learned_links(config, harness.service):
        harness.discovery.put(card(1))
        assert slowness(harness.service) == []
    harness.service.stop()
    assert events_of(caplog.records).count(Event.LEARNED_NOT_READ) == 1
    assert str(path) in caplog.text


async def test_learned_links_of_another_link_table_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    other = structs.replace(news(), table="another")
    path.write_bytes(msgspec.json.encode({"version": 1, "saved_at_s": 100.0, "links": (other,)}))
    harness, config = await a_bench(path)
    async with keeping_learned_links(config, harness.service, clock=lambda: 101.0):
        harness.discovery.put(card(1))
        assert slowness(harness.service) == []
    harness.service.stop()


async def test_an_unwritable_learned_file_path_is_refused_at_the_start(tmp_path: Path) -> None:
    harness, config = await a_bench(tmp_path / "nowhere" / "learned.json")
    with pytest.raises(ConfigError, match="router_learned_file") as refused:
        async with keeping_learned_links(config, harness.service):
            raise AssertionError("it began")
    assert refused.value.param == "router_learned_file"
    harness.service.stop()


async def test_a_full_disk_is_reported_once_and_keeps_the_old_file(
    tmp_path: Path, make_fail: MakeFail, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrouter.router")
    path = tmp_path / "learned.json"
    path.write_bytes(msgspec.json.encode({"version": 1, "saved_at_s": 100.0, "links": ()}))
    before = path.read_bytes()
    full = ConfigError(f"{path}: cannot be written: No space left on device", param=str(path))
    tries = make_fail(learned_file, "write_atomic", full)
    harness, config = await a_bench(path)
    async with keeping_learned_links(config, harness.service, save_s=0.005):
        await until(lambda: len(tries) >= 3)
        assert events_of(caplog.records).count(Event.LEARNED_NOT_KEPT) == 1
    harness.service.stop()
    assert path.read_bytes() == before
