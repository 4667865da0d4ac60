"""What asking the API server says when it fails, and list-and-watch as a task."""

import asyncio
from typing import TypeVar

from kvrouter.core.backoff import Backoff
from kvrouter.kube.client import FORBIDDEN, NOT_FOUND, RequestRefused
from kvrouter.kube.informer import ListAndWatch, Objects
from kvrouter.kube.objects import ResourceKind
from kvrouter.transports.background import go_on
from kvrouter.transports.discovery.records import ChangeFeed


def why(error: Exception) -> str:
    """What ``error`` says, one of asking the API server."""
    if isinstance(error, RequestRefused):
        return f"the API server says {error.status} {error.reason}: {error.said}"
    return str(error) or type(error).__name__


def named(resource: ResourceKind) -> str:
    """Return what kubectl calls the objects of a kind."""
    return f"{resource.plural}.{resource.api_version.partition('/')[0]}"


def reason(error: Exception, resource: ResourceKind, *, rights: str = "") -> str:
    """What ``error`` says, in a line that a person can act on. ``rights`` are what a Role has to give."""
    if isinstance(error, RequestRefused) and error.status == NOT_FOUND:
        return f"{why(error)} (is {named(resource)} installed? kubectl apply --server-side -f deploy/crds)"
    if isinstance(error, RequestRefused) and error.status == FORBIDDEN:
        return f"{why(error)} (bind a Role {rights}for {named(resource)} to this user)"
    return why(error)


Item = TypeVar("Item")

RETRY_S = 0.1
RETRY_MAX_S = 5.0
"""The pauses of discovery: a worker that joins or leaves should be heard of soon."""


class Follow(ListAndWatch[Item], ChangeFeed):
    """A :class:`~kvrouter.kube.informer.ListAndWatch` that runs in a task called ``name``."""

    def __init__(self, objects: Objects[Item], *, name: str, tick_s: float, quiet_s: float) -> None:
        super().__init__(objects, tick_s=tick_s, quiet_s=quiet_s, backoff=Backoff(RETRY_S, RETRY_MAX_S))
        self._name = name

    async def start(self) -> None:
        """Deliver what is there and go on watching; report a store that does not answer, and wait for it."""
        self._task = go_on(self.run(), name=self._name)
        began = asyncio.create_task(self.began.wait())
        try:
            # The task may end before it has listed anything, by a mistake of ours; it reports that itself.
            await asyncio.wait({began, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            began.cancel()
