"""A mock engine: requests and the time go in; tokens, KV events, load and handoff notices come out.

It never reads a clock. The caller says what happens at which second, asks :meth:`MockEngine.next_time`
when the engine wants to be called again, and advances it to that second. What it computes depends on its
inputs and their times alone.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from kvrouter.core.events import KvEvent, Stored
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, KvLoss, Leg
from kvrouter.core.workers import LoadReport, Role
from kvrouter.mock.config import KvLoadFailurePolicy, MockConfig
from kvrouter.mock.network import Arrived
from kvrouter.mock.paged_kv import TableId
from kvrouter.mock.scheduler import RankScheduler
from kvrouter.mock.sequence import (
    UNLIMITED_CREDIT,
    Content,
    EngineSequence,
    LegSink,
    LegStamps,
    SequenceKey,
    TokenContent,
    sequence_key,
)
from kvrouter.mock.tokens import TokenModel

SERVED_LEGS = {
    Role.PREFILL: frozenset({Leg.PREFILL}),
    Role.DECODE: frozenset({Leg.DECODE, Leg.AGGREGATED}),
    Role.BOTH: frozenset({Leg.DECODE, Leg.AGGREGATED}),
}


class EngineFull(Unavailable):
    """The engine's waiting queue is full; the request was not accepted."""

    code = "engine_full"


class KvReady(NamedTuple):
    """A prefill leg ended well; its KV is pinned until it is released."""

    key: SequenceKey


class KvWanted(NamedTuple):
    """A decode leg has memory for the ``kv_tokens`` tokens of its prompt that are not in its own cache."""

    key: SequenceKey
    kv_tokens: int


class LegEnded(NamedTuple):
    """A leg ended while its handoff was under way."""

    key: SequenceKey
    reason: str


Notice = KvReady | KvWanted | LegEnded


@dataclass(slots=True)
class Outputs:
    """What an engine did: events come before the chunks that they explain. ``scheduled`` are the legs that
    were given a place in a step.
    """

    events: list[tuple[DpRank, tuple[KvEvent, ...]]] = field(default_factory=list)
    loads: list[LoadReport] = field(default_factory=list)
    chunks: list[tuple[SequenceKey, EngineChunk]] = field(default_factory=list)
    scheduled: list[SequenceKey] = field(default_factory=list)


class PinnedKv(NamedTuple):
    """The KV of an ended prefill leg."""

    scheduler: RankScheduler
    table: TableId


