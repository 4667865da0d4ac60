"""Which policies for bindings are wanted: one for each set of levels, for the workers that need it."""

import re
from typing import Any

import pytest

from kvrouter.kube.client import KubeClient, ObjectList, RequestRefused
from kvrouter.kube.objects import Key, Manifest, ResourceKind, metadata_of
from kvrouter.operator.api.grove import ClusterTopology, Level
from kvrouter.operator.cluster_info import ClusterInfo, Grove
from kvrouter.operator.labels.level_labels import LevelLabels
from kvrouter.operator.labels.pods import Node
from kvrouter.operator.reconcile.bindings import (
    KINDS,
    OPERATOR_LABEL,
    Bindings,
    WantedLabels,
    owner_label,
    policies_for,
    wanted_by,
)

ZONE = LevelLabels("zone", "topology.kubernetes.io/zone", "topology.kubernetes.io/zone")
LEASE = Key("kvrouter-system", "kvrouter-operator")
NODES = (Node("n2", {ZONE.node_label: "b"}), Node("n1", {ZONE.node_label: "a", "example.com/rack": "r1"}))
RACK = LevelLabels("rack", "example.com/rack", "example.com/rack")


def test_deployments_with_equal_levels_share_one_binding_policy() -> None:
    wanted = [
        WantedLabels(Key("b", "chat"), ("chat-decode",), (ZONE,)),
        WantedLabels(Key("a", "llm"), ("llm-decode", "llm-prefill"), (ZONE,)),
        WantedLabels(Key("a", "code"), ("code-decode",), (RACK,)),
    ]
    policies = policies_for(wanted, NODES, LEASE)
    assert policies == policies_for(reversed(wanted), NODES[::-1], LEASE)
    reported = sorted(str(policy["spec"]) for _, policy, _ in policies.values())
    assert [spec.count("'values': ['a', 'b']") + 2 * spec.count("'values': ['a']") for spec in reported] == [
        1,
        2,
    ]
    assert all(name.startswith("kvrouter-topology-") for name in policies)
    places = sorted((metadata_of(manifest)["name"], manifest["spec"]) for manifest, _, _ in policies.values())
    assert [name for name, _ in places] == sorted(policies)
    of_zones = {"a": ["llm-decode-", "llm-prefill-"], "b": ["chat-decode-"]}
    zones = {"levels": [f"zone={ZONE.node_label}"], "workers": of_zones, "values": {"n1": ["a"], "n2": ["b"]}}
    of_racks = {"a": ["code-decode-"]}
    racks = {"levels": ["rack=example.com/rack"], "workers": of_racks, "values": {"n1": ["r1"], "n2": [""]}}
    assert sorted((spec for _, spec in places), key=str) == [racks, zones]


def test_binding_policy_names_its_operator_and_differs_between_operators() -> None:
    others = [
        Key("kvrouter-system", "other"),
        Key("elsewhere", "kvrouter-operator"),
        Key("kvrouter", "system.kvrouter-operator"),
        Key("n" * 63, "l" * 253),
    ]
    names = set[str]()
    for lease in (LEASE, *others):
        label = owner_label(lease)
        assert re.fullmatch(r"[a-z0-9][-a-z0-9.]{0,61}[a-z0-9]", label)
        wanted = [WantedLabels(Key("a", "llm"), ("llm-decode",), (ZONE,))]
        ((name, manifests),) = policies_for(wanted, NODES, lease).items()
        names.add(name)
        for manifest in manifests:
            labels = metadata_of(manifest)["labels"]
            assert isinstance(labels, dict)
            assert labels[OPERATOR_LABEL] == label
            assert labels["app.kubernetes.io/managed-by"] == "kvrouter-operator"
    assert len(names) == 5


def test_labels_are_wanted_for_workers_under_a_policy_and_not_for_frontends() -> None:
    policy = {"labelKey": "example.com/rack", "domain": "rack"}
    assert wanted_by(graph(policy), ClusterInfo(), ()) == WantedLabels(
        Key("team", "llm"), ("llm-prefill", "llm-decode"), (RACK,)
    )


def test_labels_are_wanted_for_frontends_where_prefill_stays_near_them() -> None:
    document = graph(None)
    near = {"level": "rack", "label": "example.com/rack", "prefill": {"level": "rack"}}
    document["spec"]["components"][0]["kvCacheTransferTopology"] = near
    wanted = wanted_by(document, ClusterInfo(), ())
    assert wanted is not None
    assert wanted.level_labels == (RACK,)
    assert wanted.workloads == ("llm-frontend", "llm-prefill", "llm-decode")


def test_levels_of_a_missing_topology_are_wanted_as_last_known() -> None:
    policy = {"clusterTopologyName": "fabric", "domain": "rack"}
    levels = (Level("zone", "topology.kubernetes.io/zone"), Level("rack", "example.com/rack"))
    cluster_info = ClusterInfo(grove=Grove.PRESENT, topologies={"fabric": ClusterTopology("fabric", levels)})
    there = wanted_by(graph(policy), cluster_info, ())
    assert there is not None
    assert [copy.domain for copy in there.level_labels] == ["zone", "rack"]
    assert wanted_by(graph(policy), ClusterInfo(grove=Grove.PRESENT), levels) == there


def test_no_labels_are_wanted_without_a_policy_or_by_an_unreadable_spec() -> None:
    assert wanted_by(graph(None), ClusterInfo(), ()) is None
    assert wanted_by({"metadata": {"name": "llm"}, "spec": {"components": "none"}}, ClusterInfo(), ()) is None


class OneRefused(KubeClient):
    """Takes every object but the policies for these levels."""

    def __init__(self, copy: LevelLabels) -> None:
        self.refused = f"{copy.domain}={copy.node_label}"
        self.written: list[Manifest] = []

    async def apply(self, kind: ResourceKind, manifest: Manifest, *, subresource: str = "") -> Manifest:
        if self.refused in str(manifest["spec"]):
            raise RequestRefused("too long", status=422)
        self.written.append(manifest)
        return manifest

    async def find(self, kind: ResourceKind, *, namespace: str = "", labels: str = "") -> ObjectList:
        return ObjectList([], "1")


async def test_refused_binding_policy_does_not_block_the_others() -> None:
    cluster = OneRefused(RACK)
    bindings = Bindings(cluster, LEASE)
    wanted = [
        WantedLabels(Key("a", "code"), ("code-decode",), (RACK,)),
        WantedLabels(Key("b", "chat"), ("chat-decode",), (ZONE,)),
    ]
    for _ in range(2):
        with pytest.raises(RequestRefused, match="too long"):
            await bindings.write(wanted, NODES)
        assert bindings.refused == {Key("a", "code"): "too long"}
    assert [manifest["kind"] for manifest in cluster.written] == [kind.name for kind in KINDS]


def graph(policy: dict[str, str] | None) -> dict[str, Any]:
    components = [{"name": name, "type": name} for name in ("frontend", "prefill", "decode")]
    spec: dict[str, Any] = {"components": components}
    if policy is not None:
        spec["experimental"] = {"kvTransferPolicy": policy}
    return {"metadata": {"namespace": "team", "name": "llm"}, "spec": spec}


async def test_binding_policy_accepted_later_no_longer_counts_as_refused() -> None:
    cluster = OneRefused(RACK)
    bindings = Bindings(cluster, LEASE)
    wanted = [WantedLabels(Key("a", "code"), ("code-decode",), (RACK,))]
    with pytest.raises(RequestRefused):
        await bindings.write(wanted, NODES)
    cluster.refused = "no such level"
    await bindings.write(wanted, NODES)
    assert bindings.refused == {}
