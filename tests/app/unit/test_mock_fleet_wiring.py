"""From a fleet file's words to mock engines, cards and links."""

import pytest

from kvrouter.app.fleet_build import text_mock_config
from kvrouter.app.mock_fleet import MockFleet
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.timing import Timing
from kvrouter.core.workers import Enforcement, KvFormat, Role
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.fleetfile.fleet_checks import default_fleet_document, load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.fleet_workers import link_table, mock_links, numbered_workers, worker_card
from kvrouter.kernel.topology.link_table import Link
from kvrouter.settings.problems import parse_document
from kvrouter.text.model import TextModel
from kvrouter.text.tokenizer import EncodePool
from kvrouter.transports.records.encoding import CardRecord, decode_record, encode_record


@pytest.fixture(scope="module")
def text() -> TextModel:
    return TextModel.load_mock(pool=EncodePool())


def fleet_of(text: str) -> FleetFile:
    return load_fleet(parse_document(text, "fleet.yaml")).fleet


def test_default_fleet_file_gets_the_default_mock_engine(text: TextModel) -> None:
    fleet = load_fleet(default_fleet_document()).fleet
    worker_id, group = next(numbered_workers(fleet))
    config, default = text_mock_config(fleet, group, worker_id, text, bootstrap=None), MockConfig()
    assert config.timing == Timing()
    for name in ("total_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "kv_bytes_per_token"):
        assert getattr(config, name) == getattr(default, name)


async def test_only_prefill_workers_that_bootstrap_offer_a_rendezvous() -> None:
    fleet = fleet_of(
        "version: 1\nmodels: [{name: mock}]\nworkers:\n"
        "  - {name: b, role: prefill}\n"
        "  - {name: s, role: prefill, engine: {handoff: synchronous}}\n"
        "  - {name: d, role: decode}\n"
    )
    async with MockFleet(fleet) as mock:
        hosts = [worker.card.runtime_config.bootstrap_host for worker in mock.workers.values()]
    assert hosts == ["mock-1", None, None]


def test_mock_cards_have_their_place_and_transfer_policy() -> None:
    fleet = load_fleet(default_fleet_document()).fleet
    worker_id, group = next(numbered_workers(fleet))
    card = worker_card(fleet, group, worker_id, incarnation=Epoch(1), address="there", bootstrap=None)
    assert (card.address, card.incarnation) == ("there", 1)
    assert card.role is Role.PREFILL
    assert card.runtime_config.topology_domains == {"zone": "a"}
    assert card.runtime_config.kv_transfer_domain == "zone"
    assert card.runtime_config.kv_transfer_enforcement is Enforcement.REQUIRED


def test_cards_have_the_kv_format_of_the_fleet_file_and_otherwise_none() -> None:
    workers = "workers: [{name: w, kv_format: {version: 0.32.0, connector: nixl}}, {name: v}]"
    fleet = fleet_of(f"version: 1\nmodels: [{{name: mock}}]\n{workers}")
    stated, plain = (
        worker_card(fleet, group, WorkerId(1), incarnation=Epoch(1), address="x", bootstrap=None)
        for group in fleet.workers
    )
    assert stated.runtime_config.kv_format == KvFormat(version="0.32.0", connector="nixl")
    assert b"kv_format" not in encode_record(CardRecord(plain, lease_s=10.0))
    assert decode_record(encode_record(CardRecord(stated, lease_s=10.0))).card == stated


async def test_stopped_mock_fleet_encodes_no_prompts() -> None:
    long = "x" * 100_000
    async with MockFleet(load_fleet(default_fleet_document()).fleet) as mock:
        (text,) = mock.texts.values()
        assert await text.encode_prompt(long)
    with pytest.raises(RuntimeError, match="shutdown"):
        await text.encode_prompt(long)


def test_links_of_the_file_apply_to_mock_transfers_and_decisions() -> None:
    fleet = fleet_of(
        "version: 1\nmodels: [{name: mock}]\n"
        "topology:\n"
        "  levels: [zone]\n"
        "  links:\n"
        "    within: {zone: {latency_s: 0.1, bandwidth_bytes_per_s: 100.0}}\n"
        "    across: {latency_s: 0.2, bandwidth_bytes_per_s: 50.0}\n"
        "    pairs: [{level: zone, between: [a, c], latency_s: 0.3, bandwidth_bytes_per_s: 25.0}]\n"
        "workers: [{name: w, domains: {zone: a}}]\n"
    )
    links, table = mock_links(fleet), link_table(fleet)
    for one, other, link in (
        ("a", "a", Link(0.1, 100.0)),
        ("a", "b", Link(0.2, 50.0)),
        ("c", "a", Link(0.3, 25.0)),
    ):
        assert links.between(one, other) == link
        assert table.link({"zone": one}, {"zone": other}, ["zone"]) == link


def test_mock_transfers_use_links_of_every_level_and_report_the_policys_level() -> None:
    fleet = fleet_of(
        "version: 1\nmodels: [{name: mock}]\n"
        "topology:\n"
        "  levels: [zone, rack]\n"
        "  links:\n"
        "    within:\n"
        "      zone: {latency_s: 0.1, bandwidth_bytes_per_s: 100.0}\n"
        "      rack: {latency_s: 0.0, bandwidth_bytes_per_s: 900.0}\n"
        "kv_transfer: {domain: rack, enforcement: fallback}\n"
        "workers: [{name: w, domains: {zone: a, rack: r}}]\n"
    )
    links, table = mock_links(fleet), link_table(fleet)
    here, near, far = (
        links.place({"zone": "a", "rack": rack, "label": "x"}, WorkerId(1)) for rack in ("r", "r", "s")
    )
    for other, bandwidth in ((near, 900.0), (far, 100.0)):
        _, link = links.shared(here, other)
        assert link.bandwidth_bytes_per_s == bandwidth
        assert link == table.link(here.domains, other.domains, ["zone", "rack"])
    assert links.pair(here, far) == ("r", "s")
