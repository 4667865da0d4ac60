"""The setting ``router_links``: read from its text or from a file, and followed while it serves."""

import logging
from pathlib import Path

import pytest

from kvrouter.app.followed_links import following_links
from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import ModelName
from kvrouter.fleetfile.link_table import link_warnings, read_links
from kvrouter.fleetfile.routing_settings import routing_settings
from kvrouter.kernel.topology.link_table import Link, LinkTable
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.telemetry import Event
from tests.testing.log_events import event_of
from tests.testing.router_harness import RouterHarness, card
from tests.testing.scripted_transport import ScriptedTransport
from tests.testing.waits import until

TEXT = '{"within": {"zone": {"latency_s": 0.001, "bandwidth_bytes_per_s": 1e9, "price_per_gb": 0.5}}}'
SLOW = "within: {zone: {latency_s: 0.001, bandwidth_bytes_per_s: 1.0e8}}\n"


def test_router_links_holds_a_link_table_or_names_its_file(tmp_path: Path) -> None:
    file = tmp_path / "links.yaml"
    file.write_text(SLOW)
    assert read_links(TEXT).by_level == {"zone": Link(0.001, 1e9, 0.5)}
    assert read_links(str(file)).by_level == {"zone": Link(0.001, 1e8)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"within": {"zone": {"latency_s": 1}}}', "bandwidth_bytes_per_s"),
        ('{"wihtin": {}}', "wihtin"),
        ('{"within": {"zone": {"latency_s": -1, "bandwidth_bytes_per_s": 1}}}', "latency_s"),
        ("{", "not YAML"),
        ("links\0.yaml", "cannot be read"),
        ("/nowhere/links.yaml", "router_links: /nowhere/links.yaml: cannot be read"),
    ],
)
def test_an_invalid_router_links_setting_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        routing_settings(KvRouterConfig(router_links=text), None)
    assert said in refused.value.message
    assert "router_links" in refused.value.message
    assert refused.value.param == "router_links"


def test_router_links_override_fleet_file_links_and_default_to_assumed() -> None:
    of_file = LinkTable(otherwise=Link(1.0, 1.0))
    given = routing_settings(KvRouterConfig(router_links=TEXT, kv_transfer_weight=1.0), of_file)
    assert given.links is not None
    assert given.links.by_level == {"zone": Link(0.001, 1e9, 0.5)}
    assert routing_settings(KvRouterConfig(kv_transfer_weight=1.0), of_file).links is of_file
    blocks = KvRouterConfig(router_links=TEXT, router_cost="blocks")
    assert routing_settings(blocks, of_file).links is None
    assumed = routing_settings(KvRouterConfig(router_cost="time"), None).links
    assert assumed is not None
    assert assumed.has_same_links(LinkTable(assumes_otherwise=True))


def test_a_transfer_weight_without_links_is_warned_of() -> None:
    weighed = KvRouterConfig(kv_transfer_weight=1.0)
    warning = "router.kv_transfer_weight has no effect without links: give router.router_links"
    stated = LinkTable(by_level={"zone": Link(0.001, 1e9)})
    assert link_warnings(weighed, None) == [warning]
    assert link_warnings(weighed, stated) == []
    assert link_warnings(weighed.model_copy(update={"router_links": "{}"}), stated) == [warning]
    assert link_warnings(weighed.model_copy(update={"router_links": TEXT}), None) == []
    assert link_warnings(KvRouterConfig(), None) == []


UNLIKE = LinkTable(by_level={"zone": Link(0.001, 1e9)}, otherwise=Link(0.002, 1e8))


def test_blocks_cost_over_unlike_links_is_warned_of() -> None:
    blocks = KvRouterConfig(router_cost="blocks")
    (warning,) = link_warnings(blocks, UNLIKE)
    assert warning.startswith("router.router_cost 'blocks' does not see that links differ")
    assert link_warnings(blocks.model_copy(update={"router_links": TEXT}), None) == [warning]
    for change in ({"kv_transfer_topology_level": "zone"}, {"router_mode": RouterMode.ROUND_ROBIN}):
        assert link_warnings(blocks.model_copy(update=change), UNLIKE) == []
    assert link_warnings(KvRouterConfig(router_cost="blocks", kv_transfer_weight=1.0), UNLIKE) == []
    assert link_warnings(KvRouterConfig(), UNLIKE) == []
    alike = LinkTable(by_level={"zone": Link(0.001, 1e9)}, otherwise=Link(0.001, 1e9, 0.02))
    assert link_warnings(blocks, alike) == []


async def test_a_changed_links_file_applies_to_present_and_later_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrouter.router")
    file = tmp_path / "links.yaml"
    file.write_text(TEXT)
    config = KvRouterConfig(router_links=str(file), router_cost="time")
    harness = RouterHarness(ScriptedTransport(None), config)
    await harness.start(card(1))

    def within_zone() -> Link | None:
        links = harness.model.placer.settings.links
        return None if links is None else links.by_level["zone"]

    def said(event: Event) -> int:
        return sum(event_of(record) == event for record in caplog.records)

    def write(text: str) -> None:
        replaced = tmp_path / "next"
        replaced.write_text(text)
        replaced.rename(file)

    at_start = harness.model.placer.settings.links
    try:
        async with following_links(config, harness.service, poll_s=0.005):
            await until(lambda: harness.model.placer.settings.links is not at_start)
            assert within_zone() == Link(0.001, 1e9, 0.5)
            write(SLOW)
            await until(lambda: within_zone() == Link(0.001, 1e8))
            assert said(Event.LINKS_READ) == 1
            write("within: {zone: {}}")
            await until(lambda: said(Event.LINKS_REFUSED) == 1)
            file.unlink()
            await until(lambda: said(Event.LINKS_REFUSED) == 2)
            assert within_zone() == Link(0.001, 1e8)
            harness.discovery.put(card(2, model="other"))
            other = harness.service.model(ModelName("other")).placer.settings.links
            assert other is not None
            assert other.by_level == {"zone": Link(0.001, 1e8)}
            write(SLOW.replace("1.0e8", "1.0e7"))
            await until(lambda: within_zone() == Link(0.001, 1e7))
            assert said(Event.LINKS_READ) == 2
    finally:
        harness.service.stop()
