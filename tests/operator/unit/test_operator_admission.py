"""The table of what admission refuses, warns of and leaves alone."""

import re
from copy import deepcopy
from itertools import pairwise

import pytest
import yaml
from pydantic import JsonValue

from kvrouter.operator.admission.validate import Verdict
from kvrouter.operator.api.grove import ClusterTopology, Level
from kvrouter.operator.cluster_info import ClusterInfo, Grove, by_name
from kvrouter.settings.problems import Problem, dotted
from tests.testing.operator_deployments import (
    AGGREGATED,
    GROVE,
    NO_GROVE,
    Document,
    component,
    deployment,
    validated,
)

Fields = dict[str, JsonValue]
ZONE = "topology.kubernetes.io/zone"
ON_FRONTEND: Fields = {"level": "zone"}
ON_GRAPH: Fields = {"clusterTopologyName": "fabric", "domain": "zone"}
UNREAD = ClusterInfo(grove=Grove.UNREAD, unread_because="403 from the API server")
ODD = ClusterInfo(
    grove=Grove.PRESENT,
    topologies=by_name([ClusterTopology("fabric", (Level("zone", ZONE),), oddities=("level 2 is odd",))]),
)


def lines(problems: tuple[Problem, ...]) -> list[str]:
    return [f"{dotted(problem.path)}: {problem.must}" for problem in problems]


def refused(document: Document, cluster_info: ClusterInfo = GROVE) -> str:
    verdict = validated(document, None, cluster_info)
    assert not verdict.is_allowed
    (line,) = lines(verdict.problems)
    return line


@pytest.mark.parametrize("cluster_info", [NO_GROVE, GROVE, UNREAD])
@pytest.mark.parametrize("types", [("frontend", "prefill", "decode"), AGGREGATED])
def test_deployment_without_a_policy_gets_no_problem_and_no_warning(
    cluster_info: ClusterInfo, types: tuple[str, ...]
) -> None:
    assert validated(deployment(types=types), None, cluster_info) == Verdict()


@pytest.mark.parametrize("cluster_info", [NO_GROVE, GROVE, UNREAD])
@pytest.mark.parametrize(
    "document",
    [
        deployment(frontend={**ON_FRONTEND, "label": ZONE}),
        deployment(graph={"labelKey": ZONE, "domain": "zone"}),
    ],
)
def test_policy_with_a_raw_label_is_admitted_with_or_without_grove(
    cluster_info: ClusterInfo, document: Document
) -> None:
    assert validated(document, None, cluster_info) == Verdict()


@pytest.mark.parametrize(
    "document",
    [
        deployment(frontend=ON_FRONTEND, topology="fabric"),
        deployment(graph=ON_GRAPH),
        deployment(frontend=ON_FRONTEND, graph=ON_GRAPH, topology="fabric"),
    ],
)
def test_policy_at_a_level_of_an_existing_topology_is_admitted(document: Document) -> None:
    assert validated(document, None, GROVE) == Verdict()


def test_named_topology_is_refused_where_grove_is_absent() -> None:
    assert refused(deployment(frontend=ON_FRONTEND, topology="fabric"), NO_GROVE) == (
        "spec.topologyConstraint.clusterTopologyName: 'fabric' cannot be read: this cluster knows no "
        "ClusterTopologyBinding and no ClusterTopology (grove.io). Install Grove, or set "
        "kvCacheTransferTopology.label to the key of a node label, which needs no Grove"
    )
    assert refused(deployment(graph=ON_GRAPH), NO_GROVE) == (
        "spec.experimental.kvTransferPolicy.clusterTopologyName: 'fabric' cannot be read: this cluster knows "
        "no ClusterTopologyBinding and no ClusterTopology (grove.io). Install Grove, or replace "
        "clusterTopologyName by labelKey, the key of a node label, which needs no Grove"
    )


