"""The simulation: a trace's requests, the router's decisions and the mock engines, on one clock.

The clock goes from moment to moment: an arrival, a step in which some engine changes, a deadline. Random
draws come from the seed, so that the same inputs give the same outcomes.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from kvrouter.core.errors import ConfigError
from kvrouter.core.hashing import Prompt, mix64
from kvrouter.core.ids import RequestId, WorkerId
from kvrouter.core.requests import DEFAULT_LEVEL, EngineRequest, GenerateRequest, Sampling, ServiceLevel
from kvrouter.core.timing import Timing
from kvrouter.engines.mock_engine.handoff import LegId
from kvrouter.engines.mock_engine.mock_links import DomainPair
from kvrouter.engines.mock_engine.network import Carried
from kvrouter.engines.mock_engine.sequence import Content, NamedContent
from kvrouter.fleetfile.fleet_file import FleetFile
from kvrouter.kernel.index import PrefixSet
from kvrouter.kernel.placement.placement import Draw
from kvrouter.settings.router_settings import KvRouterConfig
from kvrouter.sim.replay.cache import EventCacheView
from kvrouter.sim.replay.content import block_names, check_block_size
from kvrouter.sim.replay.dispatch import Arrival, Dispatch
from kvrouter.sim.replay.outcome import Outcome
from kvrouter.sim.replay.outcomes import Outcomes
from kvrouter.sim.replay.sim_fleet import SimFleet
from kvrouter.sim.replay.sim_request import NO_TOKENS, SimRequest
from kvrouter.sim.replay.timetable import (
    AddEvent,
    DieEvent,
    DrainEvent,
    JoinEvent,
    LabelEvent,
    LinkEvent,
    PolicyEvent,
    TimetableEvent,
)
from kvrouter.sim.replay.timetable_plan import Step, plan_timetable
from kvrouter.sim.rules.rule import PublishedRule
from kvrouter.sim.traces.trace_request import TraceRequest

CEILING_BLOCKS_MAX = 7_000_000
"""Distinct blocks or pieces of a trace up to which its ceiling is known; more are not kept in mind."""

COLLECTED_OBJECTS = 500_000
"""So many new objects call the garbage collector while a replay runs."""

_SALT = 0x9E3779B97F4A7C15


class Beat(NamedTuple):
    """The progress of a replay: its clock, and how many requests arrived and ended."""

    now_s: float
    arrived: int
    ended: int


@dataclass(slots=True)
class Result:
    """The result of a replay. ``is_whole``: it was not stopped before its end. ``prefill_workers``: how many
    workers that prefill were there at any time.
    """

    outcomes: Outcomes = field(default_factory=Outcomes)
    carried: dict[DomainPair, Carried] = field(default_factory=dict)
    ended_s: float = 0.0
    ceiling_known: bool = True
    is_whole: bool = True
    prefill_workers: int = 0


@contextmanager
def _little_collected() -> Iterator[None]:
    """The fleet stays to the end, and requests are no cycles: the collector walks the fleet not at all, and
    requests under way rarely. Of a thousand workers they are many, and most of them are not over.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTED_OBJECTS, *thresholds[1:])
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


