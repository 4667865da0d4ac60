"""The fleet of a recording, as the router's decisions read it, at each moment of the recorded past."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrouter.core.constraints import Pin, RouterMode, RoutingConstraints
from kvrouter.core.errors import ConfigError
from kvrouter.core.ids import DpRank, Epoch, ModelName, RequestId, Slot, Taint, WorkerId, WorkerRank
from kvrouter.core.taints import adapter_taints, listed_taints
from kvrouter.core.workers import Enforcement, ModelRuntimeConfig, Role, WorkerCard
from kvrouter.kernel.fleet.columns import IntColumn
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.interface import RouteRequest, RoutingSettings, View
from kvrouter.recording.schema import Constraints, LegRecord, Worker
from kvrouter.sim.past.fleet_history import FleetHistory, FleetMove, Move, RecordedWorker
from kvrouter.sim.past.recorded_fleet import Policy, policy_of
from kvrouter.sim.traces.recorded_trace import PastRequest


class Moved(NamedTuple):
    """The effect of a worker's change on the slots; data of ``freed`` slots is dropped first."""

    at_s: float
    move: Move
    worker: Worker
    joined: tuple[Slot, ...]
    freed: tuple[Slot, ...]


class PastFleet:
    """The fleet at the first request of a recording, and then at each later moment.

    With ``policy`` every worker publishes that transfer policy in place of its own. Raises ConfigError, with
    file and line, for a worker that no fleet can have.
    """

    def __init__(self, history: FleetHistory, *, policy: Policy | None = None) -> None:
        self.fleet = Fleet(ModelName(history.model), history.block_size)
        self.version = 0
        """The number of changes: results for one version hold as long as it does."""
        self._policy = policy
        self._settings = RoutingSettings(mode=RouterMode.ROUND_ROBIN)
        self._incarnations = 0
        self._zeros: IntColumn = np.zeros(16, np.int64)
        self._moves = deque(history.moves)
        self.initial = tuple(
            self._take(FleetMove(0.0, Move.JOINED, recorded))
            for _, recorded in sorted(history.initial.items(), key=lambda item: _number(item[1]))
        )
        """The workers that were there from the beginning."""

    @property
    def next_s(self) -> float | None:
        """When the next change is, in seconds after the first request; None after the last one."""
        return self._moves[0].at_s if self._moves else None

    def step(self) -> Moved:
        """Let the next change happen."""
        return self._take(self._moves.popleft())

    @property
    def view(self) -> View:
        """Return a reading of the fleet for a decision, without load and without caches."""
        n_slots = self.fleet.n_slots
        if len(self._zeros) < n_slots:
            self._zeros = np.zeros(2 * n_slots, np.int64)
        zeros = self._zeros[:n_slots]
        return View(
            fleet=self.fleet,
            settings=self._settings,
            overlap_blocks=None,
            prefill_tokens=zeros,
            active_blocks=zeros,
            not_active=None,
        )

    def asks(self, request: PastRequest, *, aggregated: bool) -> RouteRequest:
        """Return the routing request of a recorded request now. Raises ConfigError, with file and line, for
        an invalid pin.
        """
        record, fleet = request.record, self.fleet
        asked = record.constraints or Constraints()
        context_tokens = record.input_tokens + record.max_tokens
        if context_tokens == fleet.context_length_tokens:  # what an answer without a limit of its own gets
            context_tokens = record.input_tokens + 1
        try:
            pin, prefill_pin = _pin(asked.pin), _pin(asked.prefill_pin)
        except ValueError as error:
            raise ConfigError(
                f"{request.path}:{request.line}: constraints: a pin that is none: {error}",
                param=str(request.path),
            ) from error
        return RouteRequest(
            request_id=RequestId(f"r{request.number}"),
            isl_tokens=record.input_tokens,
            total_blocks=-(-record.input_tokens // record.block_size),
            constraints=RoutingConstraints(
                required_taints=adapter_taints([record.adapter]).union(map(Taint, asked.required_taints)),
                preferred_taints={Taint(taint): weight for taint, weight in asked.preferred_taints.items()},
                required_decode_taints=frozenset(map(Taint, asked.required_decode_taints)),
            ),
            pin=pin,
            prefill_pin=prefill_pin,
            aggregated=aggregated,
            is_guess=record.media or record.by_text,
            context_tokens=0 if context_tokens <= fleet.shortest_context_tokens else context_tokens,
        )

    def _take(self, move: FleetMove) -> Moved:
        self.version += 1
        recorded = move.recorded
        worker_id = _number(recorded)
        known = self.fleet.card(worker_id)
        if move.move is Move.LEFT:
            freed = () if known is None else tuple(self.fleet.leave(worker_id, known.incarnation))
            return Moved(move.at_s, move.move, recorded.worker, (), freed)
        if known is None or move.move is Move.JOINED:
            self._incarnations += 1
            incarnation = Epoch(self._incarnations)
        else:
            incarnation = known.incarnation
        try:
            change = self.fleet.join(_card(recorded.worker, worker_id, incarnation, self._policy))
        except (ConfigError, ValueError) as error:
            raise ConfigError(
                f"{recorded.place}: worker {recorded.worker.worker}: {error}", param="fleet"
            ) from error
        self.fleet.set_alive(worker_id, recorded.worker.alive)
        return Moved(move.at_s, move.move, recorded.worker, change.joined, change.freed)


def leg_called(legs: Sequence[LegRecord], name: str) -> LegRecord | None:
    """Return the leg with this name; None without one."""
    return next((leg for leg in legs if leg.leg == name), None)


def rank_of(leg: LegRecord) -> WorkerRank:
    """Return the rank of a leg. Raises ValueError for an invalid one."""
    worker, _, dp_rank = leg.worker.partition("/")
    return WorkerRank(WorkerId(int(worker)), DpRank(int(dp_rank or "0")))


def _pin(text: str | None) -> Pin | None:
    if text is None:
        return None
    worker, _, dp_rank = text.partition("/")
    return Pin(WorkerId(int(worker)), DpRank(int(dp_rank)) if dp_rank else None)


def _number(recorded: RecordedWorker) -> WorkerId:
    try:
        return WorkerId(int(recorded.worker.worker))
    except ValueError as error:
        raise ConfigError(
            f"{recorded.place}: worker: must be a number, not {recorded.worker.worker!r}", param="fleet"
        ) from error


def _card(worker: Worker, worker_id: WorkerId, incarnation: Epoch, policy: Policy | None) -> WorkerCard:
    """Return a worker's card. Raises ValueError for an invalid role or enforcement."""
    held = policy_of(worker) if policy is None else policy
    config = ModelRuntimeConfig(
        topology_domains=worker.domains,
        topology_levels=worker.levels,
        kv_transfer_domain=None if held is None else held.domain,
        kv_transfer_enforcement=None if held is None else Enforcement(held.enforcement),
        kv_transfer_preferred_weight=None if held is None else held.preferred_weight,
        taints=frozenset(map(Taint, listed_taints(worker.taints))),
        total_kv_blocks=worker.kv_blocks,
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        kv_bytes_per_token=worker.kv_bytes_per_token,
        prompt_tokens_min=worker.prompt_tokens_min,
        prompt_tokens_max=worker.prompt_tokens_max,
        kv_format=worker.kv_format,
    )
    return WorkerCard(
        worker_id=worker_id,
        incarnation=incarnation,
        model=ModelName(worker.model),
        role=Role(worker.role),
        block_size=worker.block_size,
        context_length=worker.context_length,
        address=f"recorded://{worker_id}",
        dp_size=worker.dp_size,
        dp_start=worker.dp_start,
        draining=worker.draining,
        engine=worker.engine,
        engine_silent=worker.engine_silent,
        decode_only=worker.decode_only,
        runtime_config=config,
    )
