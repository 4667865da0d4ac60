"""The router of one model: drives its placer with the clock and random draws, and lets requests wait."""

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import NamedTuple

import msgspec
from msgspec import structs

from kvrouter.core.errors import RoutingRefused
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import RequestId, RouterId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import GenerateRequest, TokenBuffer
from kvrouter.core.workers import LoadReport
from kvrouter.fleetfile.routing_settings import circuit_settings, waiting_limits
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.journey import RetryPlan
from kvrouter.kernel.ledger.port import Ledger
from kvrouter.kernel.placement.attempt_request import attempt_request, hash_prompt, prompt_of
from kvrouter.kernel.placement.cache_view import CacheView
from kvrouter.kernel.placement.placement import AttemptRequest, Draw, Placement
from kvrouter.kernel.placement.placer import OnPicked, Placer
from kvrouter.kernel.routing.decision_input import DecisionInput, decision_input
from kvrouter.kernel.routing.interface import Decision, RouteRequest, RoutingSettings, View
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.router.admission_queue import Wait
from kvrouter.router.engine_reports import EngineReports
from kvrouter.router.instrumentation import ModelInstrumentation, expected_tokens
from kvrouter.router.kept_inputs import KeptInputs, RefusalLog
from kvrouter.router.kv_flows import KvFlows
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.settings.router_settings import KvRouterConfig

ATTEMPTS_MAX = 16
"""The most decisions kept for one request id; of a client that repeats an id, the last ones."""


class SeenAnswer(msgspec.Struct, gc=False):
    """The measured time to the request's first token, and the cached tokens that the engine counted for the
    attempt; None until they are known.
    """

    ttft_s: float | None = None
    cached_tokens: int | None = None


class KeptDecision(NamedTuple):
    """One attempt's decision, its time on the wall clock, and the request's trace. ``overlap_tokens``
    are the expected cached tokens, None where the prompt is unknown and ``isl_tokens`` an estimate. ``input``
    gives its candidates; None where it was dropped.
    """

    decided_at_s: float
    decision: Decision
    trace_id: str
    model: str
    isl_tokens: int
    overlap_tokens: int | None
    seen: SeenAnswer
    input: DecisionInput | None = None


class DecisionLog:
    """Keeps the attempts of the last ``requests_max`` requests, with what they were decided on; the oldest
    request is dropped first. ``refusals`` has the requests that no worker could take.
    """

    def __init__(self, *, requests_max: int) -> None:
        self._requests_max = requests_max
        self._by_request: OrderedDict[RequestId, deque[KeptDecision]] = OrderedDict()
        self._inputs = KeptInputs()
        self.refusals = RefusalLog(requests_max=requests_max)

    def __len__(self) -> int:
        """The number of requests that are kept."""
        return len(self._by_request)

    @property
    def keeps_decisions(self) -> bool:
        """Whether any decision is kept."""
        return self._requests_max > 0

    def record(
        self,
        decision: Decision,
        *,
        decided_at_s: float,
        trace_id: str = "",
        model: str = "",
        isl_tokens: int = 0,
        overlap_tokens: int | None = None,
        is_again: bool = False,
        decision_input: DecisionInput | None = None,
    ) -> None:
        """Add one attempt's decision; ``is_again`` if the attempt's decode worker was picked again."""
        if self._requests_max == 0:
            return
        if decision_input is not None:
            self._inputs.put((decision.request_id, decided_at_s), decision_input)
        attempts = self._by_request.get(decision.request_id)
        if attempts is None:
            attempts = self._by_request[decision.request_id] = deque(maxlen=ATTEMPTS_MAX)
            if len(self._by_request) > self._requests_max:
                dropped_id, dropped = self._by_request.popitem(last=False)
                for kept in dropped:
                    self._inputs.drop((dropped_id, kept.decided_at_s))
        elif len(attempts) == ATTEMPTS_MAX:
            self._inputs.drop((decision.request_id, attempts[0].decided_at_s))
        seen = SeenAnswer()
        if attempts and is_again:
            seen = attempts[-1].seen
        elif attempts and decision.attempt:  # an answer that is resumed keeps its first token
            seen.ttft_s = attempts[-1].seen.ttft_s
        attempts.append(
            KeptDecision(decided_at_s, decision, trace_id, model, isl_tokens, overlap_tokens, seen)
        )

    def seen(self, request_id: RequestId) -> SeenAnswer | None:
        """Return what was seen of the answer to the last attempt, to be changed; None when it is unknown."""
        attempts = self._by_request.get(request_id)
        return attempts[-1].seen if attempts else None

    def get(self, request_id: RequestId) -> list[KeptDecision] | None:
        """Return every attempt's decision in order; None when the request is unknown or dropped."""
        attempts = self._by_request.get(request_id)
        return None if attempts is None else [self._with_input(kept) for kept in attempts]

    def latest(self, limit: int) -> list[KeptDecision]:
        """Return the last attempt of each of the last ``limit`` requests, newest first."""
        last = islice(reversed(self._by_request.values()), limit)
        return [self._with_input(attempts[-1]) for attempts in last]

    def _with_input(self, kept: KeptDecision) -> KeptDecision:
        return kept._replace(input=self._inputs.get((kept.decision.request_id, kept.decided_at_s)))


