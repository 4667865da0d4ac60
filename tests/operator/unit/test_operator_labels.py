"""What pods get of their nodes' labels: which, in the write that binds them, and later."""

import json
from typing import cast

import pytest
from pydantic import JsonValue

from kvrouter.kernel.topology.policy import Required
from kvrouter.operator.api.grove import ClusterTopology, Level
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.labels.binding import backfill_labels, binding_patch, binding_policy
from kvrouter.operator.labels.level_labels import (
    NODES_MAX,
    LevelLabels,
    Source,
    gather_s,
    is_pod_of,
    level_labels_of,
    node_places,
    pod_labels,
    pod_name_stem,
    resolve,
)
from kvrouter.operator.labels.pods import Node, Pod, read_node, read_pod
from kvrouter.operator.policy import DeploymentPolicy, NamedTopology, RawLabel

ZONE = LevelLabels("zone", "topology.kubernetes.io/zone", "grove.io/topology.zone")
RACK = LevelLabels("rack", "nvidia.com/rack", "grove.io/topology.rack")
LEVELS = (Level("zone", ZONE.node_label), Level("rack", RACK.node_label))
FABRIC = {"gpu-fabric": ClusterTopology("gpu-fabric", LEVELS)}
FACTS = ClusterInfo(grove=Grove.PRESENT, topologies=FABRIC)
OF_FABRIC = DeploymentPolicy(Required("zone"), NamedTopology("gpu-fabric"))


# Which labels.


def test_a_topology_gives_each_level_a_label_of_its_own() -> None:
    assert resolve(OF_FABRIC, FACTS) == ((ZONE, RACK), Source.TOPOLOGY)


def test_raw_label_keeps_its_key_and_needs_no_topology() -> None:
    policy = DeploymentPolicy(Required("zone"), RawLabel("example.com/zone"))
    raw = LevelLabels("zone", "example.com/zone", "example.com/zone")
    assert resolve(policy, ClusterInfo()) == ((raw,), Source.LABEL)


@pytest.mark.parametrize(
    ("cluster_info", "source"),
    [
        (ClusterInfo(), Source.GROVE_ABSENT),
        (ClusterInfo(grove=Grove.UNREAD), Source.TOPOLOGY_UNREAD),
        (ClusterInfo(grove=Grove.PRESENT), Source.TOPOLOGY_ABSENT),
    ],
)
def test_missing_topology_keeps_its_last_levels_or_leaves_the_domain_empty(
    cluster_info: ClusterInfo, source: Source
) -> None:
    assert resolve(OF_FABRIC, cluster_info, LEVELS) == ((ZONE, RACK), source)
    ((only,), found) = resolve(OF_FABRIC, cluster_info)
    assert (only.pod_label, found) == (ZONE.pod_label, source)
    assert pod_labels({ZONE.node_label: "us-east-1a"}, (only,)) == {ZONE.pod_label: ""}


def test_level_missing_from_the_topology_keeps_the_last_known_labels() -> None:
    racks = {"gpu-fabric": ClusterTopology("gpu-fabric", LEVELS[1:])}
    found = resolve(OF_FABRIC, ClusterInfo(grove=Grove.PRESENT, topologies=racks), LEVELS)
    assert found == ((ZONE, RACK), Source.LEVEL_ABSENT)


def test_node_without_a_level_label_gives_an_empty_pod_label() -> None:
    assert pod_labels({ZONE.node_label: "a", "other": "x"}, (ZONE, RACK)) == {
        ZONE.pod_label: "a",
        RACK.pod_label: "",
    }


# In the write that binds.


