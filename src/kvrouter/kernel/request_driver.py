"""Drives one request without I/O: its attempts, what is booked for them, which workers the loss of a leg
counts against, and the blocks of output that become full.

The owner of a :class:`RequestDriver` sends the legs, reads them, cancels them and waits: the service for its
requests and for prefill legs alone, and a replay. Each input returns the commands that are to be carried out
now. All moments are on one monotonic clock, in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Generic, TypeVar

from kvrouter.core.engine_answer import EngineAnswer
from kvrouter.core.errors import KvrouterError
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

SILENT_SHARE = 0.5
"""Who had a request for this part of its deadline, and brought nothing, is silent; else it came too late."""


@dataclass(slots=True)
class Attempt:
    """One attempt of a request, and what it leaves behind. A leg that was never sent has the moment 0."""

    placement: Placement
    placed_s: float = 0.0
    prefill_sent_s: float = 0.0
    prefill_done_s: float | None = None
    last_sent_s: float = 0.0
    """When the leg was sent that answers."""
    first_token_s: float | None = None
    ended_s: float | None = None
    prefill_cached_tokens: int | None = None
    """What the engine of a pair's prefill leg says that it had cached."""
    cached_tokens: int | None = None
    """The same of the leg that answers."""
    kv_bytes: int | None = None
    """What the engine of a pair's decode leg says that it fetched."""
    lost_leg: Leg | None = None
    kv_loss: KvLoss | None = None
    prefill_runs_in_parallel: bool = False
    """Whether its prefill leg runs while KV is fetched from it."""
    prefill_lost: LegLost | None = None
    """How such a leg was lost, which the decode leg shows."""
    prefill_refused: KvrouterError | None = None
    """What the engine of such a leg says of the call, which both engines are given."""

    def sent_s(self, leg: Leg) -> float:
        """When ``leg`` was sent."""
        return self.prefill_sent_s if leg is Leg.PREFILL else self.last_sent_s


@dataclass(frozen=True, slots=True)
class _FailedLeg:
    """A leg that a worker failed at ``failed_s``."""

    attempt: Attempt
    leg: Leg
    failed_s: float


