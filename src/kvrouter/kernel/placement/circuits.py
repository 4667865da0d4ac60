"""The circuits of one model: which failures count against which worker or pair.

Each router has circuits of its own: they show what it met itself. Memory: one for each worker that was sent
something, and at most :data:`PAIRS_MAX` pairs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf

from kvrouter.core.clock import DueTimes
from kvrouter.core.hashing import mix64
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import Leg
from kvrouter.core.workers import WorkerCard
from kvrouter.kernel.fleet.circuit import Circuit, CircuitSettings, CircuitState, Fault, Pair, Suspicion
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.events import PlacementEvents
from kvrouter.kernel.placement.placement import Placement

PAIRS_MAX = 4096
"""How many pairs that lost KV are remembered; the one that was noted first is forgotten first."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A circuit, and which starts of its workers it is about."""

    circuit: Circuit
    incarnations: tuple[Epoch | None, ...]


class Circuits:
    """Hears what becomes of each leg, and keeps the fleet's word on who is passed over.

    ``on_let_in`` is called when somebody may be sent requests again. With 0 ``failures`` nobody is ever
    passed over.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: CircuitSettings,
        events: PlacementEvents,
        *,
        seed: int,
        on_let_in: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._pair_settings = replace(settings, failures=1)
        self._events = events
        self._seed = seed
        self._on_let_in = on_let_in
        self._workers: dict[WorkerId, _Kept] = {}
        self.not_closed: set[WorkerId | Pair] = set()
        """Whose circuits are not closed. While there are none, which is nearly always, :meth:`refresh` and
        :meth:`booked` have nothing to do, and need not be called.
        """
        self._pairs: dict[Pair, _Kept] = {}
        self._due: DueTimes[WorkerId | Pair] = DueTimes()
        """When time alone changes something."""

    # Reading

    def state_of(self, worker_id: WorkerId, *, now_s: float) -> CircuitState:
        """What the worker's circuit lets through."""
        kept = self._workers.get(worker_id)
        return CircuitState.CLOSED if kept is None else kept.circuit.state(now_s)

    def pairs(self, *, now_s: float) -> Iterator[tuple[Pair, CircuitState]]:
        """The pairs whose KV was lost, and what their circuits let through."""
        return ((pair, kept.circuit.state(now_s)) for pair, kept in self._pairs.items())

    # What becomes of a request

    def refresh(self, *, now_s: float) -> None:
        """Time has passed: let the next request in where a circuit is half open now."""
        shown = [self._show(subject, now_s) for subject in self._due.take(now_s)]
        if any(shown):
            self._on_let_in()

    def booked(self, placement: Placement, *, now_s: float) -> None:
        """An attempt is sent to its workers; it may be the one request that a half-open circuit lets in."""
        for worker_id in _workers_of(placement):
            kept = self._workers.get(worker_id)
            if kept is not None and kept.circuit.take(now_s):
                placement.tries += ((worker_id, kept.circuit),)
                self._show_worker(worker_id, now_s)
        pair = pair_of(placement)
        kept_pair = None if pair is None else self._pairs.get(pair)
        if pair is not None and kept_pair is not None and kept_pair.circuit.take(now_s):
            placement.tries += ((pair, kept_pair.circuit),)
            self._show_pair(pair, now_s)

    def prefilled(self, placement: Placement, *, now_s: float) -> None:
        """A prefill leg came to its end."""
        self._begun(placement.prefill_pick.rank.worker_id, has_ended=True, now_s=now_s)

    def begun(self, placement: Placement, *, now_s: float) -> None:
        """The first token came: of a pair, the KV did too."""
        placement.has_begun = True
        if self._is_instead_of_pairs(placement):
            self._fleet.broken_pairs.whole_failed = False
        self._begun(placement.decision.decode.rank.worker_id, has_ended=False, now_s=now_s)
        pair = pair_of(placement)
        if pair is not None:
            self._begun(pair.prefill, has_ended=True, now_s=now_s)
            if pair in self._pairs:
                self._forget_pair(pair)
                self._events.pair_closed(pair.prefill, pair.decode)
        self.give_back(placement, now_s=now_s)

    def suspected(self, placement: Placement, leg: Leg, *, now_s: float) -> bool:
        """A leg failed, and the fault may be its request's. Return whether it is its worker's all the same:
        one that is tried again because it failed what others did.
        """
        if leg is not Leg.PREFILL:
            placement.has_begun = False
            if self._is_instead_of_pairs(placement):
                self._fleet.broken_pairs.whole_failed = True
        circuit = self._countable(placement, leg)
        if circuit is None:
            return False
        circuit.suspect(now_s)
        return circuit.state(now_s) is CircuitState.HALF_OPEN

    def failed(
        self,
        placement: Placement,
        leg: Leg,
        fault: Fault,
        *,
        since_s: float,
        now_s: float,
        has_begun: bool = False,
        failed_s: float | None = None,
        suspicion: Suspicion = Suspicion.SURE,
    ) -> None:
        """A leg failed through its worker's fault. ``since_s``: when it was sent, or became silent;
        ``failed_s``: when it failed, where :meth:`suspected` was called then.
        """
        worker_id = _picked(placement, leg)
        if self._fleet.card(worker_id) is not None:
            self._events.failed(worker_id, fault)
        if failed_s is None:
            self.suspected(placement, leg, now_s=now_s)
        circuit = self._countable(placement, leg)
        if circuit is None or not circuit.counts(suspicion, now_s):
            return
        if circuit.failed(now_s, fault, since_s=since_s, has_begun=has_begun, failed_s=failed_s):
            self.not_closed.add(worker_id)
            self._show_worker(worker_id, now_s)
            self._events.opened(worker_id, fault, for_s=self._open_for(circuit, now_s))

    def kv_lost(self, placement: Placement, *, since_s: float, now_s: float) -> None:
        """KV of a pair did not arrive, and neither worker is known to be to blame."""
        pair = pair_of(placement)
        if not self._settings.failures or pair is None:
            return
        kept = self._pairs.get(pair)
        if kept is None:
            if len(self._pairs) >= PAIRS_MAX:
                self._forget_pair(next(iter(self._pairs)))
            circuit = Circuit(self._pair_settings, now_s=-inf, seed=self._seed_of(*pair))
            kept = self._pairs[pair] = _Kept(circuit, self._incarnations(*pair))
            self.not_closed.add(pair)
        if kept.circuit.failed(now_s, Fault.KV_LOST, since_s=since_s, has_begun=False):
            self._show_pair(pair, now_s)
            for_s = self._open_for(kept.circuit, now_s)
            self._events.pair_opened(pair.prefill, pair.decode, for_s=for_s)

    def give_back(self, placement: Placement, *, now_s: float) -> None:
        """What the attempt was let in for is known, or it will never be known. Idempotent."""
        if not placement.tries:
            return
        tries, placement.tries = placement.tries, ()
        for subject, circuit in tries:
            circuit.give_back()
            if self._show(subject, now_s):
                self._on_let_in()

    def released(self, placement: Placement, *, now_s: float) -> None:
        """The attempt is over. Idempotent."""
        if placement.tries:
            self.give_back(placement, now_s=now_s)
        if placement.has_begun:  # and did not fail: its client got all that it wanted
            placement.has_begun = False
            kept = self._workers.get(placement.decision.decode.rank.worker_id)
            if kept is not None:
                kept.circuit.ended()

    def fleet_changed(self) -> None:
        """What is known of workers that are gone goes; a new start is another worker."""
        for worker_id in tuple(self.not_closed):
            if isinstance(worker_id, Pair):
                continue
            if self._incarnations(worker_id) != self._workers[worker_id].incarnations:
                self._closed(worker_id)
                del self._workers[worker_id]
        if len(self._workers) > len(self._fleet):
            here = {
                worker_id: kept for worker_id, kept in self._workers.items() if self._fleet.card(worker_id)
            }
            self._workers = here
        for pair, kept_pair in tuple(self._pairs.items()):
            if self._incarnations(*pair) != kept_pair.incarnations:
                self._forget_pair(pair)

    # How

    def _countable(self, placement: Placement, leg: Leg) -> Circuit | None:
        """Return the circuit of the worker of a leg, where the leg's failure may count at all."""
        worker_id = _picked(placement, leg)
        card = self._fleet.card(worker_id)
        if not self._settings.failures or card is None or not card.takes_new_requests:
            return None
        # of one that is not alive the request plane knows, and will know when it is back
        return self._circuit_of(card) if self._fleet.is_alive(worker_id) else None

    def _is_instead_of_pairs(self, placement: Placement) -> bool:
        """Whether one worker has all of a request because KV does not arrive."""
        decision = placement.decision
        is_whole = decision.decode.leg is Leg.AGGREGATED and not decision.together
        return bool(self._fleet.broken_pairs) and is_whole

    def _begun(self, worker_id: WorkerId, *, has_ended: bool, now_s: float) -> None:
        card = self._fleet.card(worker_id)
        if card is None:
            return
        circuit = self._circuit_of(card)
        was_open = circuit.begun(now_s)
        if has_ended:
            circuit.ended()
        if was_open:
            self._closed(worker_id)
            self._fleet.set_circuit_open(worker_id, False)
            self._events.closed(worker_id)
            self._on_let_in()

    def _circuit_of(self, card: WorkerCard) -> Circuit:
        incarnations = (card.incarnation,)
        kept = self._workers.get(card.worker_id)
        if kept is None or kept.incarnations != incarnations:
            circuit = Circuit(self._settings, now_s=-inf, seed=self._seed_of(card.worker_id))
            kept = self._workers[card.worker_id] = _Kept(circuit, incarnations)
        return kept.circuit

    def _incarnations(self, *worker_ids: WorkerId) -> tuple[Epoch | None, ...]:
        cards = map(self._fleet.card, worker_ids)
        return tuple(None if card is None else card.incarnation for card in cards)

    def _seed_of(self, *worker_ids: WorkerId) -> int:
        seed = self._seed
        for worker_id in worker_ids:
            seed = mix64(seed ^ worker_id)
        return seed

    def _closed(self, worker_id: WorkerId) -> None:
        self.not_closed.discard(worker_id)
        self._due.drop(worker_id)

    def _show(self, subject: WorkerId | Pair, now_s: float) -> bool:
        """Show the fleet what a circuit lets in, where it is not closed; return whether that is somebody."""
        if isinstance(subject, Pair):
            return subject in self._pairs and self._show_pair(subject, now_s)
        return subject in self.not_closed and self._show_worker(subject, now_s)

    def _show_worker(self, worker_id: WorkerId, now_s: float) -> bool:
        circuit = self._workers[worker_id].circuit
        lets_in = circuit.lets_in(now_s)
        self._fleet.set_circuit_open(worker_id, not lets_in)
        self._set_due(worker_id, circuit.half_open_s, now_s)
        return lets_in

    def _show_pair(self, pair: Pair, now_s: float) -> bool:
        """Half open for long enough, it is forgotten."""
        kept = self._pairs[pair]
        lets_in, forgotten_s = kept.circuit.lets_in(now_s), self._forgotten_s(kept)
        if lets_in and now_s >= forgotten_s:
            self._forget_pair(pair)
            return True
        self._fleet.set_broken_pair(pair.prefill, pair.decode, not lets_in)
        self._set_due(pair, forgotten_s if lets_in else kept.circuit.half_open_s, now_s)
        return lets_in

    def _set_due(self, subject: WorkerId | Pair, due_s: float | None, now_s: float) -> None:
        """``due_s`` is when time alone changes something, once it comes."""
        if due_s is not None and now_s < due_s < inf:
            self._due.put(subject, due_s)

    def _forget_pair(self, pair: Pair) -> None:
        del self._pairs[pair]
        self.not_closed.discard(pair)
        self._due.drop(pair)
        self._fleet.set_broken_pair(pair.prefill, pair.decode, False)

    def _forgotten_s(self, kept: _Kept) -> float:
        """When a pair that nobody tries again is forgotten: by then it would be open for no longer."""
        half_open_s = kept.circuit.half_open_s
        return inf if half_open_s is None else half_open_s + self._settings.open_max_s

    @staticmethod
    def _open_for(circuit: Circuit, now_s: float) -> float:
        half_open_s = circuit.half_open_s
        return 0.0 if half_open_s is None else half_open_s - now_s


def pair_of(placement: Placement) -> Pair | None:
    """The pair that an attempt's KV goes between; None where one worker does all of it."""
    prefill, decode = placement.decision.prefill, placement.decision.decode
    return None if prefill is None else Pair(prefill.rank.worker_id, decode.rank.worker_id)


def _picked(placement: Placement, leg: Leg) -> WorkerId:
    pick = placement.prefill_pick if leg is Leg.PREFILL else placement.decision.decode
    return pick.rank.worker_id


def _workers_of(placement: Placement) -> Iterator[WorkerId]:
    decision = placement.decision
    if decision.prefill is not None:
        yield decision.prefill.rank.worker_id
    yield decision.decode.rank.worker_id
