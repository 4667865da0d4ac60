"""The router of one model: one view, one decision, one booking, no await between them."""

import random
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvrouter.config.router import KvRouterConfig
from kvrouter.core.constraints import Pin, RouterMode
from kvrouter.core.errors import RoutingRefused
from kvrouter.core.hashing import Prompt, hash_seed
from kvrouter.core.ids import LeaseId, LeaseKey, RequestId, RouterId, Slot, WorkerId
from kvrouter.core.requests import Bootstrap, GenerateRequest, Leg, TokenBuffer
from kvrouter.core.workers import LoadReport, WorkerCard
from kvrouter.fleet import CircuitSettings, Fleet
from kvrouter.journey.journey import RetryPlan, Shape
from kvrouter.ledger.port import Ledger
from kvrouter.routing.request import Decision, Pick, RouteRequest, RoutingSettings, View
from kvrouter.routing.route import route, route_decode
from kvrouter.service.admission_queue import AdmissionQueue
from kvrouter.service.attempt import Placement, decide_one_of, route_request, wish_in
from kvrouter.service.cache_view import CacheView
from kvrouter.service.circuits import Circuits
from kvrouter.service.engine_reports import EngineReports
from kvrouter.service.instrumentation import ModelInstrumentation
from kvrouter.service.load_at_report import LoadAtReport
from kvrouter.service.replica_sync import ReplicaSync

ATTEMPTS_MAX = 16
"""Decisions kept for one request id: of a client that sends one id again and again, the last ones."""


class DecisionLog:
    """Holds the attempts of the last ``requests_max`` requests; the oldest request is forgotten first."""

    def __init__(self, *, requests_max: int) -> None:
        self._requests_max = requests_max
        self._by_request: OrderedDict[RequestId, deque[tuple[float, Decision]]] = OrderedDict()

    def record(self, decision: Decision, *, decided_at_s: float) -> None:
        """Add one attempt's decision; ``decided_at_s`` is a wall-clock time."""
        if self._requests_max == 0:
            return
        attempts = self._by_request.get(decision.request_id)
        if attempts is None:
            attempts = self._by_request[decision.request_id] = deque(maxlen=ATTEMPTS_MAX)
            if len(self._by_request) > self._requests_max:
                self._by_request.popitem(last=False)
        attempts.append((decided_at_s, decision))

    def get(self, request_id: RequestId) -> list[tuple[float, Decision]] | None:
        """Every attempt's decision in order, or None when the request is unknown or forgotten."""
        attempts = self._by_request.get(request_id)
        return None if attempts is None else list(attempts)


U32 = npt.NDArray[np.uint32]
ROOM_LIMIT = 2**63 - 1
"""A bootstrap room is below this: engines keep it in a signed 64-bit integer."""


