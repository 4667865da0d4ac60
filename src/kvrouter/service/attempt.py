"""One attempt of a request: its placement, times and timeouts, and its output."""

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from kvrouter.core.errors import RoutingRefused
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, WorkerId
from kvrouter.core.requests import Bootstrap, GenerateRequest, Leg, TokenBuffer
from kvrouter.fleet import Circuit, Pair
from kvrouter.journey.journey import Journey, LegLost, RetryPlan, Shape
from kvrouter.routing.request import Decision, Pick, RouteRequest
from kvrouter.transports.requests.port import EngineStream, TokenSink

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
        ways: Sequence[RetryPlan] = (RetryPlan.USUAL,),
    ) -> Placement:
        """Decide and book, in the first of ``ways`` in which somebody may take the request; wait as long as
        the settings allow when nobody may now. ``ways`` has ``RetryPlan.USUAL``.
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
        """What the engine really had cached, next to what was predicted; ``prompt_tokens``: its own count."""

    def release(self, placement: Placement) -> None:
        """Close the leases; idempotent."""


@dataclass(slots=True)
class Times:
    """When things happened, on the monotonic clock, in seconds."""

    begun_s: float
    placed_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None


@dataclass(slots=True)
class Attempt:
    """What one attempt holds; all of it is given back when the attempt is abandoned."""

    placement: Placement
    prefill: EngineStream | None = None
    prefill_task: asyncio.Task[None] | None = None
    decode: EngineStream | None = None
    lost: list[LegLost] = field(default_factory=list)
    prefill_sent_s: float = 0.0
    last_sent_s: float = 0.0
    """When its legs were sent, on the monotonic clock; the last leg is the one that answers."""


def wish_in(way: RetryPlan, usual: RouteRequest, kv_lost_from: frozenset[WorkerId]) -> RouteRequest:
    """Return what to ask for under one of the open retry plans; ``usual`` is what the request asks for."""
    match way:
        case RetryPlan.USUAL:
            return usual
        case RetryPlan.OTHER_PREFILL:
            return structs.replace(usual, excluded=usual.excluded | kv_lost_from)
        case RetryPlan.WHOLE:
            return structs.replace(usual, whole=True)


def decide_one_of(
    options: Mapping[RetryPlan, RouteRequest],
    decide: Callable[[RouteRequest, Prompt], Decision],
    prompt: Prompt,
) -> tuple[RouteRequest, Decision]:
    """Decide for the first option that is not refused, a last resort only where all others are; else raise
    the refusal of the usual one.
    """
    refusals: dict[RetryPlan, RoutingRefused] = {}
    last_resorts: list[tuple[RouteRequest, Decision]] = []
    for way, option in options.items():
        try:
            decision = decide(option, prompt)
        except RoutingRefused as refused:
            refusals[way] = refused
            continue
        if not decision.last_resort:
            return option, decision
        last_resorts.append((option, decision))
    if last_resorts:
        return last_resorts[0]
    raise refusals[RetryPlan.USUAL]


def route_request(
    request: GenerateRequest,
    prompt: Prompt,
    *,
    attempt: int,
    excluded: frozenset[WorkerId],
    has_lost_kv: bool = False,
) -> RouteRequest:
    """Return what routing needs to know of one attempt of ``request``.

    One that has lost no KV itself begins with what worked for others; after that its journey says what to
    try next.
    """
    return RouteRequest(
        request_id=request.request_id,
        isl_tokens=prompt.isl_tokens,
        total_blocks=prompt.total_blocks,
        constraints=request.constraints,
        override=request.override,
        pin=request.pin,
        prefill_pin=request.prefill_pin,
        excluded=excluded,
        attempt=attempt,
        whole_if_parted=not has_lost_kv,
        has_media=request.has_media,
        context_tokens=max(request.context_tokens, prompt.isl_tokens + 1) if request.context_tokens else 0,
    )


LATE_S = 0.1
"""A check that comes so much too late shows that this process stood still, not that a worker is silent."""


class TooLong(Enum):
    """What took too long."""

    REQUEST = auto()
    """The request as a whole."""
    PREFILL = auto()
    """The prefill leg of a pair, before the one that answers."""
    FIRST_TOKEN = auto()
    """The client's first token."""
    SILENCE = auto()
    """A worker that should go on with an answer: another one may."""


