"""Both spellings of the policy of KV transfers become one."""

import pytest
from pydantic import JsonValue

from kvrouter.config.problems import dotted
from kvrouter.core.workers import Enforcement
from kvrouter.operator.api import read_deployment
from kvrouter.operator.policy import (
    DeploymentPolicy,
    NamedTopology,
    PolicyReading,
    RawLabel,
    read_policy,
)
from kvrouter.topology import Fallback, Preferred, Required
from tests.support.operator_deployments import deployment

Fields = dict[str, JsonValue]
ZONE = "topology.kubernetes.io/zone"


def reading(
    *,
    frontend: Fields | None = None,
    graph: Fields | None = None,
    topology: str | None = None,
    types: tuple[str, ...] = ("frontend", "prefill", "decode"),
) -> PolicyReading:
    document = deployment(frontend=frontend, graph=graph, topology=topology, types=types)
    found = read_deployment(document).deployment
    assert found is not None
    return read_policy(found.spec)


def reported(found: PolicyReading) -> list[str]:
    return [f"{dotted(problem.path)}: {problem.must}" for problem in found.problems]


@pytest.mark.parametrize(
    ("frontend", "graph", "policy"),
    [
        (
            {"level": "zone"},
            {"clusterTopologyName": "fabric", "domain": "zone"},
            DeploymentPolicy(Required("zone"), NamedTopology("fabric")),
        ),
        (
            {"level": "zone", "mismatchPolicy": "fallback"},
            {"clusterTopologyName": "fabric", "domain": "zone", "enforcement": "fallback"},
            DeploymentPolicy(Fallback("zone"), NamedTopology("fabric")),
        ),
        (
            {"level": "zone", "mismatchPolicy": "fail", "label": ZONE},
            {"labelKey": ZONE, "domain": "zone", "enforcement": "required"},
            DeploymentPolicy(Required("zone"), RawLabel(ZONE)),
        ),
    ],
)
def test_two_spellings_of_one_policy_are_one(
    frontend: Fields, graph: Fields, policy: DeploymentPolicy
) -> None:
    first = reading(frontend=frontend, topology="fabric")
    second = reading(graph=graph)
    both = reading(frontend=frontend, graph=graph, topology="fabric")
    assert first.policy == second.policy == both.policy == policy
    assert both.problems == ()


def test_preferred_has_its_weight() -> None:
    found = reading(
        graph={"labelKey": ZONE, "domain": "zone", "enforcement": "preferred", "preferredWeight": 0}
    )
    assert found.policy == DeploymentPolicy(Preferred("zone", 0.0), RawLabel(ZONE))
    assert found.policy.enforcement is Enforcement.PREFERRED
    assert found.policy.preferred_weight == 0
    assert found.policy.domain == "zone"


def test_without_a_policy_there_is_none() -> None:
    assert reading(topology="fabric") == PolicyReading(None)
    assert reading(topology="fabric").policy is None


def test_a_policy_says_where_it_is_written() -> None:
    first = reading(frontend={"level": "zone"}, topology="fabric").declared
    assert first is not None
    assert [dotted(path) for path in first[1:]] == [
        "spec.components[0].kvCacheTransferTopology",
        "spec.components[0].kvCacheTransferTopology.level",
        "spec.topologyConstraint.clusterTopologyName",
    ]
    second = reading(graph={"labelKey": ZONE, "domain": "zone"}).declared
    assert second is not None
    assert [dotted(path) for path in second[1:]] == [
        "spec.experimental.kvTransferPolicy",
        "spec.experimental.kvTransferPolicy.domain",
        "spec.experimental.kvTransferPolicy.labelKey",
    ]


@pytest.mark.parametrize(
    ("frontend", "graph", "types", "message"),
    [
        (
            {"level": "zone"},
            None,
            ("frontend", "prefill", "decode"),
            "spec.components[0].kvCacheTransferTopology: does not say where the values of 'zone' come from: "
            "set spec.topologyConstraint.clusterTopologyName to one of Grove's topologies, or "
            "spec.components[0].kvCacheTransferTopology.label to the key of a node label such as",
        ),
        (
            {"level": "zone", "label": ZONE},
            None,
            ("prefill", "decode"),
            "spec.components[0].kvCacheTransferTopology: belongs to the component of type frontend, and "
            "prefill is of type prefill: move it there",
        ),
        (
            {"level": "zone", "label": ZONE, "kvTransferWeight": 50.0},
            None,
            ("frontend", "prefill", "decode"),
            "spec.components[0].kvCacheTransferTopology.kvTransferWeight: is not supported yet: remove it",
        ),
        (
            None,
            {"domain": "zone"},
            ("frontend", "prefill", "decode"),
            "spec.experimental.kvTransferPolicy: does not say where the values of 'zone' come from: set "
            "clusterTopologyName to one of Grove's topologies, or labelKey to the key of a node label",
        ),
        (
            None,
            {"domain": "zone", "labelKey": ZONE, "clusterTopologyName": "fabric"},
            ("frontend", "prefill", "decode"),
            "spec.experimental.kvTransferPolicy: has both labelKey and clusterTopologyName: remove one",
        ),
        (
            None,
            {"domain": "zone", "labelKey": ZONE, "preferredWeight": 0.5},
            ("frontend", "prefill", "decode"),
            "spec.experimental.kvTransferPolicy.preferredWeight: is only for enforcement: preferred, not "
            "required: remove it, or say preferred",
        ),
        (
            None,
            {"domain": "zone", "labelKey": ZONE, "enforcement": "fallback", "preferredWeight": 0.5},
            ("frontend", "prefill", "decode"),
            "spec.experimental.kvTransferPolicy.preferredWeight: is only for enforcement: preferred, not "
            "fallback",
        ),
        (
            None,
            {"domain": "zone", "labelKey": ZONE, "enforcement": "preferred"},
            ("frontend", "prefill", "decode"),
            "spec.experimental.kvTransferPolicy.preferredWeight: is required when enforcement is "
            "preferred: a number from 0 to 1",
        ),
    ],
)
def test_what_is_wrong_is_reported_with_its_fix(
    frontend: Fields | None, graph: Fields | None, types: tuple[str, ...], message: str
) -> None:
    found = reading(frontend=frontend, graph=graph, types=types)
    (line,) = reported(found)
    assert line.startswith(message)
    assert found.policy is None


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        ({"labelKey": ZONE, "domain": "zone"}, f"says required in zone of label {ZONE}"),
        (
            {"clusterTopologyName": "fabric", "domain": "rack"},
            "says required in rack of clusterTopologyName fabric",
        ),
        (
            {
                "clusterTopologyName": "fabric",
                "domain": "zone",
                "enforcement": "preferred",
                "preferredWeight": 0.5,
            },
            "says preferred 0.5 in zone of clusterTopologyName fabric",
        ),
    ],
)
def test_spellings_that_contradict_each_other_are_refused(graph: Fields, says: str) -> None:
    found = reading(frontend={"level": "zone"}, graph=graph, topology="fabric")
    (line,) = reported(found)
    assert line == (
        f"spec.experimental.kvTransferPolicy: {says}, but spec.components[0].kvCacheTransferTopology says "
        "required in zone of clusterTopologyName fabric: remove one of them, or make them say the same"
    )
    assert found.policy is None


def test_all_that_is_wrong_is_reported_at_once() -> None:
    found = reading(
        frontend={"level": "zone", "kvTransferWeight": 1},
        graph={"domain": "zone", "preferredWeight": 0.5},
        types=("prefill", "decode"),
    )
    assert len(found.problems) == 5
