"""One replayed request: its journey, driven without waiting, as the service drives it over sockets."""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
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
from kvrouter.engines.mock_engine.engine import EngineFull
from kvrouter.engines.mock_engine.handoff import LegId
from kvrouter.engines.mock_engine.sequence import Content
from kvrouter.kernel.journey import (
    Abandon,
    ClientLeft,
    Command,
    End,
    Fail,
    Finished,
    LegLost,
    LegRefused,
    NotPlaced,
    Place,
    PrefillDone,
    SendDecode,
    SendPrefill,
    Shape,
    State,
)
from kvrouter.kernel.placement.attempt_request import attempt_request
from kvrouter.kernel.placement.legs import keeping_leg, last_leg, prefill_leg
from kvrouter.kernel.placement.placement import Draw
from kvrouter.kernel.placement.service_levels import waited_too_long
from kvrouter.kernel.placement.waiting_line import Ticket
from kvrouter.kernel.request_driver import Attempt, RequestDriver
from kvrouter.sim.replay.outcome import Move, Outcome
from kvrouter.sim.replay.sim_fleet import SimFleet

NO_TOKENS = TokenBuffer("I")

_PREFILL, _DECODING, _DONE = Leg.PREFILL, State.DECODING, State.DONE
_SYNCHRONOUS, _ERROR, _CANCELLED = Shape.SYNCHRONOUS, FinishReason.ERROR, FinishReason.CANCELLED
"""Constants, because access to an enumeration's members is slow before Python 3.12."""

FINISHED = "finished"
"""Why a journey gives up the attempt that brought the whole answer."""


