"""``kvrouter`` with a router's ear that is not to be relied on: ``python -m tests.testing.lossy_frontend``.

Of each hundred batches that workers publish one is lost, one comes twice, and one comes late; chance says
which. What is asked of a worker is answered as ever.
"""

import os
import random
import sys
from collections.abc import Callable

from kvrouter.app.router_transports import CombinedSubscriber
from kvrouter.cli import main
from kvrouter.core.events import KvBatch
from kvrouter.transports.events.port import BatchSink, LoadSink

ROUND_BATCHES = 100
LATE_BATCHES = 3
"""A late batch comes after so many others."""


Subscribe = Callable[[CombinedSubscriber, BatchSink, LoadSink], Callable[[], None]]


class LossySubscriber:
    """Passes batches on, but for those that it draws."""

    def __init__(self, on_batch: BatchSink, seed: int) -> None:
        self._on_batch = on_batch
        self._random = random.Random(seed)
        self._late: list[tuple[int, KvBatch]] = []
        self._n_heard = 0
        self._lost = self._delayed = self._doubled = 0

    def __call__(self, batch: KvBatch) -> None:
        number = self._n_heard % ROUND_BATCHES
        if number == 0:
            self._lost, self._delayed, self._doubled = self._random.sample(range(ROUND_BATCHES), 3)
        self._n_heard += 1
        if number == self._lost:
            return
        if number == self._delayed:
            self._late.append((self._n_heard + LATE_BATCHES, batch))
            return
        self._on_batch(batch)
        if number == self._doubled:
            self._on_batch(batch)
        while self._late and self._late[0][0] <= self._n_heard:
            self._on_batch(self._late.pop(0)[1])


def lose_batches() -> None:
    """From now on every router of this process hears badly."""
    subscribe: Subscribe = CombinedSubscriber.subscribe

    def shaky(lanes: CombinedSubscriber, on_batch: BatchSink, on_load: LoadSink) -> Callable[[], None]:
        return subscribe(lanes, LossySubscriber(on_batch, os.getpid()), on_load)

    setattr(CombinedSubscriber, "subscribe", shaky)  # noqa: B010 - a method that is put in the place of another


if __name__ == "__main__":
    lose_batches()
    sys.exit(main())
