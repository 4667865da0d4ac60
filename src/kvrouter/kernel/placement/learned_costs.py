"""Learned costs: the speeds of ranks and links, measured from a placer's requests and used for predictions.

Measurements are first tokens and the ends of prefill legs. An answer that arrives in one piece has no visible
first token: its length is the client's choice, and its time does not show how fast its prompt was computed.
"""

from collections.abc import Iterator
from hashlib import sha256
from heapq import heapify, heappop, heappush
from math import inf

import msgspec

from kvrouter.core.hashing import Prompt
from kvrouter.core.ids import RouterId, Slot
from kvrouter.core.requests import Leg, ServiceLevel
from kvrouter.kernel.fleet.columns import IntColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.ledger.port import Ledger, LedgerColumns
from kvrouter.kernel.placement.kept_speeds import KeptSpeeds
from kvrouter.kernel.placement.placement import AttemptRequest, Placement
from kvrouter.kernel.placement.placement_events import PlacementEvents
from kvrouter.kernel.placement.service_levels import CriticalWork, refuse_late
from kvrouter.kernel.placement.speeds import LearnedSpeeds
from kvrouter.kernel.placement.transfers import Transfers
from kvrouter.kernel.routing.costs.time import CHUNK_TOKENS, prompt_s
from kvrouter.kernel.routing.interface import CostInput, Decision, Pick, RoutingSettings

_AGGREGATED = Leg.AGGREGATED


