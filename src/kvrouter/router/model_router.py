"""The router of one model: drives its placer with the clock, random numbers and tasks that wait."""

import asyncio
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from msgspec import structs

from kvrouter.core.errors import RoutingRefused
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import RequestId, RouterId, Slot, WorkerId, WorkerRank
from kvrouter.core.requests import GenerateRequest, TokenBuffer
from kvrouter.core.workers import LoadReport
from kvrouter.fleetfile.decision import circuit_settings, waiting_limits
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.journey import RetryPlan
from kvrouter.kernel.ledger.port import Ledger
from kvrouter.kernel.placement.attempt_request import attempt_request, hash_prompt, prompt_of
from kvrouter.kernel.placement.cache_view import CacheView
from kvrouter.kernel.placement.placement import AttemptRequest, Draw, Placement
from kvrouter.kernel.placement.placer import Placer
from kvrouter.kernel.routing.interface import Candidate, Decision, RouteRequest, RoutingSettings, View
from kvrouter.kernel.topology.link_table import LinkTable
from kvrouter.router.admission_queue import Wait
from kvrouter.router.engine_reports import EngineReports
from kvrouter.router.instrumentation import ModelInstrumentation, prefilling
from kvrouter.router.kv_flows import KvFlows
from kvrouter.router.replica_sync import ReplicaSync
from kvrouter.settings.router_settings import KvRouterConfig

ATTEMPTS_MAX = 16
"""Decisions kept for one request id: of a client that sends one id again and again, the last ones."""


TABLES_MAX = 32
"""Decisions that keep the table of their candidates: a row for each worker rank."""

WATCHED_S = 10.0
"""Candidates are kept for so long after somebody asked for the latest decisions."""

TABLE_PAUSE_S = 0.2
"""Between two tables at least so long,"""

TABLE_TIME_SHARE = 0.02
"""and no more than this share of the event loop's time goes into them."""


class KeptDecision(NamedTuple):
    """A decision of one attempt, when it was made on the wall clock, and the trace of its request. ``rows``
    are its candidates, where they were kept.
    """

    decided_at_s: float
    decision: Decision
    trace_id: str
    model: str
    rows: tuple[Candidate, ...] = ()


