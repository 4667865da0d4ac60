"""Laws of admission over any JSON, over objects that are almost deployments, and over both spellings."""

import json
import math
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from kvrouter.core.errors import ProtocolError
from kvrouter.core.workers import Enforcement
from kvrouter.operator.admission.review import WARNING_CHARS_MAX, answer, judged, read_review
from kvrouter.operator.api.deployment import read_deployment
from kvrouter.operator.api.grove import ClusterTopology, Level, read_topology
from kvrouter.operator.cluster_info import ClusterInfo, Grove, by_name
from kvrouter.operator.plan.frontend_links import qos_text, read_qos
from kvrouter.operator.policy import NamedTopology, RawLabel, read_policy
from tests.testing.operator_deployments import FABRIC, Document, deployment, validated
from tests.testing.planned_deployments import DEFAULTS

FIELDS = st.sampled_from(
    [
        "apiVersion",
        "kind",
        "metadata",
        "name",
        "spec",
        "status",
        "components",
        "type",
        "replicas",
        "podTemplate",
        "labels",
        "annotations",
        "env",
        "valueFrom",
        "priorityClassName",
        "topologyConstraint",
        "packDomain",
        "clusterTopologyName",
        "kvCacheTransferTopology",
        "level",
        "mismatchPolicy",
        "label",
        "kvTransferWeight",
        "networkQoS",
        "prefill",
        "weight",
        "latencySeconds",
        "bandwidthBytesPerSecond",
        "pricePerGB",
        "across",
        "pairs",
        "between",
        "experimental",
        "kvTransferPolicy",
        "labelKey",
        "domain",
        "enforcement",
        "preferredWeight",
        "request",
        "uid",
        "operation",
        "object",
        "oldObject",
        "levels",
        "key",
        "deletionTimestamp",
    ]
)
WORDS = st.sampled_from(
    [
        "frontend",
        "prefill",
        "decode",
        "worker",
        "zone",
        "rack",
        "fabric",
        "lab",
        "required",
        "preferred",
        "fallback",
        "fail",
        "CREATE",
        "UPDATE",
        "DynamoGraphDeployment",
        "nvidia.com",
        "topology.kubernetes.io/zone",
    ]
)
TEXTS = st.one_of(WORDS, st.text(max_size=12), st.text(st.characters(), max_size=4))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS)
ANY_JSON: st.SearchStrategy[JsonValue] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(FIELDS, TEXTS), inner, max_size=5)
    ),
    max_leaves=25,
)
DOMAINS = st.sampled_from(["zone", "rack", "host"])
NAMES = st.sampled_from(["fabric", "lab", "nowhere"])
LABELS = st.sampled_from(["topology.kubernetes.io/zone", "example.com/rack"])
FACTS = st.sampled_from(
    [
        ClusterInfo(),
        ClusterInfo(grove=Grove.UNREAD),
        ClusterInfo(grove=Grove.PRESENT),
        ClusterInfo(
            grove=Grove.PRESENT,
            topologies=by_name([FABRIC, ClusterTopology("lab", (Level("host", "kubernetes.io/hostname"),))]),
        ),
    ]
)
TYPES = st.lists(st.sampled_from(["prefill", "decode", "worker"]), unique=True).map(
    lambda kinds: ("frontend", *kinds)
)


def paths(document: JsonValue) -> list[tuple[str | int, ...]]:
    """Every place in a document, the top apart."""
    inside: list[tuple[str | int, JsonValue]] = []
    if isinstance(document, dict):
        inside = list(document.items())
    elif isinstance(document, list):
        inside = list(enumerate(document))
    return [(key, *rest) for key, value in inside for rest in [(), *paths(value)]]


LINK: Document = {"latencySeconds": 0.001, "bandwidthBytesPerSecond": 25e9, "pricePerGB": 0.01}
LINKS: Document = {
    "levels": [{**LINK, "level": "zone"}],
    "across": LINK,
    "pairs": [{**LINK, "level": "zone", "between": ["a", "b"]}],
}
TOPOLOGY: Document = {
    "levels": [{"domain": "zone", "key": "a.b/zone", "networkQoS": LINK}],
    "networkQoS": {"across": LINK, "pairs": [{**LINK, "level": "zone", "between": ["a", "b"]}]},
}
WHOLE = deployment(
    frontend={
        "level": "zone",
        "mismatchPolicy": "fail",
        "label": "a.b/c",
        "kvTransferWeight": 1.0,
        "networkQoS": LINKS,
        "prefill": {"level": "zone", "enforcement": "preferred", "weight": 0.5},
    },
    graph={"labelKey": "a.b/c", "domain": "zone", "enforcement": "preferred", "preferredWeight": 0.5},
    topology="fabric",
)


@st.composite
def broken(draw: st.DrawFn, whole: JsonValue = WHOLE) -> JsonValue:
    """A whole document in which a few values are anything."""
    document = cast(JsonValue, json.loads(json.dumps(whole)))
    for path in draw(st.lists(st.sampled_from(paths(whole)), min_size=1, max_size=3)):
        here, value = document, draw(ANY_JSON)
        for part in path[:-1]:
            here = _inside(here, part)
        if isinstance(here, dict):
            here[cast(str, path[-1])] = value
    return document