class LearnedCosts:
    """The learned speeds of one model's ranks and links. ``now_s`` is seconds of one monotonic clock."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        events: PlacementEvents,
        settings: RoutingSettings,
        router_id: RouterId,
    ) -> None:
        self.settings = settings
        self.speeds = LearnedSpeeds(fleet, events)
        self.transfers = Transfers(fleet, events, settings.links, router_id)
        self._critical_work = CriticalWork()
        self._fleet = fleet
        self._ledger = ledger

    def admit(
        self, request: AttemptRequest, decision: Decision, overlap_blocks: IntColumn | None, *, now_s: float
    ) -> None:
        """Raise for a request in its first attempt as :meth:`refuse_late` does."""
        if request.arrived_s is not None:
            level, waited_s = request.service_level, now_s - request.arrived_s
            self.refuse_late(level, decision, overlap_blocks, now_s=now_s, waited_s=waited_s)

    def admitted(self, request: AttemptRequest, decision: Decision, *, now_s: float) -> None:
        """Count the work of a request in its first attempt."""
        level, times = request.service_level, decision.prefilling.times
        if request.arrived_s is not None and times is not None:
            self._critical_work.add(times.prefill_s, is_critical=level.is_critical, now_s=now_s)

    def refuse_late(
        self,
        level: ServiceLevel,
        decision: Decision,
        overlap_blocks: IntColumn | None,
        *,
        now_s: float,
        waited_s: float = 0.0,
    ) -> None:
        """Raise :class:`SloUnreachable` where the first token is predicted later than the request's
        objective, or that of the settings, allows; but not where the rank is idle and its speed was not
        measured lately: only a request shows that it is faster by now. ``overlap_blocks`` are those of the
        decision's view.
        """
        limit_s, pick = self.settings.ttft_limit_s(level), decision.prefilling
        if limit_s == inf or pick.times is None:
            return
        is_idle = pick.times.queue_s + pick.times.memory_s == 0.0
        if is_idle and self.speeds.may_be_outdated(pick.slot, now_s=now_s):
            return
        cached = 0 if overlap_blocks is None else int(overlap_blocks.max(initial=0))
        share = self._critical_work.share
        refuse_late(decision, level, share, limit_s, waited_s=waited_s, cached_blocks=cached)

    def cost_input(self, load: LedgerColumns, prompt_tokens: int, *, now_s: float) -> CostInput:
        """Return the input of the time rule; ``load`` is the ledger's columns."""
        if self.transfers.has_begun:
            self.transfers.refresh(self._is_clear, now_s=now_s)
        speeds = self.speeds.speeds(self._fleet.n_slots, now_s=now_s)
        if self.speeds.has_trials:
            self.speeds.offer(prompt_s(self.settings.timing, prompt_tokens))
        return CostInput(load.requests, load.waiting, speeds, self.transfers.state)

    @property
    def timing_digest(self) -> str:
        """A digest of the timing that slownesses are relative to."""
        return sha256(msgspec.json.encode(self.settings.timing)).hexdigest()[:16]

    def kept_speeds(self, *, now_s: float) -> KeptSpeeds:
        """Return what was learned of ranks, to be kept over a restart."""
        return self.speeds.kept(self._fleet.model, self.timing_digest, now_s=now_s)

    def freed(self, slot: Slot) -> None:
        """Remove the slot's worker rank."""
        self.speeds.freed(slot)
        self.transfers.engine_sums.freed(slot)

    def placed(self, placement: Placement, *, now_s: float) -> None:
        """Record the predictions for both legs of a placement."""
        for pick in (placement.decision.prefill, placement.decision.decode):
            if pick is not None:
                tokens = missing_tokens(self._fleet, pick, placement.prompt)
                expected = self.speeds.placed(
                    pick,
                    tokens if placement.is_sampled else 0,
                    steps_s=self._decode_share_s(pick, tokens),
                    now_s=now_s,
                )
                placement.expected = placement.expected or expected
        slot = placement.decision.prefilling.slot
        if self._ledger.columns().waiting.item(slot) <= 1:
            self.speeds.step_began(slot, now_s=now_s)
        prefill = placement.decision.prefill
        if prefill is not None and prefill.pulled_blocks:
            placement.expected = None  # the time to fetch would pass for that to compute
        self.begin_transfer(placement)

    def prefill_ends_s(self, placement: Placement, *, now_s: float) -> float:
        """Return when the prompt of an aggregated placement, just booked, is expected to be computed."""
        pick = placement.decision.decode
        if pick.times is not None:
            return now_s + pick.times.expected_s
        queued = int(self._ledger.columns().prefill_tokens[pick.slot])
        return now_s + prompt_s(self.settings.timing, queued)

    def transfer_ends_s(self, placement: Placement, *, now_s: float) -> float:
        """Return when the KV of a pair, whose prompt is computed, is expected at the decode rank."""
        times = placement.decision.decode.times
        return now_s if times is None else now_s + times.transfer_s

    def begin_transfer(self, placement: Placement) -> None:
        """Add the pair's transfer to its link's load, when links are weighed."""
        decision, links = placement.decision, self.settings.links
        if decision.prefill is None or links is None:
            return
        prefill, decode = decision.prefill, decision.decode
        if self._fleet.rank_at(prefill.slot) != prefill.rank:
            return  # the prefill worker left, and its domains are unknown
        tokens = missing_tokens(self._fleet, decode, placement.prompt)
        placement.transfer = self.transfers.begin(links, prefill.slot, decode.slot, tokens)

    def end_transfer(self, placement: Placement) -> None:
        """Remove the transfer from its link's load, without a measurement."""
        if placement.transfer is not None:
            self.transfers.end(placement.transfer)
            placement.transfer = None

    def kv_ready(self, placement: Placement, *, now_s: float) -> None:
        """Handle the end of prefill; not measured for engines that report it only after the transfer."""
        transfer, step_s = placement.transfer, self._step_s(placement)
        if transfer is None or step_s is None or placement.decision.prefill is None:
            return
        card = self._fleet.card_at(placement.decision.prefill.slot)
        if card is not None and not card.ends_after_transfer:
            is_clear = placement.is_sampled and self._is_clear(transfer.to)
            steps_s = step_s * self.speeds.decode_slowness(transfer.to)
            self.transfers.kv_ready(transfer, is_clear=is_clear, steps_s=steps_s, now_s=now_s)

    def prefill_done(self, placement: Placement, *, now_s: float) -> None:
        """Handle the end of the prefill leg."""
        self.kv_ready(placement, now_s=now_s)
        if placement.decision.decode.leg is not _AGGREGATED:
            self._record_prompt_time(placement, now_s)

    def first_token(self, placement: Placement, *, now_s: float) -> None:
        """Handle the first token, or the end of an answer in one piece."""
        if placement.shows_first_token:
            step_s = self._step_s(placement)
            self._arrived(placement, step_s, now_s)
            if self._is_learned_from(placement):
                placement.first_token_s, placement.step_s = (None, 0.0) if step_s is None else (now_s, step_s)
            if placement.decision.decode.leg is _AGGREGATED:
                self._record_prompt_time(placement, now_s)
        self.end_transfer(placement)

    def released(self, placement: Placement, *, tokens: int, now_s: float) -> None:
        """Handle the end of an attempt with so many output ``tokens``; idempotent."""
        self.end_transfer(placement)
        if placement.first_token_s is not None:
            slot, took_s = placement.decision.decode.slot, now_s - placement.first_token_s
            step_s = self._step_s(placement)
            if step_s is not None:
                mean_s = (placement.step_s + step_s) / 2
                self.speeds.answered(
                    slot, tokens, took_s, step_s=mean_s, client=placement.client, now_s=now_s
                )
            placement.first_token_s = None

    def _is_learned_from(self, placement: Placement) -> bool:
        """Whether times are predicted, and the client did not choose the worker."""
        return placement.is_sampled and placement.decision.decode.times is not None

    def _record_prompt_time(self, placement: Placement, now_s: float) -> None:
        """Record the measured time of a predicted prompt, after which the next step begins."""
        pick = placement.decision.prefilling
        if pick.times is not None and self._fleet.rank_at(pick.slot) == pick.rank:
            self.speeds.step_began(pick.slot, now_s=now_s)
        expected, placement.expected = placement.expected, None
        if expected is not None and placement.is_sampled:
            self.speeds.observed(expected, client=placement.client, now_s=now_s)

    def _arrived(self, placement: Placement, step_s: float | None, now_s: float) -> None:
        """Record the arrival of the KV as a measurement of its link; ``step_s`` is that of a decode step."""
        transfer = placement.transfer
        if transfer is not None and step_s is not None:
            placement.transfer = None
            is_clear = placement.is_sampled and self._is_clear(transfer.to)
            steps_s = step_s * self.speeds.decode_slowness(transfer.to)
            self.transfers.arrived(transfer, is_clear=is_clear, steps_s=steps_s, now_s=now_s)

    def _is_clear(self, slot: Slot) -> bool:
        """Whether a decode leg at the slot waits only for its KV: not for prompts, memory or a seat."""
        ledger, columns, settings = self._ledger.columns(), self._fleet.columns, self.settings
        return bool(
            settings.track_prefill_tokens
            and settings.track_active_blocks
            and slot < len(columns.seats)
            and ledger.prefill_tokens[slot] == 0
            and ledger.active_blocks[slot] <= columns.total_blocks[slot]
            and ledger.requests[slot] <= columns.seats[slot]
        )

    def _decode_share_s(self, pick: Pick, tokens: int) -> float:
        """Return the seconds of others' decode steps in a pick's queue while ``tokens`` are prefilled."""
        columns, weight = self._ledger.columns(), self.settings.decode_weight
        is_alone = columns.requests.item(pick.slot) <= columns.waiting.item(pick.slot)
        if pick.times is None or weight == 0.0 or is_alone:
            return 0.0
        return pick.times.decode_s / weight * (1.0 + tokens / CHUNK_TOKENS)

    def _step_s(self, placement: Placement) -> float | None:
        """Return a decode step's seconds at the answering rank now, at slowness 1; None when it left."""
        decode = placement.decision.decode
        if self._fleet.rank_at(decode.slot) != decode.rank:
            return None
        slot, columns = decode.slot, self._ledger.columns()
        held = columns.active_blocks.item(slot)
        running = max(1, columns.requests.item(slot) - columns.waiting.item(slot))
        use_share = min(1.0, held / self._fleet.columns.total_blocks.item(slot))
        return self.settings.timing.decode_ms(use_share, running, held * self._fleet.block_size) / 1e3


