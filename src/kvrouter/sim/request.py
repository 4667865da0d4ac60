"""One replayed request: its journey, driven without waiting, as the service drives it over sockets."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrouter.core.errors import DeadlineExceeded, InvalidRequest, KvrouterError, RoutingRefused, Unavailable
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import (
    EngineChunk,
    EngineRequest,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    Leg,
    TokenBuffer,
)
from kvrouter.core.workers import WorkerCard
from kvrouter.fleet import Fault
from kvrouter.journey import (
    Abandon,
    ClientLeft,
    Command,
    End,
    Fail,
    Finished,
    FirstTokens,
    Journey,
    KvLost,
    LegLost,
    LegRefused,
    NoteFirstToken,
    NotPlaced,
    Place,
    Placed,
    PrefillDone,
    SendDecode,
    SendPrefill,
    Shape,
    State,
)
from kvrouter.mock import Content, EngineFull, Party
from kvrouter.placement.placement import Draw, Placement
from kvrouter.placement.placer import Placer, attempt_request, last_leg, prefill_leg
from kvrouter.placement.waiting_line import Ticket
from kvrouter.sim.outcome import Move, Outcome

NO_TOKENS = TokenBuffer("I")

FINISHED = "finished"
"""Why a journey gives up the attempt that brought the whole answer."""


class Host(Protocol):
    """The simulation, as a request needs it."""

    now_s: float
    placer: Placer

    def draw(self) -> Draw:
        """What the next decision draws from."""

    def submit(self, run: "SimRequest", worker_id: WorkerId, leg: EngineRequest, content: Content) -> Party:
        """Hand a leg to an engine. Raises what the engine raises."""

    def cancel(self, party: Party, reason: str) -> None:
        """End a leg, or give up the KV that waits for one."""

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call once at this moment."""

    def booked(self, placement: Placement) -> None:
        """A request was placed."""

    def released(self, placement: Placement) -> None:
        """Its leases were closed."""

    def ended(self, run: "SimRequest") -> None:
        """The request is over: its outcome is whole."""


