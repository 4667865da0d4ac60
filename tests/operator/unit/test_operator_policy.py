"""Both spellings of the policy of KV transfers become one."""

import pytest
from pydantic import JsonValue

from kvrouter.core.workers import Enforcement
from kvrouter.kernel.topology.policy import Fallback, Preferred, Required
from kvrouter.operator.api.deployment import read_deployment
from kvrouter.operator.api.qos import LinkQoS, NetworkQoS
from kvrouter.operator.policy import (
    DeploymentPolicy,
    FrontendSettings,
    NamedTopology,
    PolicyReading,
    RawLabel,
    read_policy,
)
from kvrouter.settings.problems import dotted
from tests.testing.operator_deployments import component, deployment

Fields = dict[str, JsonValue]
ZONE = "topology.kubernetes.io/zone"
LINK: Fields = {"latencySeconds": 0.001, "bandwidthBytesPerSecond": 25e9}
LEVEL: Fields = {**LINK, "level": "zone"}
PAIR: Fields = {**LINK, "level": "zone", "between": ["a", "b"]}
PAIR_TURNED: Fields = {**LINK, "latencySeconds": 1, "level": "zone", "between": ["b", "a"]}


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
def test_two_spellings_of_one_policy_read_the_same(
    frontend: Fields, graph: Fields, policy: DeploymentPolicy
) -> None:
    first = reading(frontend=frontend, topology="fabric")
    second = reading(graph=graph)
    both = reading(frontend=frontend, graph=graph, topology="fabric")
    assert first.policy == second.policy == both.policy == policy
    assert both.problems == ()


def test_preferred_policy_keeps_its_weight() -> None:
    found = reading(
        graph={"labelKey": ZONE, "domain": "zone", "enforcement": "preferred", "preferredWeight": 0}
    )
    assert found.policy == DeploymentPolicy(Preferred("zone", 0.0), RawLabel(ZONE))
    assert found.policy.enforcement is Enforcement.PREFERRED
    assert found.policy.preferred_weight == 0
    assert found.policy.domain == "zone"


def test_deployment_without_a_policy_reads_as_having_none() -> None:
    assert reading(topology="fabric") == PolicyReading(None)
    assert reading(topology="fabric").policy is None


