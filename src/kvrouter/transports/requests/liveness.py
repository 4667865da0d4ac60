"""Liveness listeners of one worker."""

import asyncio
from collections.abc import Callable

from kvrouter.transports.requests.port import AliveSink


class LivenessListeners:
    """The followers of one worker. Each takes it to be alive until it is notified otherwise."""

    def __init__(self) -> None:
        self._sinks: dict[object, AliveSink] = {}
        self._notified_dead: set[object] = set()

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def add(self, on_alive: AliveSink) -> Callable[[], None]:
        """Notify ``on_alive`` from now on; return the function that ends it, idempotent."""
        key = object()
        self._sinks[key] = on_alive

        def end() -> None:
            self._sinks.pop(key, None)
            self._notified_dead.discard(key)

        return end

    def tell(self, *, is_alive: bool) -> None:
        """Notify those that do not know: never the same twice in a row. A follower's mistake is its own."""
        for key, on_alive in tuple(self._sinks.items()):
            if (key in self._notified_dead) is not is_alive or key not in self._sinks:
                continue
            if is_alive:
                self._notified_dead.discard(key)
            else:
                self._notified_dead.add(key)
            try:
                on_alive(is_alive)
            except Exception as error:  # noqa: BLE001 - the watch goes on, for the others too
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a follower of a worker failed", "exception": error}
                )
