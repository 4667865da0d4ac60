"""Typed ids, and random ones. An id is never a bare int or str in a signature."""

import os
from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", int)
"""An engine instance, unique in its component; 0 ≤ id < :data:`WORKER_IDS`."""

WORKER_IDS = 2**63

DRAWN_WORKER_IDS = 2**53
"""Random worker ids are below this, so that JSON readers that parse numbers as floats keep them exact."""

DpRank = NewType("DpRank", int)
"""A data-parallel index inside one worker."""

Slot = NewType("Slot", int)
"""The dense index of a worker rank in one model's fleet; reused once that rank has left."""

RequestId = NewType("RequestId", str)
RouterId = NewType("RouterId", str)
"""One incarnation of one router process; random at every start."""

LeaseId = NewType("LeaseId", int)
ModelName = NewType("ModelName", str)
SequenceHash = NewType("SequenceHash", int)
EngineHash = NewType("EngineHash", int)
"""The engine's own id of a block: opaque, unsigned 64 bits."""

EventId = NewType("EventId", int)
Epoch = NewType("Epoch", int)
"""The id of one start of a worker's publisher; random, so that a restart never looks like a continuation."""

Taint = NewType("Taint", str)


class WorkerRank(NamedTuple):
    """A worker and one of its data-parallel ranks: the target of a routed request."""

    worker_id: WorkerId
    dp_rank: DpRank

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.dp_rank}"


class LeaseKey(NamedTuple):
    """The key of a lease: one leg of one request, booked by one router incarnation.

    ``leg_number`` counts the legs over all attempts of the request. Attempt ``n``, from 0, has two:
    2·n is its prefill leg, 2·n + 1 its decode or aggregated leg.
    """

    router_id: RouterId
    request_id: RequestId
    leg_number: int


class RandomHex:
    """Makes random hexadecimal texts, and asks the system for random bytes only once for many of them.

    Thread-safe. A forked process makes others than its parent. It lives as long as the process.
    """

    def __init__(self, digits: int, *, at_once: int = 256) -> None:
        self._digits = digits
        self._at_once = at_once
        self._made: list[str] = []
        os.register_at_fork(after_in_child=self._made.clear)

    def take(self) -> str:
        """Return a text that was not returned before."""
        try:
            return self._made.pop()
        except IndexError:
            text = os.urandom(self._digits * self._at_once // 2).hex()
            made = [text[at : at + self._digits] for at in range(0, len(text), self._digits)]
            last = made.pop()
            self._made.extend(made)
            return last


_REQUEST_IDS = RandomHex(32)


def new_request_id() -> RequestId:
    """Return a new unique request id."""
    return RequestId(_REQUEST_IDS.take())
