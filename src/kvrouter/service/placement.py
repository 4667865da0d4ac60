"""A placed attempt: the decision, and what was booked for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, WorkerId
from kvrouter.core.requests import Bootstrap, GenerateRequest, Leg, TokenBuffer
from kvrouter.fleet import Circuit, Pair
from kvrouter.journey.words import Shape, Way
from kvrouter.routing.decision import Decision, Pick
from kvrouter.routing.request import RouteRequest

if TYPE_CHECKING:
    from kvrouter.service.circuits import Circuits


@dataclass(slots=True)
class Placement:
    """One attempt's workers and leases. ``decision`` changes when decode is picked again after prefill."""

    wish: RouteRequest
    decision: Decision
    prompt: Prompt
    token_ids: TokenBuffer
    block_size: int
    shape: Shape
    seed: int
    """What the decision's draws came from."""

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
    decode_domains: Mapping[str, str] = field(default_factory=dict)
    prefill_domains: Mapping[str, str] = field(default_factory=dict)

    def without_addresses(self, text: str) -> str:
        """``text``, which a client may read, without the workers' addresses that may stand in it."""
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


class Placer(Protocol):
    """Picks and books workers for the attempts of requests, and keeps their leases true."""

    @property
    def circuits(self) -> "Circuits":
        """Who hears how the workers fare."""

    async def place(
        self,
        request: GenerateRequest,
        token_ids: TokenBuffer,
        *,
        attempt: int,
        excluded: frozenset[WorkerId],
        kv_lost_from: frozenset[WorkerId] = frozenset(),
        ways: Sequence[Way] = (Way.USUAL,),
    ) -> Placement:
        """Decide and book, in the first of ``ways`` in which somebody may take the request; wait as long as
        the settings allow when nobody may now. ``ways`` has ``Way.USUAL``.
        """

    def pick_decode_again(self, placement: Placement) -> None:
        """After a synchronous prefill: decide decode afresh under its constraint, and move the lease."""

    def prefill_worker_left(self, placement: Placement) -> bool:
        """Whether the pair's prefill worker left or does not answer, and the KV that waited there with it."""

    def prefill_done(self, placement: Placement) -> None:
        """The prefill leg ended: its tokens no longer load its worker."""

    def first_token(self, placement: Placement) -> None:
        """The first token came: load moves from prefill to decode."""

    def output_blocks(self, placement: Placement, blocks: int) -> None:
        """So many more blocks are full of output."""

    def note_cached_tokens(self, placement: Placement, cached_tokens: int, prompt_tokens: int | None) -> None:
        """What the engine really had cached, beside what was predicted; ``prompt_tokens``: its own count."""

    def release(self, placement: Placement) -> None:
        """Close the leases; idempotent."""
