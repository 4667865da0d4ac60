"""Cordons as objects of a Kubernetes API server, one for each."""

from msgspec import structs

from kvrouter.core.cordon_rules import Cordon
from kvrouter.kube.client import ClusterUser
from kvrouter.kube.objects import CORDONS as CORDON_OBJECTS
from kvrouter.transports.discovery.card_tracker import TroubleSink
from kvrouter.transports.discovery.kubernetes.api import named
from kvrouter.transports.discovery.kubernetes.objects import StoredObject
from kvrouter.transports.discovery.kubernetes.records import ObjectRecords, Stood, stood
from kvrouter.transports.discovery.records import Record
from kvrouter.transports.discovery.stored import StoredCordons
from kvrouter.transports.discovery.wire import CORDONS

ANSWER_S = 5.0
"""The API server must answer within this, else the store cannot be asked."""


class CordonObjects(ObjectRecords[Cordon]):
    """Objects that somebody else wrote count too, whatever their names, which are their keys."""

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
        """What reports call an object."""
        return f"{super().called(name)} of {named(CORDON_OBJECTS)}"

    def name_of(self, key: str) -> str:
        """Return the name of an object, which is its key."""
        return key

    def opened(self, found: StoredObject) -> Record[Cordon, Stood]:
        """Return the cordon in an object. One that nobody dated has the age of its object."""
        cordon, made = CORDONS.decode(bytes(found.spec)), found.metadata.creation_timestamp
        if not cordon.at_s and made is not None:
            cordon = structs.replace(cordon, at_s=made.timestamp())
        return Record(found.metadata.name, cordon, stood(found))


class KubernetesCordons(StoredCordons[Stood]):
    """Keeps the cordons of the fleet ``namespace`` as objects in the user's namespace of Kubernetes, where
    everything counts that has the fleet's label.

    ``on_refused`` hears of objects that hold no cordon, once each.
    """

    look_s = 2.0

    def __init__(self, user: ClusterUser, *, namespace: str, on_refused: TroubleSink) -> None:
        store = CordonObjects(user, fleet=namespace, on_refused=on_refused)
        super().__init__(store, why=lambda error: f"cordons cannot be read or written: {store.reason(error)}")

    async def remove(self, cordon: Cordon) -> None:
        """Remove every object of a cordon of this level, name and source, as it is read; idempotent."""
        for record in await self._asked(self._store.list_all()):
            if CORDONS.key_of(record.value) == CORDONS.key_of(cordon):
                await self._asked(self._store.delete(record.key, record.version))
