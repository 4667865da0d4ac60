"""``packDomain``: the affinity that packs pods, whose domain it is, and what pods have of their own."""

from collections.abc import Mapping

import pytest
from pydantic import JsonValue

from kvrouter.operator.api.deployment import DynamoGraphDeployment, read_deployment
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.plan.packing import PACKING_ANNOTATION, PREFERRED, REQUIRED
from kvrouter.operator.plan.plan import Plan, plan, read_levels
from kvrouter.settings.problems import dotted
from tests.testing.planned_deployments import DEFAULTS, FACTS, at, has, of_kind, planned, templates

ZONE = "topology.kubernetes.io/zone"
PACKED = "kvrouter.dev/packed-by"
UNREAD = ClusterInfo(grove=Grove.UNREAD, unread_because="forbidden")


def packed(
    pack_domain: str | None = None,
    own: Mapping[str, str] | None = None,
    pods: Mapping[str, JsonValue] | None = None,
    **spec: JsonValue,
) -> DynamoGraphDeployment:
    """A frontend, prefill and decode workers; ``own`` are levels, ``pods`` specs of pods by component."""
    components: list[JsonValue] = []
    for kind in ("frontend", "prefill", "decode"):
        pod_spec: dict[str, JsonValue] = {"containers": [{"name": "main", "image": "example.com/engine:1"}]}
        more = (pods or {}).get(kind, {})
        assert isinstance(more, dict)
        component: dict[str, JsonValue] = {
            "name": kind,
            "type": kind,
            "podTemplate": {"spec": {**pod_spec, **more}},
        }
        if own is not None and kind in own:
            component["topologyConstraint"] = {"packDomain": own[kind]}
        components.append(component)
    constraint: dict[str, JsonValue] = {"clusterTopologyName": "gpu-fabric"}
    if pack_domain is not None:
        constraint["packDomain"] = pack_domain
    metadata: JsonValue = {"name": "llm", "namespace": "fleet", "uid": "uid-1"}
    document: JsonValue = {
        "metadata": metadata,
        "spec": {"topologyConstraint": constraint, "components": components, **spec},
    }
    reading = read_deployment(document)
    assert reading.deployment is not None, reading.problems
    return reading.deployment


def required(template: JsonValue) -> JsonValue:
    """The terms that a pod requires."""
    return at(template, "spec", "affinity", "podAffinity", REQUIRED)


def preferred(template: JsonValue) -> JsonValue:
    """The terms that it prefers."""
    return at(template, "spec", "affinity", "podAffinity", PREFERRED)


def packed_by(template: JsonValue) -> JsonValue:
    return at(template, "metadata", "labels", PACKED)


def warned(found: Plan) -> list[str]:
    return [f"{dotted(problem.path)} {problem.must}" for problem in found.warnings]


def test_the_deployments_level_packs_all_components_into_one_domain() -> None:
    found = planned(packed("zone"))
    of = templates(found)
    assert {str(packed_by(template)) for template in of.values()} == {str(packed_by(of["decode"]))}
    assert str(packed_by(of["decode"])).startswith("zone-")
    term: JsonValue = {
        "labelSelector": {"matchLabels": {"kvrouter.dev/deployment": "llm", PACKED: packed_by(of["decode"])}},
        "topologyKey": ZONE,
    }
    for template in of.values():
        assert required(template) == [term]
        assert at(template, "spec", "affinity") == {"podAffinity": {REQUIRED: [term]}}
    assert found.warnings == ()


def test_a_components_own_level_packs_it_alone_and_near_the_others() -> None:
    of = templates(planned(packed("zone", {"prefill": "rack"})))
    assert required(of["prefill"]) == [
        {
            "labelSelector": {
                "matchLabels": {
                    "kvrouter.dev/deployment": "llm",
                    "kvrouter.dev/component": "prefill",
                    PACKED: packed_by(of["prefill"]),
                }
            },
            "topologyKey": "nvidia.com/rack",
        }
    ]
    near: JsonValue = {
        "weight": 100,
        "podAffinityTerm": {
            "labelSelector": {"matchLabels": {"kvrouter.dev/deployment": "llm"}},
            "topologyKey": ZONE,
        },
    }
    assert [preferred(template) for template in of.values()] == [[near]] * 3
    assert at(required(of["decode"]), 0, "topologyKey") == ZONE
    assert packed_by(of["prefill"]) != packed_by(of["decode"]) == packed_by(of["frontend"])


def test_a_component_that_names_the_deployments_own_level_shares_its_domain() -> None:
    assert planned(packed("zone", {"prefill": "zone"})).manifests == planned(packed("zone")).manifests


