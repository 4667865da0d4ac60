"""The sync plane inside one process: a message reaches every router before ``publish`` returns."""

from collections.abc import Awaitable, Callable

from kvrouter.core.ids import RouterId
from kvrouter.core.replica_messages import SyncMessage
from kvrouter.transports.sync.port import MessageSink


class MemorySyncTransport:
    """Every router of one process shares it. Use it from one event loop.

    Delivery is a plain call for each router, so there is no queue here that could fill.
    """

    def __init__(self) -> None:
        self._sinks: dict[RouterId, MessageSink] = {}

    def publish(self, message: SyncMessage, *, to: RouterId | None = None) -> bool:
        """Hand a message to every router, or to one."""
        for router_id, on_message in tuple(self._sinks.items()):
            if to is None or to == router_id:
                on_message(message)
        return True

    async def subscribe(self, router_id: RouterId, on_message: MessageSink) -> Callable[[], Awaitable[None]]:
        """Begin to deliver to the router; return what ends it."""
        self._sinks[router_id] = on_message

        async def end() -> None:
            self._sinks.pop(router_id, None)

        return end