def test_grove_that_cannot_be_read_is_not_taken_for_absent() -> None:
    assert refused(deployment(graph=ON_GRAPH), UNREAD).startswith(
        "spec.experimental.kvTransferPolicy.clusterTopologyName: 'fabric' could not be read just now (403 "
        "from the API server): try again, or replace clusterTopologyName by labelKey"
    )


def test_missing_topology_is_refused_with_existing_names_and_a_fix() -> None:
    assert refused(deployment(frontend=ON_FRONTEND, topology="fabrik")) == (
        "spec.topologyConstraint.clusterTopologyName: no ClusterTopologyBinding or ClusterTopology "
        "'fabrik' is in this cluster; there are fabric, lab (did you mean fabric?). Name one that is "
        "there, create it, or set kvCacheTransferTopology.label to the key of a node label, which needs no "
        "Grove"
    )
    line = refused(deployment(graph=ON_GRAPH), ClusterInfo(grove=Grove.PRESENT))
    assert "there is none" in line


def test_refusal_lists_ten_topologies_and_counts_the_rest() -> None:
    many = [ClusterTopology(f"t{number:02}", ()) for number in range(40)]
    line = refused(deployment(graph=ON_GRAPH), ClusterInfo(Grove.PRESENT, by_name(many)))
    assert "there are t00, t01, t02, t03, t04, t05, t06, t07, t08, t09 and 30 more." in line


def test_level_missing_from_the_topology_is_refused_with_its_levels() -> None:
    assert refused(deployment(frontend={"level": "zones"}, topology="fabric")) == (
        "spec.components[0].kvCacheTransferTopology.level: 'zones' is no level of ClusterTopologyBinding "
        "fabric, which has zone, rack (did you mean zone?)"
    )
    assert refused(deployment(graph={**ON_GRAPH, "domain": "host"})) == (
        "spec.experimental.kvTransferPolicy.domain: 'host' is no level of ClusterTopologyBinding fabric, "
        "which has zone, rack"
    )
    assert refused(deployment(graph={"clusterTopologyName": "lab", "domain": "zone"})).endswith(
        "ClusterTopologyBinding lab, which has none that can be used"
    )
    assert refused(deployment(graph={**ON_GRAPH, "domain": "rack"}), ODD).endswith("(level 2 is odd)")


@pytest.mark.parametrize(
    ("document", "where"),
    [
        (deployment(frontend=ON_FRONTEND), "spec.components[0].kvCacheTransferTopology: does not say"),
        (
            deployment(frontend={**ON_FRONTEND, "label": ZONE}, types=("worker", "prefill")),
            "spec.components[0].kvCacheTransferTopology: belongs to the component of type frontend",
        ),
        (
            deployment(frontend=ON_FRONTEND, graph={**ON_GRAPH, "domain": "rack"}, topology="fabric"),
            "spec.experimental.kvTransferPolicy: says required in rack",
        ),
        (
            deployment(graph={**ON_GRAPH, "preferredWeight": 0.5}),
            "spec.experimental.kvTransferPolicy.preferredWeight: is only for enforcement: preferred",
        ),
        (
            deployment(graph={**ON_GRAPH, "enforcement": "preferred", "preferredWeight": 1.5}),
            "spec.experimental.kvTransferPolicy.preferredWeight: must be ≤ 1, not 1.5",
        ),
        (
            deployment(frontend={**ON_FRONTEND, "kvTransferWeight": -1}, topology="fabric"),
            "spec.components[0].kvCacheTransferTopology.kvTransferWeight: must be ≥ 0, not -1",
        ),
        (deployment(name="my.llm"), "metadata.name: becomes the name of Services"),
        (
            deployment(name="x" * 55),
            f"spec.components[0].name: {'x' * 55}-frontend would be a Service's name of 64 characters: 63 "
            "are",
        ),
    ],
)
def test_mistakes_of_policy_and_names_are_refused_at_their_field(document: Document, where: str) -> None:
    assert refused(document).startswith(where)