def missing_tokens(fleet: Fleet, pick: Pick, prompt: Prompt) -> int:
    """Return the tokens of the prompt that are neither cached at the picked rank nor fetched there."""
    overlap_blocks, pulled_blocks = pick.overlap_blocks, pick.pulled_blocks
    there_blocks = overlap_blocks if overlap_blocks > pulled_blocks else pulled_blocks
    tokens = prompt.isl_tokens - there_blocks * fleet.block_size
    return tokens if tokens > 0 else 0


class UnseenPrefills:
    """Requests without a visible first token (answers in one piece), until their prefill should end."""

    def __init__(self) -> None:
        self._running: dict[int, Placement] = {}
        self._ends: list[tuple[float, int]] = []
        """A heap of times and keys; entries of ended requests are removed in bulk."""
        self._next = 1

    def expect(self, placement: Placement, at_s: float) -> None:
        """Set the expected end of the request's prefill; a later call has no effect."""
        if placement.unseen_prefill:
            return
        key = placement.unseen_prefill = self._next
        self._next += 1
        self._running[key] = placement
        heappush(self._ends, (at_s, key))

    def forget(self, placement: Placement) -> None:
        """Remove a request that ended earlier. Idempotent."""
        self._running.pop(placement.unseen_prefill, None)
        if len(self._ends) > 2 * len(self._running) + 64:
            self._ends = [end for end in self._ends if end[1] in self._running]
            heapify(self._ends)

    def ended(self, now_s: float) -> Iterator[Placement]:
        """Yield, once each, the requests whose prefill should have ended by now."""
        while self._ends and self._ends[0][0] <= now_s:
            placement = self._running.pop(heappop(self._ends)[1], None)
            if placement is not None:
                yield placement
