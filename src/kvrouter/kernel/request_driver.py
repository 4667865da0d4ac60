"""The driver of one request, without I/O: its attempts and bookings, the failures that count against workers,
and the blocks of output that become full.

The owner of a :class:`RequestDriver` sends, reads and cancels the legs, and waits: the router for requests
and for separate prefill legs, and the replay. Each input returns the commands to execute now. All times are
seconds of one monotonic clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from msgspec.structs import replace

from kvrouter.core.engine_answer import EngineAnswer
from kvrouter.core.errors import KvrouterError, RoutingRefused
from kvrouter.core.requests import KvLoss, Leg, Sampling
from kvrouter.kernel.fleet.circuit import Fault, Suspicion
from kvrouter.kernel.journey import (
    ClientLeft,
    Command,
    FirstTokens,
    Journey,
    KvLost,
    LegLost,
    LegRefused,
    Placed,
    PrefillDone,
    Shape,
    State,
)
from kvrouter.kernel.placement.circuits import Circuits
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.placement.placer import Placer

_PREFILL = Leg.PREFILL
"""A constant, because access to an enumeration's members is slow before Python 3.12."""

SILENT_SHARE = 0.5
"""The share of a request's deadline after which a worker without output counts as silent."""


@dataclass(slots=True)
class Attempt:
    """One attempt of a request, and its measurements. A leg that was never sent has the time 0."""

    placement: Placement
    placed_s: float = 0.0
    prefill_sent_s: float = 0.0
    prefill_done_s: float | None = None
    last_sent_s: float = 0.0
    """When the answering leg was sent."""
    first_token_s: float | None = None
    ended_s: float | None = None
    prefill_cached_tokens: int | None = None
    """The prompt tokens that the engine of a pair's prefill leg had cached, as it reports them."""
    cached_tokens: int | None = None
    """The prompt tokens that the engine of the answering leg had cached, as it reports them."""
    kv_bytes: int | None = None
    """The bytes of KV that the engine of a pair's decode leg fetched, as it reports them."""
    lost_leg: Leg | None = None
    kv_loss: KvLoss | None = None
    prefill_runs_in_parallel: bool = False
    """Whether the prefill leg runs in parallel with the decode leg (bootstrap handoff)."""
    prefill_lost: LegLost | None = None
    """The loss of a parallel prefill leg, reported when the decode leg fails."""
    prefill_refused: KvrouterError | None = None
    """The error with which the engine of a parallel prefill leg refused the call."""

    def sent_s(self, leg: Leg) -> float:
        """Return when ``leg`` was sent."""
        return self.prefill_sent_s if leg is Leg.PREFILL else self.last_sent_s


@dataclass(frozen=True, slots=True)
class _FailedLeg:
    """A leg that its worker failed at ``failed_s``."""

    attempt: Attempt
    leg: Leg
    failed_s: float


class FailedLegs:
    """The legs of one request that failed after their workers accepted them, before any output.

    The request's later attempts decide who is at fault: the request, if other workers fail it too, so that
    one request cannot open the circuits of healthy engines; or the workers that failed, if another one serves
    it.
    """

    __slots__ = ("_circuits", "_kv_lost", "_last", "_prefill")

    def __init__(self, circuits: Circuits) -> None:
        self._circuits = circuits
        self._prefill: list[_FailedLeg] = []
        self._last: list[_FailedLeg] = []
        self._kv_lost: list[Attempt] = []

    def add(self, attempt: Attempt, leg: Leg, now_s: float) -> None:
        """Add a leg that failed after its worker accepted it."""
        failed = self._prefill if leg is Leg.PREFILL else self._last
        failed.append(_FailedLeg(attempt, leg, now_s))

    def add_kv_lost(self, attempt: Attempt) -> None:
        """Add an attempt whose decode worker failed while fetching KV, without a reason."""
        self._kv_lost.append(attempt)

    def prefilled(self, now_s: float) -> None:
        """Count the failed prefill legs against their workers: another worker prefilled the request."""
        self._blame(self._prefill, Suspicion.SURE, now_s)

    def begun(self, now_s: float) -> None:
        """Count the failed last legs against their workers: another worker answers. Failed prefill legs were
        skipped, so they count as in :meth:`end`.
        """
        if not (self._prefill or self._last or self._kv_lost):
            return
        self._blame(self._last, Suspicion.SURE, now_s)
        for attempt in self._kv_lost:
            self._circuits.kv_lost(attempt.placement, KvLoss.BROKEN, since_s=attempt.last_sent_s, now_s=now_s)
        self.end(now_s)

    def end(self, now_s: float) -> None:
        """Count all remaining failures: the request is not sent again. Idempotent."""
        if not (self._prefill or self._last or self._kv_lost):
            return
        is_shared = len(self._prefill) + len(self._last) + len(self._kv_lost) > 1
        for failed in (self._prefill, self._last):
            self._blame(failed, Suspicion.SHARED if is_shared else Suspicion.ALONE, now_s)
        self._kv_lost.clear()

    def _blame(self, failed: list[_FailedLeg], suspicion: Suspicion, now_s: float) -> None:
        for each in failed:
            self._circuits.failed(
                each.attempt.placement,
                each.leg,
                Fault.LOST,
                since_s=each.attempt.sent_s(each.leg),
                now_s=now_s,
                failed_s=each.failed_s,
                suspicion=suspicion,
            )
        failed.clear()