def test_only_components_with_a_level_are_packed_where_the_deployment_has_none() -> None:
    of = templates(planned(packed(None, {"decode": "zone"})))
    assert at(required(of["decode"]), 0, "topologyKey") == ZONE
    assert not has(at(of["decode"], "spec", "affinity", "podAffinity"), PREFERRED)
    for name in ("frontend", "prefill"):
        assert not has(at(of[name], "spec"), "affinity")
        assert not has(at(of[name], "metadata", "labels"), PACKED)
    assert packed_by(of["decode"]) == packed_by(templates(planned(packed("zone")))["decode"])


def test_pack_label_differs_by_level_and_node_label() -> None:
    labels = {
        packed_by(templates(planned(packed(level), cluster_info))["decode"])
        for level, cluster_info in [("zone", FACTS), ("rack", FACTS), ("host", ClusterInfo())]
    }
    assert len(labels) == 3
    policy: JsonValue = {"kvTransferPolicy": {"labelKey": "example.com/zone", "domain": "zone"}}
    found = planned(packed("zone", experimental=policy), ClusterInfo())
    assert at(required(templates(found)["decode"]), 0, "topologyKey") == "example.com/zone"
    assert packed_by(templates(found)["decode"]) not in labels


@pytest.mark.parametrize(
    ("domain", "key"),
    [("region", "topology.kubernetes.io/region"), ("zone", ZONE), ("host", "kubernetes.io/hostname")],
)
def test_pack_levels_use_kubernetes_labels_where_no_topology_exists(domain: str, key: str) -> None:
    found = planned(packed(domain), ClusterInfo())
    assert at(required(templates(found)["decode"]), 0, "topologyKey") == key
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("domain", "cluster_info", "why"),
    [
        (
            "rack",
            ClusterInfo(),
            "has no effect: this cluster has no topologies (grove.io) that say which node label 'rack' is",
        ),
        ("zone", UNREAD, "has no effect: topology 'gpu-fabric' could not be read (forbidden)"),
        ("zone", ClusterInfo(grove=Grove.PRESENT), "topology 'gpu-fabric' is not in this cluster"),
        ("racks", FACTS, "is no level of gpu-fabric, which has zone, rack (did you mean rack?)"),
    ],
)
def test_unknown_pack_level_packs_nothing_and_is_warned_of(
    domain: str, cluster_info: ClusterInfo, why: str
) -> None:
    found = planned(packed(domain), cluster_info)
    assert not has(at(templates(found)["decode"], "spec"), "affinity")
    (line,) = warned(found)
    assert line.startswith("spec.topologyConstraint.packDomain")
    assert why in line
    assert line.endswith(": pods are not packed by it")


@pytest.mark.parametrize("cluster_info", [UNREAD, ClusterInfo(grove=Grove.PRESENT), ClusterInfo()])
def test_missing_topology_rolls_nothing_while_the_pack_level_is_known(cluster_info: ClusterInfo) -> None:
    of = packed("rack", {"decode": "zone"})
    before = planned(of)
    annotations = [
        at(workload, "metadata", "annotations", PACKING_ANNOTATION)
        for workload in of_kind(before, "Deployment").values()
    ]
    assert annotations == ["rack=nvidia.com/rack", "rack=nvidia.com/rack", f"zone={ZONE}"]
    last = [level for text in annotations for level in read_levels(str(text))]
    after = plan(of, cluster_info, DEFAULTS, last_pack_levels=last)
    assert after.manifests == before.manifests
    assert "pods stay packed by nvidia.com/rack, as before" in warned(after)[0]


# What pods have of their own.

CACHE: JsonValue = {
    "labelSelector": {"matchLabels": {"app": "cache"}},
    "topologyKey": "kubernetes.io/hostname",
}


def of_fleet(*expressions: JsonValue, **more: JsonValue) -> JsonValue:
    """A term that selects this deployment's pods."""
    labels: JsonValue = {"kvrouter.dev/deployment": "llm"}
    selector: JsonValue = {"matchLabels": labels, "matchExpressions": [*expressions]}
    return {"labelSelector": selector, "topologyKey": "example.com/room", **more}


def with_term(*terms: JsonValue) -> JsonValue:
    return {
        "affinity": {
            "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
            "podAffinity": {REQUIRED: [*terms], PREFERRED: [{"weight": 1, "podAffinityTerm": CACHE}]},
            "podAntiAffinity": {REQUIRED: [CACHE]},
        }
    }


