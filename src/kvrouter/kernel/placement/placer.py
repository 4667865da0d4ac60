"""The placer of one model: reads the state once, decides and books; later moves and releases leases.

No other task runs between the reading and the booking. ``now_s`` is seconds of one monotonic clock.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvrouter.core.constraints import Pin, QueuePolicy, RouterMode
from kvrouter.core.errors import RoutingRefused, SloUnreachable
from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import LeaseId, LeaseKey, RouterId, Slot, WorkerRank
from kvrouter.core.requests import (
    Bootstrap,
    GenerateRequest,
    Leg,
)
from kvrouter.core.workers import CONTEXT_TOKENS_UNKNOWN, LoadReport, WorkerCard
from kvrouter.kernel.fleet.circuit import CircuitSettings
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.journey import RetryPlan, Shape
from kvrouter.kernel.ledger.port import Ledger, LedgerColumns
from kvrouter.kernel.ledger.replicas import Replication
from kvrouter.kernel.placement.attempt_request import prompt_of, to_route_request
from kvrouter.kernel.placement.cache_view import CacheView
from kvrouter.kernel.placement.circuits import Circuits
from kvrouter.kernel.placement.kv_pull import with_pulled_blocks
from kvrouter.kernel.placement.learned_costs import LearnedCosts, UnseenPrefills, missing_tokens
from kvrouter.kernel.placement.load_at_report import load_at_report
from kvrouter.kernel.placement.placement import AttemptRequest, Draw, Placement
from kvrouter.kernel.placement.placement_events import PlacementEvents
from kvrouter.kernel.placement.service_levels import soonest
from kvrouter.kernel.placement.waiting_line import CallSoon, WaitingLimits, WaitingLines
from kvrouter.kernel.routing.costs.time import prompt_s
from kvrouter.kernel.routing.formats import takers_of_peer
from kvrouter.kernel.routing.interface import (
    CostInput,
    Decision,
    Pick,
    PickingRule,
    RouteRequest,
    RoutingSettings,
    View,
    cost_rule,
)
from kvrouter.kernel.routing.route import route, route_decode

U32 = npt.NDArray[np.uint32]


class DecisionSink(Protocol):
    """A callback for each decision that the placer books, with its input."""

    def __call__(
        self, route_request: RouteRequest, view: View, decision: Decision, *, prefill: WorkerRank | None
    ) -> None:
        """Called with a decision. ``view``'s columns are reused by the next reading. ``prefill``: the rank
        where the KV waits of a request whose decode was picked again; None for a first decision.
        """


OnPicked = Callable[[Placement], None]
"""Called with a placement that is decided and not booked yet."""

_PREFILL, _AGGREGATED = Leg.PREFILL, Shape.AGGREGATED
"""Constants, because access to an enumeration's members is slow before Python 3.12."""

PREFILLS_PASSED = 10.0
"""Under ``shortest`` a request's slack is so many times the seconds of its own prefill."""

ROOM_LIMIT = 2**63 - 1
"""One more than the largest bootstrap room: engines store it in a signed 64-bit integer."""


