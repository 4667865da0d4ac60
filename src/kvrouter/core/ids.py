"""Typed ids. An id is never a bare int or str in a signature."""

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
