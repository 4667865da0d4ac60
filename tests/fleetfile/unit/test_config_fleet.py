"""The fleet file: one schema, mistakes found with their lines."""

from pathlib import Path

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement, Role
from kvrouter.fleetfile.fleet_checks import default_fleet_document, load_fleet
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.fleetfile.fleet_workers import link_table
from kvrouter.settings.problems import parse_document, read_document

EXAMPLES = Path(__file__).parents[3] / "examples"

GOOD = """\
version: 1
models:
  - name: mock
topology:
  levels: [zone, rack]
kv_transfer: {domain: zone}
workers:
  - {name: p, role: prefill, domains: {zone: a, rack: r1}}
  - {name: d, role: decode, replicas: 2, domains: {zone: a}}
"""


def load(text: str) -> FleetFile:
    return load_fleet(parse_document(text, "fleet.yaml")).fleet


def refused(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return caught.value.message.split("\n")


def warned(text: str) -> str:
    return "\n".join(load_fleet(parse_document(text, "fleet.yaml")).warnings)


def test_default_fleet_has_two_zones_with_required_kv_transfer() -> None:
    loaded = load_fleet(default_fleet_document())
    fleet = loaded.fleet
    assert loaded.warnings == ()
    assert [(g.role, g.n_workers, dict(g.domains)) for g in fleet.workers] == [
        (Role.PREFILL, 1, {"zone": "a"}),
        (Role.DECODE, 2, {"zone": "a"}),
        (Role.PREFILL, 1, {"zone": "b"}),
        (Role.DECODE, 2, {"zone": "b"}),
    ]
    assert fleet.kv_transfer is not None
    assert (fleet.kv_transfer.domain, fleet.kv_transfer.enforcement) == ("zone", Enforcement.REQUIRED)
    assert fleet.model_of(fleet.workers[0]).name == "mock"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("fleet*.yaml")), ids=lambda path: path.name)
def test_every_example_loads_without_a_warning(path: Path) -> None:
    assert load_fleet(read_document(path)).warnings == ()


