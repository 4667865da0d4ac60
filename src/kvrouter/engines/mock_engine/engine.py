"""A mock engine: requests and the time go in; tokens, KV events, load and handoff notices come out.

It never reads a clock. The caller passes in the time of each input, asks :meth:`MockEngine.next_time` when to
call the engine again, and advances it to that second. Its outputs depend only on its inputs and their times.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from kvrouter.core.events import KvEvents, Stored
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, KvLoss, Leg
from kvrouter.core.workers import KvTransfers, LoadReport, Role
from kvrouter.engines.mock_engine.config import KvLoadFailurePolicy, MockConfig
from kvrouter.engines.mock_engine.network import Arrived
from kvrouter.engines.mock_engine.ranks import (
    FINISHES,
    ChunkRow,
    EndedRow,
    EngineRanks,
    LoadRow,
    WantingRow,
)
from kvrouter.engines.mock_engine.sequence import (
    UNLIMITED_CREDIT,
    Content,
    EngineSequence,
    LegSink,
    LegStamps,
    NamedContent,
    SequenceHandle,
    SequenceKey,
    TokenContent,
    sequence_key,
)
from kvrouter.engines.mock_engine.tokens import TokenModel

_PREFILL, _DECODE, _AGGREGATED = Leg.PREFILL, Leg.DECODE, Leg.AGGREGATED
"""Constants, because access to an enumeration's members is slow before Python 3.12."""

SERVED_LEGS = {
    Role.PREFILL: frozenset({_PREFILL}),
    Role.DECODE: frozenset({_PREFILL, _DECODE, _AGGREGATED}),
    Role.BOTH: frozenset({_DECODE, _AGGREGATED}),
}


class EngineFull(Unavailable):
    """The engine's waiting queue is full; the request was not accepted."""

    code = "engine_full"


class KvReady(NamedTuple):
    """A prefill leg ended well; its KV is pinned until it is released."""

    key: SequenceKey


class KvWanted(NamedTuple):
    """A leg has memory for the ``kv_tokens`` tokens of its prompt that are elsewhere, and not cached here."""

    key: SequenceKey
    kv_tokens: int


class LegEnded(NamedTuple):
    """A leg ended while its handoff was under way."""

    key: SequenceKey
    reason: str


Notice = KvReady | KvWanted | LegEnded


@dataclass(slots=True)
class Outputs:
    """The outputs of an engine: events come before the chunks that they explain. ``scheduled`` are the legs
    that got a place in a step, and when.
    """

    events: list[tuple[DpRank, KvEvents]] = field(default_factory=list)
    loads: list[LoadReport] = field(default_factory=list)
    chunks: list[tuple[SequenceKey, EngineChunk]] = field(default_factory=list)
    scheduled: list[tuple[SequenceKey, float]] = field(default_factory=list)