QOS = "spec.components[0].kvCacheTransferTopology.networkQoS"
LINK: Fields = {"latencySeconds": 0.001, "bandwidthBytesPerSecond": 25e9}


def of_links(level: str = "zone", **fields: JsonValue) -> Document:
    links: Fields = {"levels": [{**LINK, "level": level}]}
    return deployment(frontend={**ON_FRONTEND, **fields, "networkQoS": links}, topology="fabric")


def test_links_at_an_existing_level_are_admitted_with_a_weight() -> None:
    assert validated(of_links("rack", kvTransferWeight=50), None, GROVE) == Verdict()
    assert validated(of_links(label=ZONE, kvTransferWeight=50), None, NO_GROVE) == Verdict()


def test_links_at_a_missing_level_are_refused() -> None:
    assert refused(of_links("racks")) == (
        f"{QOS}.levels[0].level: 'racks' is no level of clusterTopologyName fabric, which has zone, rack "
        "(did you mean rack?)"
    )
    assert refused(of_links("rack", label=ZONE), NO_GROVE) == (
        f"{QOS}.levels[0].level: 'rack' is no level of label {ZONE}, which has zone"
    )
    pair: Fields = {**LINK, "level": "host", "between": ["a", "b"]}
    document = deployment(frontend={**ON_FRONTEND, "networkQoS": {"pairs": [pair]}}, topology="fabric")
    assert refused(document).startswith(f"{QOS}.pairs[0].level: 'host' is no level of")
    verdict = validated(document, None, GROVE)
    assert verdict.warnings == (), "a mistake is reported once"


def test_unchanged_links_at_a_level_the_topology_lost_are_only_warned_of() -> None:
    verdict = validated(of_links("rack"), of_links("rack"), ODD)
    assert verdict.is_allowed
    (line, odd) = lines(verdict.warnings)
    assert line.startswith(f"{QOS}.levels[0].level: 'rack' is no level of clusterTopologyName fabric")
    assert "level 2 is odd" in odd


PREFILL = "spec.components[0].kvCacheTransferTopology.prefill"


def near(level: str = "zone", label: JsonValue = None, **fields: JsonValue) -> Document:
    of: Fields = {**ON_FRONTEND, "label": label, "prefill": {"level": level, **fields}}
    return deployment(frontend=of, topology="fabric")


def test_prefill_near_a_frontend_at_an_existing_level_is_admitted() -> None:
    assert validated(near("rack", enforcement="required"), None, GROVE) == Verdict()
    assert validated(near(label=ZONE, weight=0.5), None, NO_GROVE) == Verdict()


def test_prefill_near_a_frontend_with_a_bad_level_or_weight_is_refused() -> None:
    assert refused(near("racks")) == (
        f"{PREFILL}.level: 'racks' is no level of clusterTopologyName fabric, which has zone, rack (did you "
        "mean rack?)"
    )
    assert refused(near("rack", label=ZONE), NO_GROVE).startswith(f"{PREFILL}.level: 'rack' is no level of")
    assert refused(near(enforcement="required", weight=0.5)) == (
        f"{PREFILL}.weight: is only for enforcement: preferred: remove it, or say preferred"
    )
    assert refused(near(weight=1.5)) == f"{PREFILL}.weight: must be ≤ 1, not 1.5"
    assert refused(near(enforcement="fallback")).startswith(f"{PREFILL}.enforcement: must be 'required' or")


def test_a_weight_without_links_is_a_warning() -> None:
    document = deployment(frontend={**ON_FRONTEND, "kvTransferWeight": 50}, topology="fabric")
    verdict = validated(document, None, GROVE)
    assert verdict.is_allowed
    assert lines(verdict.warnings) == [
        "spec.components[0].kvCacheTransferTopology.kvTransferWeight: weighs links that are assumed, 100 "
        "Gbit/s inside every level and 25 Gbit/s otherwise: measure them and write networkQoS"
    ]
    weightless = deployment(frontend={**ON_FRONTEND, "kvTransferWeight": 0}, topology="fabric")
    assert validated(weightless, None, GROVE) == Verdict()