class Draws:
    """What one decision after another draws from: 64 random bits and a turn. A seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.turn = 0
        self.seed = self._random.getrandbits(64)

    def take(self) -> int:
        """These are used: there are others from now on. Return the random bits that were used."""
        used, self.seed = self.seed, self._random.getrandbits(64)
        self.turn += 1
        return used


class ModelRouter:
    """A :class:`placement.Placer` of one model; with ``sync`` requests of other routers are load here too."""

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
    ) -> None:
        self.fleet = fleet
        self.cache = cache
        self.ledger: Ledger = ledger
        self.settings = settings
        self._tracks_active_blocks = config.track_active_blocks
        self._at_report = self._begin_at_report()
        self._waiting = AdmissionQueue(config, observed)
        if sync is not None:
            self.ledger = sync.share(fleet, ledger, on_less=self.load_changed, before_more=self._read_load)
        self._router_id = router_id
        self._sync = sync
        self._decisions = decisions
        self.observed = observed
        self._random = random.Random(seed)
        self.accounts = EngineReports(fleet, observed.engines)
        self.circuits = Circuits(
            fleet,
            CircuitSettings(config.circuit_failures, config.circuit_open_s, config.circuit_open_max_s),
            observed.circuits,
            seed=self._random.getrandbits(64),
            on_let_in=self.load_changed,
        )
        self._draws = Draws(self._random.getrandbits(64))
        self._asked = Draws(self._random.getrandbits(64))
        """What questions draw from: they must not all be given the draw of the next booking."""
        self._not_active: U32 = np.zeros(16, np.uint32)

    # Deciding

    def hash_prompt(
        self, token_ids: TokenBuffer, *, lora_name: str | None = None, cache_namespace: str | None = None
    ) -> Prompt:
        """Hash a prompt's blocks, once; the result travels with the request."""
        seed = hash_seed(lora_name=lora_name, cache_namespace=cache_namespace)
        # An empty array has no buffer. Nothing may be known of a prompt that an engine tokenizes itself.
        return Prompt(token_ids or (), block_size=self.fleet.block_size, seed=seed)

    def set_busy_thresholds(self, *, decode_blocks: float | None, prefill_tokens: int | None) -> None:
        """Judge from now on who is busy by these; requests that wait may try again."""
        self.settings = structs.replace(
            self.settings,
            active_decode_blocks_threshold=decode_blocks,
            active_prefill_tokens_threshold=prefill_tokens,
        )
        self._at_report = self._at_report or self._begin_at_report()
        self.load_changed()

    def set_prefill_alone(self, is_alone: bool) -> None:
        """Whether the prefill leg is all that is decided from now on, for workers that hold no block of a
        running answer.
        """
        self.settings = structs.replace(
            self.settings,
            prefill_alone=is_alone,
            track_active_blocks=self._tracks_active_blocks and not is_alone,
        )

    def _begin_at_report(self) -> LoadAtReport | None:
        """Keep what reports have found from now on; nobody needs it while no worker is ever busy."""
        settings = self.settings
        thresholds = settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold
        return None if thresholds == (None, None) else LoadAtReport(self.ledger.columns())

    @property
    def _admitted(self) -> RoutingSettings:
        """The settings for a request that is admitted already."""
        return structs.replace(
            self.settings, active_decode_blocks_threshold=None, active_prefill_tokens_threshold=None
        )

    def decide(self, request: RouteRequest, prompt: Prompt) -> Decision:
        """Take one reading and decide; books nothing."""
        return route(request, self.view(prompt, has_media=request.has_media))

    def explain(self, request: GenerateRequest) -> Decision:
        """Decide as :meth:`place` would, with a row for every candidate; books nothing.

        Each question has a draw and a turn of its own, and none of a booking's: the answers
        spread over the workers as requests do, and no question changes a request.
        """
        prompt = self.hash_prompt(
            request.token_ids, lora_name=request.lora_name, cache_namespace=request.cache_namespace
        )
        wanted = route_request(request, prompt, attempt=0, excluded=frozenset())
        view = self.view(prompt, has_media=request.has_media, draws=self._asked)
        self._asked.take()
        return route(wanted, view, explain=True)

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
        """Decide, in the first of ``ways`` that is open, and book.

        Raises :class:`RoutingRefused` when waiting is not allowed or was in vain.
        """
        prompt = self.hash_prompt(
            token_ids, lora_name=request.lora_name, cache_namespace=request.cache_namespace
        )
        usual = route_request(
            request, prompt, attempt=attempt, excluded=excluded, has_lost_kv=bool(kv_lost_from)
        )
        options = {way: wish_in(way, usual, kv_lost_from) for way in ways}
        with self._waiting.begin(request) as wait:
            while True:
                started_s = time.perf_counter()
                try:
                    wanted, decision = decide_one_of(options, self.decide, prompt)
                except RoutingRefused as refused:
                    await wait.for_change(refused)
                    continue
                placement = self._book(wanted, decision, prompt, token_ids)
                decision_s = time.perf_counter() - started_s
                self.observed.placed(placement, decision_s=decision_s, waited_s=wait.was_for(placement))
                self._decisions.record(decision, decided_at_s=time.time())
                return placement

    def pick_decode_again(self, placement: Placement) -> None:
        """After a synchronous prefill: decide decode afresh under its constraint, and move the lease."""
        started_s = time.perf_counter()
        old = placement.decision
        self.circuits.give_back(placement)  # or it would be passed over for its own sake
        decision = structs.replace(self._decide_decode_again(placement), prefill=old.prefill)
        if not self.ledger.move(placement.decode_lease, decision.decode.slot, 0):
            # The worker left during prefill, and the lease with it.
            placement.decode_lease = self._book_decode(decision, placement.prompt)
        card = self._card(decision.decode)
        placement.decision = decision
        self.circuits.booked(placement)
        placement.decode_address = card.address
        placement.decode_context_tokens = card.context_length
        placement.decode_domains = card.runtime_config.topology_domains
        if decision.decode.rank != old.decode.rank:
            self.observed.picked_again(placement, decision_s=time.perf_counter() - started_s)
            self._decisions.record(decision, decided_at_s=time.time())

    def _decide_decode_again(self, placement: Placement) -> Decision:
        """Decide with the draw of the booking. In turn and by chance there is nothing new to weigh, so the
        worker is kept while it may be: else all that ends its prefill at one time would meet at one worker.
        Nobody is too busy for a request that was admitted: its load is booked.
        """
        old, wanted = placement.decision, placement.wish
        view = structs.replace(
            self.view(placement.prompt, has_media=wanted.has_media, own=old.decode),
            seed=placement.seed,
            settings=self._admitted,
        )
        sender = None if old.prefill is None else old.prefill.rank
        if old.mode is not RouterMode.KV and not self.fleet.columns.circuit_open[old.decode.slot]:
            keep = structs.replace(wanted, pin=Pin(*old.decode.rank))
            with suppress(RoutingRefused):
                kept = route_decode(keep, view, old.constraint, prefill=sender)
                if not kept.fallback_used:
                    return kept
        return route_decode(wanted, view, old.constraint, prefill=sender)

    def view(
        self,
        prompt: Prompt,
        *,
        has_media: bool = False,
        own: Pick | None = None,
        draws: Draws | None = None,
    ) -> View:
        """Take one reading of all that a decision depends on; its columns are reused by the next one.

        ``own`` is where the request is booked already: its blocks are active there, so none would be new.
        Turn and seed are of ``draws``, by default those of the next booking: two readings show the same.
        """
        draws = draws or self._draws
        self.circuits.refresh()
        n_slots = self.fleet.n_slots
        self.ledger.ensure_slots(n_slots)
        if len(self._not_active) < n_slots:
            self._not_active = np.zeros(max(n_slots, 2 * len(self._not_active)), np.uint32)
        not_active = None
        if self.settings.track_active_blocks:
            not_active = self._not_active[:n_slots]
            self.ledger.not_active(prompt, not_active)
            if own is not None and self.fleet.rank_at(own.slot) == own.rank:
                not_active[own.slot] = 0
        columns = self.ledger.columns()
        at_report = self._at_report
        if at_report is not None:
            at_report.look(columns)
        return View(
            fleet=self.fleet,
            overlap_blocks=self.cache.overlap(prompt, n_slots, has_media=has_media),
            prefill_tokens=columns.prefill_tokens[:n_slots],
            active_blocks=columns.active_blocks[:n_slots],
            not_active=not_active,
            settings=self.settings,
            seed=draws.seed,
            turn=draws.turn,
            unseen=0.0 if self._sync is None else self._sync.unseen(self.fleet.model),
            tokens_at_report=None if at_report is None else at_report.prefill_tokens(n_slots),
            blocks_at_report=None if at_report is None else at_report.active_blocks(n_slots),
        )

    # Waiting

    @property
    def waiting(self) -> int:
        """How many requests wait, for whatever reason."""
        return len(self._waiting)

    @property
    def waiting_for_load(self) -> int:
        """How many of them wait for a worker that is less busy."""
        return len(self._waiting.admission)

    def fleet_changed(self) -> None:
        """A worker came, changed or left: requests that wait may try again."""
        if self._sync is not None:
            self._sync.fleet_changed(self.fleet.model)
        self.circuits.fleet_changed()
        self._waiting.domain.pulse()
        self._waiting.admission.pulse()

    def freed(self, slot: Slot) -> None:
        """A slot has no worker rank any more: what is known of it goes."""
        self.ledger.drop_slot(slot)
        self.cache.freed(slot)
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
        self.fleet.report(report)
        self.capacity_changed(slot)
        self.accounts.reported(report)
        if self._at_report is not None:
            self.ledger.ensure_slots(self.fleet.n_slots)
            self._at_report.reported(slot, self.ledger.columns())
        self.load_changed()
        return True

    def _read_load(self) -> None:
        if self._at_report is not None:
            self._at_report.look(self.ledger.columns())

    def load_changed(self) -> None:
        """Some worker may be less busy: requests that wait for that may try again."""
        self._waiting.admission.pulse()

    # Booking

    def _book(
        self, wanted: RouteRequest, decision: Decision, prompt: Prompt, token_ids: TokenBuffer
    ) -> Placement:
        """Claim the picked ranks. The two legs of an attempt hold leases 2·attempt and 2·attempt + 1."""
        decode, prefill = decision.decode, decision.prefill
        prefill_lease: LeaseId | None = None
        if prefill is not None:
            prefill_lease = self.ledger.book(
                key=self._key(decision.request_id, 2 * decision.attempt),
                slot=prefill.slot,
                prompt=prompt,
                prefill_tokens=self._uncached_tokens(prefill, prompt),
                track_blocks=False,
            )
        decode_lease = self._book_decode(decision, prompt)
        seed = self._draws.take()
        self.cache.decided(decision, prompt, has_media=wanted.has_media)
        decode_card = self._card(decode)
        placement = Placement(
            wish=wanted,
            decision=decision,
            prompt=prompt,
            token_ids=token_ids,
            block_size=self.fleet.block_size,
            shape=Shape.AGGREGATED,
            seed=seed,
            decode_address=decode_card.address,
            decode_context_tokens=decode_card.context_length,
            decode_lease=decode_lease,
            decode_domains=decode_card.runtime_config.topology_domains,
            bootstrap=self._bootstrap(decode_card, decode) if decode.leg is Leg.PREFILL else None,
        )
        if prefill is not None:
            prefill_card = self._card(prefill)
            placement.prefill_lease = prefill_lease
            placement.prefill_address = prefill_card.address
            placement.prefill_domains = prefill_card.runtime_config.topology_domains
            placement.bootstrap = self._bootstrap(prefill_card, prefill)
            placement.shape = Shape.SYNCHRONOUS if placement.bootstrap is None else Shape.BOOTSTRAP
        self.circuits.booked(placement)
        return placement

    def _book_decode(self, decision: Decision, prompt: Prompt) -> LeaseId:
        decode = decision.decode
        return self.ledger.book(
            key=self._key(decision.request_id, 2 * decision.attempt + 1),
            slot=decode.slot,
            prompt=prompt,
            prefill_tokens=self._uncached_tokens(decode, prompt) if decision.prefill is None else 0,
            track_blocks=self.settings.track_active_blocks,
        )

    def _uncached_tokens(self, pick: Pick, prompt: Prompt) -> int:
        if not self.settings.track_prefill_tokens:
            return 0
        return max(0, prompt.isl_tokens - pick.overlap_blocks * self.fleet.block_size)

    def _key(self, request_id: RequestId, number: int) -> LeaseKey:
        return LeaseKey(self._router_id, request_id, number)

    def _card(self, pick: Pick) -> WorkerCard:
        card = self.fleet.card_at(pick.slot)
        if card is None:
            raise RuntimeError(f"slot {pick.slot} was picked and is free")
        return card

    def _bootstrap(self, card: WorkerCard, prefill: Pick) -> Bootstrap | None:
        """The rendezvous, when the prefill worker offers one: a random room, congruent to its dp rank."""
        host, port = card.runtime_config.bootstrap_host, card.runtime_config.bootstrap_port
        if host is None or port is None:
            return None
        rank = prefill.rank.dp_rank - card.dp_start
        room = self._random.randrange((ROOM_LIMIT - rank) // card.dp_size) * card.dp_size + rank
        return Bootstrap(host, port, room)

    # Leases

    def prefill_worker_left(self, placement: Placement) -> bool:
        """Whether the pair's prefill worker left or does not answer, and the KV that waited there with it."""
        pick = placement.decision.prefill
        if pick is None:
            return False
        card = self.fleet.card_at(pick.slot)
        return (
            card is None
            or card.address != placement.prefill_address
            or not self.fleet.is_alive(card.worker_id)
        )

    def prefill_done(self, placement: Placement) -> None:
        """The prefill leg ended: its tokens no longer load its worker."""
        self.circuits.prefilled(placement)
        if placement.prefill_lease is not None:
            self.ledger.close(placement.prefill_lease)
            self.load_changed()

    def first_token(self, placement: Placement) -> None:
        """The first token came: load moves from prefill to decode."""
        self.circuits.begun(placement)
        self.ledger.first_token(placement.decode_lease)
        if placement.prefill_lease is not None:
            self.ledger.close(placement.prefill_lease)
        self.observed.handed_over(placement)
        self.load_changed()

    def output_blocks(self, placement: Placement, blocks: int) -> None:
        """So many more blocks are full of output."""
        self._read_load()
        self.ledger.output_block(placement.decode_lease, blocks)

    def note_cached_tokens(self, placement: Placement, cached_tokens: int, prompt_tokens: int | None) -> None:
        """What the engine really had cached, next to what was predicted; ``prompt_tokens``: its own count."""
        decision = placement.decision
        pick = decision.decode if decision.prefill is None else decision.prefill
        predicted_tokens = pick.overlap_blocks * placement.block_size
        self.observed.cached_tokens(predicted=predicted_tokens, actual=cached_tokens)
        card, slot = self.fleet.card(pick.rank.worker_id), self.fleet.slot_of(pick.rank)
        if card is None or slot is None or card.cache_is_partial or placement.wish.has_media:
            return
        if self.cache.is_sure_of(slot) and self.accounts.answered(
            slot,
            pick.rank,
            predicted_tokens=predicted_tokens,
            cached_tokens=cached_tokens,
            isl_tokens=placement.prompt.isl_tokens,
            prompt_tokens=prompt_tokens,
        ):
            self.cache.doubt(slot)

    def release(self, placement: Placement) -> None:
        """Close the leases; idempotent."""
        self.circuits.released(placement)
        if placement.prefill_lease is not None:
            self.ledger.close(placement.prefill_lease)
        self.ledger.close(placement.decode_lease)
        self.load_changed()
