"""The circuit breakers of one model: counts failures against workers and pairs.

Each router has separate circuits, from the failures of its own requests. Memory: one circuit for each worker
that had a leg, and at most :data:`PAIRS_MAX` pairs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf

from kvrouter.core.clock import DueTimes
from kvrouter.core.hashing import mix64
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import KvLoss, Leg
from kvrouter.core.workers import WorkerCard
from kvrouter.kernel.fleet.circuit import Circuit, CircuitSettings, CircuitState, Fault, Pair, Suspicion
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.placement.placement import Placement
from kvrouter.kernel.placement.placement_events import PlacementEvents

_PREFILL, _AGGREGATED = Leg.PREFILL, Leg.AGGREGATED
"""Constants, because access to an enumeration's members is slow before Python 3.12."""

PAIRS_MAX = 4096
"""The most pairs that lost KV; beyond it the oldest is dropped."""

REFUSING_PAIRS_MAX = 256
"""The most pairs whose engines refuse each other; others are open circuits only. Each costs routing a
comparison of all workers when it is added, tried or removed.
"""

REFUSED_S = 600.0
"""For how long a pair whose engines refused each other's handshake gets no request, if neither restarts."""


@dataclass(frozen=True, slots=True)
class _CircuitEntry:
    """A circuit, and the incarnations of its workers for which it holds."""

    circuit: Circuit
    incarnations: tuple[Epoch | None, ...]


@dataclass(frozen=True, slots=True)
class _PairEntry(_CircuitEntry):
    """The circuit of a pair. ``refuses``: an engine said that the two refuse each other."""

    refuses: bool

    @property
    def fault(self) -> Fault:
        """Why the pair gets no requests."""
        return Fault.CANNOT_TRANSFER if self.refuses else Fault.KV_LOST