class MockEngine:
    """One engine with ``config.dp_size`` ranks. ``engine_id`` distinguishes it from its own earlier lives.

    ``kv_address`` (host, port) is where other processes come for the KV of its prefill legs, if they may.
    With ``leaps`` it asks to be called only when something changes but the number of tokens: its outputs are
    those of an engine that makes every step, in fewer chunks.
    """

    def __init__(
        self, config: MockConfig, *, worker_id: WorkerId, engine_id: str, leaps: bool = False
    ) -> None:
        self.config = config
        self.worker_id = worker_id
        self.engine_id = engine_id
        self.kv_address: tuple[str, int] | None = None
        self.on_leg_ended: LegSink | None = None
        """Is given the stamps of each leg that generated all of its tokens."""
        self._model = TokenModel(
            model_seed=config.model_seed,
            token_ids=config.token_ids,
            eos_token_id=config.eos_token_id,
            eos_every=config.eos_every,
        )
        first = config.dp_start
        self._ranks = {
            DpRank(rank): RankScheduler(config, WorkerRank(worker_id, DpRank(rank)), leaps=leaps)
            for rank in range(first, first + config.dp_size)
        }
        self._schedulers = tuple(self._ranks.values())
        self._sequences: dict[SequenceKey, EngineSequence] = {}
        self._pinned: dict[SequenceKey, PinnedKv] = {}
        self._notices: list[Notice] = []

    def submit(
        self,
        now: float,
        request: EngineRequest,
        *,
        credit_tokens: int = UNLIMITED_CREDIT,
        content: Content | None = None,
    ) -> SequenceKey:
        """Accept a leg. At most ``credit_tokens`` tokens are generated until :meth:`give_credit`. ``content``
        is what it says instead of ``request.token_ids``.

        Raises InvalidRequest for a leg that this engine can never serve, EngineFull when too many wait.
        """
        n_tokens = len(request.token_ids) if content is None else content.prompt_tokens
        scheduler = self._check(request, n_tokens)
        if len(scheduler.waiting) >= self.config.max_waiting_seqs:
            raise EngineFull(f"worker {scheduler.rank}: {len(scheduler.waiting)} requests wait already")
        scheduler.catch_up(now)
        if content is None:
            content = TokenContent(request, self.config, self._model)
        sequence = EngineSequence(request, content, credit_tokens=credit_tokens, came_s=now)
        self._sequences[sequence.key] = sequence
        scheduler.waiting.append(sequence)
        scheduler.wake(now)
        return sequence.key

    def is_source_for(self, request: EngineRequest) -> bool:
        """Whether the KV that a decode leg comes for is or will be here, in this life of the engine."""
        config, bootstrap = self.config, request.bootstrap
        if bootstrap is not None:
            return (bootstrap.host, bootstrap.port) == (config.bootstrap_host, config.bootstrap_port)
        return (request.kv_transfer_params or {}).get("remote_engine_id") == self.engine_id

    def cancel(self, now: float, key: SequenceKey, reason: str) -> bool:
        """End a leg and free what it holds; its last chunk says so. False when it is not running here."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        self._end(now, sequence, FinishReason.CANCELLED, reason)
        return True

    def give_credit(self, now: float, key: SequenceKey, tokens: int) -> None:
        """The reader of ``key`` made room for ``tokens`` more; nothing when the leg has ended."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            scheduler = self._ranks[sequence.request.dp_rank]
            scheduler.catch_up(now)
            scheduler.give_credit(now, sequence, tokens)

    def kv_arrived(self, now: float, key: SequenceKey, arrived: Arrived) -> None:
        """The KV that a decode leg wanted is in its memory."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            scheduler = self._ranks[sequence.request.dp_rank]
            scheduler.catch_up(now)
            scheduler.count_transfer(arrived)
            scheduler.receive(now, sequence, arrived=True)

    def kv_failed(self, now: float, key: SequenceKey, loss: KvLoss, reason: str) -> None:
        """The KV that a decode leg waits for will never come: fail, or compute it here, by the policy."""
        sequence = self._sequences.get(key)
        if sequence is None or not sequence.wants_remote_kv:
            return
        scheduler = self._ranks[sequence.request.dp_rank]
        scheduler.catch_up(now)
        scheduler.count_transfer(None)
        if self.config.kv_load_failure_policy is KvLoadFailurePolicy.RECOMPUTE:
            scheduler.receive(now, sequence, arrived=False)
        else:
            sequence.wants_remote_kv = False
            sequence.kv_lost = loss
            self._end(now, sequence, FinishReason.ERROR, f"KV transfer failed: {reason}")

    def release_kv(self, now: float, key: SequenceKey) -> None:
        """The KV of an ended prefill leg is no longer needed; nothing when it was released before."""
        pinned = self._pinned.pop(key, None)
        if pinned is not None:
            pinned.scheduler.catch_up(now)
            pinned.scheduler.kv.release(pinned.table)
            pinned.scheduler.wake(now)

    def catch_up(self, now: float) -> None:
        """Do what was leapt over and ended before ``now``, so that :meth:`take_outputs` has it."""
        for scheduler in self._schedulers:
            scheduler.catch_up(now)
            scheduler.report_pending()

    def next_time(self) -> float | None:
        """When to call :meth:`advance`; None when nothing happens until someone calls."""
        if len(self._schedulers) == 1:
            return self._schedulers[0].next_time()
        earliest: float | None = None
        for scheduler in self._schedulers:
            time = scheduler.next_time()
            if time is not None and (earliest is None or time < earliest):
                earliest = time
        return earliest

    def advance(self, now: float) -> None:
        """Do everything that is due up to ``now``, each thing at its own second."""
        while (time := self.next_time()) is not None and time <= now:
            for scheduler in self._schedulers:
                scheduler.end_step(time)
                if scheduler.ended:
                    self._finish(scheduler)
                scheduler.begin_step(time)
                if scheduler.admitted_remote:
                    self._want_kv(scheduler)

    def take_notices(self) -> list[Notice]:
        """Return what happened to handoffs since the last call."""
        if not self._notices:
            return []
        notices, self._notices = self._notices, []
        return notices

    def take_outputs(self, *, with_loads: bool = True) -> Outputs:
        """Return what happened since the last call; the tokens of several steps are one chunk a sequence."""
        outputs = Outputs()
        for rank, scheduler in self._ranks.items():
            events = scheduler.kv.take_events()
            if events:
                outputs.events.append((rank, events))
            if with_loads and (load := scheduler.load_report()) is not None:
                outputs.loads.append(load)
            if scheduler.dirty:
                outputs.chunks += [(sequence.key, sequence.take_chunk()) for sequence in scheduler.dirty]
                scheduler.dirty.clear()
            if scheduler.scheduled:
                outputs.scheduled += [sequence.key for sequence in scheduler.scheduled]
                scheduler.scheduled.clear()
        return outputs

    def snapshot(self, dp_rank: DpRank) -> tuple[Stored, ...]:
        """Return the blocks that the rank holds now, as stores with parents first."""
        return self._ranks[dp_rank].kv.snapshot()

    def held_blocks(self, dp_rank: DpRank) -> int:
        """Return how many blocks the rank holds now."""
        return self._ranks[dp_rank].kv.cached_blocks

    @property
    def idle(self) -> bool:
        """True when no leg runs or waits here and no KV waits to be pulled."""
        return not self._sequences and not self._pinned

    def check_integrity(self) -> list[str]:
        """Return what is wrong with the books: empty lists are good ones. Idle engines hold nothing."""
        problems: list[str] = []
        for rank, scheduler in self._ranks.items():
            tables = [
                sequence.table
                for sequence in self._sequences.values()
                if sequence.request.dp_rank == rank and sequence.table is not None
            ]
            tables += [pinned.table for pinned in self._pinned.values() if pinned.scheduler is scheduler]
            problems += [f"rank {rank}: {problem}" for problem in scheduler.kv.check_integrity(tables)]
            if self.idle and scheduler.kv.active_blocks:
                problems.append(f"rank {rank}: idle, and {scheduler.kv.active_blocks} blocks are held")
        return problems

    def _check(self, request: EngineRequest, n_tokens: int) -> RankScheduler:
        """Refuse what can never be served, with the field that is to blame."""
        config, sampling = self.config, request.sampling
        scheduler = self._ranks.get(request.dp_rank)
        if scheduler is None:
            raise InvalidRequest(f"worker {self.worker_id} has no rank {request.dp_rank}", param="dp_rank")
        if request.leg not in SERVED_LEGS[config.role]:
            raise InvalidRequest(f"a {config.role} engine serves no {request.leg} leg", param="leg")
        if sequence_key(request) in self._sequences:
            raise InvalidRequest(f"{request.engine_key} is running here already", param="request_id")
        if not n_tokens:
            raise InvalidRequest("token_ids: at least one token", param="token_ids")
        if sampling.max_tokens < 1 or (request.leg is Leg.PREFILL and sampling.max_tokens != 1):
            raise InvalidRequest(
                f"max_tokens: {sampling.max_tokens} for a {request.leg} leg", param="max_tokens"
            )
        blocks = -(-(n_tokens + sampling.max_tokens - 1) // config.block_size)
        if blocks > config.total_kv_blocks:
            raise ContextLengthExceeded(
                f"{n_tokens} tokens and {sampling.max_tokens} more need {blocks} blocks, "
                f"worker {self.worker_id} has {config.total_kv_blocks}",
                param="token_ids",
            )
        if not config.chunked_prefill and n_tokens > config.max_num_batched_tokens:
            raise ContextLengthExceeded(
                f"{n_tokens} tokens do not fit into one step of {config.max_num_batched_tokens}",
                param="token_ids",
            )
        self._check_handoff(request)
        return scheduler

    def _check_handoff(self, request: EngineRequest) -> None:
        config, bootstrap = self.config, request.bootstrap
        if request.leg is Leg.DECODE and bootstrap is None and request.kv_transfer_params is None:
            raise InvalidRequest("a decode leg needs bootstrap or kv_transfer_params", param="bootstrap")
        if request.leg is not Leg.PREFILL or bootstrap is None:
            return
        if (bootstrap.host, bootstrap.port) != (config.bootstrap_host, config.bootstrap_port):
            raise InvalidRequest(
                f"bootstrap: {bootstrap.host}:{bootstrap.port} is not this engine's address",
                param="bootstrap",
            )
        if bootstrap.room % config.dp_size != request.dp_rank - config.dp_start:
            raise InvalidRequest(
                f"bootstrap: room {bootstrap.room} % {config.dp_size} is not rank {request.dp_rank}",
                param="bootstrap",
            )

    def _want_kv(self, scheduler: RankScheduler) -> None:
        """Say which sequences have memory for KV from elsewhere."""
        for sequence in scheduler.admitted_remote:
            lacking = sequence.content.prompt_tokens - (sequence.cached_tokens or 0)
            self._notices.append(KvWanted(sequence.key, lacking))
        scheduler.admitted_remote.clear()

    def _finish(self, scheduler: RankScheduler) -> None:
        """Settle the sequences that generated their last token."""
        for sequence in scheduler.ended:
            del self._sequences[sequence.key]
            table, sequence.table = sequence.table, None
            request = sequence.request
            if self.on_leg_ended is not None:
                self.on_leg_ended(self._stamps(sequence, scheduler.step_ended_s))
            if request.leg is Leg.PREFILL and table is not None:
                self._pinned[sequence.key] = PinnedKv(scheduler, table)
                self._notices.append(KvReady(sequence.key))
                if request.bootstrap is None:
                    sequence.kv_transfer_params = self._transfer_params(sequence)
            else:
                scheduler.free(table)
        scheduler.ended.clear()

    def _stamps(self, sequence: EngineSequence, now: float) -> LegStamps:
        request = sequence.request
        return LegStamps(
            worker_id=self.worker_id,
            request_id=request.request_id,
            attempt=request.attempt,
            leg=request.leg,
            came_s=sequence.came_s,
            first_s=now if sequence.first_s is None else sequence.first_s,
            last_s=now,
            output_tokens=sequence.output_tokens,
            cached_tokens=sequence.cached_tokens or 0,
        )

    def _transfer_params(self, sequence: EngineSequence) -> dict[str, object]:
        """Return how a decode engine gets the KV that waits here, in the format of vLLM's NixlConnector."""
        host, port = self.kv_address or (None, None)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": str(sequence.key),
            "remote_host": host,
            "remote_port": port,
            "remote_dp_rank": int(sequence.request.dp_rank),
            "remote_num_tokens": sequence.content.prompt_tokens,
        }

    def _end(self, now: float, sequence: EngineSequence, finish: FinishReason, reason: str) -> None:
        """End a sequence early."""
        scheduler = self._ranks[sequence.request.dp_rank]
        scheduler.catch_up(now)
        scheduler.drop(sequence)
        scheduler.free(sequence.table)
        sequence.table = None
        sequence.finish = finish
        sequence.error = reason if finish is FinishReason.ERROR else None
        del self._sequences[sequence.key]
        scheduler.report(sequence)
        if sequence.wants_remote_kv or sequence.request.leg is Leg.PREFILL:
            self._notices.append(LegEnded(sequence.key, f"the {sequence.request.leg} leg ended: {reason}"))
        scheduler.wake(now)