class Draws:
    """A sequence of random draws, one for each decision. The same seed gives the same sequence."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.next = Draw(self._random.getrandbits(64), 0, self._random.getrandbits(64))
        """The draw of the next booking; decisions that book nothing use it too."""

    def take(self) -> None:
        """Advance to the following draw."""
        bits = self._random.getrandbits
        self.next = Draw(bits(64), self.next.turn + 1, bits(64))


class ModelRouter:
    """Places one model's requests at once, or as soon as a worker may take them.

    With ``sync`` the requests of other routers count as load. ``clock`` is monotonic, in seconds; callers of
    ``placer``, ``flows`` and ``cache`` pass its time.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        cache: CacheView,
        ledger: Ledger,
        router_id: RouterId,
        config: KvRouterConfig,
        settings: RoutingSettings,
        decisions: DecisionLog,
        instrumentation: ModelInstrumentation,
        seed: int,
        sync: ReplicaSync | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        seeds = random.Random(seed)
        self.fleet = fleet
        self.cache = cache
        self.instrumentation = instrumentation
        self.engine_reports = EngineReports(fleet, instrumentation.engines)
        self.placer = Placer(
            fleet=fleet,
            cache=cache,
            ledger=ledger,
            router_id=router_id,
            settings=settings,
            tracks_active_blocks=config.track_active_blocks,
            circuits=circuit_settings(config),
            circuit_seed=seeds.getrandbits(64),
            events=instrumentation.placement,
            waiting=waiting_limits(config),
            call_soon=_call_soon,
            now_s=clock(),
            replication=None if sync is None else sync.replication,
        )
        self.ledger = self.placer.ledger
        self.flows = KvFlows(fleet)
        self.clock = clock
        self._request_timeout_s = config.request_timeout_s
        self._decisions = decisions
        self._decision_input: DecisionInput | None = None
        """The input of the decision that is being placed; None before it, and where none is kept."""
        if decisions.keeps_decisions:
            self.placer.on_decided = self._decided
        self._draws = Draws(seeds.getrandbits(64))
        self._explain_draws = Draws(seeds.getrandbits(64))
        """The draws of :meth:`explain`, which must not reveal or use those of bookings."""

    # Deciding

    def hash_prompt(
        self, token_ids: TokenBuffer, *, lora_name: str | None = None, cache_namespace: str | None = None
    ) -> Prompt:
        """Hash a prompt's blocks; the result accompanies the request, so that it is done once."""
        return hash_prompt(
            token_ids,
            block_size=self.fleet.block_size,
            lora_name=lora_name,
            cache_namespace=cache_namespace,
        )

    def view(self, prompt: Prompt, *, is_guess: bool = False) -> View:
        """Return a view with the draw of the next booking; the next view reuses its columns."""
        return self.placer.view(prompt, self._draws.next, now_s=self.clock(), is_guess=is_guess)

    def decide(self, request: RouteRequest, prompt: Prompt) -> Decision:
        """Decide without booking. Raises RoutingRefused."""
        return self.placer.decide(request, prompt, self._draws.next, now_s=self.clock())

    def explain(self, request: GenerateRequest) -> Decision:
        """Decide as :meth:`place` would, with a row for every candidate, without booking.

        Each call has a draw and a turn apart from those of bookings: answers spread over the workers as
        requests do, and a call does not change any request.
        """
        draw = self._explain_draws.next
        self._explain_draws.take()
        return self.placer.explain(request, draw, now_s=self.clock())

    async def place(
        self,
        request: GenerateRequest,
        token_ids: TokenBuffer,
        *,
        attempt: int,
        excluded: frozenset[WorkerId],
        kv_lost_from: frozenset[WorkerId] = frozenset(),
        plans: Sequence[RetryPlan] = (RetryPlan.USUAL,),
        may_pull_kv: bool = False,
        on_picked: OnPicked | None = None,
    ) -> Placement:
        """Decide and book by the first of ``plans`` under which a worker may take the request; wait as long
        as the settings allow when no worker may. ``plans`` contains ``RetryPlan.USUAL``. With ``may_pull_kv``
        the caller can send a prefill leg that fetches KV. ``on_picked`` is called as by :meth:`Placer.place`,
        for a request that did not wait.

        Raises :class:`RoutingRefused` when no wait is allowed or the wait timed out.
        """
        prompt = prompt_of(request, token_ids, block_size=self.fleet.block_size)
        request_of_attempt = attempt_request(
            request,
            prompt,
            token_ids,
            attempt=attempt,
            excluded=excluded,
            kv_lost_from=kv_lost_from,
            plans=plans,
            arrived_s=self.clock(),
            may_pull_kv=partial(self._has_engines_tokens, request) if may_pull_kv else None,
        )
        place = partial(self._place, request_of_attempt, request.trace.trace_id)
        refused: RoutingRefused | None = None
        if not self.placer.waiting.admission.has_calls_due:
            try:
                return place(None, on_picked)
            except RoutingRefused as error:
                refused = error
        objective_s = inf if attempt else self.placer.settings.ttft_limit_s(request.service_level)
        wait = Wait(
            self.placer, request, prompt, self.instrumentation, place,
            limit_s=self._request_timeout_s, objective_s=objective_s,
        )  # fmt: skip
        try:
            return await wait.until_placed(refused)
        except RoutingRefused as final:
            self._record_refusal(request_of_attempt, final, request.trace.trace_id)
            raise
        except asyncio.CancelledError:
            if wait.unclaimed is not None:
                self.release(wait.unclaimed)
            raise

    def _has_engines_tokens(self, request: GenerateRequest) -> bool:
        """Whether the request's tokens are surely those that engines make of its call."""
        is_exact = request.call is None or request.call.resumable
        is_guess = request.is_guess or request.is_prompt_unknown
        return is_exact and not is_guess and not self.engine_reports.shapes.is_blind(request.shape)

    def _place(
        self, request: AttemptRequest, trace_id: str, wait: Wait | None, on_picked: OnPicked | None = None
    ) -> Placement:
        started_s = time.perf_counter()
        draw = self._draws.next
        placement = self.placer.place(request, draw, now_s=self.clock(), on_picked=on_picked)
        self._draws.take()
        placement.trace_id = trace_id
        placement.decision_s = time.perf_counter() - started_s - placement.sending_s
        placement.waited_s = None if wait is None else wait.waited_s(placement)
        # Nothing is awaited before these: the series of a worker that left meanwhile would appear again and
        # stay, and a prefill leg may answer while the decode leg waits for a connection.
        try:
            self.instrumentation.placed(placement)
            self._record(placement)
        except Exception:
            self.release(placement)
            raise
        return placement

    def _decided(
        self, route_request: RouteRequest, view: View, decision: Decision, *, prefill: WorkerRank | None
    ) -> None:
        """Keep the input of a decision, before anything of it changes."""
        constraint = None if prefill is None else decision.constraint
        self._decision_input = decision_input(route_request, view, constraint=constraint, prefill=prefill)

    def pick_decode_again(self, placement: Placement) -> None:
        """Pick the decode worker again after a synchronous prefill, under its constraint; move the lease."""
        started_s = time.perf_counter()
        if self.placer.pick_decode_again(placement, now_s=self.clock()):
            placement.again_s = time.perf_counter() - started_s
            self.instrumentation.picked_again(placement)
            self._record(placement, is_again=True)

    def _record(self, placement: Placement, *, is_again: bool = False) -> None:
        """Record a decision, with its input."""
        self._decisions.record(
            placement.decision,
            decided_at_s=time.time(),
            trace_id=placement.trace_id,
            model=self.fleet.model,
            isl_tokens=placement.prompt.isl_tokens,
            overlap_tokens=expected_tokens(placement),
            is_again=is_again,
            decision_input=self._decision_input,
        )
        self._decision_input = None

    def _record_refusal(self, request: AttemptRequest, refused: RoutingRefused, trace_id: str) -> None:
        """Record the refusal of the usual plan, with the state of the moment in which it became final."""
        if not self._decisions.keeps_decisions:
            return
        route_request, placer = request.options[RetryPlan.USUAL], self.placer
        view = placer.view(
            request.prompt, self._draws.next, now_s=self.clock(), is_guess=route_request.is_guess
        )
        self._decisions.refusals.record(
            refused,
            decision_input(route_request, view),
            refused_at_s=time.time(),
            mode=route_request.override.router_mode or placer.settings.mode,
            trace_id=trace_id,
            model=self.fleet.model,
        )

    # Settings that change

    def moved(self, place: Mapping[str, str]) -> None:
        """Set the frontend's topology domains; prefill that must be near the frontend follows."""
        near = self.placer.settings.near
        if near is not None and near.value != place.get(near.domain):
            near = structs.replace(near, value=place.get(near.domain))
            self.placer.set_routing(structs.replace(self.placer.settings, near=near), now_s=self.clock())

    def links_changed(self, links: LinkTable) -> None:
        """Replace the link table where links are weighed; learned speeds start anew."""
        if self.placer.settings.links is not None:
            self.placer.set_routing(structs.replace(self.placer.settings, links=links), now_s=self.clock())

    # The fleet

    def freed(self, slot: Slot) -> None:
        """Forget the slot's rank, which has left."""
        self.placer.freed(slot)
        self.engine_reports.freed(slot)

    def capacity_changed(self, slot: Slot) -> None:
        """Pass the slot's number of KV blocks to the cache view, after a card or a load report named it."""
        card = self.fleet.card_at(slot)
        if card is not None:
            self.cache.set_total_blocks(slot, self.fleet.kv_blocks(slot), n_ranks=card.dp_size)

    def reported(self, report: LoadReport) -> bool:
        """Take a rank's load report; return False when the rank is unknown."""
        slot = self.fleet.slot_of(report.rank)
        if slot is None:
            return False
        self.placer.reported(report, slot, now_s=self.clock())
        self.capacity_changed(slot)
        carried = self.engine_reports.reported(report)
        if carried is not None:
            self.placer.transfers.engine_sums.reported(
                slot,
                transfers=carried.transfers,
                kv_bytes=carried.bytes,
                seconds=carried.seconds,
                now_s=self.clock(),
            )
        return True

    # Leases

    def first_token(self, placement: Placement) -> None:
        """Move the placement's load from prefill to decode; the first call also counts the handoff."""
        now_s = self.clock()
        if placement.is_counted:  # the owner of a booking may repeat the call
            self.placer.first_token(placement, now_s=now_s)
            return
        self.flows.handed_over(placement, now_s=now_s)
        self.placer.first_token(placement, now_s=now_s)
        self.count_first_token(placement)

    def count_first_token(self, placement: Placement) -> None:
        """Count the prefilled prompt, and for a pair the KV handoff."""
        placement.is_counted = True
        self.instrumentation.handed_over(placement)
        prefills = placement.decision.prefilling
        if self.fleet.card(prefills.rank.worker_id) is not None:
            self.instrumentation.prompt_prefilled(prefills.rank.worker_id, placement.prompt.isl_tokens)

    def note_ttft(self, request_id: RequestId, ttft_s: float) -> None:
        """Keep the measured time to a request's first token with its decision."""
        seen = self._decisions.seen(request_id)
        if seen is not None:
            seen.ttft_s = ttft_s

    def release(self, placement: Placement, *, tokens: int = 0) -> None:
        """Close the leases of an attempt that generated ``tokens``; idempotent."""
        self.placer.release(placement, now_s=self.clock(), tokens=tokens)
        self.answered(placement, tokens=tokens)

    def answered(self, placement: Placement, *, tokens: int) -> None:
        """Count an attempt's tokens for its worker, unless the worker has left and its counters with it."""
        worker_id = placement.decision.decode.rank.worker_id
        if tokens and self.fleet.card(worker_id) is not None:
            self.instrumentation.tokens_answered(worker_id, tokens)

    def note_cached_tokens(self, placement: Placement, cached_tokens: int, prompt_tokens: int | None) -> None:
        """Compare the engine's cached tokens with the prediction; ``prompt_tokens`` is its own count."""
        pick = placement.decision.prefilling
        predicted_tokens = expected_tokens(placement) or 0
        card, slot = self.fleet.card(pick.rank.worker_id), self.fleet.slot_of(pick.rank)
        worker_id = None if card is None else card.worker_id
        self.instrumentation.cached_tokens(worker_id, predicted=predicted_tokens, actual=cached_tokens)
        seen = self._decisions.seen(placement.decision.request_id)
        if seen is not None:
            seen.cached_tokens = cached_tokens
        route_request = placement.route_request
        is_guess = route_request.is_guess or route_request.is_prompt_unknown
        if card is None or slot is None or card.cache_is_partial or is_guess:
            return
        if self.cache.is_sure_of(slot) and self.engine_reports.answered(
            slot,
            pick.rank,
            predicted_tokens=predicted_tokens,
            cached_tokens=cached_tokens,
            isl_tokens=placement.prompt.isl_tokens,
            prompt_tokens=prompt_tokens,
            shape=placement.route_request.shape,
        ):
            self.cache.doubt(slot)


def _call_soon(call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(call)