def test_example_fleet_equals_the_default_but_for_a_longer_context() -> None:
    example, default = (
        load_fleet(read_document(EXAMPLES / "fleet.yaml")),
        load_fleet(default_fleet_document()),
    )
    assert example.warnings == default.warnings
    (model,) = example.fleet.models
    assert model.context_length == 131_072
    alike = model.model_copy(update={"context_length": default.fleet.models[0].context_length})
    assert example.fleet.model_copy(update={"models": (alike,)}) == default.fleet


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("replicas: 2", "replicas: 0", "9: workers[1].replicas: must be ≥ 1, not 0"),
        ("replicas: 2", "replicas: 9999", "9: workers[1].replicas: must be ≤ 1024, not 9999"),
        ("replicas: 2", "replicas: true", "9: workers[1].replicas: must be a whole number, not true"),
        ("replicas: 2", "replica: 2", "9: workers[1].replica: unknown key (did you mean replicas?)"),
        ("version: 1", "version: 2", "1: version: must be 1, not 2"),
        ("version: 1\n", "", "1: version: is required"),
        ("role: decode", "role: decoder",
         "9: workers[1].role: must be 'prefill', 'decode' or 'both', not 'decoder'"),
        ("role: decode", "role: prefill", "3: models[0]: no worker decodes 'mock': add role decode or both"),
        ("name: d", "name: p", "9: workers[1].name: must be unique: 'p' is workers[0]"),
        ("name: d", "name: '-'",
         "9: workers[1].name: must be letters, digits and ._/- between letters or digits, not '-'"),
        ("zone: a}}", "zone: no}}",
         "9: workers[1].domains.zone: must be text (put it in quotes), not false"),
        ("{zone: a}}", "{zne: a}}",
         "9: workers[1].domains.zne: must be one of topology.levels (zone, rack), not 'zne' "
         "(did you mean zone?)"),
        ("{zone: a}}", "{zone: a}, model: other}",
         "9: workers[1].model: must be a model of this file, not 'other'"),
        ("{zone: a}}", "{zone: a}, taints: [fast, dynamo.topology/zone=a]}",
         "9: workers[1].taints[1]: "
         "must not begin with dynamo.topology/: topology taints come from domains"),
        ("{zone: a}}", "{zone: a}, taints: [kvrouter.adapter/french]}",
         "9: workers[1].taints[0]: "
         "must not begin with kvrouter.adapter/: adapter taints come from the engine"),
        ("{zone: a}}", "{zone: a}, engine: {timing: {decode_liner: 1}}}",
         "9: workers[1].engine.timing.decode_liner: unknown key (did you mean decode_linear?)"),
        ("{zone: a}}", "{zone: a}, engine: {kind: tgi}}",
         "9: workers[1].engine.kind: must be 'mock', 'vllm', 'sglang' or 'trtllm', not 'tgi'"),
        ("{domain: zone}", "{domain: host}",
         "6: kv_transfer.domain: must be one of topology.levels (zone, rack), not 'host'"),
        ("{domain: zone}", "{domain: zone, enforcement: preferred}",
         "6: kv_transfer.preferred_weight: is required under 'preferred': from 0 to 1"),
        ("{domain: zone}", "{domain: zone, enforcement: preferred, preferred_weight: 1.5}",
         "6: kv_transfer.preferred_weight: must be ≤ 1, not 1.5"),
        ("[zone, rack]", "[zone, zone, rack]",
         "5: topology.levels[1]: must be unique: 'zone' is there already"),
        ("[zone, rack]", "[zone, rack]\n  links: {within: {host: {latency_s: 0, bandwidth_bytes_per_s: 1}}}",
         "6: topology.links.within.host: must be one of topology.levels (zone, rack), not 'host'"),
        ("[zone, rack]", "[zone, rack]\n  links: {across: {latency_s: 0, bandwidth_bytes_per_s: 0}}",
         "6: topology.links.across.bandwidth_bytes_per_s: must be > 0, not 0"),
        ("version: 1", "version: 1\nspeedup: .inf", "2: speedup: must be a finite number, not inf"),
        ("version: 1", "version: 1\nrouter:\n  router_temprature: 1",
         "3: router.router_temprature: unknown key (did you mean router_temperature?)"),
        ("  - name: mock", "  - name: mock\n  - name: other",
         "9: workers[0].model: is required: the file has 2 models"),
        ("  - name: mock", "  - name: mock\n  - {}",
         "4: models[1].name: is required: the file has 2 models"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert refused(GOOD.replace(old, new))[0] == f"fleet.yaml:{message}"


def test_all_mistakes_come_at_once_in_the_order_of_the_file() -> None:
    text = (
        GOOD.replace("version: 1", "version: 3").replace("replicas: 2", "replicas: 0").replace("mock", "1x-")
    )
    assert [line.split(":")[1] for line in refused(text)] == ["1", "3", "9"]


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ("role: prefill", "role: both", "kv_transfer has no effect on model 'mock'"),
        ("{zone: a}}", "{zone: b}}", "zone=a has prefill workers and no decode worker"),
        ("{zone: a}}", "{zone: b}}", "zone=b has decode workers and no prefill worker"),
        ("{zone: a}}", "{rack: r1}}", "group 'd' has no zone"),
        ("{domain: zone}", "{domain: zone, preferred_weight: 0.5}", "no effect under 'required'"),
        ("replicas: 2", "engine: {total_kv_blocks: 10}", "room for 640 tokens"),
        ("replicas: 2", "engine: {kv_events: false}", "publishes no KV events"),
        ("version: 1", "version: 1\nrouter: {kv_transfer_weight: 2}", "kv_transfer_weight has no effect"),
        (
            "topology:\n",
            "router: {kv_transfer_weight: 2}\ntopology:\n  links: {}\n",
            "kv_transfer_weight has no effect",
        ),
        (
            "version: 1",
            "version: 1\nrouter: {kv_transfer_weight: 2, router_links: '{}'}",
            "kv_transfer_weight has no effect",
        ),
    ],
)
def test_valid_but_likely_unintended_settings_are_warned_of(old: str, new: str, warning: str) -> None:
    assert warned(GOOD) == ""
    assert warning in warned(GOOD.replace(old, new))


def test_block_cost_over_unequal_links_without_a_policy_is_warned_of() -> None:
    near = "{latency_s: 0.001, bandwidth_bytes_per_s: 5.0e9}"
    far = near.replace("5.0", "1.0")
    links = f"  links: {{within: {{zone: {near}}}, across: {far}}}"
    blocks = GOOD.replace("version: 1", "version: 1\nrouter: {router_cost: blocks}")
    unlike = blocks.replace("topology:\n", f"topology:\n{links}\n")
    assert unlike != blocks
    unbound = unlike.replace("kv_transfer: {domain: zone}\n", "")
    assert unbound != unlike
    assert "does not see that links differ" in warned(unbound)
    assert warned(unlike) == ""
    assert warned(blocks.replace("kv_transfer: {domain: zone}\n", "")) == ""
    assert warned(unbound.replace("router_cost: blocks", "router_cost: time")) == ""


def test_a_fleet_file_with_levels_and_no_links_has_one_link_for_all() -> None:
    fleet = load(GOOD)
    assert fleet.topology.levels
    assert link_table(fleet).is_assumed
    assert not link_table(fleet).has_unlike_links


def test_a_stated_link_that_equals_the_assumed_one_is_stated() -> None:
    as_assumed = "  links: {across: {latency_s: 0.002, bandwidth_bytes_per_s: 3125000000}}"
    stated = link_table(load(GOOD.replace("topology:\n", f"topology:\n{as_assumed}\n")))
    assert not stated.is_assumed
    assert not stated.has_same_links(link_table(load(GOOD)))


def test_unreadable_fleet_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read: No such file"):
        read_document(missing)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml: must be UTF-8"):
        read_document(binary)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (4 * 1024 * 1024 + 1))
    with pytest.raises(ConfigError, match=r"large\.yaml: must have ≤"):
        read_document(large)
