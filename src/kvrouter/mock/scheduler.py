"""Continuous batching on one rank: what runs in the next step, what waits, and what is preempted.

A step takes every running sequence in the order of admission: one token each for those that decode, up to the
token budget for those that prefill (in chunks). What is left of seats and budget admits waiting sequences,
first come first served; a sequence is admitted when all its tokens' blocks fit at once. A sequence that
decodes into a new block when none is left makes the last admitted one give way (its KV is computed again
later). The first admitted one therefore always moves on, and a request that fits the memory alone always
ends.

A sequence whose reader has given no credit sits steps out with its KV in place, takes no seat, and is the
first to give way.

With ``async_scheduling`` a step is planned when the one before it begins, by what is known then: a sequence
that comes meanwhile, and a seat that becomes free, wait a step longer, and the engine never waits for a plan.

Most steps repeat the one before: the same sequences decode one token each, into blocks that they have. A
scheduler that leaps does all of those at the end of the last, or when something comes from outside, and ends
up where one that makes every step does. It says what a sequence generated with its first token, where it
fills a block, and at its end.
"""

from collections import deque
from collections.abc import Iterator

from kvrouter.core.ids import WorkerRank
from kvrouter.core.requests import FinishReason
from kvrouter.core.workers import KvTransfers, LoadReport
from kvrouter.mock.batch_step import BatchStep, Work, count_planned, settle, steps_s
from kvrouter.mock.config import EngineHashing, MockConfig
from kvrouter.mock.network import Arrived
from kvrouter.mock.paged_kv import PagedKv, TableId
from kvrouter.mock.sequence import EngineSequence, SequenceState
from kvrouter.mock.tokens import MASK

RUNNING = SequenceState.RUNNING