@pytest.mark.parametrize(
    "term",
    [
        of_fleet(),
        of_fleet({"key": "app", "operator": "DoesNotExist"}, namespaces=["fleet", "other"]),
        of_fleet({"key": "kvrouter.dev/component", "operator": "Exists"}),
        of_fleet({"key": "kvrouter.dev/component", "operator": "NotIn", "values": ["planner"]}),
    ],
)
def test_pod_affinity_of_the_user_stays_before_the_packing_term(term: JsonValue) -> None:
    found = planned(packed("zone", pods={"decode": with_term(term)}))
    template = templates(found)["decode"]
    own, ours = list_of(required(template))
    assert own == term
    assert at(ours, "topologyKey") == ZONE
    assert preferred(template) == [{"weight": 1, "podAffinityTerm": CACHE}]
    assert at(template, "spec", "affinity", "podAntiAffinity") == {REQUIRED: [CACHE]}
    assert has(at(template, "spec", "affinity"), "nodeAffinity")
    assert found.warnings == ()


@pytest.mark.parametrize(
    "term",
    [
        CACHE,
        of_fleet({"key": "kvrouter.dev/component", "operator": "In", "values": ["decode"]}),
        of_fleet(namespaces=["other"]),
        of_fleet(namespaceSelector={}),
        of_fleet(matchLabelKeys=["pod-template-hash"]),
        of_fleet({"key": "app", "operator": "Exists"}),
        of_fleet({"key": "app", "operator": "Near"}),
        {"topologyKey": ZONE},
    ],
)
def test_packing_is_only_preferred_where_a_pod_requires_other_pods(term: JsonValue) -> None:
    found = planned(packed("zone", pods={"decode": with_term(term)}))
    of = templates(found)
    assert required(of["decode"]) == [term]
    own, ours = list_of(preferred(of["decode"]))
    assert own == {"weight": 1, "podAffinityTerm": CACHE}
    assert at(ours, "weight") == 100
    assert [at(ours, "podAffinityTerm")] == required(of["prefill"])
    assert not has(at(of["decode"], "metadata", "labels"), PACKED)
    (line,) = warned(found)
    assert line.startswith(f"spec.components[2].podTemplate.spec.affinity.podAffinity.{REQUIRED}")
    assert "zone is preferred, not required" in line


def test_own_component_term_keeps_packing_required_where_packed_alone() -> None:
    term = of_fleet({"key": "kvrouter.dev/component", "operator": "In", "values": ["decode"]})
    found = planned(packed(None, {"decode": "zone"}, pods={"decode": with_term(term)}))
    assert len(list_of(required(templates(found)["decode"]))) == 2
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("affinity", "where"),
    [
        ([], "affinity"),
        ({"podAffinity": "zone"}, "affinity.podAffinity"),
        ({"podAffinity": {REQUIRED: {}}}, f"affinity.podAffinity.{REQUIRED}"),
        ({"podAffinity": {PREFERRED: ["zone"]}}, f"affinity.podAffinity.{PREFERRED}"),
    ],
)
def test_an_affinity_of_a_wrong_form_is_a_problem_at_its_place(affinity: JsonValue, where: str) -> None:
    found = plan(packed("zone", pods={"prefill": {"affinity": affinity}}), FACTS, DEFAULTS)
    assert [dotted(problem.path) for problem in found.problems] == [
        f"spec.components[1].podTemplate.spec.{where}"
    ]


def test_spread_constraint_over_the_packed_level_is_warned_of() -> None:
    spread: dict[str, JsonValue] = {"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule"}
    soft: JsonValue = {**spread, "whenUnsatisfiable": "ScheduleAnyway"}
    other: JsonValue = {**spread, "topologyKey": "kubernetes.io/hostname"}
    pods: dict[str, JsonValue] = {"decode": {"topologySpreadConstraints": [soft, other, spread]}}
    (line,) = warned(planned(packed("zone", pods=pods)))
    assert line.startswith("spec.components[2].podTemplate.spec.topologySpreadConstraints[2] spreads pods")


def test_pack_label_of_the_user_is_left_out_with_a_warning() -> None:
    document: JsonValue = {
        "metadata": {"name": "llm"},
        "spec": {
            "components": [
                {
                    "name": "f",
                    "type": "frontend",
                    "podTemplate": {"metadata": {"labels": {PACKED: "zone-1", "team": "a"}}},
                }
            ]
        },
    }
    of = read_deployment(document).deployment
    assert of is not None
    found = planned(of)
    labels = at(templates(found)["f"], "metadata", "labels")
    assert has(labels, "team")
    assert not has(labels, PACKED)
    (line,) = warned(found)
    assert line.startswith(f"spec.components[0].podTemplate.metadata.labels.{PACKED}")


def list_of(found: JsonValue) -> list[JsonValue]:
    assert isinstance(found, list)
    return found