def test_component_names_that_differ_in_case_alone_are_refused() -> None:
    document = deployment()
    document["spec"] = {"components": [component("decode", "Decode"), component("prefill", "decode")]}
    assert refused(document).startswith("spec.components[1].name: 'decode' is the name of spec.components[0]")


def test_a_component_cannot_be_packed_without_a_topology() -> None:
    document = deployment()
    document["spec"] = {"components": [component("worker", topologyConstraint={"packDomain": "rack"})]}
    assert refused(document).startswith("spec.components[0].topologyConstraint: needs a topology")


@pytest.mark.parametrize(
    ("document", "cluster_info", "warning"),
    [
        (
            deployment(graph=ON_GRAPH, types=AGGREGATED),
            GROVE,
            "spec.experimental.kvTransferPolicy: has no effect: no component is of type prefill",
        ),
        (
            deployment(graph=ON_GRAPH, types=("frontend", "prefill")),
            GROVE,
            "spec.components: has prefill workers, and none that decode",
        ),
        (
            deployment(graph=ON_GRAPH, topology="lab"),
            GROVE,
            "spec.experimental.kvTransferPolicy.clusterTopologyName: is 'fabric', but pods are placed by "
            "'lab'",
        ),
        (
            deployment(graph={**ON_GRAPH, "enforcement": "preferred", "preferredWeight": 0}),
            GROVE,
            "spec.experimental.kvTransferPolicy: prefers nothing",
        ),
        (
            deployment(graph=ON_GRAPH),
            ODD,
            "spec.experimental.kvTransferPolicy.clusterTopologyName: not all of it can be used: level 2 is "
            "odd",
        ),
    ],
)
def test_questionable_policies_and_components_are_admitted_with_a_warning(
    document: Document, cluster_info: ClusterInfo, warning: str
) -> None:
    verdict = validated(document, None, cluster_info)
    assert verdict.is_allowed
    (line,) = lines(verdict.warnings)
    assert line.startswith(warning)


def test_prefill_with_aggregated_workers_instead_of_decode_is_admitted() -> None:
    document = deployment(graph=ON_GRAPH, types=("frontend", "prefill", "worker"))
    assert validated(document, None, GROVE) == Verdict()


def test_missing_pack_level_or_topology_is_admitted_with_a_warning() -> None:
    document = deployment()
    document["spec"] = {
        "topologyConstraint": {"clusterTopologyName": "fabric", "packDomain": "zone"},
        "components": [component("worker", topologyConstraint={"packDomain": "host"})],
    }
    gone = validated(document, None, ClusterInfo(grove=Grove.PRESENT))
    assert [line.partition(":")[2] for line in lines(gone.warnings)] == [
        " has no effect: topology 'fabric' is not in this cluster: pods are not packed by it"
    ] * 2
    verdict = validated(document, None, GROVE)
    assert lines(verdict.warnings) == [
        "spec.components[0].topologyConstraint.packDomain: 'host' is no level of fabric, which has zone, "
        "rack: pods are not packed by it",
    ]
    assert verdict.is_allowed


NO_IMAGE: Fields = {"spec": {"containers": [{"name": "main"}]}}


@pytest.mark.parametrize(
    ("template", "where"),
    [
        ({}, ".spec.containers: is needed: the container of decode's engine, called main"),
        (NO_IMAGE, ".spec.containers[0]: needs an image, or args for kvrouter's own"),
        ({"spec": {"containers": {}}}, ".spec.containers: must be a list of objects"),
        ({"spec": []}, ".spec: must be an object"),
    ],
)
def test_pod_template_without_a_valid_container_is_refused(template: JsonValue, where: str) -> None:
    document = deployment()
    document["spec"] = {"components": [component("frontend"), component("decode", podTemplate=template)]}
    assert refused(document).startswith(f"spec.components[1].podTemplate{where}")


