"""The decision, as it travels with the request and is kept for whoever asks why."""

import msgspec

from kvrouter.core.constraints import RouterMode
from kvrouter.core.errors import Reason
from kvrouter.core.ids import RequestId, Slot, WorkerRank
from kvrouter.core.requests import Leg
from kvrouter.topology import TransferConstraint


class Pick(msgspec.Struct, frozen=True):
    """The worker rank that takes one leg, with the parts of its cost, in blocks.

    cost = (overlap_score_weight · prefill_blocks + decode_blocks + transfer_blocks) · multiplier.
    ``candidates`` counts the ranks that could have taken the leg. ``unseen`` is how many requests like this
    one were taken to be on their way, from other routers, to the ranks that are cheapest.
    """

    slot: Slot
    rank: WorkerRank
    leg: Leg
    overlap_blocks: int
    prefill_blocks: float
    decode_blocks: float
    transfer_blocks: float
    multiplier: float
    cost: float
    candidates: int
    unseen: int = 0


class Candidate(msgspec.Struct, frozen=True):
    """One row of an explanation: one worker rank that was asked for the leg, and its first refusal if any.

    Those are the ranks of the leg's role, or all ranks where none has it. The parts of the cost are those of
    :class:`Pick`; a refused rank has them too.
    """

    slot: Slot
    rank: WorkerRank
    leg: Leg
    overlap_blocks: int
    prefill_blocks: float
    decode_blocks: float
    transfer_blocks: float
    multiplier: float
    cost: float
    refused: Reason | None
    picked: bool


class Decision(msgspec.Struct, frozen=True):
    """Where one attempt of a request goes.

    ``prefill`` is None when the request is not split: ``decode`` then takes all of it, or its prefill leg
    where that is all that is decided, as ``decode.leg`` tells. ``constraint`` is what the prefill worker asks
    of any decode worker, and holds when decode is picked again. ``fallback_used`` says that no decode worker
    of the domain could take it; ``cross_domain`` that the pair is not known to share the policy's domain
    value; ``last_resort`` that nobody was left whose circuit is closed. ``rows`` is empty unless an
    explanation was asked for.
    """

    request_id: RequestId
    attempt: int
    mode: RouterMode
    decode: Pick
    prefill: Pick | None = None
    constraint: TransferConstraint | None = None
    fallback_used: bool = False
    cross_domain: bool = False
    last_resort: bool = False
    rows: tuple[Candidate, ...] = ()