class Circuits:
    """Updates circuits with the outcome of each leg, and marks open circuits in the fleet.

    ``on_readmitted`` is called when a worker or pair may get requests again. 0 ``failures`` disable circuits.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: CircuitSettings,
        events: PlacementEvents,
        *,
        seed: int,
        on_readmitted: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._pair_settings = replace(settings, failures=1)
        self._refused_settings = CircuitSettings(1, REFUSED_S, REFUSED_S)
        self._events = events
        self._seed = seed
        self._on_readmitted = on_readmitted
        self._workers: dict[WorkerId, _CircuitEntry] = {}
        self.not_closed: set[WorkerId | Pair] = set()
        """The workers and pairs whose circuits are not closed. While it is empty, which is nearly always,
        :meth:`refresh` and :meth:`booked` need not be called.
        """
        self._pairs: dict[Pair, _PairEntry] = {}
        self._due: DueTimes[WorkerId | Pair] = DueTimes()
        """When a circuit changes its state without a request."""

    # Reading

    def state_of(self, worker_id: WorkerId, *, now_s: float) -> CircuitState:
        """Return the state of the worker's circuit."""
        entry = self._workers.get(worker_id)
        return CircuitState.CLOSED if entry is None else entry.circuit.state(now_s)

    def pairs(self, *, now_s: float) -> Iterator[tuple[Pair, CircuitState]]:
        """Yield the pairs whose KV was lost, and the states of their circuits."""
        return ((pair, entry.circuit.state(now_s)) for pair, entry in self._pairs.items())

    # Outcomes of a request

    def refresh(self, *, now_s: float) -> None:
        """Mark circuits that have become half open, so that they allow the next request."""
        readmitted = [self._update(subject, now_s) for subject in self._due.take(now_s)]
        if any(readmitted):
            self._on_readmitted()

    def booked(self, placement: Placement, *, now_s: float) -> None:
        """Handle a booked attempt, which may be the single request of a half-open circuit."""
        for worker_id in _workers_of(placement):
            entry = self._workers.get(worker_id)
            if entry is not None and entry.circuit.take(now_s):
                placement.tries += ((worker_id, entry.circuit),)
                self._update_worker(worker_id, now_s)
        pair = pair_of(placement)
        pair_entry = None if pair is None else self._pairs.get(pair)
        if pair is not None and pair_entry is not None and pair_entry.circuit.take(now_s):
            placement.tries += ((pair, pair_entry.circuit),)
            self._update_pair(pair, now_s)

    def prefilled(self, placement: Placement, *, now_s: float) -> None:
        """Handle the successful end of a prefill leg."""
        self._begun(placement.prefill_pick.rank.worker_id, has_ended=True, now_s=now_s)

    def begun(self, placement: Placement, *, now_s: float) -> None:
        """Handle the first token: for a pair, the KV arrived too."""
        placement.has_begun = True
        if self._is_instead_of_pairs(placement):
            self._fleet.set_aggregated_failed(False)
        self._begun(placement.decision.decode.rank.worker_id, has_ended=False, now_s=now_s)
        pair = pair_of(placement)
        if pair is not None:
            self._begun(pair.prefill, has_ended=True, now_s=now_s)
            if pair in self._pairs:
                self._forget_pair(pair)
                self._events.pair_closed(pair.prefill, pair.decode)
        self.give_back(placement, now_s=now_s)

    def suspected(self, placement: Placement, leg: Leg, *, now_s: float) -> bool:
        """Handle a failed leg that may be its request's fault. Return whether it is the worker's in any case,
        because its circuit is half open.
        """
        if leg is not _PREFILL:
            placement.has_begun = False
            if self._is_instead_of_pairs(placement):
                self._fleet.set_aggregated_failed(True)
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
        """Count a failed leg against its worker. ``since_s``: when it was sent, or became silent;
        ``failed_s``: when it failed, if :meth:`suspected` was called then.
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
            self._update_worker(worker_id, now_s)
            self._events.opened(worker_id, fault, for_s=self._open_for(circuit, now_s))

    def kv_lost(self, placement: Placement, loss: KvLoss, *, since_s: float, now_s: float) -> None:
        """Count lost KV against the pair: it did not arrive, and neither worker is known to be at fault.

        Only an engine that says so shows that the two refuse each other: a network that is cut between some
        workers looks like anything else.
        """
        pair = pair_of(placement)
        if not self._settings.failures or pair is None:
            return
        is_refused = loss is KvLoss.REFUSED and len(self._fleet.refusing_pairs) < REFUSING_PAIRS_MAX
        entry = self._pairs.get(pair)
        if entry is None or (is_refused and not entry.refuses):
            if entry is None and len(self._pairs) >= PAIRS_MAX:
                self._forget_pair(next(iter(self._pairs)))
            settings = self._refused_settings if is_refused else self._pair_settings
            circuit = Circuit(settings, now_s=-inf, seed=self._seed_of(*pair))
            entry = self._pairs[pair] = _PairEntry(circuit, self._incarnations(*pair), is_refused)
            if is_refused:
                self._fleet.set_broken_pair(pair.prefill, pair.decode, False)
            self.not_closed.add(pair)
        if entry.circuit.failed(now_s, entry.fault, since_s=since_s, has_begun=False):
            self._update_pair(pair, now_s)
            for_s = self._open_for(entry.circuit, now_s)
            self._events.pair_opened(pair.prefill, pair.decode, entry.fault, for_s=for_s)

    def give_back(self, placement: Placement, *, now_s: float) -> None:
        """Release an attempt's half-open circuits: its outcome is known, or never will be. Idempotent."""
        if not placement.tries:
            return
        tries, placement.tries = placement.tries, ()
        for subject, circuit in tries:
            circuit.give_back()
            if self._update(subject, now_s):
                self._on_readmitted()

    def released(self, placement: Placement, *, now_s: float) -> None:
        """Handle the end of the attempt. Idempotent."""
        if placement.tries:
            self.give_back(placement, now_s=now_s)
        if placement.has_begun:  # and did not fail: the answer is complete
            placement.has_begun = False
            entry = self._workers.get(placement.decision.decode.rank.worker_id)
            if entry is not None:
                entry.circuit.ended()

    def fleet_changed(self) -> None:
        """Drop the circuits of workers that left; a new incarnation starts with a closed circuit."""
        for worker_id in tuple(self.not_closed):
            if isinstance(worker_id, Pair):
                continue
            if self._incarnations(worker_id) != self._workers[worker_id].incarnations:
                self._closed(worker_id)
                del self._workers[worker_id]
        if len(self._workers) > len(self._fleet):
            remaining = {
                worker_id: entry for worker_id, entry in self._workers.items() if self._fleet.card(worker_id)
            }
            self._workers = remaining
        for pair, pair_entry in tuple(self._pairs.items()):
            is_restarting = pair_entry.refuses and self._is_silent(*pair)
            if is_restarting or self._incarnations(*pair) != pair_entry.incarnations:
                self._forget_pair(pair)

    # Internals

    def _countable(self, placement: Placement, leg: Leg) -> Circuit | None:
        """Return the circuit of a leg's worker; None when failures of the worker do not count."""
        worker_id = _picked(placement, leg)
        card = self._fleet.card(worker_id)
        if not self._settings.failures or card is None or not card.takes_new_requests:
            return None
        # the request transport tracks workers that are not alive
        return self._circuit_of(card) if self._fleet.is_alive(worker_id) else None

    def _is_instead_of_pairs(self, placement: Placement) -> bool:
        """Whether the request runs aggregated because KV does not arrive between pairs."""
        decision = placement.decision
        is_whole = decision.decode.leg is _AGGREGATED and not decision.together
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
            self._on_readmitted()

    def _circuit_of(self, card: WorkerCard) -> Circuit:
        incarnations = (card.incarnation,)
        entry = self._workers.get(card.worker_id)
        if entry is None or entry.incarnations != incarnations:
            circuit = Circuit(self._settings, now_s=-inf, seed=self._seed_of(card.worker_id))
            entry = self._workers[card.worker_id] = _CircuitEntry(circuit, incarnations)
        return entry.circuit

    def _incarnations(self, *worker_ids: WorkerId) -> tuple[Epoch | None, ...]:
        cards = map(self._fleet.card, worker_ids)
        return tuple(None if card is None else card.incarnation for card in cards)

    def _is_silent(self, *worker_ids: WorkerId) -> bool:
        """Whether one of the workers' engines does not answer: it may come back as another version."""
        cards = map(self._fleet.card, worker_ids)
        return any(card is not None and card.engine_silent for card in cards)

    def _seed_of(self, *worker_ids: WorkerId) -> int:
        seed = self._seed
        for worker_id in worker_ids:
            seed = mix64(seed ^ worker_id)
        return seed

    def _closed(self, worker_id: WorkerId) -> None:
        self.not_closed.discard(worker_id)
        self._due.drop(worker_id)

    def _update(self, subject: WorkerId | Pair, now_s: float) -> bool:
        """Update the fleet from a circuit that is not closed; return whether it allows a request."""
        if isinstance(subject, Pair):
            return subject in self._pairs and self._update_pair(subject, now_s)
        return subject in self.not_closed and self._update_worker(subject, now_s)

    def _update_worker(self, worker_id: WorkerId, now_s: float) -> bool:
        circuit = self._workers[worker_id].circuit
        allows_request = circuit.allows_request(now_s)
        self._fleet.set_circuit_open(worker_id, not allows_request)
        self._set_due(worker_id, circuit.half_open_s, now_s)
        return allows_request

    def _update_pair(self, pair: Pair, now_s: float) -> bool:
        """Update the fleet from a pair's circuit; drop a pair that has been half open for long."""
        entry = self._pairs[pair]
        allows_request, forgotten_s = entry.circuit.allows_request(now_s), self._forgotten_s(entry)
        if allows_request and now_s >= forgotten_s:
            self._forget_pair(pair)
            return True
        if entry.refuses:
            self._fleet.set_refusing_pair(pair, allows_request)
        else:
            self._fleet.set_broken_pair(pair.prefill, pair.decode, not allows_request)
        self._set_due(pair, forgotten_s if allows_request else entry.circuit.half_open_s, now_s)
        return allows_request

    def _set_due(self, subject: WorkerId | Pair, due_s: float | None, now_s: float) -> None:
        """Schedule a refresh at ``due_s``."""
        if due_s is not None and now_s < due_s < inf:
            self._due.put(subject, due_s)

    def _forget_pair(self, pair: Pair) -> None:
        del self._pairs[pair]
        self.not_closed.discard(pair)
        self._due.drop(pair)
        self._fleet.set_broken_pair(pair.prefill, pair.decode, False)
        self._fleet.set_refusing_pair(pair, None)

    def _forgotten_s(self, entry: _CircuitEntry) -> float:
        """Return when an unused half-open pair is dropped: after the longest possible open time."""
        half_open_s = entry.circuit.half_open_s
        return inf if half_open_s is None else half_open_s + self._settings.open_max_s

    @staticmethod
    def _open_for(circuit: Circuit, now_s: float) -> float:
        half_open_s = circuit.half_open_s
        return 0.0 if half_open_s is None else half_open_s - now_s


def pair_of(placement: Placement) -> Pair | None:
    """Return the pair of an attempt; None when one worker does all of it."""
    prefill, decode = placement.decision.prefill, placement.decision.decode
    return None if prefill is None else Pair(prefill.rank.worker_id, decode.rank.worker_id)


def _picked(placement: Placement, leg: Leg) -> WorkerId:
    pick = placement.prefill_pick if leg is _PREFILL else placement.decision.decode
    return pick.rank.worker_id


def _workers_of(placement: Placement) -> Iterator[WorkerId]:
    decision = placement.decision
    if decision.prefill is not None:
        yield decision.prefill.rank.worker_id
    yield decision.decode.rank.worker_id
