"""Whose the cluster's definition of DynamoGraphDeployment is: another project's is left alone."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from kvrouter.operator.api.crd import CRD_NAME, DEFINITION
from kvrouter.operator.reconcile.cluster import FORBIDDEN, Cluster, ClusterError, Refused
from kvrouter.operator.reconcile.kinds import Key, Kind, Manifest, metadata_of

DEFINITIONS = Kind(
    "apiextensions.k8s.io/v1",
    "CustomResourceDefinition",
    "customresourcedefinitions",
    is_namespaced=False,
)
LOOK_S = 10.0
"""How often the definition is looked at."""
LOOK_AGAIN_S = 1.0
"""How soon while it is not kvrouter's: it may be installed any moment."""


class Listener(Protocol):
    """Who is told whether the operator works, or stands back."""

    def definition_is(self, why: str | None) -> None:
        """The definition is not kvrouter's, for this reason; with None it is."""


class Definition:
    """Looks at the definition, and lets work run only while it is kvrouter's.

    While the API server cannot be asked, or answers with an error of its own, what was seen last holds.
    Before the first look nothing is done.
    """

    def __init__(self, cluster: Cluster, listener: Listener, *, look_s: float = LOOK_S) -> None:
        self._cluster, self._listener, self._look_s = cluster, listener, look_s
        self._ours, self._not_ours = asyncio.Event(), asyncio.Event()
        self._told = ""

    @property
    def is_ours(self) -> bool:
        """Whether it was kvrouter's when it was looked at last."""
        return self._ours.is_set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            with suppress(ClusterError):
                self._learn(await self._why_not())
            await asyncio.sleep(self._look_s if self.is_ours else min(self._look_s, LOOK_AGAIN_S))

    async def while_ours(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` while the definition is kvrouter's: it is cancelled when that ends, and begun again.

        Returns when ``work`` does; what it raises is raised.
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
        """Raises ClusterError where that is not known: the API server is overloaded, for example, or ends."""
        try:
            found = await self._cluster.read(DEFINITIONS, Key("", CRD_NAME))
        except Refused as refused:
            if refused.status != FORBIDDEN:
                raise
            return f"it may not be read, so nobody knows whose it is: {refused.message}"
        return why_not_ours(found)

    def _learn(self, why: str | None) -> None:
        told = why or "ours"
        if told == self._told:
            return
        self._told = told
        (self._ours if why is None else self._not_ours).set()
        (self._not_ours if why is None else self._ours).clear()
        self._listener.definition_is(why)


def definition_version(definition: Manifest) -> str | None:
    """Return the version that a definition of kvrouter's has; None for another project's."""
    annotations = metadata_of(definition).get("annotations")
    version = annotations.get(DEFINITION) if isinstance(annotations, dict) else None
    return version if isinstance(version, str) else None


def why_not_ours(definition: Manifest | None) -> str | None:
    """Return why the operator has to leave a definition alone; None when it is kvrouter's."""
    if definition is None:
        return f"{CRD_NAME} is not installed"
    if definition_version(definition) is None:
        return f"{CRD_NAME} is another project's: it has no annotation {DEFINITION}"
    return None
