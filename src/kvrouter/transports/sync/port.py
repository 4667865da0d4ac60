"""The port of replica sync: one-way, best effort; a replica that missed messages asks."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from kvrouter.core.ids import RouterId
from kvrouter.core.replica_messages import SyncMessage

MessageSink = Callable[[SyncMessage], None]
"""Called in the order of arrival; must not block."""


class SyncTransport(Protocol):
    """One router's connection to the others."""

    def publish(self, message: SyncMessage, *, to: RouterId | None = None) -> bool:
        """Send to every router, or to one; never waits. False when it was dropped: full, or disconnected.

        A message may come back to its sender, come twice, or not come at all.
        """

    async def subscribe(self, router_id: RouterId, on_message: MessageSink) -> Callable[[], Awaitable[None]]:
        """Subscribe to messages to all and to ``router_id``; return what ends that, after the last send."""
