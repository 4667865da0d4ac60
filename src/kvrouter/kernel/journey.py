"""The states of one request as a table: (state, input) → next state and commands.

::

                 Placed(aggregated | bootstrap)
    ROUTING ───────────────────────────────────────▶ DECODING ──FirstTokens──▶ STREAMING ──Finished──▶ DONE
       │  ▲  └─Placed(synchronous)─▶ PREFILLING ──PrefillDone──▶ ▲                 │
       │  └─LegLost (a new worker or pair), KvLost (prefilled again)─┴─────────────┘  (resumable only)
       └─NotPlaced─▶ DONE          ClientLeft, LegRefused, tries used up: from anywhere ─▶ DONE

A prefill leg that is refused, or that fails wherever it is sent, is left out: one worker does it all then.

Tokens are the one input that comes thousands of times: they are added to ``generated`` without a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any

from kvrouter.core.engine_answer import EngineAnswer
from kvrouter.core.errors import AllWorkersBusy, KvrouterError, RoutingRefused, WorkerFailed
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import FinishReason, KvLoss, KvTransferParams, Leg, Sampling


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


class Shape(StrEnum):
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
    """Nothing is known against it: it is leaving, was no longer to be had, or does not take this call."""
    answer: EngineAnswer | None = None
    """What its engine answered instead; the client gets the last one when the tries are used up."""
    taken: bool = False
    """It had the leg when it failed: it may be the request that does that to every engine."""


@dataclass(frozen=True, slots=True)
class KvLost:
    """The decode worker did not get the prefill worker's KV. Nothing is wrong with the decode worker, and the
    prefill worker may serve others: its way to this one is what failed.
    """

    prefill_worker_id: WorkerId
    decode_worker_id: WorkerId
    loss: KvLoss
    why: str
    answer: EngineAnswer | None = None


@dataclass(frozen=True, slots=True)
class LegRefused:
    """A worker refused the request for a reason that every worker would have: the client's mistake."""

    error: KvrouterError


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Nobody waits for the answer any more; or the answer is complete without the engine's consent."""

    reason: str


Input = Placed | NotPlaced | PrefillDone | FirstTokens | Finished | LegLost | KvLost | LegRefused | ClientLeft


class RetryPlan(Enum):
    """How an attempt may be placed."""

    USUAL = auto()
    """As routing decides: a pair where prefill workers are, else one worker for all of it."""
    OTHER_PREFILL = auto()
    """The same, without the prefill workers whose KV was lost."""
    WHOLE = auto()
    """One worker for all of it, although prefill workers are here: it needs nobody's KV."""


@dataclass(frozen=True, slots=True)
class Place:
    """Pick and book workers for a new attempt; never one of ``excluded``. The first of ``plans`` in which it
    can be placed is taken; ``kv_lost_from`` are the prefill workers whose KV was lost.
    """

    attempt: int
    excluded: frozenset[WorkerId] = frozenset()
    kv_lost_from: frozenset[WorkerId] = frozenset()
    plans: tuple[RetryPlan, ...] = (RetryPlan.USUAL,)


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """Open the prefill leg."""


@dataclass(frozen=True, slots=True)
class SendDecode:
    """Open the last leg; with ``params``, the KV of a synchronous prefill, decode may be picked again."""

    params: KvTransferParams | None


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


Command = Place | SendPrefill | SendDecode | Abandon | End | Fail


REDISPATCHES_MAX = 2
"""How often a request may be sent again: one poisonous prompt must not kill a fleet."""

_MORE_THAN_TEXT = "a seed, penalties, a grammar, logprobs, tools, several answers or fields unknown here"


class JourneyError(KvrouterError):
    """An input that this state cannot have: the driver is wrong, not the request."""

    code = "journey_error"