def test_binding_policy_matches_worker_bindings_and_looks_up_the_node() -> None:
    policy, binding = binding_policy("kvrouter-llm", (ZONE,), ["fleet", "chat"])
    assert policy["spec"] == {
        "paramKind": {"apiVersion": "kvrouter.dev/v1alpha1", "kind": "KvrouterNodePlaces"},
        "matchConstraints": {
            "namespaceSelector": {
                "matchExpressions": [
                    {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["chat", "fleet"]}
                ]
            },
            "resourceRules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE"],
                    "resources": ["pods/binding"],
                }
            ],
        },
        "matchConditions": [
            {
                "name": "is-a-worker",
                "expression": "request.namespace in params.spec.workers && "
                "params.spec.workers[request.namespace].exists(start, "
                "object.metadata.name.startsWith(start) && "
                "(object.metadata.name.substring(size(start))"
                ".matches('^[456789bcdf]{1,10}-[bcdfghjklmnpqrstvwxz2456789]{5}$') || "
                "size(object.metadata.name) == 63 && object.metadata.name.substring(size(start))"
                ".matches('^([456789bcdf]{1,10}-?)?[bcdfghjklmnpqrstvwxz2456789]{5}$')))",
            }
        ],
        "variables": [
            {
                "name": "values",
                "expression": "object.target.name in params.spec.values ? "
                "params.spec.values[object.target.name] : []",
            },
        ],
        "mutations": [
            {
                "patchType": "JSONPatch",
                "jsonPatch": {
                    "expression": "size(variables.values) != 1 ? [] :\n"
                    "(has(object.metadata.labels) ? [] : "
                    '[JSONPatch{op: "add", path: "/metadata/labels", value: {}}]) + [\n'
                    '  JSONPatch{op: "add", path: "/metadata/labels/" + '
                    'jsonpatch.escapeKey("grove.io/topology.zone"), '
                    "value: variables.values[0]}\n]"
                },
            }
        ],
        "failurePolicy": "Ignore",
        "reinvocationPolicy": "IfNeeded",
    }
    assert binding["spec"] == {
        "policyName": "kvrouter-llm",
        "paramRef": {"name": "kvrouter-llm", "parameterNotFoundAction": "Allow"},
    }


def test_node_places_have_the_values_of_each_level_up_to_a_node_limit() -> None:
    nodes = [Node("n2", {RACK.node_label: "r2"}), Node("n1", {ZONE.node_label: "a", "other": "x"})]
    found = node_places("kvrouter-llm", (ZONE, RACK), nodes, {"fleet": ("llm-prefill", "llm-decode")})
    assert found["spec"] == {
        "levels": [f"zone={ZONE.node_label}", f"rack={RACK.node_label}"],
        "workers": {"fleet": ["llm-decode-", "llm-prefill-"]},
        "values": {"n1": ["a", ""], "n2": ["", "r2"]},
    }
    many = node_places("p", (ZONE,), [Node(f"n{number:05}") for number in reversed(range(NODES_MAX + 1))], {})
    values = cast(dict[str, dict[str, object]], many["spec"])["values"]
    assert (len(values), "n00000" in values, f"n{NODES_MAX:05}" in values) == (NODES_MAX, True, False)


@pytest.mark.parametrize("nodes", [10, 500, 5000])
def test_node_places_written_in_five_minutes_stay_below_50_mib(nodes: int) -> None:
    """Less than 50 MiB within the five minutes for which etcd keeps what was written over."""
    there = [
        Node(f"ip-10-0-0-{number:05}.us-east-1.compute.internal", {ZONE.node_label: "us-east-1a"})
        for number in range(nodes)
    ]
    written = json.dumps(node_places("p", (ZONE, RACK, *level_labels_of(LEVELS)), there, {})).encode()
    assert 300 * len(written) / gather_s(nodes) < 50 * 2**20
    assert gather_s(nodes) <= 5


@pytest.mark.parametrize(
    ("workload", "name", "is_one"),
    [
        ("llm-prefill", "llm-prefill-5d9c8f7b6-x7k2p", True),
        ("llm-prefill", "llm-prefill-4-bcdfg", True),
        ("llm-prefill", "llm-prefill-0", False),
        ("llm-prefill", "llm-prefill-migrate-x7k2p", False),
        ("llm-prefill", "llm-prefill-b-5d9c8f7b6-x7k2p", False),
        ("llm-prefill", "llm-prefill-5d9c8f7b6", False),
        ("llm-prefill", "llm-prefill-x7k2p", False),
        ("llm-prefill", "llm-prefill-5d9c8f7b6-x7k2p-0", False),
        ("llm-prefill", "my-llm-prefill-5d9c8f7b6-x7k2p", False),
        ("llm-prefill", "llm-prefill-5d9c8f7b6-x7k2p\n", False),
        ("a" * 50, f"{'a' * 50}-5d9c8f7x7k2p", True),
        ("a" * 47, f"{'a' * 47}-5d9c8f7b6-x7k2p", True),
        ("a" * 57, f"{'a' * 57}-x7k2p", True),
        ("a" * 63, f"{'a' * 58}x7k2p", True),
        ("a" * 56, f"{'a' * 56}-x7k2p", False),
        ("a" * 63, f"{'a' * 58}-0", False),
    ],
)
def test_pod_of_a_workload_is_recognized_by_its_whole_name(workload: str, name: str, is_one: bool) -> None:
    assert is_pod_of(pod_name_stem(workload), name) is is_one


def test_long_workload_name_is_truncated_for_matching_its_pods() -> None:
    name = "a" * 63
    spec = cast(dict[str, object], node_places("p", (ZONE,), [], {"fleet": [name]})["spec"])
    assert spec["workers"] == {"fleet": ["a" * 58]}


