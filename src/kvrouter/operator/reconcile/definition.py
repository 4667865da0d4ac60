"""The cluster's CRD: which project owns it, and what prevents installing or upgrading it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvrouter.kube.client import FORBIDDEN, ClusterError, KubeClient, RequestRefused
from kvrouter.kube.objects import (
    Key,
    Manifest,
    ResourceKind,
    annotations_of,
    fields_of,
    metadata_of,
    objects_in,
)
from kvrouter.operator.api.crd import CRD_NAME, DEFINITION
from kvrouter.operator.instrumentation import OperatorInstrumentation

DEFINITIONS = ResourceKind(
    "apiextensions.k8s.io/v1",
    "CustomResourceDefinition",
    "customresourcedefinitions",
    is_namespaced=False,
)
CHECK_EACH_S = 10.0
"""How often the definition is read."""
LOOK_AGAIN_S = 1.0
"""How often it is read while it is not kvrouter's: it may be installed any moment."""


class Definition:
    """Reads the definition, and runs work only while it is kvrouter's.

    While the API server does not answer, or answers with an error of its own, the last reading holds. Before
    the first reading no work runs.
    """

    def __init__(
        self,
        client: KubeClient,
        instrumentation: OperatorInstrumentation,
        *,
        check_each_s: float = CHECK_EACH_S,
    ) -> None:
        self._client, self._instrumentation, self._look_s = client, instrumentation, check_each_s
        self._ours, self._not_ours = asyncio.Event(), asyncio.Event()
        self._reported = ""

    @property
    def is_ours(self) -> bool:
        """Whether it was kvrouter's at the last reading."""
        return self._ours.is_set()

    async def run(self) -> None:
        """Read it until cancelled."""
        while True:
            with suppress(ClusterError):
                self._learn(await self._why_not())
            await asyncio.sleep(self._look_s if self.is_ours else min(self._look_s, LOOK_AGAIN_S))

    async def while_ours(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` while the definition is kvrouter's: cancel it when that ends, and begin it again.

        Returns when ``work`` does, and raises its errors.
        """
        while True:
            await self._ours.wait()
            working = asyncio.ensure_future(work())
            ending = asyncio.ensure_future(self._not_ours.wait())
            try:
                await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
                    return
            finally:
                for task in (working, ending):
                    task.cancel()
                await asyncio.gather(working, ending, return_exceptions=True)

    async def _why_not(self) -> str | None:
        """Return why it is not kvrouter's. Raises ClusterError if that is unknown, as in an overload."""
        try:
            found = await self._client.read(DEFINITIONS, Key("", CRD_NAME))
        except RequestRefused as refused:
            if refused.status != FORBIDDEN:
                raise
            return f"it may not be read, so nobody knows whose it is: {refused.message}"
        return why_not_ours(found)

    def _learn(self, why: str | None) -> None:
        state = why or "ours"
        if state == self._reported:
            return
        self._reported = state
        (self._ours if why is None else self._not_ours).set()
        (self._not_ours if why is None else self._ours).clear()
        self._instrumentation.definition_is(why)


def definition_version(definition: Manifest) -> str | None:
    """Return the version of kvrouter's definition; None for another project's."""
    version = annotations_of(definition).get(DEFINITION)
    return version if isinstance(version, str) else None


def why_not_ours(definition: Manifest | None) -> str | None:
    """Return why the operator must not use a CRD; None if it is kvrouter's."""
    if definition is None:
        return f"{CRD_NAME} is not installed"
    if definition_version(definition) is None:
        return f"{CRD_NAME} is another project's: it has no annotation {DEFINITION}"
    return None


NAMES = (
    CRD_NAME,
    "kvrouterworkers.kvrouter.dev",
    "kvrouternodeplaces.kvrouter.dev",
    "kvroutercordons.kvrouter.dev",
)
INSTALL = "kubectl apply --server-side -k deploy/crds"
TAKE_OVER = f"{INSTALL} --force-conflicts"
KUBECTL, APPLY = "kubectl", "Apply"
"""The field manager and the operation of ``kubectl apply --server-side``."""
KUBECTL_BEFORE = "kubectl-client-side-apply"
"""The field manager of a plain ``kubectl apply``; kubectl itself moves its fields to the other one."""


class DefinitionReport(NamedTuple):
    """The state of one definition, and what to do. ``is_conflict``: ``kubectl apply`` would be refused."""

    name: str
    message: str
    is_conflict: bool = False


class InstalledDefinition(NamedTuple):
    """One definition as it is in the cluster, and the number of its objects and of their namespaces."""

    name: str
    definition: Manifest | None
    objects: int = 0
    namespaces: int = 0


async def preflight(client: KubeClient) -> list[DefinitionReport]:
    """Check each definition. Raises ClusterError when the cluster does not answer, or does not allow it."""
    found = []
    for name in NAMES:
        definition = await client.read(DEFINITIONS, Key("", name))
        objects: list[Manifest] = []
        if (
            definition is not None
            and definition_version(definition) is None
            and (kind := _kind_of(definition))
        ):
            objects = (await client.find(kind)).objects
        namespaces = {metadata_of(each).get("namespace") for each in objects}
        found.append(InstalledDefinition(name, definition, len(objects), len(namespaces)))
    return reports(found)


def reports(found: Sequence[InstalledDefinition]) -> list[DefinitionReport]:
    """Return a report on each definition.

    Taking over fields is advised only if every definition is kvrouter's, since one command applies all.
    """
    is_alone = all(
        each.definition is None or definition_version(each.definition) is not None for each in found
    )
    return [_report(each, is_alone=is_alone) for each in found]


def _report(found: InstalledDefinition, *, is_alone: bool) -> DefinitionReport:
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


def _foreign(found: InstalledDefinition, definition: Manifest) -> str:
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
        "in another cluster: docs/kubernetes-engines.md"
    )
    if not found.objects:
        message += f". If nobody wants it any more: kubectl delete crd {found.name}, then {INSTALL}"
    return message


def _holders(definition: Manifest) -> set[tuple[str, str]]:
    """Return the field managers of the definition's versions, with their operations."""
    return {
        (str(entry.get("manager")), str(entry.get("operation")))
        for entry in objects_in(metadata_of(definition).get("managedFields"))
        if "f:versions" in fields_of(fields_of(entry.get("fieldsV1")).get("f:spec"))
    }


def _versions(definition: Manifest) -> list[str]:
    return [str(version.get("name")) for version in _served(definition)]


def _kind_of(definition: Manifest) -> ResourceKind | None:
    """Return the kind that it defines, in a version that it serves; None if it serves no version."""
    spec, served = fields_of(definition.get("spec")), _served(definition)
    if not served:
        return None
    names, version = fields_of(spec.get("names")), f"{spec.get('group')}/{served[0].get('name')}"
    return ResourceKind(version, str(names.get("kind")), str(names.get("plural")))


def _served(definition: Manifest) -> list[Manifest]:
    versions = objects_in(fields_of(definition.get("spec")).get("versions"))
    return [version for version in versions if version.get("served")]
