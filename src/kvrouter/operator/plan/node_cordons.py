"""Cordons of nodes: users write an annotation, and routers read objects of their fleet."""

from collections.abc import Iterable

from kvrouter.core.cordon_rules import CORDON_REASON_CHARS_MAX, NODE_LEVEL, Cordon, CordonSource
from kvrouter.kube.objects import FLEET_LABEL, annotations_of, cordon_object, key_of
from kvrouter.operator.api.deployment import DynamoGraphDeployment
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.manifest import Manifest, fleet_name, labels_of
from kvrouter.operator.plan.workload import owned_metadata
from kvrouter.settings.planes import DiscoveryBackend

CORDON_ANNOTATION = "kvrouter.dev/cordon"
"""Annotation of a node: its workers get no new requests. The value is the reason."""

OFF = "false"
"""The value that cordons nothing."""

ON = "true"
"""The value without a reason."""


def node_cordon(node: Manifest) -> Cordon | None:
    """Return the cordon that a node's annotation asks for; None without one."""
    text = annotations_of(node).get(CORDON_ANNOTATION)
    if not isinstance(text, str) or text.strip().lower() == OFF:
        return None
    reason = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    if reason.lower() == ON:
        reason = ""
    return Cordon(
        NODE_LEVEL,
        key_of(node).name,
        reason=reason[:CORDON_REASON_CHARS_MAX],
        source=CordonSource.NODE_ANNOTATION,
    )


def cordon_manifests(
    deployment: DynamoGraphDeployment, defaults: PlanDefaults, cordons: Iterable[Cordon]
) -> list[Manifest]:
    """Return the objects of these cordons in a deployment's fleet; an empty list if routers keep cordons
    elsewhere.

    Every cordoned node has an object, even without pods of the deployment: later pods are cordoned too.
    """
    if defaults.discovery is not DiscoveryBackend.KUBERNETES:
        return []
    namespace, name = deployment.metadata.namespace, deployment.metadata.name
    fleet = fleet_name(namespace, name)
    found = []
    for cordon in sorted(cordons, key=lambda cordon: cordon.name):
        manifest = cordon_object(cordon, namespace=namespace, fleet=fleet)
        labels = {**labels_of(deployment), FLEET_LABEL: fleet}
        metadata = owned_metadata(deployment, key_of(manifest).name, labels)
        found.append({**manifest, "metadata": metadata})
    return found