class Host(Protocol):
    """The simulation, as a request needs it."""

    now_s: float
    fleet: SimFleet

    def draw(self) -> Draw:
        """Return the random source of the next decision."""

    def submit(self, run: "SimRequest", worker_id: WorkerId, leg: EngineRequest, content: Content) -> LegId:
        """Submit a leg to an engine. Raises the engine's errors."""

    def cancel(self, leg_id: LegId, reason: str) -> None:
        """End a leg, or give up the KV that waits for one."""

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call once at this moment."""

    def ended(self, run: "SimRequest") -> None:
        """The request is over: its outcome is whole."""


class SimRequest:
    """One request from its arrival on. ``prompt`` makes its prompt, given the tokens that were generated
    elsewhere before; ``content`` makes the content of a leg with so many tokens of prompt.
    """

    __slots__ = (
        "_content",
        "_decode",
        "_host",
        "_kept",
        "_prefill",
        "_prompt",
        "_sink",
        "_source",
        "_ticket",
        "_wait",
        "driver",
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
        content: Callable[[int], Content],
        session: str,
        retries_max: int,
    ) -> None:
        self.request = request
        self.outcome = outcome
        self.session = session
        self.driver: RequestDriver[Attempt] = RequestDriver(
            request.sampling, host.fleet.placer, redispatches_max=retries_max
        )
        self._host = host
        self._prompt = prompt
        self._content = content
        self._kept: LegId | None = None
        self._prefill: LegId | None = None
        self._decode: LegId | None = None
        self._source: WorkerCard | None = None
        self._sink: WorkerCard | None = None
        self._ticket: Ticket | None = None
        self._wait: Place | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its outcome is whole."""
        return self.driver.journey.state is _DONE

    def begin(self) -> None:
        """The request arrives."""
        self._perform(self.driver.journey.begin())

    def time_is_up(self, limit_s: float) -> None:
        """Its deadline passed; does nothing if it has ended."""
        if not self.has_ended:
            error = DeadlineExceeded(f"the request took longer than {limit_s:g} s")
            self._stop_waiting()
            self._perform(self.driver.journey.handle(ClientLeft(error.code)))
            self._end(error)

    # What engines say

    def take(self, leg_id: LegId, chunk: EngineChunk) -> None:
        """A leg brought something."""
        if leg_id == self._decode:
            self._take_decode(chunk)
        elif leg_id == self._prefill:
            self._take_prefill(chunk)
        elif leg_id == self._kept and chunk.finish is not None:
            self._perform(self._submit_prefill(chunk.kv_transfer_params))

    def worker_died(self, worker_id: WorkerId) -> None:
        """A worker is gone, and the leg that it had with it."""
        attempt = self.driver.attempt
        if attempt is None:
            return
        decode = attempt.placement.decision.decode
        if self._decode is not None and decode.rank.worker_id == worker_id:
            self._decode = None
            self._lose(attempt, LegLost(decode.leg, worker_id, "the worker died", blameless=True))
        elif self._kept is not None and self._kept.worker_id == worker_id and self._prefill is None:
            self._kept = None
            self._perform(self._submit_prefill(None))
        elif self._prefill is not None and self._prefill.worker_id == worker_id:
            self._prefill = None
            if self.driver.journey.state in (State.PREFILLING, _DECODING):
                self._lose(attempt, LegLost(_PREFILL, worker_id, "the worker died", blameless=True))

    def _take_decode(self, chunk: EngineChunk) -> None:
        outcome, now_s, driver, attempt = (
            self.outcome,
            self._host.now_s,
            self.driver,
            self.driver.current_attempt,
        )
        placement = attempt.placement
        if chunk.finish is _ERROR or chunk.finish is _CANCELLED:
            self._decode = None
            self._lose_decode(attempt, chunk)
            return
        if chunk.cached_tokens is not None:
            if placement.decision.prefill is not None:
                self._note_move(placement.prompt.isl_tokens - chunk.cached_tokens)
            elif not outcome.first_s:
                outcome.cached_tokens = chunk.cached_tokens
        if chunk.token_ids:
            if driver.journey.state is _DECODING:
                if outcome.first_s is None:
                    outcome.first_s = now_s
                driver.first_tokens(now_s)
                driver.prompt_computed(attempt, now_s)
            outcome.last_s = now_s
            outcome.generated_tokens += len(chunk.token_ids)
            driver.tokens(chunk.token_ids, now_s)
        if chunk.finish is not None:
            self._decode = None
            self._perform(driver.journey.handle(Finished(chunk.finish)))

    def _note_move(self, tokens: int) -> None:
        """Note that the KV of this many tokens came from the prefill worker."""
        source, sink = self._source, self._sink
        if source is not None and sink is not None:
            config = source.runtime_config
            kv_bytes = tokens * (config.kv_bytes_per_token or 0)
            self.outcome.moves.append(
                Move(config.topology_domains, sink.runtime_config.topology_domains, kv_bytes)
            )

    def _take_prefill(self, chunk: EngineChunk) -> None:
        driver, attempt, now_s = self.driver, self.driver.current_attempt, self._host.now_s
        placement = attempt.placement
        if chunk.cached_tokens is not None and self.outcome.first_s is None:
            self.outcome.cached_tokens = chunk.cached_tokens
        if chunk.finish is None:
            return
        worker_id = placement.prefill_pick.rank.worker_id
        if chunk.finish is _ERROR or chunk.finish is _CANCELLED:
            self._prefill = None
            why, not_fetched = chunk.error or "cancelled", chunk.kv_lost is not None
            lost = LegLost(_PREFILL, worker_id, why, taken=True, repeated=not_fetched, blameless=not_fetched)
            self._lose(attempt, lost)
            return
        self._kept = None  # its KV has been fetched
        driver.prefilled(attempt, now_s)
        if placement.shape is _SYNCHRONOUS:
            done = PrefillDone(worker_id, chunk.kv_transfer_params)
            self._perform(driver.prefill_ended(attempt, done, now_s))

    def _lose(self, attempt: Attempt, lost: LegLost) -> None:
        self._perform(self.driver.lost(attempt, lost, self._host.now_s))

    def _lose_decode(self, attempt: Attempt, chunk: EngineChunk) -> None:
        driver, now_s, decode = self.driver, self._host.now_s, attempt.placement.decision.decode
        why = chunk.error or "it did not say why"
        lost = LegLost(decode.leg, decode.rank.worker_id, why, taken=True)
        loss = chunk.kv_lost
        event = None if loss is None else driver.kv_loss(attempt, loss, why)
        if event is None or loss is None:
            self._perform(driver.last_leg_lost(attempt, lost, now_s))
        else:
            self._perform(driver.kv_lost(attempt, event, loss, lost, now_s))

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
                case Abandon(reason):
                    self._abandon(reason)
                case End():
                    self._end(None)
                case Fail(error):
                    self._end(error)

    def _place(self, command: Place) -> Sequence[Command]:
        host, driver = self._host, self.driver
        prompt = self._prompt(len(driver.journey.generated))
        asked = attempt_request(
            self.request,
            prompt,
            NO_TOKENS,
            attempt=command.attempt,
            excluded=command.excluded,
            kv_lost_from=command.kv_lost_from,
            plans=command.plans,
            arrived_s=self.outcome.arrived_s,
            may_pull_kv=(lambda: True) if driver.journey.may_pull_kv else None,
        )
        try:
            placement = host.fleet.placer.place(asked, host.draw(), now_s=host.now_s)
        except RoutingRefused as refused:
            return self._wait_or_fail(command, refused, prompt)
        self._stop_waiting()
        outcome, decision = self.outcome, placement.decision
        outcome.attempts += 1
        if outcome.placed_s is None:
            outcome.placed_s = host.now_s
            pick = decision.decode if decision.prefill is None else decision.prefill
            outcome.predicted_tokens = pick.overlap_blocks * placement.block_size
        prefill = decision.prefill
        self._source = None if prefill is None else host.fleet.placer.fleet.card(prefill.rank.worker_id)
        host.fleet.loads.booked(placement)
        return driver.placed(Attempt(placement))

    def _wait_or_fail(self, command: Place, refused: RoutingRefused, prompt: Prompt) -> Sequence[Command]:
        """Wait in the queue for this refusal, up to its limit; keep the position between tries."""
        host, placer = self._host, self._host.fleet.placer
        line, wait_s = placer.waiting.line_for(refused)
        if self._ticket is not None and wait_s > 0.0:
            self._wait = command
            return []
        if wait_s <= 0.0 or line.is_full:
            self._stop_waiting()
            return self.driver.journey.handle(NotPlaced(refused))
        level = self.request.service_level
        slack_s = placer.slack_s(self.request, prompt, now_s=host.now_s)
        ticket = self._ticket = line.enter(self._called, level, now_s=host.now_s, slack_s=slack_s)
        self._wait = command
        objective_s = inf if command.attempt else placer.settings.ttft_limit_s(level)
        if objective_s <= wait_s:
            wait_s, refused = objective_s, waited_too_long(refused, objective_s)
        host.call_at(host.now_s + wait_s, lambda: self._waited(ticket, refused))
        return []

    def _called(self) -> None:
        command, self._wait = self._wait, None
        if command is not None:
            self._perform([command])

    def _waited(self, ticket: Ticket, refused: RoutingRefused) -> None:
        if self._ticket is ticket:
            self._stop_waiting()
            self._perform(self.driver.journey.handle(NotPlaced(refused)))

    def _stop_waiting(self) -> None:
        ticket, self._ticket, self._wait = self._ticket, None, None
        if ticket is not None:
            ticket.leave()

    def _send_prefill(self) -> Sequence[Command]:
        """Send the prefill leg, or before it the one that makes the decode worker keep what it fetches."""
        placement = self.driver.current_attempt.placement
        pulled_tokens = placement.prefill_pick.pulled_blocks * placement.block_size
        if pulled_tokens:
            leg = keeping_leg(self.request, placement, time_left_s=None)
            try:
                self._kept = self._submit(placement.decision.decode.rank.worker_id, leg, pulled_tokens)
            except (InvalidRequest, Unavailable):
                pass  # the prefill worker computes it
            else:
                return ()
        return self._submit_prefill(None)

    def _submit_prefill(self, pulled: KvTransferParams | None) -> Sequence[Command]:
        """Send the prefill leg, which fetches what is ``pulled``. What a bootstrap handoff's is refused for
        counts once decode is sent too.
        """
        host, attempt = self._host, self.driver.current_attempt
        placement = attempt.placement
        if not pulled and placement.prefill_pick.pulled_blocks:
            placement.compute_all()
        worker_id = placement.prefill_pick.rank.worker_id
        leg = prefill_leg(self.request, placement, time_left_s=None, kv_transfer_params=pulled)
        attempt.prefill_sent_s = host.now_s
        try:
            self._prefill = self._submit(worker_id, leg, placement.prompt.isl_tokens)
        except (InvalidRequest, Unavailable) as error:
            outcome = _not_sent(_PREFILL, worker_id, error)
            if placement.shape is _SYNCHRONOUS:
                return self.driver.prefill_ended(attempt, outcome, host.now_s)
            if isinstance(outcome, LegLost):
                attempt.prefill_lost = outcome
            else:
                attempt.prefill_refused = outcome.error
        return ()

    def _send_decode(self, params: KvTransferParams | None) -> Sequence[Command]:
        host, driver, attempt = self._host, self.driver, self.driver.current_attempt
        placement = attempt.placement
        try:
            if params is not None:
                host.fleet.loads.released(placement)
                try:
                    host.fleet.placer.pick_decode_again(placement, now_s=host.now_s)
                except RoutingRefused as refused:
                    return driver.decode_not_placed(attempt, refused)
                finally:
                    host.fleet.loads.booked(placement)
            leg = last_leg(self.request, placement, kv_transfer_params=params, time_left_s=None)
            worker_id = placement.decision.decode.rank.worker_id
            self._sink = host.fleet.placer.fleet.card(worker_id)
            attempt.last_sent_s = host.now_s
            self._decode = self._submit(worker_id, leg, placement.prompt.isl_tokens)
        except (InvalidRequest, Unavailable) as error:
            decode = placement.decision.decode
            outcome = _not_sent(decode.leg, decode.rank.worker_id, error)
            if isinstance(outcome, LegLost):
                return driver.lost(attempt, outcome, host.now_s)
            return driver.journey.handle(outcome)
        return driver.decode_sent(attempt, host.now_s)

    def _submit(self, worker_id: WorkerId, leg: EngineRequest, prompt_tokens: int) -> LegId:
        return self._host.submit(self, worker_id, leg, self._content(prompt_tokens))

    def _abandon(self, reason: str) -> None:
        """Cancel what runs and close the leases of the current attempt."""
        attempt = self.driver.attempt
        if attempt is None:
            return
        placement = attempt.placement
        host, outcome, decision = self._host, self.outcome, placement.decision
        prefill, self._prefill = self._prefill, None
        decode, self._decode = self._decode, None
        kept, self._kept = self._kept, None
        if decode is not None:
            host.cancel(decode, reason)
        if prefill is not None and reason != FINISHED:  # its KV was fetched: nothing waits there any more
            host.cancel(prefill, reason)
        if kept is not None:
            host.cancel(kept, reason)
        outcome.prefill = None if decision.prefill is None else decision.prefill.rank.worker_id
        outcome.decode = decision.decode.rank.worker_id
        outcome.crosses = decision.cross_domain
        host.fleet.loads.released(placement)
        self.driver.release(host.now_s)

    def _end(self, error: KvrouterError | None) -> None:
        if error is not None:
            self.outcome.error = error.code
            if isinstance(error, RoutingRefused):
                refusals = error.refusals
                self.outcome.reason = str(max(refusals, key=lambda reason: refusals[reason], default=""))
        self.driver.end(self._host.now_s)
        self._host.ended(self)


def _not_sent(leg: Leg, worker_id: WorkerId, error: InvalidRequest | Unavailable) -> LegLost | LegRefused:
    """Return the event for an engine's refusal of a leg."""
    if isinstance(error, InvalidRequest):
        return LegRefused(error)
    full = isinstance(error, EngineFull)
    return LegLost(leg, worker_id, error.message, full=full, blameless=not full)
