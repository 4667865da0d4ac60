"""A placement: one attempt's workers and leases, with the request and the random draw it was made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, WorkerId
from kvrouter.core.requests import Bootstrap, Leg, TokenBuffer
from kvrouter.kernel.fleet.circuit import Circuit, Pair
from kvrouter.kernel.journey import RetryPlan, Shape
from kvrouter.kernel.placement.speeds import Expected
from kvrouter.kernel.placement.transfers import Transfer
from kvrouter.kernel.routing.request import Decision, Pick, RouteRequest


class Draw(NamedTuple):
    """What one decision and its booking draw from: the same draw gives the same worker among equals."""

    seed: int
    """64 random bits, for the decision."""

    turn: int
    """Counts requests, for round-robin."""

    room: int
    """64 random bits, for the bootstrap room."""


@dataclass(frozen=True, slots=True)
class AttemptRequest:
    """What an attempt asks for, under each of its open retry plans; ``RetryPlan.USUAL`` is one of them."""

    prompt: Prompt
    token_ids: TokenBuffer
    options: Mapping[RetryPlan, RouteRequest]
    shows_first_token: bool = True
    """False where the answer comes whole, from an engine that says nothing before."""
    teaches: bool = True
    """False where the client pins it: its calls alone would say how fast that worker is."""
    client: int = 0
    """Who asks, as :attr:`GenerateRequest.client` has it."""


@dataclass(slots=True)
class Placement:
    """One attempt's workers and leases. ``decision`` changes when decode is picked again after prefill."""

    wanted: RouteRequest
    decision: Decision
    prompt: Prompt
    token_ids: TokenBuffer
    block_size: int
    shape: Shape
    draw: Draw
    """What the decision drew from."""

    decode_address: str
    decode_lease: LeaseId
    decode_context_tokens: int
    """The context of the worker that answers, in tokens."""

    prefill_address: str = ""
    prefill_lease: LeaseId | None = None
    bootstrap: Bootstrap | None = None
    has_begun: bool = False
    """Whether its answer brought something, and has not failed."""
    tries: tuple[tuple[WorkerId | Pair, Circuit], ...] = ()
    """The half-open circuits that let it in, to see whether their workers are well."""
    shows_first_token: bool = True
    teaches: bool = True
    client: int = 0
    """These three are the attempt's."""
    unseen_prefill: int = 0
    """The key of ``UnseenPrefills`` in ``learned_costs``; 0 where it is not there."""
    expected: Expected | None = None
    """What its prompt was expected to take where it is prefilled; None where times are not predicted."""
    transfer: Transfer | None = None
    """The KV that its pair has still to move, where that is counted."""
    trace_id: str = ""
    """The trace that its request belongs to, empty where none is known."""
    is_counted: bool = False
    """Whether its first token is counted."""
    decision_s: float = 0.0
    """How long it took to decide and book, in seconds."""
    first_token_s: float | None = None
    resumed_tokens: int = 0
    """What earlier attempts had generated."""
    step_s: float = 0.0
    """What a decode step was expected to take, at its first token, on a rank of slowness 1."""
    decode_domains: Mapping[str, str] = field(default_factory=dict)
    prefill_domains: Mapping[str, str] = field(default_factory=dict)

    def without_addresses(self, text: str) -> str:
        """``text``, which a client may read, without the workers' addresses that may occur in it."""
        for address in (self.decode_address, self.prefill_address):
            if address:
                text = text.removeprefix(f"{address}: ").replace(address, "the worker")
        return text

    @property
    def prefill_pick(self) -> Pick:
        """The prefill worker: of a pair, or where prefill alone was decided."""
        decision = self.decision
        if decision.decode.leg is Leg.PREFILL:
            return decision.decode
        if decision.prefill is None:
            raise RuntimeError("an aggregated attempt has no prefill worker")
        return decision.prefill