def test_a_component_without_a_pod_template_is_told_a_line_that_is_admitted() -> None:
    document = deployment()
    bare: Fields = {"name": "decode-worker", "type": "decode", "replicas": 8}
    document["spec"] = {"components": [{"name": "frontend", "type": "frontend"}, bare]}
    told = refused(document)
    (line,) = re.findall(r"`(podTemplate: .+?)`", told)
    document["spec"] = {"components": [{"name": "frontend", "type": "frontend"}, bare | yaml.safe_load(line)]}
    assert validated(document, None, GROVE) == Verdict()


@pytest.mark.parametrize(
    ("kind", "args", "is_refused"),
    [
        ("prefill", "worker mock --role decode", True),
        ("decode", "worker vllm --role=prefill --url http://127.0.0.1:8100", True),
        ("prefill", "worker mock --role prefill", False),
        ("decode", "worker mock --role both", False),
        ("worker", "worker mock --role decode", False),
    ],
)
def test_the_other_legs_role_in_a_component_is_refused(kind: str, args: str, is_refused: bool) -> None:
    document = deployment()
    main: Fields = {"name": "main", "args": [*args.split()]}
    engine = component(kind, podTemplate={"spec": {"containers": [main]}})
    document["spec"] = {"components": [component("frontend"), engine]}
    problems = lines(validated(document, None, GROVE).problems)
    assert [f"contradicts the component's type {kind}" in each for each in problems] == [True] * is_refused


def test_pod_template_label_for_a_topology_level_is_a_warning() -> None:
    document = deployment(graph=ON_GRAPH)
    place: Fields = {"metadata": {"labels": {"grove.io/topology.zone": "here"}}}
    forged = component("decode")
    forged["podTemplate"] = {**_fields(forged["podTemplate"]), **place}
    document["spec"] = {
        **_fields(document["spec"]),
        "components": [component("frontend"), component("prefill"), forged],
    }
    verdict = validated(document, None, GROVE)
    assert verdict.is_allowed
    assert lines(verdict.warnings) == [
        "spec.components[2].podTemplate.metadata.labels.grove.io/topology.zone: is the node's to say, and is "
        "left out: remove it here"
    ]


@pytest.mark.parametrize(
    ("types", "policy", "warning"),
    [
        (("prefill", "decode"), {"labelKey": ZONE}, ": is kept by frontends, and no component is of type"),
        (("frontend", "decode"), {"labelKey": ZONE}, ": has no effect: no component is of type prefill"),
        (
            ("frontend", "prefill", "decode"),
            {"labelKey": "app.kubernetes.io/zone"},
            ".labelKey: is 'app.kubernetes.io/zone', by which people and tools find pods",
        ),
    ],
)
def test_policy_without_frontend_or_prefill_or_with_an_odd_label_is_warned_of(
    types: tuple[str, ...], policy: dict[str, JsonValue], warning: str
) -> None:
    verdict = validated(deployment(graph={**policy, "domain": "zone"}, types=types), None, NO_GROVE)
    assert verdict.is_allowed
    (line,) = lines(verdict.warnings)
    assert line.startswith(f"spec.experimental.kvTransferPolicy{warning}")


def test_unchanged_invalid_pod_template_does_not_block_other_changes() -> None:
    """Not even one by which their component has another number."""
    wrong = component("decode", podTemplate=NO_IMAGE)
    old, new = deployment(), deployment()
    old["spec"] = {"components": [component("frontend"), component("prefill"), wrong]}
    new["spec"] = {"components": [component("frontend"), {**wrong, "replicas": 3}]}
    verdict = validated(new, old, GROVE)
    assert verdict.is_allowed
    (line,) = lines(verdict.warnings)
    assert line.startswith("spec.components[1].podTemplate.spec.containers[0]: needs an image")
    new["spec"] = {"components": [component("frontend"), {**wrong, "name": "other"}]}
    assert not validated(new, old, GROVE).is_allowed