class DecisionLog:
    """Holds the attempts of the last ``requests_max`` requests; the oldest request is forgotten first.

    While somebody follows the latest decisions, some of them are to be recorded with their candidates: as
    many as :data:`TABLE_TIME_SHARE` allows. ``clock`` is monotonic, in seconds.
    """

    def __init__(self, *, requests_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests_max = requests_max
        self._clock = clock
        self._by_request: OrderedDict[RequestId, deque[KeptDecision]] = OrderedDict()
        self._tables: OrderedDict[tuple[RequestId, float], tuple[Candidate, ...]] = OrderedDict()
        self._watched_until_s = -math.inf
        self._no_table_before_s = -math.inf

    @property
    def wants_table(self) -> bool:
        """Whether the next decision is to be recorded with its candidates."""
        if self._watched_until_s == -math.inf:
            return False
        return self._no_table_before_s <= self._clock() < self._watched_until_s

    def table_took(self, seconds: float) -> None:
        """The candidates of one decision took so long to be written down."""
        self._no_table_before_s = self._clock() + max(TABLE_PAUSE_S, seconds / TABLE_TIME_SHARE)

    def record(
        self,
        decision: Decision,
        *,
        decided_at_s: float,
        trace_id: str = "",
        model: str = "",
        rows: tuple[Candidate, ...] = (),
    ) -> None:
        """Add one attempt's decision."""
        if self._requests_max == 0:
            return
        if rows:
            self._tables[decision.request_id, decided_at_s] = rows
            if len(self._tables) > TABLES_MAX:
                self._tables.popitem(last=False)
        attempts = self._by_request.get(decision.request_id)
        if attempts is None:
            attempts = self._by_request[decision.request_id] = deque(maxlen=ATTEMPTS_MAX)
            if len(self._by_request) > self._requests_max:
                self._by_request.popitem(last=False)
        attempts.append(KeptDecision(decided_at_s, decision, trace_id, model))

    def get(self, request_id: RequestId) -> list[KeptDecision] | None:
        """Every attempt's decision in order, or None when the request is unknown or forgotten."""
        attempts = self._by_request.get(request_id)
        return None if attempts is None else [self._with_table(kept) for kept in attempts]

    def latest(self, limit: int) -> list[KeptDecision]:
        """Return the last attempt of each of the last ``limit`` requests, the newest request first; who asks
        follows them from now on.
        """
        self._watched_until_s = self._clock() + WATCHED_S
        last = islice(reversed(self._by_request.values()), limit)
        return [self._with_table(attempts[-1]) for attempts in last]

    def _with_table(self, kept: KeptDecision) -> KeptDecision:
        rows = self._tables.get((kept.decision.request_id, kept.decided_at_s), ())
        return kept._replace(rows=rows) if rows else kept


class Draws:
    """What one decision after another draws from. A seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.next = Draw(self._random.getrandbits(64), 0, self._random.getrandbits(64))
        """The draw of the next booking: every decision before it sees the same."""

    def take(self) -> None:
        """The next draw is used: another one follows."""
        bits = self._random.getrandbits
        self.next = Draw(bits(64), self.next.turn + 1, bits(64))


class ModelRouter:
    """Places one model's requests now, or as soon as a worker may take them.

    With ``sync`` requests of other routers are load here too. ``clock`` is monotonic, in seconds; what is
    asked of ``placer``, ``flows`` or ``cache`` themselves is asked by it.
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
        observed: ModelInstrumentation,
        seed: int,
        sync: ReplicaSync | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        seeds = random.Random(seed)
        self.fleet = fleet
        self.cache = cache
        self.observed = observed
        self.accounts = EngineReports(fleet, observed.engines)
        self.placer = Placer(
            fleet=fleet,
            cache=cache,
            ledger=ledger,
            router_id=router_id,
            settings=settings,
            tracks_active_blocks=config.track_active_blocks,
            circuits=circuit_settings(config),
            circuit_seed=seeds.getrandbits(64),
            events=observed.placement,
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
        self._draws = Draws(seeds.getrandbits(64))
        self._explain_draws = Draws(seeds.getrandbits(64))
        """What questions draw from: they must not all be given the draw of the next booking."""

    # Deciding

    def hash_prompt(
        self, token_ids: TokenBuffer, *, lora_name: str | None = None, cache_namespace: str | None = None
    ) -> Prompt:
        """Hash a prompt's blocks, once; the result travels with the request."""
        return hash_prompt(
            token_ids,
            block_size=self.fleet.block_size,
            lora_name=lora_name,
            cache_namespace=cache_namespace,
        )

    def view(self, prompt: Prompt, *, has_media: bool = False) -> View:
        """Take one reading, with the draw of the next booking; its columns are reused by the next reading."""
        return self.placer.view(prompt, self._draws.next, now_s=self.clock(), has_media=has_media)

    def decide(self, request: RouteRequest, prompt: Prompt) -> Decision:
        """Take one reading and decide; books nothing."""
        return self.placer.decide(request, prompt, self._draws.next, now_s=self.clock())

    def explain(self, request: GenerateRequest) -> Decision:
        """Decide as :meth:`place` would, with a row for every candidate; books nothing.

        Each question has a draw and a turn of its own, and none of a booking's: the answers
        spread over the workers as requests do, and no question changes a request.
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
    ) -> Placement:
        """Decide and book, in the first of ``plans`` in which a worker may take the request; wait as long as
        the settings allow when none may now. ``plans`` has ``RetryPlan.USUAL``.

        Raises :class:`RoutingRefused` when waiting is not allowed or was in vain.
        """
        prompt = prompt_of(request, token_ids, block_size=self.fleet.block_size)
        asked = attempt_request(
            request,
            prompt,
            token_ids,
            attempt=attempt,
            excluded=excluded,
            kv_lost_from=kv_lost_from,
            plans=plans,
        )
        wait: Wait | None = None
        try:
            while True:
                try:
                    return self._place(asked, wait, request.trace.trace_id)
                except RoutingRefused as refused:
                    wait = wait or Wait(
                        self.placer.waiting, request, self.observed, limit_s=self._request_timeout_s
                    )
                    await wait.for_change(refused)
        finally:
            if wait is not None:
                wait.leave()

    def _place(self, asked: AttemptRequest, wait: Wait | None, trace_id: str) -> Placement:
        explained = self._explain_attempt(asked) if self._decisions.wants_table else None
        started_s = time.perf_counter()
        placement = self.placer.place(asked, self._draws.next, now_s=self.clock())
        self._draws.take()
        placement.trace_id = trace_id
        decision_s = placement.decision_s = time.perf_counter() - started_s
        waited_s = None if wait is None else wait.was_for(placement)
        self.observed.placed(placement, decision_s=decision_s, waited_s=waited_s)
        self._record(placement, explained)
        return placement

    def _explain_attempt(self, asked: AttemptRequest) -> Decision | None:
        """What the next placement will weigh, by its own draw; None where the usual plan is refused."""
        started_s = time.perf_counter()
        try:
            return self.placer.explain_attempt(asked, self._draws.next, now_s=self.clock())
        except RoutingRefused:
            return None
        finally:
            self._decisions.table_took(time.perf_counter() - started_s)

    def pick_decode_again(self, placement: Placement) -> None:
        """After a synchronous prefill: decide decode again under its constraint, and move the lease."""
        started_s = time.perf_counter()
        if self.placer.pick_decode_again(placement, now_s=self.clock()):
            self.observed.picked_again(placement, decision_s=time.perf_counter() - started_s)
            self._record(placement)

    def _record(self, placement: Placement, explained: Decision | None = None) -> None:
        """Keep a decision; with the table of its candidates where that explains the same choice."""
        decision = placement.decision
        is_same = explained is not None and _ranks_of(explained) == _ranks_of(decision)
        self._decisions.record(
            decision,
            decided_at_s=time.time(),
            trace_id=placement.trace_id,
            model=self.fleet.model,
            rows=explained.rows if explained is not None and is_same else (),
        )

    # Settings that change

    def moved(self, place: Mapping[str, str]) -> None:
        """The frontend has these domains from now on: prefill that keeps near it moves too."""
        near = self.placer.settings.near
        if near is not None and near.value != place.get(near.domain):
            near = structs.replace(near, value=place.get(near.domain))
            self.placer.set_routing(structs.replace(self.placer.settings, near=near), now_s=self.clock())

    def links_changed(self, links: LinkTable) -> None:
        """Weigh these links from now on, where links are weighed; they are learned from the beginning."""
        if self.placer.settings.links is not None:
            self.placer.set_routing(structs.replace(self.placer.settings, links=links), now_s=self.clock())

    # The fleet

    def freed(self, slot: Slot) -> None:
        """A slot has no worker rank any more: what is known of it goes."""
        self.placer.freed(slot)
        self.accounts.freed(slot)

    def capacity_changed(self, slot: Slot) -> None:
        """A card or a load report named how many KV blocks the rank at the slot has."""
        card = self.fleet.card_at(slot)
        if card is not None:
            self.cache.set_total_blocks(slot, self.fleet.kv_blocks(slot), n_ranks=card.dp_size)

    def reported(self, report: LoadReport) -> bool:
        """A worker rank reported its load; False when it is not here."""
        slot = self.fleet.slot_of(report.rank)
        if slot is None:
            return False
        self.placer.reported(report, slot, now_s=self.clock())
        self.capacity_changed(slot)
        carried = self.accounts.reported(report)
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
        """The first token came: load moves from prefill to decode."""
        now_s = self.clock()
        if placement.is_counted:  # who booked it by hand may say so again
            self.placer.first_token(placement, now_s=now_s)
            return
        self.flows.handed_over(placement, now_s=now_s)
        self.placer.first_token(placement, now_s=now_s)
        self.count_first_token(placement)

    def count_first_token(self, placement: Placement) -> None:
        """Count the prompt that was prefilled, and of a pair that KV went over."""
        placement.is_counted = True
        self.observed.handed_over(placement)
        prefills = prefilling(placement.decision)
        if self.fleet.card(prefills.rank.worker_id) is not None:
            self.observed.prompt_prefilled(prefills.rank.worker_id, placement.prompt.isl_tokens)

    def release(self, placement: Placement, *, tokens: int = 0) -> None:
        """Close the leases, after an attempt that brought so many tokens; idempotent."""
        self.placer.release(placement, now_s=self.clock(), tokens=tokens)
        self.answered(placement, tokens=tokens)

    def answered(self, placement: Placement, *, tokens: int) -> None:
        """An attempt brought so many tokens. Nothing is counted of a worker that left: its counters went with
        it.
        """
        worker_id = placement.decision.decode.rank.worker_id
        if tokens and self.fleet.card(worker_id) is not None:
            self.observed.tokens_answered(worker_id, tokens)

    def note_cached_tokens(self, placement: Placement, cached_tokens: int, prompt_tokens: int | None) -> None:
        """What the engine really had cached, next to what was predicted; ``prompt_tokens``: its own count."""
        pick = prefilling(placement.decision)
        predicted_tokens = pick.overlap_blocks * placement.block_size
        card, slot = self.fleet.card(pick.rank.worker_id), self.fleet.slot_of(pick.rank)
        worker_id = None if card is None else card.worker_id
        self.observed.cached_tokens(worker_id, predicted=predicted_tokens, actual=cached_tokens)
        route_request = placement.route_request
        is_guess = route_request.has_media or route_request.is_prompt_unknown
        if card is None or slot is None or card.cache_is_partial or is_guess:
            return
        if self.cache.is_sure_of(slot) and self.accounts.answered(
            slot,
            pick.rank,
            predicted_tokens=predicted_tokens,
            cached_tokens=cached_tokens,
            isl_tokens=placement.prompt.isl_tokens,
            prompt_tokens=prompt_tokens,
            shape=placement.route_request.shape,
        ):
            self.cache.doubt(slot)


def _ranks_of(decision: Decision) -> tuple[WorkerRank | None, WorkerRank]:
    return None if decision.prefill is None else decision.prefill.rank, decision.decode.rank


def _call_soon(call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(call)
