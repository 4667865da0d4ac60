"""The state machine of one request, as a table: (state, input) → next state and commands.

::

                 Placed(aggregated | bootstrap)
    ROUTING ───────────────────────────────────────▶ DECODING ──FirstTokens──▶ STREAMING ──Finished──▶ DONE
       │  ▲  └─Placed(synchronous)─▶ PREFILLING ──PrefillDone──▶ ▲                 │
       │  └─LegLost (a new worker or pair), KvLost (prefilled again)─┴─────────────┘  (resumable only)
       └─NotPlaced─▶ DONE          ClientLeft, LegRefused, tries used up: from anywhere ─▶ DONE

When a prefill leg is refused, or fails repeatedly, the request continues aggregated on one worker.

Tokens are the only input that arrives thousands of times: they are added to ``generated`` without a row.
"""

from collections.abc import Callable
from enum import Enum, StrEnum, auto
from typing import Any

from msgspec import Struct

from kvrouter.core.engine_answer import EngineAnswer
from kvrouter.core.errors import AllWorkersBusy, KvrouterError, RetryBodiesFull, RoutingRefused, WorkerFailed
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import FinishReason, KvTransferParams, Leg, Sampling


class State(Enum):
    """The state of a request."""

    __hash__ = object.__hash__  # that of Enum is a call of Python code

    ROUTING = auto()
    """It waits to be placed on a worker, or on a prefill and decode pair."""
    PREFILLING = auto()
    """Its prefill leg runs; decode waits for the answer (synchronous handoff)."""
    DECODING = auto()
    """Its last leg was sent, and its first token has not arrived yet."""
    STREAMING = auto()
    """The client has tokens: from here only a resumable request can change workers."""
    DONE = auto()


_ROUTING, _PREFILLING, _DECODING, _STREAMING, _DONE = State
"""Constants, because access to an enumeration's members is slow before Python 3.12."""


class Shape(StrEnum):
    """How the legs of one attempt are connected."""

    AGGREGATED = auto()
    SYNCHRONOUS = auto()
    BOOTSTRAP = auto()


class Placed(Struct, frozen=True):
    """Workers were picked and booked."""

    shape: Shape


class NotPlaced(Struct, frozen=True):
    """Routing refused."""

    error: KvrouterError


class PrefillDone(Struct, frozen=True):
    """The prefill leg of a synchronous handoff ended; ``params`` describe where its KV waits."""

    worker_id: WorkerId
    params: KvTransferParams | None


class FirstTokens(Struct, frozen=True):
    """The first tokens of this attempt arrived."""


class Finished(Struct, frozen=True):
    """The last leg completed."""

    finish: FinishReason


class LegLost(Struct, frozen=True):
    """A leg failed: its worker was unreachable, lost or stalled, or answered with a failure of its own."""

    leg: Leg
    worker_id: WorkerId
    why: str
    full: bool = False
    """The worker is alive, but accepts no more requests for now."""
    repeated: bool = False
    """The worker already had this leg, or did not get KV that it was to fetch: it is healthy, and the next
    attempt may use it.
    """
    blameless: bool = False
    """The worker is not at fault: it is leaving, was unreachable, or does not accept this call."""
    shutting_down: bool = False
    """The worker takes no legs now and had nothing of this one: that is no try, so that a fleet of which many
    leave at once loses no request. A request gets one such answer of each worker at most.
    """
    answer: EngineAnswer | None = None
    """The engine's error answer; the client gets the last one when the tries are used up."""
    taken: bool = False
    """The worker had accepted the leg when it failed: the request may be the cause."""


class KvLost(Struct, frozen=True):
    """The decode worker did not get the prefill worker's KV. The decode worker is healthy, and the prefill
    worker may serve others: the connection between the two failed.
    """

    prefill_worker_id: WorkerId
    decode_worker_id: WorkerId
    why: str
    answer: EngineAnswer | None = None


class LegRefused(Struct, frozen=True):
    """A worker refused the request for a reason that every worker would have: the client's mistake."""

    error: KvrouterError


class ClientLeft(Struct, frozen=True):
    """The client no longer waits, or its answer is complete before the engine ended."""

    reason: str


