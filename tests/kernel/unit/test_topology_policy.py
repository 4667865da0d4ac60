"""Every row of what a selected prefill worker asks of its decode worker."""

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig
from kvrouter.kernel.topology.policy import (
    Fallback,
    MismatchPolicy,
    Preferred,
    Required,
    RouterTopologyDefault,
    TransferConstraint,
    TransferPolicy,
    derive,
    policy_of,
)

FAIL = RouterTopologyDefault("zone")
FALLBACK = RouterTopologyDefault("zone", MismatchPolicy.FALLBACK)


def worker(
    domain: str | None = "zone",
    enforcement: Enforcement | None = Enforcement.REQUIRED,
    weight: float | None = None,
    **domains: str,
) -> ModelRuntimeConfig:
    return ModelRuntimeConfig(
        topology_domains=domains,
        kv_transfer_domain=domain,
        kv_transfer_enforcement=enforcement,
        kv_transfer_preferred_weight=weight,
    )


@pytest.mark.parametrize(
    ("config", "router_default", "policy"),
    [
        (worker(None, None), None, None),
        (worker("  ", None), None, None),
        (worker(), None, Required("zone")),
        (worker(enforcement=None), None, Required("zone")),
        (worker(" zone "), None, Required("zone")),
        (worker(enforcement=Enforcement.FALLBACK), None, Fallback("zone")),
        (worker(enforcement=Enforcement.PREFERRED, weight=0.85), None, Preferred("zone", 0.85)),
        (worker(None, None), FAIL, Required("zone")),
        (worker(None, None), FALLBACK, Fallback("zone")),
        (None, FAIL, Required("zone")),
        (None, None, None),
        # a worker's own policy wins over the router's
        (worker("rack", Enforcement.FALLBACK), FAIL, Fallback("rack")),
        (worker("rack"), FALLBACK, Required("rack")),
        # an enforcement without a domain is no policy
        (worker(None, Enforcement.FALLBACK), FAIL, Required("zone")),
    ],
)
def test_the_transfer_policy_follows_from_card_and_router_default(
    config: ModelRuntimeConfig | None,
    router_default: RouterTopologyDefault | None,
    policy: TransferPolicy | None,
) -> None:
    assert policy_of(config, router_default) == policy


def test_the_routers_default_mismatch_policy_is_fail() -> None:
    assert RouterTopologyDefault("zone").kv_transfer_mismatch_policy is MismatchPolicy.FAIL


def test_preferred_without_a_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_transfer_preferred_weight"):
        policy_of(worker(enforcement=Enforcement.PREFERRED), None)


def test_required_and_fallback_and_preferred_name_one_taint() -> None:
    for enforcement, weight in ((Enforcement.REQUIRED, None), (Enforcement.PREFERRED, 0.5)):
        constraint = derive(worker(enforcement=enforcement, weight=weight, zone="us-east-1a", rack="r1"))
        assert constraint is not None
        assert (constraint.domain, constraint.value) == ("zone", "us-east-1a")
        assert constraint.taint == "dynamo.topology/zone=us-east-1a"
    assert derive(worker(enforcement=Enforcement.FALLBACK, zone="a")) == TransferConstraint(
        Fallback("zone"), "a"
    )


def test_a_worker_without_a_policy_has_no_constraint() -> None:
    assert derive(worker(None, None, zone="a")) is None


def test_an_unknown_worker_without_required_policies_has_no_constraint() -> None:
    assert derive(None) is None


def test_an_unknown_worker_with_required_policies_elsewhere_fails_closed() -> None:
    constraint = derive(None, required_elsewhere="zone", router_default=FALLBACK)
    assert constraint == TransferConstraint(Required("zone"), None)
    assert constraint.taint is None


def test_an_unknown_worker_gets_the_routers_default() -> None:
    assert derive(None, router_default=FAIL) == TransferConstraint(Required("zone"), None)
    assert derive(None, router_default=FALLBACK) == TransferConstraint(Fallback("zone"), None)


@pytest.mark.parametrize("config", [worker(rack="r1"), worker(zone="  "), worker(enforcement=None)])
def test_a_required_domain_without_a_value_matches_no_worker(config: ModelRuntimeConfig) -> None:
    assert derive(config) == TransferConstraint(Required("zone"), None)


def test_fallback_and_preferred_constraints_may_lack_a_value() -> None:
    assert derive(worker(enforcement=Enforcement.FALLBACK)) == TransferConstraint(Fallback("zone"), None)
    preferred = derive(worker(enforcement=Enforcement.PREFERRED, weight=0.5))
    assert preferred == TransferConstraint(Preferred("zone", 0.5), None)


def test_the_routers_default_uses_the_workers_value_of_its_level() -> None:
    assert derive(worker(None, None, zone="b"), router_default=FAIL) == TransferConstraint(
        Required("zone"), "b"
    )
