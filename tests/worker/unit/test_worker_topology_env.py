"""The variables that state a worker's place: what they mean, and what is refused."""

from pathlib import Path

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig
from kvrouter.worker.topology import read_domains, topology_config
from kvrouter.worker.topology_env import TopologyEnv, parse_topology_env

ON = {"DYN_TOPOLOGY_ENABLED": "true", "DYN_KV_TRANSFER_DOMAIN": "zone"}
ENFORCEMENT = "DYN_KV_TRANSFER_ENFORCEMENT"
WEIGHT = "DYN_KV_TRANSFER_PREFERRED_WEIGHT"


@pytest.mark.parametrize("text", ["true", "1", "on", "yes", "TRUE", " Yes "])
def test_topology_is_enabled_by_each_true_value(text: str) -> None:
    assert parse_topology_env({**ON, "DYN_TOPOLOGY_ENABLED": text}).enabled


@pytest.mark.parametrize(
    "environ", [{}] + [{"DYN_TOPOLOGY_ENABLED": text} for text in ("false", "0", "off", "NO", "")]
)
def test_topology_is_disabled_by_default_and_by_each_false_value(environ: dict[str, str]) -> None:
    env = parse_topology_env(environ)
    assert not env.enabled
    config = ModelRuntimeConfig(total_kv_blocks=5)
    assert topology_config(config, env, read_domains(env.mount_path)) is config


def test_the_defaults_equal_the_specification() -> None:
    env = parse_topology_env(ON)
    assert env == TopologyEnv(
        enabled=True,
        mount_path=Path("/etc/dynamo/topology"),
        awaited_domain="zone",
        transfer_domain="zone",
        enforcement=Enforcement.REQUIRED,
        poll_s=1.0,
        timeout_s=30.0,
    )


@pytest.mark.parametrize("enforcement", ["required", "preferred", "fallback"])
def test_each_enforcement_is_read(enforcement: str) -> None:
    environ = {**ON, "DYN_KV_TRANSFER_ENFORCEMENT": enforcement}
    if enforcement == "preferred":
        environ["DYN_KV_TRANSFER_PREFERRED_WEIGHT"] = "0.85"
    env = parse_topology_env(environ)
    assert env.enforcement == enforcement
    assert env.preferred_weight == (0.85 if enforcement == "preferred" else None)
    assert env.warnings == ()


@pytest.mark.parametrize(
    ("environ", "variable", "says"),
    [
        ({"DYN_TOPOLOGY_ENABLED": "ture"}, "DYN_TOPOLOGY_ENABLED", "must be true or false, not 'ture'"),
        ({"DYN_TOPOLOGY_ENABLED": "true"}, "DYN_KV_TRANSFER_DOMAIN", "must name the domain"),
        ({**ON, "DYN_KV_TRANSFER_DOMAIN": " "}, "DYN_KV_TRANSFER_DOMAIN", "must name the domain"),
        ({**ON, "DYN_KV_TRANSFER_DOMAIN": "a/b"}, "DYN_KV_TRANSFER_DOMAIN", "'a/b' cannot be"),
        ({**ON, "DYN_KV_TRANSFER_DOMAIN": ".zone"}, "DYN_KV_TRANSFER_DOMAIN", "hidden"),
        ({**ON, "DYN_KV_TRANSFER_DOMAIN": "z=1"}, "DYN_KV_TRANSFER_DOMAIN", "'='"),
        ({**ON, ENFORCEMENT: "Required"}, ENFORCEMENT, "is none of required"),
        ({**ON, ENFORCEMENT: "preferred"}, WEIGHT, "must be set"),
        ({**ON, WEIGHT: "heavy"}, WEIGHT, "'heavy'"),
        ({**ON, WEIGHT: "1.5"}, WEIGHT, "between 0 and 1"),
        ({**ON, WEIGHT: "-0.1"}, WEIGHT, "between 0 and 1"),
        ({**ON, WEIGHT: "nan"}, WEIGHT, "finite"),
        ({**ON, "DYN_TOPOLOGY_LEVELS": "zone,,rack"}, "DYN_TOPOLOGY_LEVELS", "is empty"),
        ({**ON, "DYN_TOPOLOGY_LEVELS": "zone, zone"}, "DYN_TOPOLOGY_LEVELS", "twice"),
        ({**ON, "DYN_TOPOLOGY_POLL_S": "0"}, "DYN_TOPOLOGY_POLL_S", "no time"),
        ({**ON, "DYN_TOPOLOGY_TIMEOUT_S": "soon"}, "DYN_TOPOLOGY_TIMEOUT_S", "'soon'"),
    ],
)
def test_invalid_topology_variables_are_refused_by_name(
    environ: dict[str, str], variable: str, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_topology_env(environ)
    assert refused.value.param == variable
    assert refused.value.message.startswith(f"{variable}: ")
    assert says in refused.value.message


def test_a_weight_without_preferred_is_a_warning_and_is_not_published() -> None:
    env = parse_topology_env({**ON, "DYN_KV_TRANSFER_PREFERRED_WEIGHT": "0.5"})
    assert env.preferred_weight is None
    assert env.warnings == (
        "DYN_KV_TRANSFER_PREFERRED_WEIGHT is only read when DYN_KV_TRANSFER_ENFORCEMENT is preferred",
    )


def test_a_policy_without_topology_is_a_warning() -> None:
    env = parse_topology_env({"DYN_KV_TRANSFER_DOMAIN": "zone"})
    assert env.warnings == ("DYN_KV_TRANSFER_DOMAIN has no effect unless DYN_TOPOLOGY_ENABLED is true",)


def test_a_router_topology_level_is_awaited_but_sets_no_policy(tmp_path: Path) -> None:
    (tmp_path / "rack").write_text("r1")
    env = parse_topology_env(
        {
            "DYN_TOPOLOGY_ENABLED": "1",
            "DYN_TOPOLOGY_MOUNT_PATH": str(tmp_path),
            "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL": "rack",
            "DYN_KV_TRANSFER_ENFORCEMENT": "required",
        }
    )
    assert env.awaited_domain == "rack"
    assert env.warnings == ("DYN_KV_TRANSFER_ENFORCEMENT has no effect without DYN_KV_TRANSFER_DOMAIN",)
    config = topology_config(ModelRuntimeConfig(), env, read_domains(tmp_path))
    assert config == ModelRuntimeConfig(topology_domains={"rack": "r1"})


def test_a_workers_transfer_domain_overrides_the_routers_level() -> None:
    env = parse_topology_env({**ON, "DYN_ROUTER_KV_TRANSFER_TOPOLOGY_LEVEL": "rack"})
    assert (env.awaited_domain, env.transfer_domain) == ("zone", "zone")
