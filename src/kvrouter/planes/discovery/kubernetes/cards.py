"""The objects of a fleet as the store of the cards that a process holds."""

from typing import NamedTuple

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import WorkerId
from kvrouter.planes.discovery.held import OtherWrote
from kvrouter.planes.discovery.kubernetes.api import WorkersApi, reason
from kvrouter.planes.discovery.kubernetes.objects import (
    OwnerReference,
    Pod,
    WorkerObject,
    encode_object,
    record_of,
)
from kvrouter.planes.discovery.kubernetes.server import STORE_ERRORS, ApiError
from kvrouter.planes.discovery.wire import CardRecord


class Stood(NamedTuple):
    """What stands under a worker's name: its version, and who owns it."""

    version: str
    owners: tuple[OwnerReference, ...]


class ObjectCards:
    """One object for each record, owned by ``pod`` where it is written here. Withdrawing changes no owner."""

    errors: tuple[type[Exception], ...] = STORE_ERRORS

    def __init__(self, api: WorkersApi, *, fleet: str, pod: Pod | None) -> None:
        self._api = api
        self._fleet = fleet
        self._owners = () if pod is None else (pod.reference(),)

    def reason(self, error: Exception) -> str:
        """What ``error`` says, in a line that a person can act on."""
        return reason(error)

    async def read(self, worker_id: WorkerId) -> tuple[CardRecord | None, Stood | None]:
        """Return what is there."""
        found = await self._api.read(worker_id)
        if found is None:
            return None, None
        try:
            return record_of(found, fleet=self._fleet), _stood(found)
        except ProtocolError:
            return None, _stood(found)

    async def write(self, record: CardRecord, over: Stood | None, *, number: int) -> Stood:
        """Write over a version, or where none is. Raises OtherWrote when something else is there."""
        body = encode_object(
            record,
            fleet=self._fleet,
            renewals=number,
            replaces=None if over is None else over.version,
            owners=over.owners if over is not None and record.withdrawn else self._owners,
        )
        try:
            if over is None:
                return _stood(await self._api.create(body))
            return _stood(await self._api.replace(record.card.worker_id, body))
        except ApiError as error:
            if error.code == 409 or (error.code == 404 and over is not None):
                raise OtherWrote(f"the object of worker {record.card.worker_id} is another by now") from error
            raise


def _stood(found: WorkerObject) -> Stood:
    return Stood(found.metadata.resource_version, found.metadata.owner_references)
