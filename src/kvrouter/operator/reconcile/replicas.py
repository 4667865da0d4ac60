"""The number of a component's pods changes hands: from the operator, which stated it, to whoever scales."""

from pydantic import JsonValue

from kvrouter.operator.reconcile.cluster import MANAGER, Cluster
from kvrouter.operator.reconcile.kinds import Kind, Manifest, key_of, metadata_of, uid_of, version_of

HOLDER = "kvrouter-operator-replicas"
"""The field manager that holds the number between the operator, which lets go of it, and who scales first."""


async def let_go_of_replicas(cluster: Cluster, kind: Kind, manifest: Manifest) -> None:
    """See that the number of pods stays when ``manifest``, which states none, is applied.

    Server-side apply removes a field that its only owner no longer states, and one pod is what is left then:
    so another manager holds it first. Raises ClusterError; Refused with 409 when it is scaled at that moment.
    """
    there = await cluster.read(kind, key_of(manifest))
    replicas = None if there is None else stated_replicas(there)
    if there is None or replicas is None or not is_held_alone(there):
        return
    metadata: Manifest = {
        **{part: metadata_of(there)[part] for part in ("namespace", "name")},
        "uid": uid_of(there),
        "resourceVersion": version_of(there),
    }
    held: Manifest = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": metadata,
        "spec": {"replicas": replicas},
    }
    await cluster.claim(kind, held, manager=HOLDER)


def stated_replicas(manifest: Manifest) -> int | None:
    """Return the number of pods that a manifest states; None where it states none."""
    spec = manifest.get("spec")
    replicas = spec.get("replicas") if isinstance(spec, dict) else None
    return replicas if isinstance(replicas, int) else None


def is_held_alone(manifest: Manifest) -> bool:
    """Whether the operator holds the number of pods, and nobody else does."""
    entries = metadata_of(manifest).get("managedFields")
    holders = {
        (str(entry.get("manager")), str(entry.get("operation")))
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and _has_replicas(entry.get("fieldsV1"))
    }
    return holders == {(MANAGER, "Apply")}


def _has_replicas(fields: JsonValue) -> bool:
    spec = fields.get("f:spec") if isinstance(fields, dict) else None
    return isinstance(spec, dict) and "f:replicas" in spec
