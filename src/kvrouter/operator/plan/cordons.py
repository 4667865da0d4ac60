"""Cordons of nodes, which people write as an annotation, and routers read as objects of their fleet."""

from collections.abc import Iterable

from kvrouter.core.cordons import CORDON_REASON_CHARS_MAX, NODE_LEVEL, Cordon, CordonSource
from kvrouter.kube.objects import FLEET_LABEL, annotations_of, cordon_object, key_of
from kvrouter.operator.api.deployment import DynamoGraphDeployment
from kvrouter.operator.plan.defaults import PlanDefaults
from kvrouter.operator.plan.manifest import Manifest, fleet_name, labels_of
from kvrouter.operator.plan.workload import owned_metadata
from kvrouter.settings.planes import DiscoveryBackend

CORDON_ANNOTATION = "kvrouter.dev/cordon"
"""Annotation of a node: its workers get no new requests, for the reason that its value says."""

OFF = "false"
"""The value that says nothing."""

ON = "true"
"""The value that gives no reason."""


def node_cordon(node: Manifest) -> Cordon | None:
    """Return the cordon that a node's annotation asks for; None where it asks for none."""
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
    """Return the objects of these cordons in a deployment's fleet; none where routers keep cordons elsewhere.

    Every cordoned node has one, whether pods of the deployment are there or not: those that come later are
    cordoned too.
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