class RankScheduler:
    """One data-parallel rank. ``dirty`` collects sequences with something to report, ``admitted_remote``
    those that now have memory for the KV they wait for, ``ended`` those that just generated their last token,
    ``scheduled`` those that were given a place in a step.
    """

    def __init__(self, config: MockConfig, rank: WorkerRank, *, leaps: bool) -> None:
        self.rank = rank
        self.kv = PagedKv(
            total_blocks=config.total_kv_blocks,
            opaque=config.engine_hashing is EngineHashing.OPAQUE,
            seed=((config.seed << 16) + rank.dp_rank) & MASK,
            caching=config.prefix_caching,
        )
        self.waiting: deque[EngineSequence] = deque()
        self.ready: deque[EngineSequence] = deque()
        self.running: list[EngineSequence] = []
        self.dirty: list[EngineSequence] = []
        self.admitted_remote: list[EngineSequence] = []
        self.ended: list[EngineSequence] = []
        self.scheduled: list[EngineSequence] = []
        self.n_receiving = 0
        self.n_parked = 0
        self.preemptions = 0
        self.steps = 0
        self.step_ended_s = 0.0
        """When the last step ended. First and last tokens come at such moments, leaping or not."""
        self.kv_transfers: KvTransfers | None = None
        self._config = config
        self._leaps = leaps
        self._step: BatchStep | None = None
        self._executing: Work = []
        self._planned: Work = []
        self._wake_at_s: float | None = None
        self._changed = True

    def wake(self, now: float) -> None:
        """Something changed that may let work begin."""
        self._changed = True
        if self._wake_at_s is None:
            self._wake_at_s = now

    def next_time(self) -> float | None:
        """When a step ends or may begin."""
        return self._step.last_ends_at_s if self._step is not None else self._wake_at_s

    def catch_up(self, now: float) -> None:
        """Do the steps that were leapt over and ended before ``now``, at which something comes from outside:
        the step that is under way is the last of them.
        """
        step = self._step
        if step is None or len(step.steps_s) == 1:
            return
        done, ends_at_s = 0, step.ends_at_s
        while ends_at_s < now and done < len(step.steps_s) - 1:
            done += 1
            ends_at_s += step.steps_s[done]
        if done:
            self._compute(step.work, done)
        step.ends_at_s = step.last_ends_at_s = ends_at_s
        step.steps_s = [step.steps_s[done]]

    def end_step(self, now: float) -> None:
        """End the step that is due. What ``ended`` holds must be settled before the next begins."""
        step = self._step
        if step is not None and step.last_ends_at_s <= now:
            self._step = None
            self.step_ended_s = now
            if self._config.async_scheduling:
                settle(step.work)
            self._compute(step.work, len(step.steps_s))
            self._wake_at_s = now

    def begin_step(self, now: float) -> None:
        """Begin a step if none is in progress and something may have changed."""
        if self._step is None and self._wake_at_s is not None and self._wake_at_s <= now:
            self._wake_at_s = None
            self._begin(now)

    def load_report(self) -> LoadReport | None:
        """Return the load, or None when nothing changed since the last report."""
        if not self._changed:
            return None
        self._changed = False
        prefilling = (sequence for sequence in self._admitted_and_waiting() if sequence.prefilling)
        return LoadReport(
            rank=self.rank,
            active_blocks=self.kv.active_blocks,
            total_blocks=self.kv.total_blocks,
            active_prefill_tokens=sum(sequence.remaining_tokens for sequence in prefilling),
            running_requests=len(self.running),
            waiting_requests=len(self.waiting) + len(self.ready) + self.n_receiving + self.n_parked,
            kv_transfers=self.kv_transfers,
        )

    def count_transfer(self, arrived: Arrived | None) -> None:
        """KV was fetched for a sequence here; None: that failed."""
        so_far = self.kv_transfers or KvTransfers(transfers=0, bytes=0, seconds=0.0)
        self.kv_transfers = KvTransfers(
            transfers=so_far.transfers + (arrived is not None),
            bytes=so_far.bytes + (0 if arrived is None else arrived.kv_bytes),
            seconds=so_far.seconds + (0.0 if arrived is None else arrived.seconds),
            failed=so_far.failed + (arrived is None),
        )

    def drop(self, sequence: EngineSequence) -> None:
        """Take ``sequence`` out of whatever it is in; its table stays with it."""
        state, sequence.state = sequence.state, SequenceState.ENDED
        if state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif state is SequenceState.READY:
            self.ready.remove(sequence)
        elif state is RUNNING:
            self.running.remove(sequence)
        elif state is SequenceState.RECEIVING:
            self.n_receiving -= 1
        elif state is SequenceState.PARKED:
            self.n_parked -= 1

    def free(self, table: TableId | None) -> None:
        """Give up the blocks of ``table``."""
        if table is not None:
            self.kv.release(table)

    def report(self, sequence: EngineSequence) -> None:
        """There is something new of ``sequence`` for its reader."""
        if not sequence.is_dirty:
            sequence.is_dirty = True
            self.dirty.append(sequence)

    def report_pending(self) -> None:
        """Report the tokens that leaping left unsaid."""
        for sequence in (*self.running, *self.waiting):
            if sequence.pending:
                self.report(sequence)

    def give_credit(self, now: float, sequence: EngineSequence, tokens: int) -> None:
        """The reader made room for ``tokens`` more."""
        was_out = sequence.credit_tokens <= 0
        sequence.credit_tokens += tokens
        if was_out and sequence.credit_tokens > 0:
            if sequence.state is SequenceState.PARKED:
                self.n_parked -= 1
                sequence.state = SequenceState.WAITING
                self.waiting.appendleft(sequence)
            self.wake(now)

    def receive(self, now: float, sequence: EngineSequence, *, arrived: bool) -> None:
        """The KV of a receiving sequence arrived; or it never will, and is computed here."""
        if sequence.state is SequenceState.RECEIVING and sequence.table is not None:
            if arrived:
                self._commit(sequence, sequence.table, sequence.n_tokens)
                sequence.computed_tokens = sequence.n_tokens - 1
                sequence.prefilling = False
            self.n_receiving -= 1
            sequence.state = SequenceState.READY
            self.ready.append(sequence)
        sequence.wants_remote_kv = False
        self.wake(now)

    def _admitted_and_waiting(self) -> Iterator[EngineSequence]:
        yield from self.running
        yield from self.ready
        yield from (sequence for sequence in self.waiting if not sequence.wants_remote_kv)

    def _begin(self, now: float) -> None:
        if self._config.async_scheduling:
            work, is_as_before = self._plan_ahead()
        else:
            work, is_as_before = self._plan()
        if not work:
            return
        durations_s = steps_s(
            work,
            self._config.timing,
            self.kv.active_blocks / self.kv.total_blocks,
            repeats=self._repeats(work) if self._leaps and is_as_before else 1,
        )
        ends_at_s = now + durations_s[0]
        last_ends_at_s = ends_at_s
        for step_s in durations_s[1:]:
            last_ends_at_s += step_s
        self._step = BatchStep(ends_at_s, work, durations_s, last_ends_at_s)
        self._changed = True

    def _plan(self) -> tuple[Work, bool]:
        """Plan a step; return it, and whether nothing but the number of tokens changed for it."""
        work: Work = []
        active_blocks, n_running = self.kv.active_blocks, len(self.running)
        budget, preempted = self._continue_running(work)
        if not preempted or not (work or self._executing):
            self._admit(work, budget)
        is_as_before = active_blocks == self.kv.active_blocks and len(work) == len(self.running) == n_running
        return work, is_as_before

    def _plan_ahead(self) -> tuple[Work, bool]:
        """Return the step that was planned when the last began, and plan the one after it.

        A sequence that gives way to the latter is taken out of the former too, which may leave nothing of it.
        """
        while True:
            self._executing = [entry for entry in self._planned if entry[0].state is RUNNING]
            self._planned = []
            if not self._executing:
                self._executing, _ = self._plan()
                if not self._executing:
                    return [], False
                count_planned(self._executing)
            self._planned, is_as_before = self._plan()
            count_planned(self._planned)
            if self._executing:
                return self._executing, is_as_before and len(self._executing) == len(self._planned)

    def _repeats(self, work: Work) -> int:
        """How many steps of ``work`` are alike: while all decode, until the first of its sequences fills a
        block, generates its last token or runs out of credit, or will in the step after, if that is planned
        already. First tokens and such as may stop their sequence are worth a step of their own.
        """
        block_size = self._config.block_size
        repeats = self._config.max_num_batched_tokens
        for sequence, _ in work:
            if sequence.prefilling or not sequence.output_tokens or sequence.content.stop_token_ids:
                return 1
            repeats = min(
                repeats,
                block_size - sequence.computed_tokens % block_size,
                sequence.max_tokens - sequence.output_tokens,
                sequence.credit_tokens,
            )
        return max(1, repeats - 1) if self._config.async_scheduling else repeats

    def _continue_running(self, work: Work) -> tuple[int, bool]:
        """Plan the running sequences; return the budget left and whether someone gave way."""
        budget, seats = self._config.max_num_batched_tokens, self._config.max_num_seqs
        block_size = self._config.block_size
        preempted = False
        for sequence in tuple(self.running):
            if not budget or len(work) == seats:
                break
            table = sequence.table
            outputs = sequence.planned_outputs
            if sequence.state is not RUNNING or sequence.credit_tokens <= outputs or table is None:
                continue
            if sequence.output_tokens + outputs == sequence.max_tokens:
                continue  # its last token is on its way
            begun_tokens = sequence.computed_tokens + sequence.planned_tokens
            n_tokens = min(sequence.n_tokens + outputs - begun_tokens, budget)
            needed_tokens = begun_tokens + n_tokens
            if needed_tokens > sequence.room_tokens:
                lacking = -(-(needed_tokens - sequence.room_tokens) // block_size)
                if not self.kv.can_grow(lacking):
                    preempted = True
                    if not self._make_room(sequence, lacking):
                        continue
                sequence.room_tokens = self.kv.grow(table, lacking) * block_size
            work.append((sequence, n_tokens))
            budget -= n_tokens
        return budget, preempted

    def _make_room(self, needy: EngineSequence, n_blocks: int) -> bool:
        """Let sequences give way until ``n_blocks`` fit; False when ``needy`` had to give way itself: now, or
        after the step that begins, if it is in that.
        """
        while not self.kv.can_grow(n_blocks):
            victim = self._paused() or self.running[-1]
            if victim is needy and needy.planned_tokens:
                return False
            self._preempt(victim)
            if victim is needy:
                return False
        return True

    def _paused(self) -> EngineSequence | None:
        for sequence in reversed(self.running):
            if sequence.credit_tokens <= 0:
                return sequence
        return None

    def _preempt(self, sequence: EngineSequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self.free(sequence.table)
        sequence.table = None
        sequence.computed_tokens = sequence.planned_tokens = sequence.planned_outputs = 0
        sequence.prefilling = True
        self._executing[:] = [entry for entry in self._executing if entry[0] is not sequence]
        if sequence.credit_tokens <= 0:
            sequence.state = SequenceState.PARKED
            self.n_parked += 1
        else:
            sequence.state = SequenceState.WAITING
            self.waiting.appendleft(sequence)

    def _admit(self, work: Work, budget: int) -> None:
        """Give seats and budget to sequences whose KV arrived, then to those that wait."""
        if not self.ready and not self.waiting:
            return
        seats = self._config.max_num_seqs - sum(1 for s in self.running if s.credit_tokens > 0)
        while self.ready and seats > 0:
            n_tokens = self._share(self.ready[0].remaining_tokens, budget, alone=not work)
            if not n_tokens:
                return
            self._seat(self.ready.popleft(), n_tokens, work)
            budget -= n_tokens
            seats -= 1
        while self.waiting:
            sequence = self.waiting[0]
            n_matched = self._match(sequence)
            n_tokens = 0
            if not sequence.wants_remote_kv:
                new_tokens = sequence.n_tokens - n_matched * self._config.block_size
                n_tokens = self._share(new_tokens, budget, alone=not work) if seats > 0 else 0
                if not n_tokens:
                    return
            if not self._hold(sequence, n_matched):
                return
            self.waiting.popleft()
            if sequence.wants_remote_kv:
                sequence.state = SequenceState.RECEIVING
                self.n_receiving += 1
                self.admitted_remote.append(sequence)
                self._changed = True
            else:
                self._seat(sequence, n_tokens, work)
                budget -= n_tokens
                seats -= 1

    def _share(self, new_tokens: int, budget: int, *, alone: bool) -> int:
        """How many of ``new_tokens`` a sequence gets of the budget. Without chunked prefill all or none, and
        what is over the whole budget (a long sequence that gave way) is computed alone.
        """
        if self._config.chunked_prefill or new_tokens <= budget:
            return max(0, min(new_tokens, budget))
        return new_tokens if alone else 0

    def _match(self, sequence: EngineSequence) -> int:
        """Count the cached blocks. The last token is computed in any case, as its output is what is wanted; a
        leg whose KV comes from elsewhere computes it as its first decode step.
        """
        n_tokens = sequence.n_tokens
        reusable = n_tokens if sequence.wants_remote_kv else n_tokens - 1
        return self.kv.matched(sequence.content.block_hashes, reusable // self._config.block_size)

    def _hold(self, sequence: EngineSequence, n_matched: int) -> bool:
        """Hold the blocks of all tokens; False when they do not fit, even if paused sequences give way."""
        n_tokens, block_size = sequence.n_tokens, self._config.block_size
        n_blocks = -(-n_tokens // block_size)
        hashes = sequence.content.block_hashes
        while (table := self.kv.hold(hashes, n_matched, n_blocks - n_matched)) is None:
            paused = self._paused()
            if paused is None:
                return False
            self._preempt(paused)
        cached_tokens = n_matched * block_size
        sequence.table = TableId(table)
        sequence.room_tokens = n_blocks * block_size
        sequence.computed_tokens = min(cached_tokens, n_tokens - 1)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached_tokens
        return True

    def _seat(self, sequence: EngineSequence, n_tokens: int, work: Work) -> None:
        sequence.state = RUNNING
        self.running.append(sequence)
        self.scheduled.append(sequence)
        work.append((sequence, n_tokens))

    def _compute(self, work: Work, repeats: int) -> None:
        """Compute the tokens of so many steps of ``work``; several only where all decode."""
        self.steps += repeats
        self._changed = True
        block_size = self._config.block_size
        any_ended = False
        for sequence, n_tokens in work:
            table = sequence.table
            if sequence.state is not RUNNING or table is None:
                continue
            if repeats > 1:  # none of these ends it; the block that they fill is known by their tokens
                self._generate(sequence, repeats - 1)
            computed = sequence.computed_tokens = sequence.computed_tokens + n_tokens * repeats
            if n_tokens > 1 or not computed % block_size:
                self._commit(sequence, table, computed)
            if computed == sequence.n_tokens:
                any_ended = self._generate(sequence, 1) or any_ended
        if any_ended:
            self.running = [sequence for sequence in self.running if sequence.state is RUNNING]

    def _commit(self, sequence: EngineSequence, table: TableId, computed_tokens: int) -> None:
        if self._config.prefix_caching:
            full_blocks = computed_tokens // self._config.block_size
            sequence.content.hash_blocks(full_blocks)
            self.kv.commit(table, sequence.content.block_hashes, full_blocks)

    def _generate(self, sequence: EngineSequence, n_tokens: int) -> bool:
        """Generate so many tokens; True when the last of them ends the sequence."""
        token_ids = sequence.content.next_tokens(n_tokens)
        if sequence.first_s is None:
            sequence.first_s = self.step_ended_s
        sequence.prefilling = False
        sequence.n_tokens += n_tokens
        sequence.output_tokens += n_tokens
        sequence.credit_tokens -= n_tokens
        sequence.pending.extend(token_ids)
        if sequence.output_tokens == sequence.max_tokens:
            sequence.finish = FinishReason.LENGTH
        elif sequence.content.stop_token_ids and self._stops(sequence, token_ids[-1]):
            sequence.finish = FinishReason.STOP
        elif self._may_go_unsaid(sequence, n_tokens):
            return False
        self.report(sequence)
        if sequence.finish is None:
            return False
        sequence.state = SequenceState.ENDED
        self.ended.append(sequence)
        return True

    def _may_go_unsaid(self, sequence: EngineSequence, n_tokens: int) -> bool:
        """Whether the reader can wait for more than these tokens: all but the first, within a block, with
        credit left.
        """
        return (
            self._leaps
            and sequence.output_tokens > n_tokens
            and sequence.credit_tokens > 0
            and sequence.n_tokens % self._config.block_size != 0
        )

    def _stops(self, sequence: EngineSequence, token: int) -> bool:
        if sequence.output_tokens <= sequence.request.sampling.min_tokens:
            return False
        return token in sequence.content.stop_token_ids