class Journey:
    """One request, from its first routing to its one ending."""

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
        self.state = State.ROUTING
        self.is_plain = is_plain
        """Whether the client gets nothing but the text of ``generated``; set to False once it got more."""
        self.can_be_sent = True
        """Whether another attempt can be made: False once the client's call is no longer kept."""
        self.attempt = 0
        self.resumes = 0
        self.generated: list[int] = []
        """Output tokens of all attempts; they are what a resumed attempt goes on from."""
        self._sampling = sampling
        self._redispatches_max = redispatches_max
        self._excluded: frozenset[WorkerId] = frozenset()
        self._losses: list[LegLost] = []
        self._kv_losses: list[WorkerId] = []
        """The prefill workers whose KV was lost, one by one."""
        self._refusal: KvrouterError | None = None
        """Why a prefill worker refused its leg."""
        self._prefill_alone = prefill_alone
        """Whether another program sends the last leg."""

    @property
    def remaining_tokens(self) -> int:
        """How many output tokens are still wanted: ``max_tokens`` counts over all attempts."""
        return self._sampling.max_tokens - len(self.generated)

    @property
    def may_resume(self) -> bool:
        """Whether another worker could go on with the answer, once there are tokens to go on from."""
        return self.is_plain and self._sampling.resumable

    @property
    def _last_answer(self) -> EngineAnswer | None:
        """What the last engine said that answered with an error; None when every one was lost in silence."""
        return next((loss.answer for loss in reversed(self._losses) if loss.answer is not None), None)

    def begin(self) -> list[Command]:
        """The first command."""
        return [self._place()]

    def handle(self, event: Input) -> list[Command]:
        """Return what is to be done now; raise :class:`JourneyError` on an input that cannot be."""
        if self.state is State.DONE:
            return []
        row = _TABLE.get((self.state, type(event)))
        if row is None:
            raise JourneyError(f"{type(event).__name__} cannot happen while {self.state.name}")
        return row(self, event)

    def _placed(self, event: Placed) -> list[Command]:
        match event.shape:
            case Shape.AGGREGATED:
                self.state = State.DECODING
                return [SendDecode(None)]
            case Shape.BOOTSTRAP:
                self.state = State.DECODING
                return [SendPrefill(), SendDecode(None)]
            case Shape.SYNCHRONOUS:
                self.state = State.PREFILLING
                return [SendPrefill()]

    def _not_placed(self, event: NotPlaced) -> list[Command]:
        return self._fail(self._with_cause(event.error))

    def _with_cause(self, refused: KvrouterError) -> KvrouterError:
        """A refusal after a loss reports the loss: that nobody else is left is only its consequence."""
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
        self.state = State.DECODING
        return [SendDecode(event.params)]

    def _first_tokens(self, _event: FirstTokens) -> list[Command]:
        self.state = State.STREAMING
        return []

    def _finished(self, event: Finished) -> list[Command]:
        self.state = State.DONE
        return [Abandon("finished"), End(event.finish)]

    def _lost(self, event: LegLost) -> list[Command]:
        if not event.repeated:
            self._excluded |= {event.worker_id}
        return self._again(event)

    def _kv_lost(self, event: KvLost) -> list[Command]:
        """Prefill again. Nobody is excluded: the decode worker did its part, and the prefill worker may be
        the only one.
        """
        self._kv_losses.append(event.prefill_worker_id)
        why = f"worker {event.decode_worker_id} did not get its KV: {event.why}"
        return self._again(LegLost(Leg.PREFILL, event.prefill_worker_id, why, answer=event.answer))

    def _again(self, event: LegLost) -> list[Command]:
        self._losses.append(event)
        if self.attempt >= self._redispatches_max:
            return self._fail(
                WorkerFailed(
                    f"worker {event.worker_id} failed ({event.why}); "
                    f"it was try {self.attempt + 1} of {self._redispatches_max + 1}",
                    answer=self._last_answer,
                )
            )
        if not self.can_be_sent:
            return self._fail(
                WorkerFailed(
                    f"worker {event.worker_id} failed ({event.why}); the request cannot be sent again: its "
                    "body was dropped to keep the bodies of others (retry_bodies_full)",
                    answer=self._last_answer,
                )
            )
        self.attempt += 1
        self.state = State.ROUTING
        return [Abandon(event.why), self._place()]

    def _place(self) -> Place:
        return Place(self.attempt, self._excluded, frozenset(self._kv_losses), self._plans())

    def _plans(self) -> tuple[RetryPlan, ...]:
        """The best way first: after a first loss of KV another prefill worker, or the same once more. Who
        lost it twice rarely has a third pair that works; one worker alone does, and is the last try. So it is
        with prefill legs that failed.
        """
        if self._prefill_alone:
            return (RetryPlan.USUAL,)
        if not self._kv_losses:
            failed = sum(
                lost.leg is Leg.PREFILL and not (lost.full or lost.repeated) for lost in self._losses
            )
            if self._refusal is not None or failed > 1 or (failed and self.attempt >= self._redispatches_max):
                return (RetryPlan.WHOLE, RetryPlan.USUAL)
            return (RetryPlan.USUAL, RetryPlan.WHOLE) if failed else (RetryPlan.USUAL,)
        if self.attempt >= self._redispatches_max:
            return (RetryPlan.WHOLE, RetryPlan.OTHER_PREFILL, RetryPlan.USUAL)
        if len(self._kv_losses) == 1:
            return (RetryPlan.OTHER_PREFILL, RetryPlan.USUAL, RetryPlan.WHOLE)
        return (RetryPlan.OTHER_PREFILL, RetryPlan.WHOLE, RetryPlan.USUAL)

    def _lost_while_streaming(self, event: LegLost) -> list[Command]:
        if event.leg is Leg.PREFILL:
            return []  # decode has its KV: what becomes of the prefill worker no longer matters here
        if self.remaining_tokens <= 0 and self.is_plain:
            self.state = State.DONE
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
        """A prefill leg is not what the client wrote: one worker is given all of that, and answers it."""
        if self._prefill_alone or self._refusal is not None or not self.can_be_sent:
            return self._fail(self._refusal or event.error)
        self._refusal = event.error
        self.attempt += 1
        self.state = State.ROUTING
        return [Abandon(event.error.code), self._place()]

    def _left(self, event: ClientLeft) -> list[Command]:
        self.state = State.DONE
        return [Abandon(event.reason)]

    def _fail(self, error: KvrouterError) -> list[Command]:
        self.state = State.DONE
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
