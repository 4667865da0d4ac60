"""What stands in the way of an installation or an upgrade: definitions of the same names."""

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import JsonValue

from kvrouter.operator.api.crd import CRD_NAME
from kvrouter.operator.reconcile.cluster import Cluster
from kvrouter.operator.reconcile.definition import DEFINITIONS, definition_version
from kvrouter.operator.reconcile.kinds import Key, Kind, Manifest, metadata_of

NAMES = (CRD_NAME, "kvrouterworkers.kvrouter.dev", "kvrouternodeplaces.kvrouter.dev")
INSTALL = "kubectl apply --server-side -k deploy/crds"
TAKE_OVER = f"{INSTALL} --force-conflicts"
KUBECTL, APPLY = "kubectl", "Apply"
"""The field manager of ``kubectl apply --server-side``, and its operation."""
KUBECTL_BEFORE = "kubectl-client-side-apply"
"""That of a plain ``kubectl apply``, whose fields kubectl moves to the other by itself."""


class DefinitionReport(NamedTuple):
    """How one definition stands, and what to do. ``is_conflict``: ``kubectl apply`` would be refused."""

    name: str
    message: str
    is_conflict: bool = False


class Found(NamedTuple):
    """One definition as it is in the cluster, and how many objects it has in how many namespaces."""

    name: str
    definition: Manifest | None
    objects: int = 0
    namespaces: int = 0


async def preflight(cluster: Cluster) -> list[DefinitionReport]:
    """Look at each definition. Raises ClusterError when the cluster cannot be asked, or does not allow it."""
    found = []
    for name in NAMES:
        definition = await cluster.read(DEFINITIONS, Key("", name))
        objects: list[Manifest] = []
        if (
            definition is not None
            and definition_version(definition) is None
            and (kind := _kind_of(definition))
        ):
            objects = (await cluster.find(kind)).objects
        namespaces = {metadata_of(each).get("namespace") for each in objects}
        found.append(Found(name, definition, len(objects), len(namespaces)))
    return reports(found)


def reports(found: Sequence[Found]) -> list[DefinitionReport]:
    """Return what is to be told of each definition.

    Fields are only ever to be taken over where every definition is kvrouter's, since one command applies all.
    """
    is_alone = all(
        each.definition is None or definition_version(each.definition) is not None for each in found
    )
    return [_report(each, is_alone=is_alone) for each in found]


def _report(found: Found, *, is_alone: bool) -> DefinitionReport:
    name, definition = found.name, found.definition
    if definition is None:
        return DefinitionReport(name, f"not installed yet: {INSTALL}" if is_alone else "not installed yet")
    version = definition_version(definition)
    if version is None:
        return DefinitionReport(name, _foreign(found, definition), is_conflict=True)
    holders = _holders(definition)
    others = sorted({manager for manager, _ in holders} - {KUBECTL, KUBECTL_BEFORE})
    if not others or (KUBECTL, APPLY) in holders:
        return DefinitionReport(name, f"kvrouter's own, of version {version}. To upgrade it: {INSTALL}")
    way_out = (
        f"Since it is kvrouter's, take them over once: {TAKE_OVER}"
        if is_alone
        else "First see to the definition that is another project's"
    )
    message = (
        f"kvrouter's own, of version {version}, and its fields are held by {', '.join(others)}: the API "
        f"server refuses another's write with a conflict. {way_out}"
    )
    return DefinitionReport(name, message, is_conflict=True)


def _foreign(found: Found, definition: Manifest) -> str:
    writers = ", ".join(sorted({manager for manager, _ in _holders(definition)})) or "nobody knows whom"
    message = (
        f"another project's definition, written by {writers}; it serves {', '.join(_versions(definition))}. "
    )
    if found.objects:
        message += (
            f"{found.objects} objects in {found.namespaces} namespaces are of it, and would lose what "
            "kvrouter's does not know. "
        )
    else:
        message += "It has no objects. "
    message += (
        "kvrouter's operator stands back from it. Leave it, and run kvrouter here without its operator, or "
        "in another cluster: docs/kubernetes-beside-dynamo.md"
    )
    if not found.objects:
        message += f". If nobody wants it any more: kubectl delete crd {found.name}, then {INSTALL}"
    return message


def _holders(definition: Manifest) -> set[tuple[str, str]]:
    """Who holds what versions the definition has, and by which operation."""
    entries = metadata_of(definition).get("managedFields")
    found = set()
    for entry in entries if isinstance(entries, list) else []:
        fields = entry.get("fieldsV1") if isinstance(entry, dict) else None
        spec = fields.get("f:spec") if isinstance(fields, dict) else None
        if isinstance(entry, dict) and isinstance(spec, dict) and "f:versions" in spec:
            found.add((str(entry.get("manager")), str(entry.get("operation"))))
    return found


def _versions(definition: Manifest) -> list[str]:
    return [str(version.get("name")) for version in _served(definition)]


def _kind_of(definition: Manifest) -> Kind | None:
    """The kind that it defines, in one of the versions that it serves; None where it serves none."""
    spec = definition.get("spec")
    served = _served(definition)
    if not isinstance(spec, dict) or not served:
        return None
    names = spec.get("names")
    plural = names.get("plural") if isinstance(names, dict) else ""
    version = f"{spec.get('group')}/{served[0].get('name')}"
    return Kind(version, str(names.get("kind")) if isinstance(names, dict) else "", str(plural))


def _served(definition: Manifest) -> list[dict[str, JsonValue]]:
    spec = definition.get("spec")
    versions = spec.get("versions") if isinstance(spec, dict) else None
    found = (
        [version for version in versions if isinstance(version, dict)] if isinstance(versions, list) else []
    )
    return [version for version in found if version.get("served")]