class Placer:
    """Places the attempts of one model's requests, and maintains their leases.

    With ``replication`` the requests of other routers count as load too. ``circuit_seed`` is the random seed
    of the circuits' open times; ``events`` receives the events of workers and links; ``call_soon`` wakes
    waiting requests. ``rule`` replaces the settings' cost and mode.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        cache: CacheView,
        ledger: Ledger,
        router_id: RouterId,
        settings: RoutingSettings,
        tracks_active_blocks: bool,
        circuits: CircuitSettings,
        circuit_seed: int,
        events: PlacementEvents,
        waiting: WaitingLimits,
        call_soon: CallSoon,
        now_s: float,
        replication: Replication | None = None,
        rule: PickingRule | None = None,
    ) -> None:
        self.rule = rule
        self.on_decided: DecisionSink | None = None
        self.fleet = fleet
        self.cache = cache
        self.ledger: Ledger = ledger
        self.settings = settings
        self._needs = (rule or cost_rule(settings.cost)).needs
        self.waiting = WaitingLines(waiting, call_soon)
        wake = self.waiting.admission.pulse
        self.circuits = Circuits(fleet, circuits, events, seed=circuit_seed, on_readmitted=wake)
        self._tracks_active_blocks = tracks_active_blocks
        self._at_report = load_at_report(self.settings, self.ledger.columns(), now_s=now_s)
        self._replication = replication
        if replication is not None:
            self.ledger = replication.share(
                fleet, ledger, on_load_decrease=wake, before_load_increase=self._read_load, now_s=now_s
            )
        self.learned = LearnedCosts(fleet, self.ledger, events, settings, router_id)
        self.speeds, self.transfers = self.learned.speeds, self.learned.transfers
        if replication is not None:
            self.transfers.begin_sharing()
            replication.replicas.links.share(fleet.model, self.transfers)
        self._router_id = router_id
        self._not_active: U32 = np.zeros(0, np.uint32)
        self._columns = self.ledger.columns()
        self._load = self._columns.first(0)
        """The part of ``_columns`` in the last view: the same arrays until the number of slots changes, and
        so the same native form under the time rule.
        """
        self._unseen_prefills = UnseenPrefills()

    # Settings

    def set_busy_thresholds(
        self, *, decode_blocks: float | None, prefill_tokens: int | None, now_s: float
    ) -> None:
        """Replace the busy thresholds; waiting requests are decided again."""
        self.settings = structs.replace(
            self.settings,
            active_decode_blocks_threshold=decode_blocks,
            active_prefill_tokens_threshold=prefill_tokens,
        )
        self._at_report = self._at_report or load_at_report(self.settings, self.ledger.columns(), now_s=now_s)
        self.waiting.admission.pulse()

    def set_routing(self, settings: RoutingSettings, *, now_s: float) -> None:
        """Replace the routing settings; waiting requests are decided again. Settings on which bookings depend
        are kept: whether blocks are tracked, and whether only the prefill leg is decided.
        """
        self.transfers.use(settings.links)
        self.settings = self.learned.settings = structs.replace(
            settings,
            prefill_alone=self.settings.prefill_alone,
            track_active_blocks=self.settings.track_active_blocks,
        )
        self._needs = (self.rule or cost_rule(settings.cost)).needs
        self._at_report = self._at_report or load_at_report(self.settings, self.ledger.columns(), now_s=now_s)
        self.waiting.domain.pulse()
        self.waiting.admission.pulse()

    def set_prefill_alone(self, is_alone: bool) -> None:
        """Set whether only prefill is decided from now on, for workers that hold no blocks of answers."""
        self.settings = self.learned.settings = structs.replace(
            self.settings,
            prefill_alone=is_alone,
            track_active_blocks=self._tracks_active_blocks and not is_alone,
        )

    # The fleet

    def fleet_changed(self, *, now_s: float) -> None:
        """Handle a worker that joined, changed or left; waiting requests are decided again."""
        if self._replication is not None:
            self._replication.replicas.fleet_changed(self.fleet.model, now_s=now_s)
        self.circuits.fleet_changed()
        self.learned.speeds.fleet_changed()
        self.waiting.domain.pulse()
        self.waiting.admission.pulse()

    def freed(self, slot: Slot) -> None:
        """Remove the state of a slot without a worker rank: its leases, cache and learned speed."""
        self.ledger.drop_slot(slot)
        self.cache.freed(slot)
        self.learned.freed(slot)

    def reported(self, report: LoadReport, slot: Slot, *, now_s: float) -> None:
        """Handle a load report of the worker rank at ``slot``."""
        self.fleet.report(report)
        if self._at_report is not None:
            self.ledger.ensure_slots(self.fleet.n_slots)
            self._at_report.reported(slot, self.ledger.columns(), now_s=now_s)
        self.waiting.admission.pulse()

    def _overlap(self, prompt: Prompt, n_slots: int, *, now_s: float, is_guess: bool) -> U32 | None:
        """Return the overlap by slot, without blocks that the engine may not reuse."""
        overlap = self.cache.overlap(prompt, n_slots, now_s=now_s, is_guess=is_guess)
        unsure = self.fleet.unsure_blocks
        if overlap is not None and unsure is not None:
            overlap -= np.minimum(overlap, unsure)
        return overlap

    def _read_load(self, now_s: float) -> None:
        if self._at_report is not None:
            self._at_report.update(self.ledger.columns(), now_s=now_s)

    # Deciding

    def view(
        self, prompt: Prompt, draw: Draw, *, now_s: float, is_guess: bool = False, own: Pick | None = None
    ) -> View:
        """Read all state that a decision depends on; the next reading reuses its columns.

        ``own`` is the pick of a request that is already booked: all of its blocks are active there.
        """
        if self.circuits.not_closed:
            self.circuits.refresh(now_s=now_s)
        self._end_unseen_prefills(now_s)
        n_slots = self.fleet.n_slots
        self.ledger.ensure_slots(n_slots)
        columns = self.ledger.columns()
        if columns is not self._columns or len(self._not_active) != n_slots:
            self._columns, self._load = columns, columns.first(n_slots)
            self._not_active = np.zeros(n_slots, np.uint32)
        not_active, load = None, self._load
        if self.settings.track_active_blocks:
            not_active = self._not_active
            self.ledger.not_active(prompt, not_active)
            if own is not None and self.fleet.rank_at(own.slot) == own.rank:
                not_active[own.slot] = 0
        at_report = self._at_report
        if at_report is not None:
            at_report.update(columns, now_s=now_s)
        replication = self._replication
        return View(
            fleet=self.fleet,
            overlap_blocks=self._overlap(prompt, n_slots, now_s=now_s, is_guess=is_guess),
            prefill_tokens=load.prefill_tokens,
            active_blocks=load.active_blocks,
            not_active=not_active,
            settings=self.settings,
            seed=draw.seed,
            turn=draw.turn,
            unseen=0.0 if replication is None else replication.replicas.unseen(self.fleet.model),
            tokens_at_report=None if at_report is None else at_report.prefill_tokens(n_slots),
            blocks_at_report=None if at_report is None else at_report.active_blocks(n_slots),
            rule=self.rule,
            cost_input=self._cost_input(load, prompt.isl_tokens, now_s) if self._needs.requests else None,
        )

    def _cost_input(self, load: LedgerColumns, prompt_tokens: int, now_s: float) -> CostInput:
        if self._needs.learned:
            return self.learned.cost_input(load, prompt_tokens, now_s=now_s)
        return CostInput(load.requests, load.waiting)

    def decide(self, route_request: RouteRequest, prompt: Prompt, draw: Draw, *, now_s: float) -> Decision:
        """Read the state and decide; books nothing. Raises :class:`RoutingRefused`."""
        return route(route_request, self.view(prompt, draw, now_s=now_s, is_guess=route_request.is_guess))

    def explain(self, request: GenerateRequest, draw: Draw, *, now_s: float) -> Decision:
        """Decide as :meth:`place` would, with a row for every candidate; books nothing. Raises
        :class:`RoutingRefused` with the rows.
        """
        prompt = prompt_of(request, request.token_ids, block_size=self.fleet.block_size)
        route_request = to_route_request(request, prompt, attempt=0, excluded=frozenset())
        view = self.view(prompt, draw, now_s=now_s, is_guess=route_request.is_guess)
        decision = route(route_request, view, explain=True)
        level, overlap_blocks = request.service_level, view.overlap_blocks
        try:
            self.learned.refuse_late(level, decision, overlap_blocks, now_s=now_s)
        except SloUnreachable:
            decision = route(*soonest(route_request, view), explain=True)
            self.learned.refuse_late(level, decision, overlap_blocks, now_s=now_s)
        return decision

    # Placing

    def place(
        self, request: AttemptRequest, draw: Draw, *, now_s: float, on_picked: OnPicked | None = None
    ) -> Placement:
        """Decide, and book the first option that is not refused; one of last resort only if all others are.
        ``on_picked`` is called with an aggregated placement before it is booked: what it sends need not wait.

        Raises the :class:`RoutingRefused` of the usual option when all are refused, without a booking.
        """
        refusals: dict[RetryPlan, RoutingRefused] = {}
        last_resort: tuple[RouteRequest, View, Decision] | None = None
        for plan, route_request in request.options.items():
            view = self.view(request.prompt, draw, now_s=now_s, is_guess=route_request.is_guess)
            try:
                decision = route(route_request, view)
            except RoutingRefused as refused:
                refusals[plan] = refused
                continue
            if not decision.last_resort:
                return self._book(route_request, view, decision, request, draw, now_s, on_picked)
            last_resort = last_resort or (route_request, view, decision)
        if last_resort is None:
            raise refusals[RetryPlan.USUAL]
        return self._book(*last_resort, request, draw, now_s, on_picked)

    def slack_s(self, request: GenerateRequest, prompt: Prompt, *, now_s: float) -> float:
        """Return the slack of a request that begins to wait now, by the queue's policy. It does not change
        while the request waits, so none waits for ever.
        """
        limits = self.waiting.limits
        match limits.policy:
            case QueuePolicy.FCFS:
                return 0.0
            case QueuePolicy.DEADLINE:
                return min(limits.request_timeout_s, self.settings.ttft_limit_s(request.service_level))
            case QueuePolicy.SHORTEST:
                fleet = self.fleet
                overlap = self._overlap(prompt, fleet.n_slots, now_s=now_s, is_guess=request.is_guess)
                most = 0 if overlap is None else int(overlap.max(initial=0)) * fleet.block_size
                return PREFILLS_PASSED * prompt_s(self.settings.timing, max(0, prompt.isl_tokens - most))

    def pick_decode_again(self, placement: Placement, *, now_s: float) -> bool:
        """Choose the decode rank again after a synchronous prefill, under the same constraint; move the
        lease. Return whether the rank changed. Raises :class:`RoutingRefused`.
        """
        old = placement.decision
        self.circuits.give_back(placement, now_s=now_s)  # else its own trial would exclude its worker
        began_s = None if placement.transfer is None else placement.transfer.began_s
        has_transfer = placement.transfer is not None
        self.learned.end_transfer(placement)  # else its own KV would count as load of the link
        decision = structs.replace(self._decide_decode_again(placement, now_s), prefill=old.prefill)
        if not self.ledger.move(placement.decode_lease, decision.decode.slot, 0):
            # The worker left during prefill, which closed the lease.
            placement.decode_lease = self._book_decode(decision, placement.prompt)
        card = self._card(decision.decode)
        placement.decision = decision
        self.circuits.booked(placement, now_s=now_s)
        if has_transfer:
            self.learned.begin_transfer(placement)
            if began_s is not None:
                self.learned.kv_ready(placement, now_s=now_s)
        placement.decode_address = card.address
        placement.decode_context_tokens = card.context_length or CONTEXT_TOKENS_UNKNOWN
        placement.decode_domains = card.runtime_config.topology_domains
        return decision.decode.rank != old.decode.rank

    def _decide_decode_again(self, placement: Placement, now_s: float) -> Decision:
        """Decide with the draw of the booking. Under round-robin and random the worker is kept while it is
        eligible: otherwise all requests that end their prefill at the same time would go to the same worker.
        Busy thresholds do not apply to an admitted request, whose load is booked. If no other worker may take
        it, a worker that was cordoned since then keeps it.
        """
        old = placement.decision
        route_request = structs.replace(placement.route_request, kv_sender=placement.kv_sender)
        admitted = structs.replace(
            self.settings, active_decode_blocks_threshold=None, active_prefill_tokens_threshold=None
        )
        view = self.view(
            placement.prompt, placement.draw, now_s=now_s, is_guess=route_request.is_guess, own=old.decode
        )
        view = structs.replace(view, settings=admitted)
        sender = None if old.prefill is None else old.prefill.rank
        fleet, slot = self.fleet, old.decode.slot
        is_here = fleet.rank_at(slot) == old.decode.rank
        if old.mode is not RouterMode.KV and is_here and not fleet.columns.circuit_open[slot]:
            keep = structs.replace(route_request, pin=Pin(*old.decode.rank))
            with suppress(RoutingRefused):
                kept = route_decode(keep, view, old.constraint, prefill=sender)
                if not kept.fallback_used:
                    return self._picked_again(keep, view, kept, sender)
        try:
            again = route_decode(route_request, view, old.constraint, prefill=sender)
        except RoutingRefused:
            if is_here and _is_kept_from_new_alone(fleet, slot) and self._takes(old.decode, placement):
                return old
            raise
        return self._picked_again(route_request, view, again, sender)

    def _takes(self, pick: Pick, placement: Placement) -> bool:
        """Whether the rank can take the KV that waits: its worker may have started again since the pick."""
        takers = takers_of_peer(self.fleet, placement.kv_sender)
        return takers is None or bool(takers[pick.slot])

    def _picked_again(
        self, route_request: RouteRequest, view: View, decision: Decision, sender: WorkerRank | None
    ) -> Decision:
        if self.on_decided is not None:
            self.on_decided(route_request, view, decision, prefill=sender)
        return decision

    # Booking

    def _book(
        self,
        route_request: RouteRequest,
        view: View,
        decision: Decision,
        request: AttemptRequest,
        draw: Draw,
        now_s: float,
        on_picked: OnPicked | None,
    ) -> Placement:
        """Book the picked ranks. The legs of an attempt have the leg numbers 2·attempt and 2·attempt + 1.
        A request that would be late goes to the worker with the earliest first token; raises
        :class:`SloUnreachable` where it would be late there too.
        """
        try:
            self.learned.admit(request, decision, view.overlap_blocks, now_s=now_s)
        except SloUnreachable:
            route_request, view = soonest(route_request, view)
            decision = route(route_request, view)
            self.learned.admit(request, decision, view.overlap_blocks, now_s=now_s)
        decode, prefill, prompt = decision.decode, decision.prefill, request.prompt
        decode_card = self._card(decode)
        placement = Placement(
            route_request=route_request,
            decision=decision,
            prompt=prompt,
            token_ids=request.token_ids,
            block_size=self.fleet.block_size,
            shape=_AGGREGATED,
            draw=draw,
            decode_address=decode_card.address,
            decode_context_tokens=decode_card.context_length or CONTEXT_TOKENS_UNKNOWN,
            decode_domains=decode_card.runtime_config.topology_domains,
            bootstrap=_bootstrap(decode_card, decode, draw) if decode.leg is _PREFILL else None,
            shows_first_token=request.shows_first_token,
            is_sampled=request.is_sampled,
            client=request.client,
        )
        if on_picked is not None and prefill is None and decode.leg is not _PREFILL:
            on_picked(placement)
        self.learned.admitted(request, decision, now_s=now_s)
        if self.on_decided is not None:
            self.on_decided(route_request, view, decision, prefill=None)
        try:
            self._book_legs(placement, view, request, now_s)
        except Exception:
            self.release(placement, now_s=now_s)  # else a worker would count as loaded for ever
            raise
        return placement

    def _book_legs(self, placement: Placement, view: View, request: AttemptRequest, now_s: float) -> None:
        """Book each leg's rank, and count what the decision makes likely."""
        route_request, prompt = placement.route_request, placement.prompt
        prefill = placement.decision.prefill
        if prefill is not None:
            self._book_prefill(placement, prefill, view, request)
        placement.decode_lease = self._book_decode(placement.decision, prompt)
        if route_request.is_guess or not route_request.is_prompt_unknown:
            self.cache.decided(placement.decision, prompt, now_s=now_s, is_guess=route_request.is_guess)
        if self.circuits.not_closed:
            self.circuits.booked(placement, now_s=now_s)
        if self._needs.learned:
            self.learned.placed(placement, now_s=now_s)
        if not placement.shows_first_token and prefill is None:
            self._unseen_prefills.expect(placement, self.learned.prefill_ends_s(placement, now_s=now_s))

    def _book_prefill(self, placement: Placement, prefill: Pick, view: View, request: AttemptRequest) -> None:
        """Book the prefill rank of a pair, which may fetch KV from the decode rank."""
        decision, prompt = placement.decision, request.prompt
        may_pull_kv = request.may_pull_kv is not None and request.may_pull_kv()
        if may_pull_kv and self.cache.is_sure_of(decision.decode.slot):
            decision = placement.decision = with_pulled_blocks(decision, view, isl_tokens=prompt.isl_tokens)
            prefill = placement.prefill_pick
        placement.prefill_lease = self.ledger.book(
            key=LeaseKey(self._router_id, decision.request_id, 2 * decision.attempt),
            slot=prefill.slot,
            prompt=prompt,
            prefill_tokens=self._uncached_tokens(prefill, prompt),
            track_blocks=False,
        )
        card = self._card(prefill)
        placement.prefill_address = card.address
        placement.kv_sender = card.kv_peer
        placement.prefill_domains = card.runtime_config.topology_domains
        placement.bootstrap = _bootstrap(card, prefill, placement.draw)
        placement.shape = Shape.SYNCHRONOUS if placement.bootstrap is None else Shape.BOOTSTRAP

    def _book_decode(self, decision: Decision, prompt: Prompt) -> LeaseId:
        decode = decision.decode
        return self.ledger.book(
            key=LeaseKey(self._router_id, decision.request_id, 2 * decision.attempt + 1),
            slot=decode.slot,
            prompt=prompt,
            prefill_tokens=self._uncached_tokens(decode, prompt) if decision.prefill is None else 0,
            track_blocks=self.settings.track_active_blocks,
        )

    def _uncached_tokens(self, pick: Pick, prompt: Prompt) -> int:
        return missing_tokens(self.fleet, pick, prompt) if self.settings.track_prefill_tokens else 0

    def _card(self, pick: Pick) -> WorkerCard:
        card = self.fleet.card_at(pick.slot)
        if card is None:
            raise RuntimeError(f"slot {pick.slot} was picked and is free")
        return card

    # Leases

    def prefill_worker_left(self, placement: Placement) -> bool:
        """Whether the pair's prefill worker left or does not answer, so that its waiting KV is lost."""
        pick = placement.decision.prefill
        if pick is None:
            return False
        card = self.fleet.card_at(pick.slot)
        return (
            card is None
            or card.address != placement.prefill_address
            or not self.fleet.is_alive(card.worker_id)
        )

    def prefill_done(self, placement: Placement, *, now_s: float) -> None:
        """Handle the end of the prefill leg: its tokens no longer count as load."""
        self.circuits.prefilled(placement, now_s=now_s)
        self.learned.prefill_done(placement, now_s=now_s)
        if placement.prefill_lease is not None:
            self.ledger.close(placement.prefill_lease)
            self.waiting.admission.pulse()
        if not placement.shows_first_token and placement.decision.prefill is not None:
            self._unseen_prefills.expect(placement, self.learned.transfer_ends_s(placement, now_s=now_s))

    def first_token(self, placement: Placement, *, now_s: float) -> None:
        """Handle the first token, or the end of an answer in one piece: the load of prefill ends."""
        self.circuits.begun(placement, now_s=now_s)
        self.learned.first_token(placement, now_s=now_s)
        self._prefilled(placement)

    def _prefilled(self, placement: Placement) -> None:
        self.ledger.first_token(placement.decode_lease)
        if placement.prefill_lease is not None:
            self.ledger.close(placement.prefill_lease)
        self.waiting.admission.pulse()

    def _end_unseen_prefills(self, now_s: float) -> None:
        """End the prefill load of requests without a visible first token when it should have ended."""
        for placement in self._unseen_prefills.ended(now_s):
            self.learned.end_transfer(placement)
            self._prefilled(placement)

    def output_blocks(self, placement: Placement, blocks: int, *, now_s: float) -> None:
        """Add blocks full of output to the decode lease."""
        self._read_load(now_s)
        self.ledger.output_block(placement.decode_lease, blocks)

    def release(self, placement: Placement, *, now_s: float, tokens: int = 0) -> None:
        """Close the leases of an attempt with so many output ``tokens``; idempotent."""
        self.learned.released(placement, tokens=tokens, now_s=now_s)
        self._unseen_prefills.forget(placement)
        self.circuits.released(placement, now_s=now_s)
        if placement.prefill_lease is not None:
            self.ledger.close(placement.prefill_lease)
        self.ledger.close(placement.decode_lease)
        self.waiting.admission.pulse()


def _is_kept_from_new_alone(fleet: Fleet, slot: Slot) -> bool:
    """Whether the rank at ``slot`` only refuses new requests, for a cordon: booked requests continue."""
    columns = fleet.columns
    leaves = columns.draining[slot] or columns.engine_silent[slot] or not columns.alive[slot]
    return bool(columns.cordoned[slot] and not leaves)


def _bootstrap(card: WorkerCard, prefill: Pick, draw: Draw) -> Bootstrap | None:
    """Return the rendezvous if the prefill worker offers one: a random room, congruent to its dp rank."""
    host, port = card.runtime_config.bootstrap_host, card.runtime_config.bootstrap_port
    if host is None or port is None:
        return None
    rank = prefill.rank.dp_rank - card.dp_start
    room = draw.room % ((ROOM_LIMIT - rank) // card.dp_size) * card.dp_size + rank
    return Bootstrap(host, port, room)
