"""API calls of Kubernetes discovery, and list-and-watch as a task."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import msgspec

from kvrouter.core.backoff import Backoff
from kvrouter.core.ids import WorkerId
from kvrouter.kube.client import FORBIDDEN, NOT_FOUND, ClusterUser, KubeClient, RequestRefused, decoded
from kvrouter.kube.informer import ListAndWatch, Objects
from kvrouter.kube.objects import FLEET_LABEL, WORKERS, WatchEvent
from kvrouter.transports.background import go_on
from kvrouter.transports.discovery.kubernetes.objects import (
    WorkerObject,
    name_of,
)

RESOURCE = f"{WORKERS.plural}.{WORKERS.api_version.partition('/')[0]}"
"""The workers' objects, as kubectl calls them."""


def why(error: Exception) -> str:
    """What ``error`` says, one of asking the API server."""
    if isinstance(error, RequestRefused):
        return f"the API server says {error.status} {error.reason}: {error.said}"
    return str(error) or type(error).__name__


def reason(error: Exception) -> str:
    """What ``error`` says, in a line that a person can act on."""
    if isinstance(error, RequestRefused) and error.status == NOT_FOUND:
        return f"{why(error)} (is {RESOURCE} installed? kubectl apply --server-side -f deploy/crds)"
    if isinstance(error, RequestRefused) and error.status == FORBIDDEN:
        return f"{why(error)} (bind a Role for {RESOURCE} to this user)"
    return why(error)


class WorkersApi:
    """The objects of one fleet. Every method raises ClusterError.

    ``answer_s`` is how long the API server may take for an answer.
    """

    def __init__(self, user: ClusterUser, *, fleet: str, answer_s: float) -> None:
        self._fleet = fleet
        self._path = WORKERS.path(user.namespace)
        self._client = KubeClient(user.connection(), answer_s=answer_s)

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


Item = TypeVar("Item")

RETRY_S = 0.1
RETRY_MAX_S = 5.0
"""The pauses of discovery: a worker that joins or leaves should be heard of soon."""


class Follow(ListAndWatch[Item]):
    """A :class:`~kvrouter.kube.informer.ListAndWatch` that runs in a task called ``name``."""

    def __init__(self, objects: Objects[Item], *, name: str, tick_s: float, quiet_s: float) -> None:
        super().__init__(objects, tick_s=tick_s, quiet_s=quiet_s, backoff=Backoff(RETRY_S, RETRY_MAX_S))
        self._name = name
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Deliver what is there and go on watching; report a store that does not answer, and wait for it."""
        self._task = go_on(self.run(), name=self._name)
        began = asyncio.create_task(self.began.wait())
        try:
            # The task may end before it has listed anything, by a mistake of ours; it reports that itself.
            await asyncio.wait({began, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            began.cancel()

    def end(self) -> None:
        """Watch no more; idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Return once nothing runs any more, after :meth:`end`."""
        if self._task is not None:
            await asyncio.wait({self._task})