Input = Placed | NotPlaced | PrefillDone | FirstTokens | Finished | LegLost | KvLost | LegRefused | ClientLeft


class RetryPlan(Enum):
    """How an attempt may be placed."""

    __hash__ = object.__hash__  # as that of State

    USUAL = auto()
    """As routing decides: a pair if there are prefill workers, else one worker."""
    OTHER_PREFILL = auto()
    """As usual, without the prefill workers whose KV was lost."""
    AGGREGATED = auto()
    """One worker for the full request even if there are prefill workers: no KV is transferred."""


_USUAL = (RetryPlan.USUAL,)
"""The plans of a request that has not failed."""


class Place(Struct, frozen=True):
    """Pick and book workers for a new attempt, without the ``excluded`` ones, under the first of ``plans``
    that can be placed; ``kv_lost_from`` are the prefill workers whose KV was lost.
    """

    attempt: int
    excluded: frozenset[WorkerId] = frozenset()
    kv_lost_from: frozenset[WorkerId] = frozenset()
    plans: tuple[RetryPlan, ...] = _USUAL


class SendPrefill(Struct, frozen=True):
    """Send the prefill leg."""


class SendDecode(Struct, frozen=True):
    """Send the last leg; with the ``params`` of a synchronous prefill, decode may be picked again."""

    params: KvTransferParams | None


class Abandon(Struct, frozen=True):
    """Cancel every open leg of this attempt, free KV that waits on engines, and close its leases."""

    reason: str


class End(Struct, frozen=True):
    """The client's answer is complete."""

    finish: FinishReason


class Fail(Struct, frozen=True):
    """End the request with this error."""

    error: KvrouterError


Command = Place | SendPrefill | SendDecode | Abandon | End | Fail


REDISPATCHES_MAX = 2
"""The most times that a failed request is sent again: one harmful prompt must not crash a fleet."""

_MORE_THAN_TEXT = "a seed, penalties, a grammar, logprobs, tools, several answers or fields unknown here"


class JourneyError(KvrouterError):
    """An input is impossible in this state: the driver has a bug."""

    code = "journey_error"


