from math import nan

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import Taint
from kvrouter.core.taints import TOPOLOGY, named_domain, topology_taint, worker_taints
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig
from kvrouter.kernel.topology.policy import validate_runtime_config


def test_a_topology_taint_has_the_reserved_prefix_domain_and_value() -> None:
    assert TOPOLOGY == "dynamo.topology/"
    assert topology_taint("zone", "us-east-1a") == "dynamo.topology/zone=us-east-1a"
    assert topology_taint(" zone ", "us-east-1a\n") == "dynamo.topology/zone=us-east-1a"


def test_worker_taints_are_its_own_and_one_for_each_non_empty_domain() -> None:
    config = ModelRuntimeConfig(
        topology_domains={"zone": " us-east-1a", "rack": "rack-22", "host": "  ", " ": "x"},
        taints=frozenset({Taint("pool=fast")}),
    )
    assert worker_taints(config) == {
        "pool=fast",
        "dynamo.topology/zone=us-east-1a",
        "dynamo.topology/rack=rack-22",
    }
    assert config.domains == {"zone": "us-east-1a", "rack": "rack-22"}


@pytest.mark.parametrize(
    ("taint", "named"),
    [
        ("dynamo.topology/zone=a", ("zone", "a")),
        ("dynamo.topology/zone=a=b", ("zone", "a=b")),
        ("dynamo.topology/zone", ("zone", "")),
        ("zone=a", None),
    ],
)
def test_a_topology_taint_is_parsed_into_domain_and_value(taint: str, named: tuple[str, str] | None) -> None:
    assert named_domain(Taint(taint)) == named


def test_topology_taints_are_case_sensitive() -> None:
    assert topology_taint("zone", "A") != topology_taint("zone", "a")


def test_an_empty_runtime_config_is_valid() -> None:
    assert validate_runtime_config(ModelRuntimeConfig()) == []


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (ModelRuntimeConfig(taints=frozenset({Taint("dynamo.topology/zone=a")})), "taints"),
        (ModelRuntimeConfig(taints=frozenset({Taint(" dynamo.topology/x")})), "taints"),
        (ModelRuntimeConfig(topology_domains={"zone": "a", " zone": "b"}), "topology_domains"),
        (ModelRuntimeConfig(topology_domains={"a=b": "c"}), "topology_domains"),
        (ModelRuntimeConfig(topology_levels=("zone", "rack", "zone")), "topology_levels"),
        (ModelRuntimeConfig(topology_levels=("zone", " ")), "topology_levels"),
        (
            ModelRuntimeConfig(kv_transfer_domain="zone", kv_transfer_enforcement=Enforcement.PREFERRED),
            "kv_transfer_preferred_weight",
        ),
    ],
)
def test_an_invalid_runtime_config_is_refused_by_field(config: ModelRuntimeConfig, field: str) -> None:
    with pytest.raises(ConfigError, match=field) as refused:
        validate_runtime_config(config)
    assert refused.value.param == field


@pytest.mark.parametrize("weight", [-0.1, 1.5, nan, float("inf")])
@pytest.mark.parametrize("enforcement", [Enforcement.PREFERRED, Enforcement.REQUIRED, None])
def test_a_weight_outside_0_to_1_is_refused_for_any_enforcement(
    weight: float, enforcement: Enforcement | None
) -> None:
    config = ModelRuntimeConfig(kv_transfer_enforcement=enforcement, kv_transfer_preferred_weight=weight)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        validate_runtime_config(config)


@pytest.mark.parametrize("weight", [0.0, 0.85, 1.0])
def test_a_weight_from_0_to_1_is_valid(weight: float) -> None:
    config = ModelRuntimeConfig(
        topology_domains={"zone": "a"},
        kv_transfer_domain="zone",
        kv_transfer_enforcement=Enforcement.PREFERRED,
        kv_transfer_preferred_weight=weight,
    )
    assert validate_runtime_config(config) == []


def test_a_config_field_without_effect_gives_a_warning() -> None:
    unread = ModelRuntimeConfig(
        topology_domains={"zone": "a"}, kv_transfer_domain="zone", kv_transfer_preferred_weight=0.5
    )
    homeless = ModelRuntimeConfig(kv_transfer_domain="zone")
    aimless = ModelRuntimeConfig(kv_transfer_enforcement=Enforcement.REQUIRED)
    assert "only read when" in validate_runtime_config(unread)[0]
    assert "has no value" in validate_runtime_config(homeless)[0]
    assert "no effect without kv_transfer_domain" in validate_runtime_config(aimless)[0]