def _fields(found: JsonValue) -> Fields:
    assert isinstance(found, dict)
    return found


def test_unknown_field_is_a_warning_with_the_nearest_name() -> None:
    document = deployment()
    document["spec"] = {
        "components": [component("worker")],
        "experimental": {"kvTransferPolcy": {}},
    }
    verdict = validated(document, None, GROVE)
    assert verdict.is_allowed
    (line,) = lines(verdict.warnings)
    assert line.startswith("spec.experimental.kvTransferPolcy: ")
    assert line.endswith("(did you mean kvTransferPolicy?)")


def test_component_type_cannot_change() -> None:
    old, new = deployment(), deployment()
    new["spec"] = {"components": [component("frontend"), component("prefill", "decode")]}
    assert lines(validated(new, old, GROVE).problems) == [
        "spec.components[1].type: of decode cannot change: add a component under another name, then remove "
        "this one (it is decode, not prefill)"
    ]


@pytest.mark.parametrize("topology", ["lab", None])
def test_topology_name_cannot_change_or_be_removed(topology: str | None) -> None:
    verdict = validated(deployment(topology=topology), deployment(topology="fabric"), GROVE)
    assert lines(verdict.problems) == [
        "spec.topologyConstraint.clusterTopologyName: cannot change once it is set: delete the deployment "
        f"and create it again (it is 'fabric', not {topology!r})"
    ]


def test_topology_may_be_added_and_policy_added_changed_or_removed() -> None:
    bare = deployment()
    placed = deployment(topology="fabric")
    required = deployment(topology="fabric", frontend=ON_FRONTEND)
    rack = deployment(topology="fabric", frontend={"level": "rack", "mismatchPolicy": "fallback"})
    other = deployment(topology="fabric", graph={"labelKey": ZONE, "domain": "zone"})
    steps = [bare, placed, required, rack, other, placed]
    for old, new in pairwise(steps):
        assert validated(new, old, GROVE) == Verdict()


def test_components_may_be_added_and_removed() -> None:
    old, new = deployment(), deployment(types=("frontend", "worker"))
    assert validated(new, old, GROVE) == Verdict()
    assert validated(old, new, GROVE) == Verdict()


@pytest.mark.parametrize("cluster_info", [NO_GROVE, UNREAD, ClusterInfo(grove=Grove.PRESENT)])
def test_topology_lost_from_the_cluster_does_not_block_other_changes(cluster_info: ClusterInfo) -> None:
    """Somebody deleted the topology: the fleet can still be scaled, and is reported."""
    old = deployment(graph=ON_GRAPH)
    new = deepcopy(old)
    new["metadata"] = {"name": "my-llm", "labels": {"team": "a"}}
    verdict = validated(new, old, cluster_info)
    assert verdict.is_allowed
    (line,) = lines(verdict.warnings)
    assert line.startswith("spec.experimental.kvTransferPolicy.clusterTopologyName: ")


def test_changed_policy_is_refused_where_its_topology_or_level_is_gone() -> None:
    old = deployment(graph=ON_GRAPH)
    new = deployment(graph={**ON_GRAPH, "domain": "rack"})
    for gone in (NO_GROVE, ClusterInfo(grove=Grove.PRESENT), ODD):
        assert not validated(new, old, gone).is_allowed


def test_deployment_being_deleted_is_admitted_unchecked() -> None:
    leaving = deployment(frontend=ON_FRONTEND)
    leaving["metadata"] = {"name": "my-llm", "deletionTimestamp": "2026-11-21T00:00:00Z", "finalizers": []}
    assert validated(leaving, deployment(topology="fabric"), NO_GROVE) == Verdict()


def test_unreadable_old_deployment_does_not_block_a_valid_update() -> None:
    assert validated(deployment(), {"spec": {"components": "none"}}, GROVE) == Verdict()


def test_deployment_that_is_not_an_object_is_refused() -> None:
    assert lines(validated("text", None, GROVE).problems) == [": must be an object"]