class FailedLegs:
    """The legs of one request that workers had when they failed, before they brought anything.

    Whose fault that is shows when others are given the same: the request's where they fail too, so that no
    request can set aside engines that serve others; the workers' that failed where another one does it.
    """

    __slots__ = ("_circuits", "_kv_lost", "_last", "_prefill")

    def __init__(self, circuits: Circuits) -> None:
        self._circuits = circuits
        self._prefill: list[_FailedLeg] = []
        self._last: list[_FailedLeg] = []
        self._kv_lost: list[Attempt] = []

    def add(self, attempt: Attempt, leg: Leg, now_s: float) -> None:
        """A worker failed a leg that it had."""
        failed = self._prefill if leg is Leg.PREFILL else self._last
        failed.append(_FailedLeg(attempt, leg, now_s))

    def add_kv_lost(self, attempt: Attempt) -> None:
        """A decode worker failed a leg that fetches KV, and did not say why."""
        self._kv_lost.append(attempt)

    def prefilled(self, now_s: float) -> None:
        """A worker prefilled the request: those that failed to are at fault."""
        self._blame(self._prefill, Suspicion.SURE, now_s)

    def begun(self, now_s: float) -> None:
        """A worker answers: those that failed to are at fault. Prefill legs that failed were left out."""
        self._blame(self._last, Suspicion.SURE, now_s)
        for attempt in self._kv_lost:
            self._circuits.kv_lost(attempt.placement, since_s=attempt.last_sent_s, now_s=now_s)
        self.end(now_s)

    def end(self, now_s: float) -> None:
        """No other worker is given the request. Idempotent."""
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
    """One request: which attempt is under way, and what became of those before."""

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
        """The attempt under way; None before the first one is placed, and once one is released."""
        self.placement: Placement | None = None
        """Where the current (or last) attempt went; None before the first decision."""
        self.error: KvrouterError | None = None
        """Why the request ends early, although its legs may still run; whatever becomes of them says so."""
        self.last_loss: LegLost | None = None
        """Why the request is sent again."""
        self._placer = placer
        self._failed_legs = FailedLegs(placer.circuits)
        self._generated = self.journey.generated
        self._silence: str | None = None
        self._silent_since_s = 0.0
        self._block_size = 0
        self._tail_tokens = 0

    @property
    def held(self) -> AttemptT:
        """The attempt under way."""
        if self.attempt is None:
            raise RuntimeError("a leg of a request that has no place")
        return self.attempt

    # Legs that go well

    def placed(self, attempt: AttemptT) -> Sequence[Command]:
        """Workers are booked for another attempt: its prompt's partial block is filled on."""
        placement = attempt.placement
        self.attempt, self.placement = attempt, placement
        placement.resumed_tokens = len(self._generated)
        self._block_size = placement.block_size
        self._tail_tokens = placement.prompt.isl_tokens % placement.block_size
        is_alone = placement.decision.decode.leg is Leg.PREFILL
        return self.journey.handle(Placed(Shape.SYNCHRONOUS if is_alone else placement.shape))

    def prefilled(self, attempt: AttemptT, now_s: float) -> None:
        """The prefill leg came to its end, and its KV waits."""
        attempt.prefill_done_s = now_s
        self._placer.prefill_done(attempt.placement, now_s=now_s)
        self._failed_legs.prefilled(now_s)

    def decode_sent(self, attempt: AttemptT, now_s: float) -> Sequence[Command]:
        """The last leg was accepted: what became of the prefill leg meanwhile counts now."""
        if attempt.prefill_refused is not None:
            return self.journey.handle(LegRefused(attempt.prefill_refused))
        if attempt.prefill_lost is not None:
            return self.lost(attempt, attempt.prefill_lost, now_s)
        return ()

    def first_tokens(self, now_s: float) -> None:
        """The first tokens of the attempt came: its prefill is over."""
        self.journey.handle(FirstTokens())
        attempt = self.held
        attempt.first_token_s = now_s
        self._failed_legs.begun(now_s)
        self._placer.first_token(attempt.placement, now_s=now_s)

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        """Output tokens came. This is called for every token of every answer."""
        self._generated.extend(token_ids)
        self._tail_tokens += len(token_ids)
        if self._tail_tokens >= self._block_size and self.placement is not None:
            blocks, self._tail_tokens = divmod(self._tail_tokens, self._block_size)
            self._placer.output_blocks(self.placement, blocks, now_s=now_s)

    # Legs that fail

    def prefill_ended(
        self, attempt: AttemptT, outcome: PrefillDone | LegLost | LegRefused, now_s: float
    ) -> Sequence[Command]:
        """A prefill leg that goes before the decode leg ended like this."""
        if isinstance(outcome, LegLost):
            return self.lost(attempt, outcome, now_s)
        if isinstance(outcome, LegRefused):
            placement = attempt.placement
            why = placement.without_addresses(f"it refused the prefill leg: {outcome.error.message}")
            self.last_loss = LegLost(Leg.PREFILL, placement.prefill_pick.rank.worker_id, why)
            attempt.lost_leg = Leg.PREFILL
        return self.journey.handle(outcome)

    def last_leg_lost(self, attempt: AttemptT, lost: LegLost, now_s: float) -> Sequence[Command]:
        """The leg that answers is lost; the prefill leg's own failure, when there is one, is the better
        reason.
        """
        if self.journey.state is State.DECODING:
            if attempt.prefill_refused is not None:
                return self.journey.handle(LegRefused(attempt.prefill_refused))
            if self._placer.prefill_worker_left(attempt.placement):
                pick = attempt.placement.prefill_pick  # its KV went with it, by no fault of the decode worker
                lost = LegLost(pick.leg, pick.rank.worker_id, lost.why)
        return self.lost(attempt, lost, now_s)

    def lost(self, attempt: AttemptT, lost: LegLost, now_s: float) -> Sequence[Command]:
        """A leg is lost: it counts against its worker, and the request is sent again, or ends."""
        if self.error is not None:  # it was ended here: the deadline passed
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
        """Return what it means that the decode worker did not get the prefill worker's KV; None where it had
        all that it needed, so that no KV was due any more.
        """
        decision = attempt.placement.decision
        if decision.prefill is None or self.journey.state is not State.DECODING:
            return None
        attempt.kv_loss = loss
        sender, receiver = decision.prefill.rank.worker_id, decision.decode.rank.worker_id
        return KvLost(sender, receiver, loss, attempt.placement.without_addresses(why), answer)

    def kv_lost(self, attempt: AttemptT, event: KvLost, lost: LegLost, now_s: float) -> Sequence[Command]:
        """KV did not arrive: neither worker is to blame, but the way between them. The prefill leg's own
        failure, when there is one, is the better reason: then the decode leg is ``lost``.
        """
        if self.error is not None or attempt.prefill_lost is not None:
            return self.last_leg_lost(attempt, lost, now_s)
        self._silence = None
        placement = attempt.placement
        if not self._placer.prefill_worker_left(placement):
            if event.loss is KvLoss.BROKEN:  # also the name of a failure that may be the request's fault
                self._failed_legs.add_kv_lost(attempt)
            else:
                self._placer.circuits.kv_lost(placement, since_s=attempt.last_sent_s, now_s=now_s)
        self.last_loss = LegLost(Leg.PREFILL, event.prefill_worker_id, event.why)
        return self.journey.handle(event)

    def silent(self, why: str, since_s: float) -> None:
        """Nothing came since then: that is why the legs, which are cancelled now, are lost."""
        self._silence, self._silent_since_s = why, since_s

    def late(self, limit_s: float, now_s: float) -> None:
        """A limit of ``limit_s`` seconds was reached, which ends the request. A worker that had it for a good
        part of them, and brought nothing, is silent.
        """
        if self.attempt is not None and self.journey.state is not State.STREAMING:
            self._blame_silence(self.attempt, now_s, before_s=now_s - SILENT_SHARE * limit_s)

    # How an attempt, and the request, end

    def release(self, now_s: float, *, shows_speed: bool = True) -> int:
        """Close the leases of the attempt under way, whose legs were cancelled; return how many tokens it
        brought, 0 where they came no faster than they were read, and do not show a worker's speed.
        """
        attempt, self.attempt = self.held, None
        attempt.ended_s = now_s
        placement = attempt.placement
        tokens = len(self._generated) - placement.resumed_tokens if shows_speed else 0
        self._placer.release(placement, now_s=now_s, tokens=tokens)
        return tokens

    def end(self, now_s: float) -> None:
        """No other worker is given the request: what its legs failed counts now. Idempotent."""
        self._failed_legs.end(now_s)

    # Which worker is to blame

    def blame(self, attempt: AttemptT, lost: LegLost, now_s: float) -> None:
        """Count the loss of a leg against its worker. One that is full, had the leg already or is leaving did
        not fail.
        """
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
        """Nothing came in time, of legs that were sent before ``before_s``. Of a pair whose legs both still
        run, either may be what is waited for; the one that is well will show it with another request.
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
