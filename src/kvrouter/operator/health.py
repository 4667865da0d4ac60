"""Whether a replica is well, and whether it is ready: what its probes tell kubelet."""

import asyncio


class Health:
    """What a replica waits for before it is ready, and the tasks that it is nothing without.

    A replica that follows is ready too. What has been there once counts as there: a cluster that does not
    answer any more is no reason to take replicas out of the Service, or to start them anew.
    """

    def __init__(self) -> None:
        self._waits: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def waits_for(self, what: str, why: str) -> None:
        """Not ready until :meth:`has` of ``what``; ``why`` not yet."""
        self._waits[what] = why

    def waits_still(self, what: str, why: str) -> None:
        """``why`` not yet, if it was never there."""
        if what in self._waits:
            self._waits[what] = why

    def has(self, what: str) -> None:
        """``what`` is there."""
        self._waits.pop(what, None)

    def needs(self, what: str, task: asyncio.Task[None]) -> None:
        """Not well once ``task`` has ended."""
        self._tasks[what] = task

    def why_not_ready(self) -> str | None:
        """Return one line; None when it is ready."""
        return "; ".join(f"{what}: {why}" for what, why in self._waits.items()) or None

    def why_not_well(self) -> str | None:
        """Return one line; None when it is well."""
        return "; ".join(f"{what} has ended" for what, task in self._tasks.items() if task.done()) or None
