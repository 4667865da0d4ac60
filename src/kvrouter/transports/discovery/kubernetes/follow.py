"""A list-and-watch of an API server as a task: started, ended, awaited."""

import asyncio
from typing import TypeVar

from kvrouter.kube.informer import ListAndWatch, Objects
from kvrouter.transports.background import go_on

Item = TypeVar("Item")


class Follow(ListAndWatch[Item]):
    """A :class:`~kvrouter.kube.informer.ListAndWatch` that runs in a task called ``name``."""

    def __init__(self, objects: Objects[Item], *, name: str, tick_s: float, quiet_s: float) -> None:
        super().__init__(objects, tick_s=tick_s, quiet_s=quiet_s)
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