def test_policy_reading_has_the_paths_of_its_fields() -> None:
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
            {"level": "zone", "label": ZONE, "networkQoS": {"levels": [LEVEL, {**LINK, "level": "zone"}]}},
            None,
            ("frontend", "prefill", "decode"),
            "spec.components[0].kvCacheTransferTopology.networkQoS.levels[1].level: 'zone' is there twice",
        ),
        (
            {"level": "zone", "label": ZONE, "networkQoS": {"pairs": [PAIR, PAIR_TURNED]}},
            None,
            ("frontend", "prefill", "decode"),
            "spec.components[0].kvCacheTransferTopology.networkQoS.pairs[1].between: 'a' and 'b' of zone are "
            "there twice",
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
def test_policy_mistake_is_reported_with_its_fix(
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


def test_all_policy_mistakes_are_reported_at_once() -> None:
    found = reading(
        frontend={"level": "zone", "networkQoS": {"pairs": [PAIR, PAIR]}},
        graph={"domain": "zone", "preferredWeight": 0.5},
        types=("prefill", "decode"),
    )
    assert len(found.problems) == 5


# What the cost of KV transfers is.


def test_weight_and_links_are_read_with_their_paths() -> None:
    of_frontend: Fields = {"level": "zone", "kvTransferWeight": 50, "networkQoS": {"across": LINK}}
    found = reading(frontend=of_frontend, topology="fabric")
    assert found.problems == ()
    assert found.settings.weight == 50.0
    assert dotted(found.settings.weight_at) == "spec.components[0].kvCacheTransferTopology.kvTransferWeight"
    assert found.settings.qos == NetworkQoS(
        across=LinkQoS(latency_seconds=0.001, bandwidth_bytes_per_second=25e9)
    )
    assert dotted(found.settings.qos_at) == "spec.components[0].kvCacheTransferTopology.networkQoS"


def test_weight_and_links_need_no_counterpart_in_the_graph_policy() -> None:
    weighed = reading(
        frontend={"level": "zone", "kvTransferWeight": 0, "networkQoS": {}},
        graph={"clusterTopologyName": "fabric", "domain": "zone"},
        topology="fabric",
    )
    assert weighed.problems == ()
    assert weighed.policy == reading(frontend={"level": "zone"}, topology="fabric").policy
    assert reading(frontend={"level": "zone"}, topology="fabric").settings == FrontendSettings()


def of_two_frontends(first: Fields, second: Fields) -> PolicyReading:
    document = deployment(topology="fabric")
    policies = ({"level": "zone", **each} for each in (first, second))
    document["spec"] = {
        "topologyConstraint": {"clusterTopologyName": "fabric"},
        "components": [
            component("frontend", f"web-{index}", kvCacheTransferTopology=policy)
            for index, policy in enumerate(policies)
        ],
    }
    found = read_deployment(document).deployment
    assert found is not None
    return read_policy(found.spec)


def test_weight_and_links_are_joined_from_several_frontends() -> None:
    found = of_two_frontends({"kvTransferWeight": 3}, {"networkQoS": {"levels": [LEVEL]}})
    assert found.problems == ()
    assert found.settings.weight == 3.0
    assert found.settings.qos is not None
    assert [dotted(place) for place in (found.settings.weight_at, found.settings.qos_at)] == [
        "spec.components[0].kvCacheTransferTopology.kvTransferWeight",
        "spec.components[1].kvCacheTransferTopology.networkQoS",
    ]


@pytest.mark.parametrize(
    ("field", "first", "second"),
    [
        ("kvTransferWeight", 3, 4),
        ("networkQoS", {"levels": [LEVEL]}, {"levels": [LEVEL], "across": LINK}),
    ],
)
def test_frontends_that_contradict_each_other_on_costs_are_refused(
    field: str, first: JsonValue, second: JsonValue
) -> None:
    found = of_two_frontends({field: first}, {field: second})
    at = "spec.components[{}].kvCacheTransferTopology." + field
    says = "remove one of them, or make them say the same"
    assert reported(found) == [f"{at.format(1)}: is not what {at.format(0)} says: {says}"]
    assert found.policy is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kvTransferWeight": -1}, "kvTransferWeight: must be ≥ 0, not -1"),
        ({"kvTransferWeight": "50"}, "kvTransferWeight: must be a number, not '50'"),
        ({"kvTransferWeight": float("inf")}, "kvTransferWeight: must be a finite number, not inf"),
        ({"networkQoS": {"across": {**LINK, "latencySeconds": -1}}}, "across.latencySeconds: must be ≥ 0"),
        (
            {"networkQoS": {"across": {**LINK, "bandwidthBytesPerSecond": 0}}},
            "across.bandwidthBytesPerSecond: must be > 0, not 0",
        ),
        ({"networkQoS": {"across": {**LINK, "pricePerGB": -0.5}}}, "across.pricePerGB: must be ≥ 0"),
        ({"networkQoS": {"across": {**LINK, "latencySeconds": True}}}, "latencySeconds: must be a number"),
        ({"networkQoS": {"levels": [LINK]}}, "networkQoS.levels[0].level: is required"),
        ({"networkQoS": {"levels": [LEVEL] * 17}}, "networkQoS.levels: must have ≤ 16 entries"),
        ({"networkQoS": {"pairs": [{**PAIR, "between": ["a"]}]}}, "pairs[0].between: must have ≥ 2 parts"),
        (
            {"networkQoS": {"pairs": [{**PAIR, "between": ["a", "$(B)"]}]}},
            "pairs[0].between[1]: must be a label's value such as us-east-1a",
        ),
        ({"networkQoS": {"pairs": [PAIR] * 257}}, "networkQoS.pairs: must have ≤ 256 entries"),
    ],
)
def test_weight_or_links_out_of_bounds_are_refused_at_their_field(fields: Fields, problem: str) -> None:
    found = read_deployment(deployment(frontend={"level": "zone", "label": ZONE, **fields}))
    assert found.deployment is None
    (line,) = [f"{dotted(each.path)}: {each.must}" for each in found.problems]
    assert line.startswith("spec.components[0].kvCacheTransferTopology.")
    assert problem in line