def _inside(found: JsonValue, part: str | int) -> JsonValue:
    if isinstance(found, dict):
        return found.get(cast(str, part))
    return found[part] if isinstance(found, list) and isinstance(part, int) and part < len(found) else None


@given(new=st.one_of(ANY_JSON, broken()), old=st.one_of(ANY_JSON, broken()), cluster_info=FACTS)
def test_validation_of_any_json_or_broken_deployment_gives_a_verdict(
    new: JsonValue, old: JsonValue, cluster_info: ClusterInfo
) -> None:
    verdict = validated(new, old, cluster_info)
    response = cast(Document, answer("1", verdict)["response"])
    json.loads(json.dumps(response).encode())
    assert response["allowed"] is (not verdict.problems)
    if verdict.problems:
        assert cast(Document, response["status"])["message"]
    for warning in cast(list[str], response.get("warnings", [])):
        assert 0 < len(warning) <= WARNING_CHARS_MAX
        assert warning.isprintable()


@given(body=ANY_JSON, cluster_info=FACTS, new=broken())
def test_any_review_is_judged_or_refused_as_a_protocol_error(
    body: JsonValue, cluster_info: ClusterInfo, new: JsonValue
) -> None:
    for asked in (body, {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": body}):
        try:
            review = read_review(asked)
        except ProtocolError:
            continue
        judged(review._replace(new=new, is_ours=True), cluster_info, DEFAULTS)


@given(found=st.one_of(ANY_JSON, broken(TOPOLOGY)))
def test_topology_with_any_spec_can_be_read(found: JsonValue) -> None:
    topology = read_topology({"metadata": {"name": "fabric"}, "spec": found})
    assert topology is not None
    assert len(set(topology.domains)) == len(topology.domains)
    if topology.network_qos is not None:
        assert not topology.network_qos.is_empty
        assert read_qos(qos_text(topology.network_qos)) == topology.network_qos


@given(types=TYPES, topology=st.one_of(st.none(), NAMES), cluster_info=FACTS)
def test_valid_deployment_without_a_policy_is_never_refused(
    types: tuple[str, ...], topology: str | None, cluster_info: ClusterInfo
) -> None:
    document = deployment(types=types, topology=topology)
    assert validated(document, None, cluster_info).is_allowed
    assert validated(document, deployment(types=types), cluster_info).is_allowed


@given(
    domain=DOMAINS,
    falls_back=st.booleans(),
    name=NAMES,
    label=st.one_of(st.none(), LABELS),
    types=TYPES,
    cluster_info=FACTS,
)
def test_frontend_and_graph_spellings_read_as_one_policy(
    *,
    domain: str,
    falls_back: bool,
    name: str,
    label: str | None,
    types: tuple[str, ...],
    cluster_info: ClusterInfo,
) -> None:
    frontend: Document = {"level": domain, "mismatchPolicy": "fallback" if falls_back else "fail"}
    graph: Document = {"domain": domain, "enforcement": "fallback" if falls_back else "required"}
    if label is None:
        graph["clusterTopologyName"] = name
    else:
        frontend["label"] = graph["labelKey"] = label
    spellings = [
        deployment(frontend=frontend, topology=name, types=types),
        deployment(graph=graph, topology=name, types=types),
        deployment(frontend=frontend, graph=graph, topology=name, types=types),
    ]
    policies = set()
    for document in spellings:
        found = read_deployment(document).deployment
        assert found is not None
        policies.add(read_policy(found.spec).policy)
    (policy,) = policies
    assert policy is not None
    assert policy.domain == domain
    assert policy.enforcement is (Enforcement.FALLBACK if falls_back else Enforcement.REQUIRED)
    assert policy.source == (NamedTopology(name) if label is None else RawLabel(label))
    verdicts = [validated(document, None, cluster_info).is_allowed for document in spellings]
    assert len(set(verdicts)) == 1


@given(
    enforcement=st.sampled_from(list(Enforcement)),
    weight=st.one_of(st.none(), st.floats(), st.integers(-2, 2)),
    label=LABELS,
)
def test_weight_in_range_is_required_with_preferred_and_refused_otherwise(
    enforcement: Enforcement, weight: float | None, label: str
) -> None:
    graph: Document = {"domain": "zone", "labelKey": label, "enforcement": enforcement.value}
    if weight is not None:
        graph["preferredWeight"] = weight
    is_in_range = weight is not None and not math.isnan(weight) and 0 <= weight <= 1
    is_right = is_in_range if enforcement is Enforcement.PREFERRED else weight is None
    assert validated(deployment(graph=graph), None, ClusterInfo()).is_allowed is is_right


@given(old=broken(), new=broken(), cluster_info=FACTS)
def test_unchanged_readable_deployment_is_never_refused(
    old: JsonValue, new: JsonValue, cluster_info: ClusterInfo
) -> None:
    """Whatever else happened in the cluster: a deployment that can be read may be written again."""
    for document in (old, new):
        if read_deployment(document).deployment is not None:
            assert validated(document, document, cluster_info).is_allowed