class SimRequest:
    """One request from its arrival on. ``content`` makes what its legs say, given the tokens that were
    generated elsewhere before.
    """

    __slots__ = (
        "_content",
        "_decode",
        "_host",
        "_placement",
        "_prefill",
        "_prompt",
        "_sent_s",
        "_sink",
        "_source",
        "_tail_tokens",
        "_ticket",
        "_unnoted_tokens",
        "_wait",
        "journey",
        "outcome",
        "request",
        "session",
    )

    def __init__(
        self,
        request: GenerateRequest,
        outcome: Outcome,
        *,
        host: Host,
        prompt: Callable[[int], Prompt],
        content: Callable[[Prompt], Content],
        session: str,
        retries_max: int,
    ) -> None:
        self.request = request
        self.outcome = outcome
        self.session = session
        self.journey = Journey(request.sampling, redispatches_max=retries_max)
        self._host = host
        self._prompt = prompt
        self._content = content
        self._placement: Placement | None = None
        self._prefill: Party | None = None
        self._decode: Party | None = None
        self._source: WorkerCard | None = None
        self._sink: WorkerCard | None = None
        self._sent_s = 0.0
        self._tail_tokens = 0
        self._unnoted_tokens = 0
        self._ticket: Ticket | None = None
        self._wait: Place | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its outcome is whole."""
        return self.journey.state is State.DONE

    def begin(self) -> None:
        """It arrives."""
        self._perform(self.journey.begin())

    def time_is_up(self, limit_s: float) -> None:
        """Its deadline passed; nothing when it has ended."""
        if self.journey.state is not State.DONE:
            error = DeadlineExceeded(f"the request took longer than {limit_s:g} s")
            self._stop_waiting()
            self._perform(self.journey.handle(ClientLeft(error.code)))
            self._end(error)

    # What engines say

    def take(self, party: Party, chunk: EngineChunk) -> None:
        """A leg brought something."""
        if party == self._decode:
            self._take_decode(chunk)
        elif party == self._prefill:
            self._take_prefill(chunk)

    def worker_died(self, worker_id: WorkerId) -> None:
        """A worker is gone, and the leg that it had with it."""
        placement = self._placement
        if placement is None:
            return
        decode = placement.decision.decode
        if self._decode is not None and decode.rank.worker_id == worker_id:
            self._decode = None
            self._lose(LegLost(decode.leg, worker_id, "the worker died"), blame=False)
        elif self._prefill is not None and self._prefill.worker_id == worker_id:
            self._prefill = None
            if self.journey.state in (State.PREFILLING, State.DECODING):
                self._lose(LegLost(Leg.PREFILL, worker_id, "the worker died"), blame=False)

    def _take_decode(self, chunk: EngineChunk) -> None:
        outcome, host, placement = self.outcome, self._host, self._held()
        if chunk.kv_lost is not None:
            self._decode = None
            self._lose_kv(placement, chunk)
            return
        if chunk.finish is FinishReason.ERROR or chunk.finish is FinishReason.CANCELLED:
            self._decode = None
            decode = placement.decision.decode
            self._lose(LegLost(decode.leg, decode.rank.worker_id, chunk.error or "cancelled"), blame=True)
            return
        if chunk.cached_tokens is not None:
            if placement.decision.prefill is not None:
                self._note_move(placement.prompt.isl_tokens - chunk.cached_tokens)
            elif not outcome.first_s:
                outcome.cached_tokens = chunk.cached_tokens
        n_tokens = len(chunk.token_ids)
        if n_tokens:
            if self.journey.state is State.DECODING:
                if outcome.first_s is None:
                    outcome.first_s = host.now_s
                self._perform(self.journey.handle(FirstTokens()))
            outcome.last_s = host.now_s
            outcome.generated_tokens += n_tokens
            self._unnoted_tokens += n_tokens
            self._tail_tokens += n_tokens
            if self._tail_tokens >= placement.block_size:
                blocks, self._tail_tokens = divmod(self._tail_tokens, placement.block_size)
                host.placer.output_blocks(placement, blocks, now_s=host.now_s)
        if chunk.finish is not None:
            self._decode = None
            self._perform(self.journey.handle(Finished(chunk.finish)))

    def _note_move(self, tokens: int) -> None:
        """The KV of so many tokens came from the prefill worker."""
        source, sink = self._source, self._sink
        if source is not None and sink is not None:
            config = source.runtime_config
            kv_bytes = tokens * (config.kv_bytes_per_token or 0)
            self.outcome.moves.append(
                Move(config.topology_domains, sink.runtime_config.topology_domains, kv_bytes)
            )

    def _take_prefill(self, chunk: EngineChunk) -> None:
        placement = self._held()
        if chunk.cached_tokens is not None and self.outcome.first_s is None:
            self.outcome.cached_tokens = chunk.cached_tokens
        if chunk.finish is None:
            return
        worker_id = placement.prefill_pick.rank.worker_id
        if chunk.finish is FinishReason.ERROR or chunk.finish is FinishReason.CANCELLED:
            self._prefill = None
            self._lose(LegLost(Leg.PREFILL, worker_id, chunk.error or "cancelled"), blame=True)
            return
        self._host.placer.prefill_done(placement, now_s=self._host.now_s)
        if placement.shape is Shape.SYNCHRONOUS:
            self._perform(self.journey.handle(PrefillDone(worker_id, chunk.kv_transfer_params)))

    def _lose(self, lost: LegLost, *, blame: bool) -> None:
        """A leg is lost; what was generated is context for the next attempt."""
        placement, host = self._held(), self._host
        is_prefill = lost.leg is Leg.PREFILL
        if blame and not (lost.full or lost.blameless):
            has_begun = not is_prefill and self.journey.state is State.STREAMING
            host.placer.circuits.failed(
                placement,
                lost.leg,
                Fault.LOST,
                since_s=self._sent_s,
                now_s=host.now_s,
                has_begun=has_begun,
            )
        self._note_tokens()
        self._perform(self.journey.handle(lost))

    def _lose_kv(self, placement: Placement, chunk: EngineChunk) -> None:
        prefill, decode = placement.decision.prefill, placement.decision.decode
        why = chunk.error or "it did not say why"
        if prefill is None or chunk.kv_lost is None or self.journey.state is not State.DECODING:
            self._lose(LegLost(decode.leg, decode.rank.worker_id, why), blame=True)
            return
        host = self._host
        if not host.placer.prefill_worker_left(placement):
            host.placer.circuits.kv_lost(placement, since_s=self._sent_s, now_s=host.now_s)
        self._perform(
            self.journey.handle(KvLost(prefill.rank.worker_id, decode.rank.worker_id, chunk.kv_lost, why))
        )

    def _note_tokens(self) -> None:
        if self._unnoted_tokens:
            self.journey.tokens((0,) * self._unnoted_tokens)
            self._unnoted_tokens = 0

    # What the journey says

    def _perform(self, commands: Sequence[Command]) -> None:
        todo = deque(commands)
        while todo:
            command = todo.popleft()
            match command:
                case Place():
                    todo.extend(self._place(command))
                case SendPrefill():
                    todo.extend(self._send_prefill())
                case SendDecode(params):
                    todo.extend(self._send_decode(params))
                case NoteFirstToken():
                    self._host.placer.first_token(self._held(), now_s=self._host.now_s)
                case Abandon(reason):
                    self._abandon(reason)
                case End():
                    self._end(None)
                case Fail(error):
                    self._end(error)

    def _place(self, command: Place) -> Sequence[Command]:
        host = self._host
        prompt = self._prompt(len(self.journey.generated))
        asked = attempt_request(
            self.request,
            prompt,
            NO_TOKENS,
            attempt=command.attempt,
            excluded=command.excluded,
            kv_lost_from=command.kv_lost_from,
            plans=command.plans,
        )
        try:
            placement = host.placer.place(asked, host.draw(), now_s=host.now_s)
        except RoutingRefused as refused:
            return self._wait_or_fail(command, refused)
        self._stop_waiting()
        self._placement = placement
        placement.resumed_tokens = len(self.journey.generated)
        self._sent_s = host.now_s
        self._tail_tokens = prompt.isl_tokens % placement.block_size
        outcome, decision = self.outcome, placement.decision
        outcome.attempts += 1
        if outcome.placed_s is None:
            outcome.placed_s = host.now_s
            pick = decision.decode if decision.prefill is None else decision.prefill
            outcome.predicted_tokens = pick.overlap_blocks * placement.block_size
        prefill = decision.prefill
        self._source = None if prefill is None else host.placer.fleet.card(prefill.rank.worker_id)
        host.booked(placement)
        return self.journey.handle(Placed(placement.shape))

    def _wait_or_fail(self, command: Place, refused: RoutingRefused) -> Sequence[Command]:
        """Stand in the line for such a refusal, up to its limit; keep the place between tries."""
        host = self._host
        if self._ticket is not None:
            self._wait = command
            return []
        line, wait_s = host.placer.waiting.line_for(refused)
        if wait_s <= 0.0 or line.is_full:
            return self.journey.handle(NotPlaced(refused))
        ticket = self._ticket = line.enter(self._called)
        self._wait = command
        host.call_at(host.now_s + wait_s, lambda: self._waited(ticket, refused))
        return []

    def _called(self) -> None:
        command, self._wait = self._wait, None
        if command is not None:
            self._perform([command])

    def _waited(self, ticket: Ticket, refused: RoutingRefused) -> None:
        if self._ticket is ticket:
            self._stop_waiting()
            self._perform(self.journey.handle(NotPlaced(refused)))

    def _stop_waiting(self) -> None:
        ticket, self._ticket, self._wait = self._ticket, None, None
        if ticket is not None:
            ticket.leave()

    def _send_prefill(self) -> Sequence[Command]:
        placement = self._held()
        leg = prefill_leg(
            self.request, placement, resumed_tokens=len(self.journey.generated), time_left_s=None
        )
        try:
            self._prefill = self._submit(placement.prefill_pick.rank.worker_id, leg)
        except (InvalidRequest, Unavailable) as error:
            return self._not_sent(Leg.PREFILL, placement.prefill_pick.rank.worker_id, error)
        return []

    def _send_decode(self, params: KvTransferParams | None) -> Sequence[Command]:
        placement = self._held()
        try:
            if params is not None:
                host = self._host
                host.released(placement)
                try:
                    host.placer.pick_decode_again(placement, now_s=host.now_s)
                finally:
                    host.booked(placement)
            leg = last_leg(
                self.request,
                placement,
                resumed_tokens=len(self.journey.generated),
                kv_transfer_params=params,
                time_left_s=None,
            )
            worker_id = placement.decision.decode.rank.worker_id
            self._sink = self._host.placer.fleet.card(worker_id)
            self._decode = self._submit(worker_id, leg)
        except (InvalidRequest, Unavailable) as error:
            return self._not_sent(
                placement.decision.decode.leg, placement.decision.decode.rank.worker_id, error
            )
        return []

    def _submit(self, worker_id: WorkerId, leg: EngineRequest) -> Party:
        return self._host.submit(self, worker_id, leg, self._content(self._held().prompt))

    def _not_sent(self, leg: Leg, worker_id: WorkerId, error: KvrouterError) -> Sequence[Command]:
        if isinstance(error, InvalidRequest):
            return self.journey.handle(LegRefused(error))
        full = isinstance(error, EngineFull)
        self._note_tokens()
        return self.journey.handle(LegLost(leg, worker_id, error.message, full=full, blameless=not full))

    def _abandon(self, reason: str) -> None:
        """Cancel what runs and close the leases of the current attempt."""
        placement, self._placement = self._placement, None
        if placement is None:
            return
        host, outcome, decision = self._host, self.outcome, placement.decision
        prefill, self._prefill = self._prefill, None
        decode, self._decode = self._decode, None
        if decode is not None:
            host.cancel(decode, reason)
        if prefill is not None and reason != FINISHED:  # its KV was fetched: nothing waits there any more
            host.cancel(prefill, reason)
        outcome.prefill = None if decision.prefill is None else decision.prefill.rank.worker_id
        outcome.decode = decision.decode.rank.worker_id
        outcome.crosses = decision.cross_domain
        host.released(placement)
        tokens = len(self.journey.generated) + self._unnoted_tokens - placement.resumed_tokens
        host.placer.release(placement, now_s=host.now_s, tokens=tokens)

    def _end(self, error: KvrouterError | None) -> None:
        if error is not None:
            self.outcome.error = error.code
            if isinstance(error, RoutingRefused):
                refusals = error.refusals
                self.outcome.reason = str(max(refusals, key=lambda reason: refusals[reason], default=""))
        self._host.ended(self)

    def _held(self) -> Placement:
        if self._placement is None:
            raise RuntimeError("a leg of a request that has no place")
        return self._placement