class MockEngine:
    """One engine with ``config.dp_size`` ranks. ``engine_id`` distinguishes it from its own earlier lives.

    ``kv_address`` (host, port) is where other processes fetch the KV of its prefill legs, if they may. With
    ``leaps`` it asks to be called only when something changes besides the number of tokens: its outputs are
    those of an engine that makes every step, in fewer chunks. ``ranks`` may also hold ranks of other engines:
    the caller that passes them in then runs them.
    """

    def __init__(
        self,
        config: MockConfig,
        *,
        worker_id: WorkerId,
        engine_id: str,
        leaps: bool = False,
        ranks: EngineRanks | None = None,
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
        self._core = EngineRanks() if ranks is None else ranks
        first = config.dp_start
        self._ranks = {
            DpRank(rank): self._core.add_rank(config, DpRank(rank), leaps=leaps)
            for rank in range(first, first + config.dp_size)
        }
        self.rank_numbers: Mapping[int, WorkerRank] = {
            number: WorkerRank(worker_id, rank) for rank, number in self._ranks.items()
        }
        """Its ranks, by their numbers in the native core."""
        self._sequences: dict[SequenceKey, EngineSequence] = {}
        self._by_handle: dict[int, EngineSequence] = {}
        """The sequences with a further chunk."""
        self._pinned: dict[SequenceKey, SequenceHandle] = {}
        self._transfers: dict[int, KvTransfers] = {}
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
        is the prompt in place of ``request.token_ids``.

        Raises InvalidRequest for a leg that this engine can never serve, EngineFull when too many wait.
        """
        n_tokens = len(request.token_ids) if content is None else content.prompt_tokens
        key = sequence_key(request)
        rank = self._check(request, key, n_tokens)
        remote_tokens = _remote_tokens(request, n_tokens)
        n_waiting = self._core.n_waiting(rank)
        if n_waiting >= self.config.max_waiting_seqs:
            raise EngineFull(f"worker {self.rank_numbers[rank]}: {n_waiting} requests wait already")
        if content is None:
            content = TokenContent(request, self.config, self._model)
        handle = SequenceHandle(
            self._core.submit(
                now,
                rank,
                block_hashes=content.block_hashes,
                prompt_tokens=n_tokens,
                max_tokens=request.sampling.max_tokens,
                credit_tokens=credit_tokens,
                may_stop=content.may_stop,
                remote_tokens=remote_tokens,
                pins_kv=request.leg is _PREFILL,
                content=content if isinstance(content, TokenContent) else None,
                salt=content.salt if isinstance(content, NamedContent) else 0,
            )
        )
        self._sequences[key] = self._by_handle[handle] = EngineSequence(key, handle, request, content, now)
        return key

    def is_source_for(self, request: EngineRequest) -> bool:
        """Whether the KV that a leg fetches is or will be here, in this life of the engine."""
        config, bootstrap = self.config, request.bootstrap
        if bootstrap is not None:
            return (bootstrap.host, bootstrap.port) == (config.bootstrap_host, config.bootstrap_port)
        return (request.kv_transfer_params or {}).get("remote_engine_id") == self.engine_id

    def cancel(self, now: float, key: SequenceKey, reason: str) -> bool:
        """End a leg and free its blocks; its last chunk has the reason. False if it does not run here."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        self._end(now, sequence, FinishReason.CANCELLED, reason)
        return True

    def give_credit(self, now: float, key: SequenceKey, tokens: int) -> None:
        """The reader of ``key`` has room for ``tokens`` more; does nothing if the leg has ended."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._core.give_credit(now, sequence.handle, tokens)

    def kv_arrived(self, now: float, key: SequenceKey, arrived: Arrived) -> None:
        """The KV that a leg wanted is in its memory."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._count_transfer(sequence, arrived)
            sequence.wants_remote_kv = False
            if sequence.request.leg is _PREFILL:
                sequence.fetched_tokens = _remote_tokens(sequence.request, sequence.content.prompt_tokens)
            sequence.kv_bytes = arrived.kv_bytes
            self._core.receive(now, sequence.handle, arrived=True)

    def kv_failed(self, now: float, key: SequenceKey, loss: KvLoss, reason: str) -> None:
        """The KV that a leg waits for will never come: fail, or compute it here, by the policy."""
        sequence = self._sequences.get(key)
        if sequence is None or not sequence.wants_remote_kv:
            return
        self._count_transfer(sequence, None)
        sequence.wants_remote_kv = False
        if self.config.kv_load_failure_policy is KvLoadFailurePolicy.RECOMPUTE:
            self._core.receive(now, sequence.handle, arrived=False)
        else:
            sequence.kv_lost = loss
            self._end(now, sequence, FinishReason.ERROR, f"KV transfer failed: {reason}")

    def release_kv(self, now: float, key: SequenceKey) -> None:
        """Free the KV of an ended prefill leg; does nothing if it was released before."""
        handle = self._pinned.pop(key, None)
        if handle is not None:
            self._core.release(now, handle)

    def catch_up(self, now: float) -> None:
        """Run the skipped steps that ended before ``now``, so that :meth:`take_outputs` has their output."""
        for rank in self.rank_numbers:
            self._core.catch_up(now, rank)

    def leave(self) -> None:
        """Take its ranks out of those of other engines, with all that they hold."""
        for rank in self.rank_numbers:
            self._core.remove(rank)

    def next_time(self) -> float | None:
        """Return when to call :meth:`advance`; None if no step is due without a new input."""
        return self._core.next_time()

    def advance(self, now: float) -> None:
        """Do everything that is due up to ``now``, each thing at its own second."""
        while self._core.run(now, through=True) is not None:
            self.note(*self._core.take_notices())

    def note(self, ended: Iterable[EndedRow], wanting: Iterable[WantingRow]) -> None:
        """Apply the native core's reports on legs: those that generated their last token, and those that have
        memory for the KV of so many tokens from elsewhere.
        """
        for handle, first_s, last_s, output_tokens, cached_tokens in ended:
            sequence = self._by_handle[handle]
            request = sequence.request
            del self._sequences[sequence.key]
            if self.on_leg_ended is not None:
                self.on_leg_ended(
                    LegStamps(
                        worker_id=self.worker_id,
                        request_id=request.request_id,
                        attempt=request.attempt,
                        leg=request.leg,
                        came_s=sequence.came_s,
                        first_s=first_s,
                        last_s=last_s,
                        output_tokens=output_tokens,
                        cached_tokens=cached_tokens,
                    )
                )
            if request.leg is _PREFILL:
                self._pinned[sequence.key] = sequence.handle
                self._notices.append(KvReady(sequence.key))
                if request.bootstrap is None:
                    sequence.kv_transfer_params = self._transfer_params(sequence)
        for handle, kv_tokens in wanting:
            self._notices.append(KvWanted(self._by_handle[handle].key, kv_tokens))

    def take_notices(self) -> list[Notice]:
        """Return what happened to handoffs since the last call."""
        if not self._notices:
            return []
        notices, self._notices = self._notices, []
        return notices

    def take_outputs(self, *, with_loads: bool = True) -> Outputs:
        """Return what happened since the last call; the tokens of several steps are one chunk a sequence."""
        outputs = Outputs()
        for rank, events, load, chunks, scheduled in self._core.take_outputs(with_loads=with_loads):
            if events is not None:
                outputs.events.append((self.rank_numbers[rank].dp_rank, events))
            if load is not None:
                outputs.loads.append(self.load_report(rank, load))
            outputs.scheduled += [(self._by_handle[handle].key, at_s) for handle, at_s in scheduled]
            outputs.chunks += [self.chunk(row) for row in chunks]
        return outputs

    def chunk(self, row: ChunkRow) -> tuple[SequenceKey, EngineChunk]:
        """Return a leg's output in the native core that its reader does not have yet."""
        handle, n_tokens, cached_tokens, finish = row
        sequence = self._by_handle.pop(handle) if finish else self._by_handle[handle]
        return sequence.key, sequence.chunk(n_tokens, cached_tokens, FINISHES[finish])

    def load_report(self, rank: int, load: LoadRow) -> LoadReport:
        """Return a rank's load as reported by the native core."""
        active_blocks, prefill_tokens, running, waiting = load
        return LoadReport(
            rank=self.rank_numbers[rank],
            active_blocks=active_blocks,
            total_blocks=self.config.total_kv_blocks,
            active_prefill_tokens=prefill_tokens,
            running_requests=running,
            waiting_requests=waiting,
            kv_transfers=self._transfers.get(rank),
        )

    def snapshot(self, dp_rank: DpRank) -> tuple[Stored, ...]:
        """Return the blocks that the rank holds now, as stores with parents first."""
        held = self._core.snapshot(self._ranks[dp_rank])
        return tuple(event for event in held if isinstance(event, Stored))

    def held_blocks(self, dp_rank: DpRank) -> int:
        """Return how many blocks the rank holds now."""
        return self._core.cached_blocks(self._ranks[dp_rank])

    @property
    def idle(self) -> bool:
        """True when no leg runs or waits here and no KV waits to be pulled."""
        return not self._sequences and not self._pinned

    def check_integrity(self) -> list[str]:
        """Return the inconsistencies, an empty list if there are none. Idle engines hold no blocks."""
        problems: list[str] = []
        for dp_rank, rank in self._ranks.items():
            problems += [f"rank {dp_rank}: {problem}" for problem in self._core.check_integrity(rank)]
            active_blocks = self._core.active_blocks(rank)
            if self.idle and active_blocks:
                problems.append(f"rank {dp_rank}: idle, and {active_blocks} blocks are held")
        return problems

    def _check(self, request: EngineRequest, key: SequenceKey, n_tokens: int) -> int:
        """Refuse a request that can never be served, naming the field; return the rank's number."""
        config, sampling = self.config, request.sampling
        rank = self._ranks.get(request.dp_rank)
        if rank is None:
            raise InvalidRequest(f"worker {self.worker_id} has no rank {request.dp_rank}", param="dp_rank")
        if request.leg not in SERVED_LEGS[config.role]:
            raise InvalidRequest(f"a {config.role} engine serves no {request.leg} leg", param="leg")
        if key in self._sequences:
            raise InvalidRequest(f"{request.engine_key} is running here already", param="request_id")
        if not n_tokens:
            raise InvalidRequest("token_ids: at least one token", param="token_ids")
        if sampling.max_tokens < 1 or (request.leg is _PREFILL and sampling.max_tokens != 1):
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
        return rank

    def _check_handoff(self, request: EngineRequest) -> None:
        config, bootstrap = self.config, request.bootstrap
        if request.leg is _DECODE and bootstrap is None and request.kv_transfer_params is None:
            raise InvalidRequest("a decode leg needs bootstrap or kv_transfer_params", param="bootstrap")
        if request.leg is not _PREFILL or bootstrap is None:
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

    def _count_transfer(self, sequence: EngineSequence, arrived: Arrived | None) -> None:
        """Count KV that was fetched for a sequence here; None: the fetch failed."""
        rank = self._ranks[sequence.request.dp_rank]
        so_far = self._transfers.get(rank) or KvTransfers(transfers=0, bytes=0, seconds=0.0)
        self._transfers[rank] = KvTransfers(
            transfers=so_far.transfers + (arrived is not None),
            bytes=so_far.bytes + (0 if arrived is None else arrived.kv_bytes),
            seconds=so_far.seconds + (0.0 if arrived is None else arrived.seconds),
            failed=so_far.failed + (arrived is None),
        )

    def _end(self, now: float, sequence: EngineSequence, finish: FinishReason, reason: str) -> None:
        """End a sequence early."""
        self._core.drop(now, sequence.handle)
        sequence.finish = finish
        sequence.error = reason if finish is FinishReason.ERROR else None
        del self._sequences[sequence.key]
        if sequence.wants_remote_kv or sequence.request.leg is _PREFILL:
            self._notices.append(LegEnded(sequence.key, f"the {sequence.request.leg} leg ended: {reason}"))


def _remote_tokens(request: EngineRequest, n_tokens: int) -> int:
    """Return how many of the first tokens of a leg's prompt have their KV elsewhere: all of a decode leg, and
    those that ``kv_transfer_params`` name of a prefill leg.
    """
    if request.leg is _DECODE:
        return n_tokens
    if request.leg is not _PREFILL or not request.kv_transfer_params:
        return 0
    remote_tokens = request.kv_transfer_params.get("remote_num_tokens")
    if not isinstance(remote_tokens, int) or remote_tokens < 1:
        raise InvalidRequest(
            f"kv_transfer_params: remote_num_tokens is {remote_tokens!r}, not 1 or more",
            param="kv_transfer_params",
        )
    return min(remote_tokens, n_tokens)