AttemptT = TypeVar("AttemptT", bound=Attempt)


class RequestDriver(Generic[AttemptT]):
    """Drives the attempts of one request."""

    __slots__ = (
        "_block_size",
        "_failed_legs",
        "_generated",
        "_placer",
        "_silence",
        "_silent_since_s",
        "_tail_tokens",
        "attempt",
        "error",
        "journey",
        "last_loss",
        "placement",
    )

    def __init__(
        self,
        sampling: Sampling,
        placer: Placer,
        *,
        redispatches_max: int,
        is_plain: bool = True,
        prefill_alone: bool = False,
    ) -> None:
        self.journey = Journey(
            sampling, redispatches_max=redispatches_max, is_plain=is_plain, prefill_alone=prefill_alone
        )
        self.attempt: AttemptT | None = None
        """The current attempt; None before the first is placed, and after an attempt is released."""
        self.placement: Placement | None = None
        """The placement of the current or last attempt; None before the first decision."""
        self.error: KvrouterError | None = None
        """Why the request ends early while its legs may still run; their outcomes then report this error."""
        self.last_loss: LegLost | None = None
        """The last loss, because of which the request is sent again."""
        self._placer = placer
        self._failed_legs = FailedLegs(placer.circuits)
        self._generated = self.journey.generated
        self._silence: str | None = None
        self._silent_since_s = 0.0
        self._block_size = 0
        self._tail_tokens = 0

    @property
    def current_attempt(self) -> AttemptT:
        """The current attempt; raises RuntimeError when there is none."""
        if self.attempt is None:
            raise RuntimeError("a leg of a request that has no place")
        return self.attempt

    # Progress of legs

    def placed(self, attempt: AttemptT) -> Sequence[Command]:
        """Start an attempt whose workers are booked; output continues in the prompt's partial block."""
        placement = attempt.placement
        self.attempt, self.placement = attempt, placement
        placement.resumed_tokens = len(self._generated)
        self._block_size = placement.block_size
        self._tail_tokens = placement.prompt.isl_tokens % placement.block_size
        is_alone = placement.decision.decode.leg is _PREFILL
        return self.journey.handle(Placed(Shape.SYNCHRONOUS if is_alone else placement.shape))

    def prefilled(self, attempt: AttemptT, now_s: float) -> None:
        """Handle the end of the prefill leg, whose KV now waits."""
        attempt.prefill_done_s = now_s
        self._placer.prefill_done(attempt.placement, now_s=now_s)
        self._failed_legs.prefilled(now_s)

    def decode_sent(self, attempt: AttemptT, now_s: float) -> Sequence[Command]:
        """Handle that the last leg was sent; a failure of a parallel prefill leg takes effect now."""
        if attempt.prefill_refused is not None:
            return self.journey.handle(LegRefused(attempt.prefill_refused))
        if attempt.prefill_lost is not None:
            return self.lost(attempt, attempt.prefill_lost, now_s)
        return ()

    def first_tokens(self, now_s: float) -> None:
        """Handle the first tokens of the attempt; :meth:`prompt_computed` follows."""
        self.journey.handle(FirstTokens())
        self.current_attempt.first_token_s = now_s

    def prompt_computed(self, attempt: AttemptT, now_s: float) -> None:
        """Count the attempt's first tokens, which came at ``now_s``, for its workers: its prefill is over."""
        self._failed_legs.begun(now_s)
        self._placer.first_token(attempt.placement, now_s=now_s)

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        """Count output tokens. Called for every token of every answer."""
        self._generated.extend(token_ids)
        self._tail_tokens += len(token_ids)
        if self._tail_tokens >= self._block_size and self.placement is not None:
            blocks, self._tail_tokens = divmod(self._tail_tokens, self._block_size)
            self._placer.output_blocks(self.placement, blocks, now_s=now_s)

    # Failures of legs

    def prefill_ended(
        self, attempt: AttemptT, outcome: PrefillDone | LegLost | LegRefused, now_s: float
    ) -> Sequence[Command]:
        """Handle the outcome of a prefill leg that precedes the decode leg."""
        if isinstance(outcome, LegLost):
            return self.lost(attempt, outcome, now_s)
        if isinstance(outcome, LegRefused):
            placement = attempt.placement
            why = placement.without_addresses(f"it refused the prefill leg: {outcome.error.message}")
            self.last_loss = LegLost(Leg.PREFILL, placement.prefill_pick.rank.worker_id, why)
            attempt.lost_leg = Leg.PREFILL
        return self.journey.handle(outcome)

    def last_leg_lost(self, attempt: AttemptT, lost: LegLost, now_s: float) -> Sequence[Command]:
        """Handle the loss of the answering leg; a failure of the prefill leg has precedence as the reason."""
        if self.journey.state is State.DECODING:
            if attempt.prefill_refused is not None:
                return self.journey.handle(LegRefused(attempt.prefill_refused))
            if self._placer.prefill_worker_left(attempt.placement):
                pick = attempt.placement.prefill_pick  # the KV was lost with it: decode is not at fault
                lost = LegLost(pick.leg, pick.rank.worker_id, lost.why)
        return self.lost(attempt, lost, now_s)

    def lost(self, attempt: AttemptT, lost: LegLost, now_s: float) -> Sequence[Command]:
        """Handle the loss of a leg: count it against its worker, and send the request again or end it."""
        if self.error is not None:  # ended by this router: the deadline passed
            return self.journey.handle(ClientLeft(self.error.code))
        lost = attempt.prefill_lost or lost
        lost = replace(lost, why=attempt.placement.without_addresses(lost.why))
        if self._silence is not None:
            lost, self._silence = replace(lost, why=self._silence), None
            self._blame_silence(attempt, now_s)
        else:
            self.blame(attempt, lost, now_s)
        self.last_loss = lost
        attempt.lost_leg = lost.leg
        return self.journey.handle(lost)

    def kv_loss(
        self, attempt: AttemptT, loss: KvLoss, why: str, answer: EngineAnswer | None = None
    ) -> KvLost | None:
        """Return the input for KV that the decode worker did not get; None when the request was not split, or
        the decode leg had started to answer and so had its KV.
        """
        decision = attempt.placement.decision
        if decision.prefill is None or self.journey.state is not State.DECODING:
            return None
        attempt.kv_loss = loss
        sender, receiver = decision.prefill.rank.worker_id, decision.decode.rank.worker_id
        return KvLost(sender, receiver, attempt.placement.without_addresses(why), answer)

    def kv_lost(
        self, attempt: AttemptT, event: KvLost, loss: KvLoss, lost: LegLost, now_s: float
    ) -> Sequence[Command]:
        """Handle lost KV: it counts against the pair and not against a worker. If the prefill leg failed
        itself, that is the reason, and the decode leg counts as ``lost``.
        """
        if self.error is not None or attempt.prefill_lost is not None:
            return self.last_leg_lost(attempt, lost, now_s)
        self._silence = None
        placement = attempt.placement
        if not self._placer.prefill_worker_left(placement):
            if loss is KvLoss.BROKEN:  # the request itself may be at fault
                self._failed_legs.add_kv_lost(attempt)
            else:
                self._placer.circuits.kv_lost(placement, loss, since_s=attempt.last_sent_s, now_s=now_s)
        self.last_loss = LegLost(Leg.PREFILL, event.prefill_worker_id, event.why)
        return self.journey.handle(event)

    def decode_not_placed(self, attempt: AttemptT, refused: RoutingRefused) -> Sequence[Command]:
        """Handle that no decode worker may take the KV that waits: it is lost, and no worker is at fault."""
        if self.error is not None:
            return self.journey.handle(ClientLeft(self.error.code))
        sender, receiver = attempt.placement.prefill_pick.rank, attempt.placement.decision.decode.rank
        self.last_loss = LegLost(Leg.PREFILL, sender.worker_id, refused.message)
        return self.journey.handle(KvLost(sender.worker_id, receiver.worker_id, refused.message))

    def silent(self, why: str, since_s: float) -> None:
        """Record why its legs, which are cancelled now, are lost: no output arrived since ``since_s``."""
        self._silence, self._silent_since_s = why, since_s

    def late(self, limit_s: float, now_s: float) -> None:
        """Handle the deadline ``limit_s``, which ends the request. A worker that had it for a large part of
        that time without output counts as silent.
        """
        if self.attempt is not None and self.journey.state is not State.STREAMING:
            self._blame_silence(self.attempt, now_s, before_s=now_s - SILENT_SHARE * limit_s)

    # Ends of an attempt and of the request

    def release(self, now_s: float, *, shows_speed: bool = True) -> int:
        """Close the leases of the current attempt, whose legs were cancelled. Return the number of its output
        tokens; 0 without ``shows_speed``, when the reader was slower than the worker.
        """
        attempt, self.attempt = self.current_attempt, None
        attempt.ended_s = now_s
        placement = attempt.placement
        tokens = len(self._generated) - placement.resumed_tokens if shows_speed else 0
        self._placer.release(placement, now_s=now_s, tokens=tokens)
        return tokens

    def end(self, now_s: float) -> None:
        """End the request: remaining failures of its legs count now. Idempotent."""
        self._failed_legs.end(now_s)

    # Faults of workers

    def blame(self, attempt: AttemptT, lost: LegLost, now_s: float) -> None:
        """Count a lost leg against its worker, unless it is full, had the leg already, or is leaving."""
        if lost.full or lost.repeated or lost.blameless:
            return
        circuits, placement, leg = self._placer.circuits, attempt.placement, lost.leg
        has_begun = leg is not Leg.PREFILL and self.journey.state is State.STREAMING
        if lost.taken and not has_begun and not circuits.suspected(placement, leg, now_s=now_s):
            self._failed_legs.add(attempt, leg, now_s)
            return
        since_s = attempt.sent_s(leg)
        circuits.failed(placement, leg, Fault.LOST, since_s=since_s, now_s=now_s, has_begun=has_begun)

    def _blame_silence(self, attempt: AttemptT, now_s: float, *, before_s: float = inf) -> None:
        """Count silence against workers whose legs were sent before ``before_s``. If both legs of a pair run,
        it counts against both: a healthy worker recovers with its next request.
        """
        circuits, placement, state = self._placer.circuits, attempt.placement, self.journey.state
        waits_for_prefill = state is State.DECODING and attempt.prefill_runs_in_parallel
        if (state is State.PREFILLING or waits_for_prefill) and attempt.prefill_sent_s < before_s:
            since_s = attempt.prefill_sent_s
            circuits.failed(placement, Leg.PREFILL, Fault.SILENT, since_s=since_s, now_s=now_s)
        leg = placement.decision.decode.leg
        if state is State.DECODING and 0.0 < attempt.last_sent_s < before_s:
            circuits.failed(placement, leg, Fault.SILENT, since_s=attempt.last_sent_s, now_s=now_s)
        elif state is State.STREAMING:
            since_s = self._silent_since_s
            circuits.failed(placement, leg, Fault.SILENT, since_s=since_s, now_s=now_s, has_begun=True)