class Simulation:
    """One replay of ``trace`` over ``file``. ``rule`` picks instead of the router's own costs. So large a
    share of requests as ``critical_share`` has a strict priority of 1.

    Raises ConfigError for what cannot be replayed.
    """

    def __init__(
        self,
        file: FleetFile,
        trace: Iterable[TraceRequest],
        *,
        config: KvRouterConfig,
        dispatch: Dispatch,
        piece_tokens: int,
        rule: PublishedRule | None = None,
        seed: int = 0,
        timing: Timing | None = None,
        timetable: Sequence[TimetableEvent] = (),
        critical_share: float = 0.0,
    ) -> None:
        self.now_s = 0.0
        self.on_beat: Callable[[Beat], None] | None = None
        """Called with the progress of the replay, now and then."""
        self.result = Result()
        self._due: deque[Callable[[], None]] = deque()
        steps = plan_timetable(timetable, file)
        self.fleet = SimFleet(
            file,
            config=config,
            rule=rule,
            seed=seed,
            call_soon=self._due.append,
            timing=timing,
            steps=steps,
        )
        check_block_size(piece_tokens, self.fleet.block_size)
        self.fleet.loads.session_of = lambda request_id: self._open[request_id].session
        self._trace = trace
        self._config = config
        self._dispatch = dispatch
        self._seed = mix64(seed + _SALT)
        self._critical_below = critical_share * 2.0**64
        self._n_draws = 0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._runs: dict[LegId, SimRequest] = {}
        self._open: dict[RequestId, SimRequest] = {}
        """The requests that have not ended."""
        self._n_arrived = 0
        self._ceiling = PrefixSet(max_blocks=CEILING_BLOCKS_MAX)
        self._reads_reports = rule is not None or self._has_thresholds()
        self._deadlines: deque[tuple[float, SimRequest]] = deque()
        self._deadline_is_set = False
        for step in steps:
            self.call_at(step.event.at_s, partial(self._happen, step))

    def run(self) -> Result:
        """Replay to the end; KeyboardInterrupt leaves the partial result in ``result``."""
        with _little_collected():
            try:
                self._run()
            except KeyboardInterrupt:
                self.result.is_whole = False
        self.result.carried = self.fleet.fabric.network.carried()
        self.result.prefill_workers = self.fleet.n_prefill_workers
        return self.result

    # What a request needs

    def draw(self) -> Draw:
        """Return the random source of the next decision."""
        number = self._n_draws
        self._n_draws += 1
        bits = mix64(self._seed + number)
        return Draw(bits, number, mix64(bits ^ _SALT))

    def submit(self, run: SimRequest, worker_id: WorkerId, leg: EngineRequest, content: Content) -> LegId:
        """Hand a leg to an engine."""
        leg_id = self.fleet.fabric.submit(self.now_s, worker_id, leg, content=content)
        self._runs[leg_id] = run
        return leg_id

    def cancel(self, leg_id: LegId, reason: str) -> None:
        """End a leg, or give up the KV that waits for one."""
        self._runs.pop(leg_id, None)
        self.fleet.fabric.cancel(self.now_s, leg_id, reason)

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Call once at this moment."""
        heappush(self._calls, (at_s, next(self._order), call))

    def ended(self, run: SimRequest) -> None:
        """A request is over; in a closed loop others may follow it."""
        outcome = run.outcome
        del self._open[run.request.request_id]
        self.result.outcomes.append(outcome)
        self.result.ended_s = self.now_s
        self._follow(self._dispatch.ended(outcome.number, self.now_s))

    def _follow(self, arrivals: Iterable[Arrival]) -> None:
        """Let these requests arrive at their time."""
        for at_s, row in arrivals:
            self.call_at(at_s, partial(self._arrive, row, at_s))

    # Time

    def _run(self) -> None:
        fabric, calls = self.fleet.fabric, self._calls
        arrivals = self._dispatch.arrivals(self._trace)
        arrival = next(arrivals, None)
        while True:
            arrival_s = inf if arrival is None else arrival[0]
            self._note_deadlines()
            call_s = calls[0][0] if calls else inf
            input_s = min(arrival_s, call_s)
            engine_s = fabric.run(input_s)
            if engine_s is not None:
                self.now_s = engine_s
                self._deliver()
                continue
            if input_s == inf:
                break
            self.now_s = input_s
            self._deliver()  # what filled meanwhile, which a decision sees
            if call_s <= arrival_s:
                heappop(calls)[2]()
            elif arrival is not None:
                self._arrive(arrival[1], arrival_s)
                arrival = next(arrivals, None)
            self._deliver()

    def _note_deadlines(self) -> None:
        """Set the first deadline of a request that has not ended: all have as long, so they come in turn."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1].has_ended:
            deadlines.popleft()
        if deadlines and not self._deadline_is_set:
            self._deadline_is_set = True
            self.call_at(deadlines[0][0], self._time_is_up)

    def _time_is_up(self) -> None:
        self._deadline_is_set = False
        while self._deadlines and self._deadlines[0][0] <= self.now_s:
            self._deadlines.popleft()[1].time_is_up(self._config.request_timeout_s)

    def _happen(self, step: Step) -> None:
        fleet, event, now_s = self.fleet, step.event, self.now_s
        match event:
            case DieEvent():
                for worker_id in fleet.selected(event):
                    self._die(worker_id)
            case DrainEvent():
                for worker_id in fleet.selected(event):
                    fleet.drain(worker_id, now_s=now_s)
            case JoinEvent():
                for worker_id in fleet.selected(event):
                    fleet.come_back(worker_id, now_s=now_s)
            case LabelEvent():
                for worker_id in fleet.selected(event):
                    fleet.label(worker_id, event.set, now_s=now_s)
            case LinkEvent() if step.link is not None:
                fleet.fabric.change_link(now_s, step.link)
            case PolicyEvent():
                fleet.switch(step.file, now_s=now_s)
                self._reads_reports = self._reads_reports or self._has_thresholds()
            case AddEvent():
                for worker_id, _ in step.added:
                    fleet.join(worker_id, now_s=now_s)

    def _die(self, worker_id: WorkerId) -> None:
        fleet = self.fleet
        if fleet.fleet.card(worker_id) is None:
            return
        fleet.fabric.catch_up(self.now_s, worker_id)
        self._deliver()
        fleet.leave(worker_id, now_s=self.now_s)
        legs = [leg_id for leg_id in self._runs if leg_id.worker_id == worker_id]
        for run in [self._runs.pop(leg_id) for leg_id in legs]:
            run.worker_died(worker_id)

    def _has_thresholds(self) -> bool:
        settings = self.fleet.placer.settings
        return (settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold) != (
            None,
            None,
        )

    def _arrive(self, row: TraceRequest, at_s: float) -> None:
        block_size, input_tokens = self.fleet.block_size, row.input_tokens
        named_tokens = row.named_tokens or input_tokens
        names = block_names(row.pieces, row.piece_tokens, n_tokens=named_tokens, block_size=block_size)
        column = names.tobytes()

        def prompt_after(n_generated: int) -> Prompt:
            tokens = input_tokens + n_generated
            known = column[: tokens // block_size * names.itemsize]
            return Prompt.from_blocks(known, isl_tokens=tokens, block_size=block_size)

        prompt = prompt_after(0)
        salt = mix64(self._seed ^ (row.number + 1))
        outcome = Outcome(
            number=row.number,
            arrived_s=at_s,
            input_tokens=input_tokens,
            output_tokens=row.output_tokens,
            ceiling_tokens=self._reach_ceiling(row, column),
            is_critical=mix64(salt + _SALT) < self._critical_below,
        )

        def content(prompt_tokens: int) -> Content:
            return NamedContent(column, prompt_tokens=prompt_tokens, salt=salt)

        run = SimRequest(
            GenerateRequest(
                request_id=RequestId(f"r{row.number}"),
                model=self.fleet.fleet.model,
                token_ids=NO_TOKENS,
                sampling=Sampling(max_tokens=row.output_tokens, ignore_eos=True),
                service_level=ServiceLevel(strict_priority=1) if outcome.is_critical else DEFAULT_LEVEL,
            ),
            outcome,
            host=self,
            prompt=lambda n_generated: prompt_after(n_generated) if n_generated else prompt,
            content=content,
            session=row.session,
            retries_max=self._config.retries_max,
        )
        self._n_arrived += 1
        self._open[run.request.request_id] = run
        self._deadlines.append((at_s + self._config.request_timeout_s, run))
        if self.on_beat is not None and not self._n_arrived % 64:
            self.on_beat(Beat(self.now_s, self._n_arrived, len(self.result.outcomes)))
        self._follow(self._dispatch.arrived(row.number, at_s))
        run.begin()

    def _reach_ceiling(self, row: TraceRequest, column: bytes) -> int:
        """Tokens of the prompt, in full blocks, that an endless cache shared by all holds; from now on, all
        that ``column`` names. Where pieces are larger than blocks the cache knows pieces: their blocks come
        together.
        """
        if not self.result.ceiling_known:
            return 0
        unit_tokens = block_size = self.fleet.block_size
        if row.piece_tokens > block_size and row.pieces:
            unit_tokens, column = row.piece_tokens, row.pieces.tobytes()
        n_tokens = len(column) // 8 * unit_tokens
        held = self._ceiling.add(Prompt.from_blocks(column, isl_tokens=n_tokens, block_size=unit_tokens))
        if held is None:
            self.result.ceiling_known = False
            return 0
        return min(held * unit_tokens, row.input_tokens) // block_size * block_size

    def _deliver(self) -> None:
        """Pass on the engines' outputs, and wake waiting requests, until there are no further ones."""
        fabric, fleet, cache = self.fleet.fabric, self.fleet, self.fleet.cache
        ranks = fabric.ranks
        while ranks.has_outputs or self._due:
            outputs = fabric.take_outputs(with_loads=self._reads_reports)
            if outputs.events and isinstance(cache, EventCacheView):
                for rank, events in outputs.events:
                    cache.publish(rank, events)
            for report in outputs.loads:
                fleet.reported(report, now_s=self.now_s)
            for leg_id, chunk in outputs.chunks:
                run = self._runs.get(leg_id) if chunk.finish is None else self._runs.pop(leg_id, None)
                if run is not None:
                    run.take(leg_id, chunk)
            while self._due:
                self._due.popleft()()


class TraceSize(NamedTuple):
    """How many requests a trace has, how many of them have no answer, and the first with the most tokens."""

    n_rows: int
    n_unanswered: int
    longest: TraceRequest

    @property
    def notes(self) -> tuple[str, ...]:
        """What the trace does not say, for readers of the figures."""
        lack = f"{self.n_unanswered:,} of {self.n_rows:,} requests have no answer, or one of 0 tokens"
        return (f"{lack}: it is replayed as one of 1",) if self.n_unanswered else ()


def size_of(trace: Iterable[TraceRequest]) -> TraceSize:
    """Return the size of a trace. Raises ConfigError for an empty one."""
    n_rows, n_unanswered, most_tokens = 0, 0, -1
    longest: TraceRequest | None = None
    for row in trace:
        n_rows += 1
        n_unanswered += not row.has_answer
        tokens = row.input_tokens + row.output_tokens
        if tokens > most_tokens:
            most_tokens, longest = tokens, row
    if longest is None:
        raise ConfigError("trace: it has no requests", param="trace")
    return TraceSize(n_rows, n_unanswered, longest)


def check_room(row: TraceRequest, fleet: SimFleet) -> None:
    """Raise ConfigError where an engine of the fleet, or the model, has no room for this request."""
    room_tokens, stated_tokens = fleet.capacity_tokens, fleet.stated_context_tokens
    tokens = row.input_tokens + row.output_tokens
    what = f"{row.place}: {row.input_tokens} tokens and {row.output_tokens} more"
    if tokens > room_tokens:
        raise ConfigError(
            f"{what}; the smallest engine of the fleet has room for {room_tokens} "
            "(total_kv_blocks × block_size): give the engines of the fleet file more total_kv_blocks",
            param="total_kv_blocks",
        )
    if stated_tokens is not None and tokens > stated_tokens:
        raise ConfigError(
            f"{what}; the model's context_length is {stated_tokens}: set models[0].context_length of the "
            f"fleet file to {tokens} or more",
            param="context_length",
        )
