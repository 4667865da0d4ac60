"""The questions to the API server that discovery asks."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import msgspec

from kvrouter.core.ids import WorkerId
from kvrouter.kube.account import Account, AccountConnection
from kvrouter.kube.client import FORBIDDEN, NOT_FOUND, KubeClient, RequestRefused, decoded
from kvrouter.kube.objects import WatchEvent
from kvrouter.transports.discovery.kubernetes.objects import (
    FLEET_LABEL,
    GROUP,
    PLURAL,
    VERSION,
    WorkerObject,
    name_of,
)


def why(error: Exception) -> str:
    """What ``error`` says, one of asking the API server."""
    if isinstance(error, RequestRefused):
        return f"the API server says {error.status} {error.reason}: {error.said}"
    return str(error) or type(error).__name__


def reason(error: Exception) -> str:
    """What ``error`` says, in a line that a person can act on."""
    if isinstance(error, RequestRefused) and error.status == NOT_FOUND:
        return f"{why(error)} (is {PLURAL}.{GROUP} installed? kubectl apply --server-side -f deploy/crds)"
    if isinstance(error, RequestRefused) and error.status == FORBIDDEN:
        return f"{why(error)} (bind a Role for {PLURAL}.{GROUP} to the pod's service account)"
    return why(error)


class WorkersApi:
    """The objects of one fleet. Every method raises ClusterError.

    ``answer_s`` is how long the API server may take for an answer.
    """

    def __init__(self, account: Account, *, fleet: str, answer_s: float) -> None:
        self._fleet = fleet
        self._path = f"/apis/{GROUP}/{VERSION}/namespaces/{account.namespace}/{PLURAL}"
        self._client = KubeClient(AccountConnection(account), answer_s=answer_s)

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._client.close()

    async def everything(self) -> tuple[list[WorkerObject], str]:
        """Return every object of the fleet, and the version as of which they are all."""
        found, version = await self._client.everything(self._path, labels=self._selector())
        return [decoded(bytes(each), WorkerObject) for each in found], version

    async def read(self, worker_id: WorkerId) -> WorkerObject | None:
        """Return a worker's object as the store has it; None without one."""
        try:
            return decoded(await self._client.ask("GET", self._url(worker_id)), WorkerObject)
        except RequestRefused as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def create(self, body: bytes) -> WorkerObject:
        """Write an object where none is: 409 where one is."""
        return decoded(await self._client.ask("POST", self._path, body=body), WorkerObject)

    async def replace(self, worker_id: WorkerId, body: bytes) -> WorkerObject:
        """Write over the version that ``body`` names: 409 where another is there, 404 where none is."""
        return decoded(await self._client.ask("PUT", self._url(worker_id), body=body), WorkerObject)

    async def delete(self, worker_id: WorkerId, version: str) -> None:
        """Delete a worker's object as of this version: 409 where another is there, 404 where none is."""
        body = msgspec.json.encode({"preconditions": {"resourceVersion": version}})
        await self._client.ask("DELETE", self._url(worker_id), body=body)

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[list[WatchEvent]]]:
        """Hear what happens after ``version``, as it comes; open when this is entered, it ends some time."""
        return self._client.watch(self._path, version, labels=self._selector())

    def _selector(self) -> str:
        return f"{FLEET_LABEL}={self._fleet}"

    def _url(self, worker_id: WorkerId) -> str:
        return f"{self._path}/{name_of(self._fleet, worker_id)}"