class Journey:
    """One request, from its first routing to its single ending."""

    __slots__ = (
        "_excluded",
        "_kv_losses",
        "_losses",
        "_prefill_alone",
        "_redispatches_max",
        "_refusal",
        "_sampling",
        "attempt",
        "can_be_sent",
        "generated",
        "is_plain",
        "resumes",
        "state",
    )

    def __init__(
        self,
        sampling: Sampling,
        *,
        redispatches_max: int = REDISPATCHES_MAX,
        is_plain: bool = True,
        prefill_alone: bool = False,
    ) -> None:
        self.state = _ROUTING
        self.is_plain = is_plain
        """Whether the client gets only the text of ``generated``; False once it got anything else."""
        self.can_be_sent = True
        """Whether another attempt can be made: False once the client's call is no longer kept."""
        self.attempt = 0
        self.resumes = 0
        self.generated: list[int] = []
        """The output tokens of all attempts, from which a resumed attempt continues."""
        self._sampling = sampling
        self._redispatches_max = redispatches_max
        self._excluded: frozenset[WorkerId] = frozenset()
        self._losses: list[LegLost] = []
        self._kv_losses: list[WorkerId] = []
        """The prefill workers whose KV was lost, one entry for each loss."""
        self._refusal: KvrouterError | None = None
        """The error with which a prefill worker refused its leg; None if it did not."""
        self._prefill_alone = prefill_alone
        """Whether another program sends the last leg."""

    @property
    def remaining_tokens(self) -> int:
        """The number of output tokens still to generate: ``max_tokens`` counts over all attempts."""
        return self._sampling.max_tokens - len(self.generated)

    @property
    def may_resume(self) -> bool:
        """Whether another worker could continue the answer, once there are tokens to continue from."""
        return self.is_plain and self._sampling.resumable

    @property
    def _last_answer(self) -> EngineAnswer | None:
        """The last error answer of an engine; None when every leg was lost without one."""
        return next((loss.answer for loss in reversed(self._losses) if loss.answer is not None), None)

    @property
    def _failed_tries(self) -> int:
        return sum(not loss.shutting_down for loss in self._losses)

    @property
    def may_pull_kv(self) -> bool:
        """Whether its prefill leg may fetch KV: in the first attempt, if another one computes where that
        fails.
        """
        return self.attempt == 0 < self._redispatches_max and self.can_be_sent

    def begin(self) -> list[Command]:
        """Return the first command."""
        return [self._place()]

    def handle(self, event: Input) -> list[Command]:
        """Return the commands for an input; raise :class:`JourneyError` if it is impossible in this state."""
        if self.state is _DONE:
            return []
        row = _TABLE.get((self.state, type(event)))
        if row is None:
            raise JourneyError(f"{type(event).__name__} cannot happen while {self.state.name}")
        return row(self, event)

    def _placed(self, event: Placed) -> list[Command]:
        match event.shape:
            case Shape.AGGREGATED:
                self.state = _DECODING
                return [SendDecode(None)]
            case Shape.BOOTSTRAP:
                self.state = _DECODING
                return [SendPrefill(), SendDecode(None)]
            case Shape.SYNCHRONOUS:
                self.state = _PREFILLING
                return [SendPrefill()]

    def _not_placed(self, event: NotPlaced) -> list[Command]:
        return self._fail(self._with_cause(event.error))

    def _with_cause(self, refused: KvrouterError) -> KvrouterError:
        """Report an earlier loss instead of the routing refusal that follows from it."""
        if self._refusal is not None and not self._losses:
            return self._refusal
        if not self._losses or not isinstance(refused, RoutingRefused):
            return refused
        lost = self._losses[-1]
        kind = AllWorkersBusy if all(each.full for each in self._losses) else type(refused)
        error = kind(
            f"worker {lost.worker_id} failed ({lost.why}); after that, {refused.message}",
            refusals=refused.refusals,
            role=refused.role,
            domain=refused.domain,
            retry_after_s=refused.retry_after_s,
        )
        error.answer = self._last_answer
        return error

    def _prefill_done(self, event: PrefillDone) -> list[Command]:
        if event.params is None:
            return self._lost(
                LegLost(Leg.PREFILL, event.worker_id, "its prefill answer carries no kv_transfer_params")
            )
        self.state = _DECODING
        return [SendDecode(event.params)]

    def _first_tokens(self, _event: FirstTokens) -> list[Command]:
        self.state = _STREAMING
        return []

    def _finished(self, event: Finished) -> list[Command]:
        self.state = _DONE
        return [Abandon("finished"), End(event.finish)]

    def _lost(self, event: LegLost) -> list[Command]:
        if not event.repeated:
            self._excluded |= {event.worker_id}
        return self._again(event)

    def _kv_lost(self, event: KvLost) -> list[Command]:
        """Prefill again, without excluding a worker: the prefill worker may be the only one."""
        self._kv_losses.append(event.prefill_worker_id)
        why = f"worker {event.decode_worker_id} did not get its KV: {event.why}"
        return self._again(LegLost(Leg.PREFILL, event.prefill_worker_id, why, answer=event.answer))

    def _again(self, event: LegLost) -> list[Command]:
        self._losses.append(event)
        if self._failed_tries > self._redispatches_max:
            return self._fail(
                WorkerFailed(
                    f"worker {event.worker_id} failed ({event.why}); "
                    f"it was try {self._failed_tries} of {self._redispatches_max + 1}",
                    answer=self._last_answer,
                )
            )
        if not self.can_be_sent:
            kind = RetryBodiesFull if event.full or event.shutting_down else WorkerFailed
            return self._fail(
                kind(
                    f"worker {event.worker_id} failed ({event.why}); the request cannot be sent again: its "
                    "body was dropped to keep the bodies of others (retry_bodies_full)",
                    answer=self._last_answer,
                )
            )
        self.attempt += 1
        self.state = _ROUTING
        return [Abandon(event.why), self._place()]

    def _place(self) -> Place:
        return Place(self.attempt, self._excluded, frozenset(self._kv_losses), self._plans())

    def _plans(self) -> tuple[RetryPlan, ...]:
        """Return the retry plans, the best first. After a first loss of KV: another prefill worker, or the
        same again. After a second loss another pair rarely works, but one aggregated worker does, so it comes
        before the usual plan, and first on the last try. Failed prefill legs are treated likewise.
        """
        has_failed = self._losses or self._kv_losses or self._refusal is not None
        if self._prefill_alone or not has_failed:
            return _USUAL
        is_last = self._failed_tries >= self._redispatches_max
        if not self._kv_losses:
            failed = sum(
                lost.leg is Leg.PREFILL and not (lost.full or lost.repeated) for lost in self._losses
            )
            if self._refusal is not None or failed > 1 or (failed and is_last):
                return (RetryPlan.AGGREGATED, RetryPlan.USUAL)
            return (RetryPlan.USUAL, RetryPlan.AGGREGATED) if failed else _USUAL
        if is_last:
            return (RetryPlan.AGGREGATED, RetryPlan.OTHER_PREFILL, RetryPlan.USUAL)
        if len(self._kv_losses) == 1:
            return (RetryPlan.OTHER_PREFILL, RetryPlan.USUAL, RetryPlan.AGGREGATED)
        return (RetryPlan.OTHER_PREFILL, RetryPlan.AGGREGATED, RetryPlan.USUAL)

    def _lost_while_streaming(self, event: LegLost) -> list[Command]:
        if event.leg is Leg.PREFILL:
            return []  # decode has its KV: the prefill worker is no longer needed
        if self.remaining_tokens <= 0 and self.is_plain:
            self.state = _DONE
            return [Abandon(event.why), End(FinishReason.LENGTH)]
        if not (self.may_resume and self.generated):
            return self._fail(
                WorkerFailed(
                    f"worker {event.worker_id} failed after {len(self.generated)} tokens ({event.why}), and "
                    f"this request cannot go on elsewhere: {self._why_not_resumable()}",
                    answer=event.answer,
                )
            )
        self.resumes += 1
        return self._lost(event)

    def _why_not_resumable(self) -> str:
        if self.may_resume:
            return "its answer has begun, and brought no token to go on from"
        return f"it has {'a seed, penalties, a grammar or logprobs' if self.is_plain else _MORE_THAN_TEXT}"

    def _refused(self, event: LegRefused) -> list[Command]:
        return self._fail(event.error)

    def _prefill_refused(self, event: LegRefused) -> list[Command]:
        """Retry aggregated: one worker now gets the client's call itself, which a prefill leg is not."""
        if self._prefill_alone or self._refusal is not None or not self.can_be_sent:
            return self._fail(self._refusal or event.error)
        self._refusal = event.error
        self.attempt += 1
        self.state = _ROUTING
        return [Abandon(event.error.code), self._place()]

    def _left(self, event: ClientLeft) -> list[Command]:
        self.state = _DONE
        return [Abandon(event.reason)]

    def _fail(self, error: KvrouterError) -> list[Command]:
        self.state = _DONE
        return [Abandon(error.code), Fail(error)]


_Row = Callable[[Journey, Any], list[Command]]

_TABLE: dict[tuple[State, type[Input]], _Row] = {
    (State.ROUTING, Placed): Journey._placed,
    (State.ROUTING, NotPlaced): Journey._not_placed,
    (State.ROUTING, ClientLeft): Journey._left,
    (State.PREFILLING, PrefillDone): Journey._prefill_done,
    (State.PREFILLING, LegLost): Journey._lost,
    (State.PREFILLING, LegRefused): Journey._prefill_refused,
    (State.PREFILLING, ClientLeft): Journey._left,
    (State.DECODING, FirstTokens): Journey._first_tokens,
    (State.DECODING, Finished): Journey._finished,
    (State.DECODING, LegLost): Journey._lost,
    (State.DECODING, KvLost): Journey._kv_lost,
    (State.DECODING, LegRefused): Journey._refused,
    (State.DECODING, ClientLeft): Journey._left,
    (State.STREAMING, Finished): Journey._finished,
    (State.STREAMING, LegLost): Journey._lost_while_streaming,
    (State.STREAMING, LegRefused): Journey._refused,
    (State.STREAMING, ClientLeft): Journey._left,
}
