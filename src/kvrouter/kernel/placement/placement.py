"""A placement: the workers and leases of one attempt, with its request and its random draw."""

from collections.abc import Callable, Mapping

import msgspec
from msgspec import structs

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, WorkerId
from kvrouter.core.requests import DEFAULT_LEVEL, Bootstrap, Leg, ServiceLevel, TokenBuffer
from kvrouter.core.workers import KvPeer
from kvrouter.kernel.fleet.circuit import Circuit, Pair
from kvrouter.kernel.journey import RetryPlan, Shape
from kvrouter.kernel.placement.speeds import Expected
from kvrouter.kernel.placement.transfers import Transfer
from kvrouter.kernel.routing.interface import Decision, Pick, RouteRequest


class Draw(msgspec.Struct, frozen=True, gc=False):
    """The random draw of one decision and its booking: equal draws pick the same worker among equals."""

    seed: int
    """64 random bits, for the decision."""

    turn: int
    """Counts requests, for round-robin."""

    room: int
    """64 random bits, for the bootstrap room."""


class AttemptRequest(msgspec.Struct, frozen=True, gc=False):
    """The input of an attempt, with an option for each of its retry plans, always ``RetryPlan.USUAL``."""

    prompt: Prompt
    token_ids: TokenBuffer
    options: Mapping[RetryPlan, RouteRequest]
    shows_first_token: bool = True
    """False when the answer arrives in one piece, so that its first token is not visible."""
    is_sampled: bool = True
    """Whether its times count in the learned speeds; False when the client pins a worker, whose measured
    speed would depend on that client's calls alone.
    """
    client: int = 0
    """The client, as in :attr:`GenerateRequest.client`."""
    service_level: ServiceLevel = DEFAULT_LEVEL
    arrived_s: float | None = None
    """When the request arrived, on the clock of placement; None for an attempt after the first."""
    may_pull_kv: Callable[[], bool] | None = None
    """Returns, for a pair, whether its prefill leg may fetch KV from the decode worker: only for a prompt
    whose tokens are surely those that engines make of the call, since KV of other tokens gives a wrong
    answer. None where no leg may.
    """


class Placement(msgspec.Struct):
    """One attempt's workers and leases. ``decision`` changes when decode is picked again after prefill."""

    route_request: RouteRequest
    decision: Decision
    prompt: Prompt
    token_ids: TokenBuffer
    block_size: int
    shape: Shape
    draw: Draw
    """The random draw of the decision."""

    decode_address: str
    decode_context_tokens: int
    """The context length of the answering worker, in tokens."""

    decode_lease: LeaseId = LeaseId(0)
    """0 until it is booked."""

    prefill_address: str = ""
    prefill_lease: LeaseId | None = None
    kv_sender: KvPeer | None = None
    """The prefill worker as it was booked; None for an aggregated attempt."""
    bootstrap: Bootstrap | None = None
    has_begun: bool = False
    """Whether its answer has had output, and has not failed."""
    tries: tuple[tuple[WorkerId | Pair, Circuit], ...] = ()
    """The half-open circuits whose single request this is."""
    shows_first_token: bool = True
    is_sampled: bool = True
    client: int = 0
    """``shows_first_token``, ``is_sampled`` and ``client`` are those of the :class:`AttemptRequest`."""
    unseen_prefill: int = 0
    """The key in ``learned_costs.UnseenPrefills``; 0 when it has none."""
    expected: Expected | None = None
    """The prediction for its prompt at the prefilling rank; None when times are not predicted."""
    transfer: Transfer | None = None
    """The pair's pending KV transfer; None when it has ended or is not tracked."""
    trace_id: str = ""
    """The trace id of its request; empty when unknown."""
    is_counted: bool = False
    """Whether its first token has been counted."""
    sending_s: float = 0.0
    """How long sending its leg before the booking took, in seconds; 0 where it is sent later."""
    decision_s: float = 0.0
    """The duration of the decision and the booking without ``sending_s``, in seconds."""
    again_s: float | None = None
    """The duration of picking decode again, in seconds; None where it was picked once."""
    waited_s: float | None = None
    """The seconds that it waited in the admission queue; None where it did not."""
    first_token_s: float | None = None
    resumed_tokens: int = 0
    """The number of tokens that earlier attempts generated."""
    step_s: float = 0.0
    """The expected seconds of a decode step at its first token, on a rank of slowness 1."""
    decode_domains: Mapping[str, str] = {}
    prefill_domains: Mapping[str, str] = {}

    def compute_all(self) -> None:
        """Let the prefill worker compute what it was to fetch from the decode worker."""
        prefill = structs.replace(self.prefill_pick, pulled_blocks=0)
        self.decision = structs.replace(self.decision, prefill=prefill)

    def without_addresses(self, text: str) -> str:
        """Return ``text``, which a client may read, without the workers' addresses in it."""
        for address in (self.decode_address, self.prefill_address):
            if address:
                text = text.removeprefix(f"{address}: ").replace(address, "the worker")
        return text

    @property
    def prefill_pick(self) -> Pick:
        """The pick for the prefill leg; raises RuntimeError for an aggregated attempt."""
        decision = self.decision
        if decision.decode.leg is Leg.PREFILL:
            return decision.decode
        if decision.prefill is None:
            raise RuntimeError("an aggregated attempt has no prefill worker")
        return decision.prefill