class Phase(Enum):
    """What is waited for."""

    FIRST_TOKEN = auto()
    PREFILLING = auto()
    """The same, and the prefill leg of a pair goes before the one that answers."""
    RESUMING = auto()
    """The client has tokens, and another worker prefills to go on."""
    STREAMING = auto()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a request may take to the end of its prefill leg, to its first token and to its end, and how
    long its stream may be silent before the worker counts as lost; in seconds.
    """

    prefill_s: float
    first_token_s: float
    between_tokens_s: float
    request_s: float


class SilenceWatch:
    """Calls ``on_too_long`` once each time a limit is reached. All moments are on the monotonic clock.

    Time that the client takes to read counts for no worker: only an open read is a worker's silence. Neither
    does time in which this process stood still: what came meanwhile waits to be read.
    """

    __slots__ = (
        "_began_s",
        "_check_s",
        "_loop",
        "_on_too_long",
        "_patience",
        "_timer",
        "heard_s",
        "is_reading",
        "phase",
    )

    def __init__(self, patience: Timeouts, on_too_long: Callable[[TooLong, float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        self._on_too_long = on_too_long
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = self._check_s = self.heard_s = time.monotonic()
        self.is_reading = False
        self.phase = Phase.FIRST_TOKEN

    @property
    def time_left_s(self) -> float:
        """How long the request may still take, in seconds."""
        return max(0.0, self._began_s + self._patience.request_s - time.monotonic())

    def enter(self, phase: Phase) -> None:
        """From now on this is waited for."""
        self.phase = phase
        self.heard_s = time.monotonic()
        self._arm()

    def stop(self) -> None:
        """Watch no longer, and drop the callback: what a request held goes with its last user."""
        self._disarm()
        self._on_too_long = _no_callback

    def _due(self) -> tuple[float, TooLong]:
        """When the next limit is reached, and which one it is."""
        patience = self._patience
        end_s = self._began_s + patience.request_s
        if self.phase is Phase.PREFILLING:
            limit_s, kind = self._began_s + patience.prefill_s, TooLong.PREFILL
        elif self.phase is Phase.FIRST_TOKEN:
            limit_s, kind = self._began_s + patience.first_token_s, TooLong.FIRST_TOKEN
        elif self.phase is Phase.RESUMING:
            limit_s, kind = self.heard_s + patience.first_token_s, TooLong.SILENCE
        else:
            limit_s, kind = self.heard_s + patience.between_tokens_s, TooLong.SILENCE
        return (end_s, TooLong.REQUEST) if end_s <= limit_s else (limit_s, kind)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._disarm()
        now_s = time.monotonic()
        wait_s = max(0.0, self._due()[0] - now_s)
        self._check_s = now_s + wait_s
        self._timer = self._loop.call_later(wait_s, self._check)

    def _check(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        if self.phase is Phase.STREAMING and not self.is_reading:
            self.heard_s = now_s  # it is the client who is slow
        due_s, kind = self._due()
        late_s = now_s - self._check_s
        if kind is TooLong.SILENCE and late_s > LATE_S:
            # as long as this process stood still, and as long again to read what came meanwhile
            self.heard_s = min(now_s, self.heard_s + 2.0 * late_s)
            due_s, kind = self._due()
        if now_s < due_s:
            self._arm()
        else:
            self._on_too_long(kind, now_s - self.heard_s)


def _no_callback(_kind: TooLong, _silent_s: float) -> None:
    """Whose watch it was has ended."""


class Output:
    """Notes what is generated, over all attempts of a request. What it does for a token is done for every
    token of every answer.
    """

    def __init__(self, journey: Journey, placer: Placer, watch: SilenceWatch) -> None:
        self.gaps_s = array("d")
        """Seconds between two arrivals of tokens: 8 bytes each, however long the answer is."""
        self._journey = journey
        self._placer = placer
        self._watch = watch
        self._placement: Placement | None = None
        self._token_s = 0.0
        self._tail_tokens = 0

    def begin(self, placement: Placement) -> None:
        """Another attempt: its prompt's partial block is filled on."""
        self._placement = placement
        self._tail_tokens = placement.prompt.isl_tokens % placement.block_size

    def first(self, token_ids: Sequence[int]) -> None:
        """An attempt's first tokens came: nobody waited for them since the last ones."""
        self._token_s = self._watch.heard_s = time.monotonic()
        self._count(token_ids)

    def more(self, token_ids: Sequence[int]) -> None:
        """More tokens came."""
        now_s = self._watch.heard_s = time.monotonic()
        self.gaps_s.append(now_s - self._token_s)
        self._token_s = now_s
        self._count(token_ids)

    def noting(self, sink: TokenSink) -> TokenSink:
        """Return a sink that notes tokens as :meth:`more` does, and hands them to ``sink``."""
        placement = self._held()
        watch, block_size = self._watch, placement.block_size
        note_gap_s, note_tokens, clock_s = self.gaps_s.append, self._journey.tokens, time.monotonic

        def take(token_ids: Sequence[int]) -> bool:
            now_s = watch.heard_s = clock_s()
            note_gap_s(now_s - self._token_s)
            self._token_s = now_s
            note_tokens(token_ids)
            self._tail_tokens += len(token_ids)
            if self._tail_tokens >= block_size:
                self._count_blocks(placement)
            return sink(token_ids)

        return take

    def _count(self, token_ids: Sequence[int]) -> None:
        placement = self._held()
        self._journey.tokens(token_ids)
        self._tail_tokens += len(token_ids)
        if self._tail_tokens >= placement.block_size:
            self._count_blocks(placement)

    def _count_blocks(self, placement: Placement) -> None:
        """Notify the ledger of each block of output that became full."""
        blocks, self._tail_tokens = divmod(self._tail_tokens, placement.block_size)
        self._placer.output_blocks(placement, blocks)

    def _held(self) -> Placement:
        if self._placement is None:
            raise RuntimeError("tokens came before the request was placed")
        return self._placement
