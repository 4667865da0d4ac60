"""Cordons as objects of a Kubernetes API server."""

from msgspec import structs

from kvrouter.core.cordon_rules import Cordon
from kvrouter.kube.client import ClusterUser
from kvrouter.kube.objects import CORDONS as CORDON_OBJECTS
from kvrouter.transports.records.card_tracker import TroubleSink
from kvrouter.transports.records.encoding import CORDONS
from kvrouter.transports.records.kubernetes.api import named
from kvrouter.transports.records.kubernetes.objects import StoredObject
from kvrouter.transports.records.kubernetes.store import ObjectRecords, ObjectVersion, object_version
from kvrouter.transports.records.store import Record
from kvrouter.transports.records.stored import StoredCordons

ANSWER_S = 5.0
"""The API server must answer within this, else the store counts as unreachable."""


class CordonObjects(ObjectRecords[Cordon]):
    """Cordon objects. Objects of other tools count too: their names may be anything, and are the keys."""

    def __init__(self, user: ClusterUser, *, fleet: str, on_refused: TroubleSink) -> None:
        super().__init__(
            user,
            CORDONS,
            CORDON_OBJECTS,
            fleet=fleet,
            answer_s=ANSWER_S,
            on_refused=on_refused,
            rights="with list, create, patch and delete ",
        )

    def called(self, name: str) -> str:
        """Return how reports name an object."""
        return f"{super().called(name)} of {named(CORDON_OBJECTS)}"

    def name_of(self, key: str) -> str:
        """Return the name of an object: its key."""
        return key

    def opened(self, found: StoredObject) -> Record[Cordon, ObjectVersion]:
        """Return the cordon in an object. A cordon without a time gets the creation time of its object."""
        cordon, made = CORDONS.decode(bytes(found.spec)), found.metadata.creation_timestamp
        if not cordon.at_s and made is not None:
            cordon = structs.replace(cordon, at_s=made.timestamp())
        return Record(found.metadata.name, cordon, object_version(found))


class KubernetesCordons(StoredCordons[ObjectVersion]):
    """Keeps the cordons of the fleet ``namespace`` as objects in the user's Kubernetes namespace: all objects
    with the fleet's label count.

    ``on_refused`` is called once for each object that holds no cordon.
    """

    poll_s = 2.0

    def __init__(self, user: ClusterUser, *, namespace: str, on_refused: TroubleSink) -> None:
        store = CordonObjects(user, fleet=namespace, on_refused=on_refused)
        super().__init__(store, why=lambda error: f"cordons cannot be read or written: {store.reason(error)}")

    async def remove(self, cordon: Cordon) -> None:
        """Remove every object that holds the cordon of this level, name and source; idempotent."""
        for record in await self._asked(self._store.list_all()):
            if CORDONS.key_of(record.value) == CORDONS.key_of(cordon):
                await self._asked(self._store.delete(record.key, record.version))