@pytest.mark.parametrize(
    ("metadata", "patch"),
    [
        ({}, [{"op": "add", "path": "/metadata/labels", "value": {"grove.io/topology.zone": "a"}}]),
        (
            {"labels": {"grove.io/topology.zone": "forged"}},
            [{"op": "add", "path": "/metadata/labels/grove.io~1topology.zone", "value": "a"}],
        ),
        ({"labels": {"grove.io/topology.zone": "a"}}, []),
    ],
)
def test_binding_patch_sets_only_missing_or_wrong_labels(
    metadata: dict[str, dict[str, str]], patch: list[object]
) -> None:
    binding = json.loads(json.dumps({"metadata": metadata}))
    assert binding_patch(binding, {"grove.io/topology.zone": "a"}) == patch


# Late.

NODE = Node("n1", {ZONE.node_label: "us-east-1a"})


def pod(**labels: str) -> Pod:
    return Pod(
        "p", "fleet", "uid-1", "n1", {f"grove.io/topology.{key}": value for key, value in labels.items()}
    )


def test_backfill_patches_missing_or_changed_labels_for_the_pods_uid() -> None:
    for found in (pod(), pod(zone="old"), pod(zone="", rack="")):
        assert backfill_labels(found, NODE, (ZONE,)).patch == {
            "metadata": {"uid": "uid-1", "labels": {ZONE.pod_label: "us-east-1a"}}
        }


def test_a_forged_label_of_a_level_that_the_node_lacks_is_emptied() -> None:
    decided = backfill_labels(pod(zone="us-east-1a", rack="forged"), NODE, (ZONE, RACK))
    assert decided.patch == {"metadata": {"uid": "uid-1", "labels": {RACK.pod_label: ""}}}
    assert decided.missing == (RACK,)


@pytest.mark.parametrize(
    "found",
    [
        pod(zone="us-east-1a"),
        Pod("p", node_name="n2"),
        Pod("p"),
        Pod("p", node_name="n1", is_over=True),
    ],
)
def test_backfill_skips_right_labels_and_pods_unbound_elsewhere_or_over(found: Pod) -> None:
    assert backfill_labels(found, NODE, (ZONE,)).patch is None


def test_level_a_node_lacks_is_reported_and_its_empty_label_written_once() -> None:
    empty: dict[str, JsonValue] = {ZONE.pod_label: "", RACK.pod_label: ""}
    patch: JsonValue = {"uid": "uid-1", "labels": empty}
    assert backfill_labels(pod(), Node("n1"), level_labels_of(LEVELS)) == ({"metadata": patch}, (ZONE, RACK))
    assert backfill_labels(pod(zone="", rack=""), Node("n1"), level_labels_of(LEVELS)) == (None, (ZONE, RACK))


# As the API server tells of them.


def test_pods_and_nodes_are_read_from_json() -> None:
    document = {
        "metadata": {"name": "p", "namespace": "fleet", "uid": "u", "labels": {"a": "b", "odd": 1}},
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    assert read_pod(document) == Pod("p", "fleet", "u", "n1", {"a": "b"}, is_ready=True, address="10.0.0.1")
    assert read_node(document) == Node("p", {"a": "b"})
    gone = {"metadata": {"name": "p", "deletionTimestamp": "2026-11-21T20:00:00Z"}}
    assert read_pod(gone) == Pod("p", is_over=True)


@pytest.mark.parametrize("document", [None, 3, [], {}, {"metadata": []}, {"metadata": {"name": ""}}])
def test_document_without_a_name_is_neither_pod_nor_node(document: object) -> None:
    assert read_pod(document) is None
    assert read_node(document) is None


# What is read of a pod.


@pytest.mark.parametrize(
    ("status", "is_stuck"),
    [
        ({}, False),
        ({"conditions": [{"type": "PodScheduled", "status": "True"}]}, False),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}, True),
        ({"initContainerStatuses": [{"state": {"waiting": {"reason": "PodInitializing"}}}]}, False),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, False),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}, True),
        ({"containerStatuses": [{"state": {"running": {}}, "restartCount": 0}]}, False),
        ({"initContainerStatuses": [{"state": {"running": {}}, "restartCount": 1}]}, True),
        ({"containerStatuses": "none", "conditions": [None]}, False),
    ],
)
def test_unschedulable_unpullable_or_restarted_pod_is_stuck(
    status: dict[str, object], is_stuck: bool
) -> None:
    found = read_pod({"metadata": {"name": "p"}, "status": status})
    assert found is not None
    assert found.is_stuck is is_stuck
