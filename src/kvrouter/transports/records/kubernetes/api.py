"""Error messages of the API server, and list-and-watch as a feed."""

import asyncio
from typing import TypeVar

from kvrouter.core.backoff import Backoff
from kvrouter.kube.client import FORBIDDEN, NOT_FOUND, RequestRefused
from kvrouter.kube.informer import ListAndWatch, Objects
from kvrouter.kube.objects import ResourceKind
from kvrouter.transports.background import spawn
from kvrouter.transports.records.store import ChangeFeed


def why(error: Exception) -> str:
    """Return an error of the API server as one line."""
    if isinstance(error, RequestRefused):
        return f"the API server says {error.status} {error.reason}: {error.detail}"
    return str(error) or type(error).__name__


def named(resource: ResourceKind) -> str:
    """Return the name of a kind as kubectl takes it."""
    return f"{resource.plural}.{resource.api_version.partition('/')[0]}"


def reason(error: Exception, resource: ResourceKind, *, rights: str = "") -> str:
    """Return ``error`` as one line that a person can act on. ``rights`` are verbs that a Role must grant."""
    if isinstance(error, RequestRefused) and error.status == NOT_FOUND:
        return f"{why(error)} (is {named(resource)} installed? kubectl apply --server-side -f deploy/crds)"
    if isinstance(error, RequestRefused) and error.status == FORBIDDEN:
        return f"{why(error)} (bind a Role {rights}for {named(resource)} to this user)"
    return why(error)


Item = TypeVar("Item")

RETRY_S = 0.1
RETRY_MAX_S = 5.0
"""The backoff of discovery, short so that workers that join or leave are noticed soon."""


class InformerFeed(ListAndWatch[Item], ChangeFeed):
    """A :class:`~kvrouter.kube.informer.ListAndWatch` that runs in a task called ``name``."""

    def __init__(self, objects: Objects[Item], *, name: str, tick_s: float, quiet_s: float) -> None:
        super().__init__(objects, tick_s=tick_s, quiet_s=quiet_s, backoff=Backoff(RETRY_S, RETRY_MAX_S))
        self._name = name

    async def start(self) -> None:
        """Deliver the present objects and go on watching; report an unreachable store and retry. Return after
        the first list succeeded or failed.
        """
        self._task = spawn(self.run(), name=self._name)
        began = asyncio.create_task(self.began.wait())
        try:
            # A bug may end the task before it has listed anything; the task reports that itself.
            await asyncio.wait({began, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            began.cancel()
