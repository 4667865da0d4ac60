"""Cordons as objects of a Kubernetes API server, one for each."""

from datetime import datetime

import msgspec
from msgspec import structs

from kvrouter.core.cordons import CORDONS_MAX, Cordon
from kvrouter.core.errors import CordonsUnavailable, ProtocolError
from kvrouter.kube.client import (
    FORBIDDEN,
    NOT_FOUND,
    ClusterError,
    ClusterUser,
    KubeClient,
    RequestRefused,
    decoded,
)
from kvrouter.kube.objects import CORDONS, FLEET_LABEL, Key, cordon_object
from kvrouter.transports.discovery.card_tracker import StoreRefusals, TroubleSink
from kvrouter.transports.discovery.kubernetes.api import why
from kvrouter.transports.discovery.kubernetes.objects import checked_fleet
from kvrouter.transports.discovery.wire import decode_cordon

ANSWER_S = 5.0
"""The API server must answer within this, else the store cannot be asked."""

RESOURCE = f"{CORDONS.plural}.{CORDONS.api_version.partition('/')[0]}"
"""The objects of cordons, as kubectl calls them."""


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str = ""
    creation_timestamp: datetime | None = None


class _CordonObject(msgspec.Struct, frozen=True):
    metadata: _Metadata
    spec: msgspec.Raw = msgspec.Raw(b"{}")


class KubernetesCordons:
    """Keeps the cordons of the fleet ``namespace`` as objects in the user's namespace of Kubernetes.

    Objects that somebody else wrote count too, whatever their names, where they have the fleet's label.
    ``on_refused`` hears of objects that hold no cordon, once each.
    """

    look_s = 2.0

    def __init__(self, user: ClusterUser, *, namespace: str, on_refused: TroubleSink) -> None:
        self._namespace = user.namespace
        self._fleet = checked_fleet(namespace)
        self._client = KubeClient(user.connection(), answer_s=ANSWER_S)
        self._refusals = StoreRefusals(on_refused)

    async def read(self) -> tuple[Cordon, ...]:
        """Return every cordon."""
        return tuple([cordon for _, cordon in await self._found()])

    async def put(self, cordon: Cordon) -> None:
        """Write a cordon, over the one of the same level, name and source."""
        try:
            manifest = cordon_object(cordon, namespace=self._namespace, fleet=self._fleet)
            await self._client.apply(CORDONS, manifest)
        except ClusterError as error:
            raise _unavailable(error) from error

    async def remove(self, cordon: Cordon) -> None:
        """Remove every object of a cordon of this level, name and source; idempotent."""
        for found, there in await self._found():
            if (there.level, there.name, there.source) == (cordon.level, cordon.name, cordon.source):
                try:
                    key = Key(self._namespace, found.name)
                    await self._client.delete(CORDONS, key, uid=found.uid)
                except ClusterError as error:
                    raise _unavailable(error) from error

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._client.close()

    async def _found(self) -> list[tuple[_Metadata, Cordon]]:
        try:
            items, _ = await self._client.everything(
                CORDONS.path(self._namespace), labels=f"{FLEET_LABEL}={self._fleet}"
            )
            objects = [decoded(bytes(item), _CordonObject) for item in items[:CORDONS_MAX]]
        except ClusterError as error:
            raise _unavailable(error) from error
        found = []
        for each in objects:
            name = each.metadata.name
            try:
                found.append((each.metadata, _dated(decode_cordon(bytes(each.spec)), each.metadata)))
            except ProtocolError as error:
                self._refusals.tell(name, f"object {name[:80]} of {RESOURCE}", error.message)
            else:
                self._refusals.forget(name)
        return found


def _dated(cordon: Cordon, metadata: _Metadata) -> Cordon:
    """A cordon that nobody dated has the age of its object."""
    made = metadata.creation_timestamp
    return cordon if cordon.at_s or made is None else structs.replace(cordon, at_s=made.timestamp())


def _unavailable(error: ClusterError) -> CordonsUnavailable:
    said = why(error)
    if isinstance(error, RequestRefused) and error.status == NOT_FOUND:
        said += f" (is {RESOURCE} installed? kubectl apply --server-side -f deploy/crds)"
    elif isinstance(error, RequestRefused) and error.status == FORBIDDEN:
        said += f" (bind a Role with list, create, patch and delete for {RESOURCE} to this user)"
    return CordonsUnavailable(f"cordons cannot be read or written: {said}")
