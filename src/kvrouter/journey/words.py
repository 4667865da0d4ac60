"""The inputs and commands of a journey: everything that can happen to a request, and all that can be done."""

from dataclasses import dataclass
from enum import Enum, auto

from kvrouter.core.errors import KvrouterError
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import FinishReason, KvLoss, KvTransferParams, Leg


class State(Enum):
    """Where a request is."""

    ROUTING = auto()
    """It waits for a place: a worker, or a prefill and decode pair."""
    PREFILLING = auto()
    """Its prefill leg runs; decode waits for the answer (synchronous handoff)."""
    DECODING = auto()
    """Its last leg is sent and no token has come yet."""
    STREAMING = auto()
    """The client has tokens: from here only a resumable request can change workers."""
    DONE = auto()


class Shape(Enum):
    """How the legs of one attempt hang together."""

    AGGREGATED = auto()
    SYNCHRONOUS = auto()
    BOOTSTRAP = auto()


@dataclass(frozen=True, slots=True)
class Placed:
    """Workers were picked and booked."""

    shape: Shape


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """Routing refused."""

    error: KvrouterError


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prefill leg of a synchronous handoff ended; ``params`` say where its KV waits."""

    worker_id: WorkerId
    params: KvTransferParams | None


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens of this attempt came."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last leg ended as it should."""

    finish: FinishReason


@dataclass(frozen=True, slots=True)
class LegLost:
    """A worker could not be reached, was lost, stalled, or answered with a failure of its own."""

    leg: Leg
    worker_id: WorkerId
    why: str
    full: bool = False
    """It is alive, and takes no more for now."""
    repeated: bool = False
    """It had this very leg before: nothing is wrong with it, and the next attempt may go there."""
    blameless: bool = False
    """Nothing is known against it: it is leaving, or was no longer to be had."""


@dataclass(frozen=True, slots=True)
class KvLost:
    """The decode worker did not get the prefill worker's KV. Nothing is wrong with the decode worker, and the
    prefill worker may serve others: its way to this one is what failed.
    """

    prefill_worker_id: WorkerId
    decode_worker_id: WorkerId
    loss: KvLoss
    why: str


@dataclass(frozen=True, slots=True)
class LegRefused:
    """A worker refused the request for a reason that every worker would have: the client's mistake."""

    error: KvrouterError


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Nobody waits for the answer any more; or the answer is complete without the engine's consent."""

    reason: str


Input = Placed | NotPlaced | PrefillDone | FirstTokens | Finished | LegLost | KvLost | LegRefused | ClientLeft


class Way(Enum):
    """How an attempt may be placed."""

    USUAL = auto()
    """As routing decides: a pair where prefill workers are, else one worker for all of it."""
    OTHER_PREFILL = auto()
    """The same, without the prefill workers whose KV was lost."""
    WHOLE = auto()
    """One worker for all of it, although prefill workers are here: it needs nobody's KV."""


@dataclass(frozen=True, slots=True)
class Place:
    """Pick and book workers for a new attempt; never one of ``excluded``. The first of ``ways`` in which it
    can be placed is taken; ``kv_lost_from`` are the prefill workers whose KV was lost.
    """

    attempt: int
    excluded: frozenset[WorkerId] = frozenset()
    kv_lost_from: frozenset[WorkerId] = frozenset()
    ways: tuple[Way, ...] = (Way.USUAL,)


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """Open the prefill leg."""


@dataclass(frozen=True, slots=True)
class SendDecode:
    """Open the last leg; with ``params``, the KV of a synchronous prefill, decode may be picked again."""

    params: KvTransferParams | None


@dataclass(frozen=True, slots=True)
class NoteFirstToken:
    """Tell the ledger that this attempt's prefill is over."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Cancel every open leg of this attempt, free the KV that waits on engines, close its leases."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The client's answer is complete."""

    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The client gets this one error."""

    error: KvrouterError


Command = Place | SendPrefill | SendDecode | NoteFirstToken | Abandon | End | Fail
