"""The requests of a measured run on a mock engine: what their stamps would be."""

from array import array

import numpy as np

from kvrouter.core.events import pack_hashes
from kvrouter.core.ids import DpRank, ModelName, RequestId, WorkerId
from kvrouter.core.requests import EngineRequest, Leg, Sampling
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.engine import MockEngine
from kvrouter.engines.mock_engine.sequence import NamedContent, SequenceKey
from kvrouter.sim.calibrate.measured_run import F64, I64, MeasuredRun, Stamps

BEFORE_S = -1e6
"""When the cache is filled: long before the first request."""

WAITING_WEIGHT = 4
"""How many running requests one waits for counts as, where a rank is picked: as in vLLM."""


def engine_config(run: MeasuredRun, kv_tokens: int) -> MockConfig:
    """Return the mock engine with the flags of ``run`` and room for ``kv_tokens``; its timing is not set."""
    flags = run.meta.engine_kwargs
    return MockConfig(
        block_size=flags.block_size,
        total_kv_blocks=max(1, kv_tokens // flags.block_size),
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_waiting_seqs=run.n_requests + 1,
        chunked_prefill=flags.enable_chunked_prefill is not False,
        async_scheduling=run.meta.plans_ahead,
        dp_size=flags.data_parallel_size,
        prefix_caching=run.cached_tokens is not None,
    )


def simulate(run: MeasuredRun, config: MockConfig, *, first: int | None = None) -> Stamps:
    """Return the stamps of all requests; with ``first``, stop when the first ``first`` have ended.

    Raises ContextLengthExceeded for a request that does not fit into the engine.
    """
    return _EngineRun(run, config).stamps(run.n_requests if first is None else first)


class _EngineRun:
    def __init__(self, run: MeasuredRun, config: MockConfig) -> None:
        n = run.n_requests
        self._run = run
        self._engine = MockEngine(config, worker_id=WorkerId(1), engine_id="calibrated", leaps=True)
        self._queued: F64 = np.full(n, np.nan)
        self._scheduled: F64 = np.full(n, np.nan)
        self._first: F64 = np.full(n, np.nan)
        self._last: F64 = np.full(n, np.nan)
        self._numbers: dict[SequenceKey, int] = {}
        self._ranks = [_RankLoad() for _ in range(config.dp_size)]
        self._rank_of = [0] * n

    def stamps(self, first: int) -> Stamps:
        engine, arrival = self._engine, self._run.stamps.arrival
        if self._run.cached_tokens is not None:
            self._fill_cache(self._run.cached_tokens)
        left = first
        for number in range(self._run.n_requests + 1):
            until = arrival[number] if number < self._run.n_requests else np.inf
            while left and (time := engine.next_time()) is not None and time < until:
                engine.advance(time)
                left -= self._note(time, first)
            if not left or number == self._run.n_requests:
                break
            self._submit(number, float(until))
        return Stamps(arrival, self._queued, self._scheduled, self._first, self._last)

    def _submit(self, number: int, now: float) -> None:
        rank = min(range(len(self._ranks)), key=lambda at: self._ranks[at].score)
        n_tokens = int(self._run.input_tokens[number])
        cached = self._run.cached_tokens
        key = self._send(
            now,
            number,
            rank,
            n_tokens=n_tokens,
            n_output=int(self._run.output_tokens[number]),
            n_cached=0 if cached is None else int(cached[number]),
        )
        self._numbers[key] = number
        self._rank_of[number] = rank
        self._ranks[rank].waiting += 1
        # An engine looks at what came as it begins to plan the next step.
        self._queued[number] = max(now, self._engine.next_time() or now)

    def _send(
        self, now: float, number: int, rank: int, *, n_tokens: int, n_output: int, n_cached: int
    ) -> SequenceKey:
        """Submit a request with a first ``n_cached`` tokens that all prompts share."""
        request = EngineRequest(
            request_id=RequestId(str(number)),
            attempt=0,
            leg=Leg.AGGREGATED,
            model=ModelName(self._run.meta.model),
            token_ids=array("I"),
            sampling=Sampling(max_tokens=n_output),
            dp_rank=DpRank(rank),
        )
        shared = pack_hashes(range(1, n_cached // self._run.meta.engine_kwargs.block_size + 1))
        content = NamedContent(shared, prompt_tokens=n_tokens, salt=number)
        return self._engine.submit(now, request, content=content)

    def _fill_cache(self, cached: I64) -> None:
        """Have each rank compute, before the run, what prompts found in the cache."""
        n_tokens = int(cached.max()) + 1
        for rank in range(len(self._ranks)):
            number = self._run.n_requests + rank
            self._send(BEFORE_S, number, rank, n_tokens=n_tokens, n_output=1, n_cached=n_tokens)
        while (time := self._engine.next_time()) is not None:
            self._engine.advance(time)
            self._engine.take_outputs()

    def _note(self, time: float, first: int) -> int:
        """Take the engine's outputs at ``time``; return how many of the ``first`` requests ended."""
        ended = 0
        outputs = self._engine.take_outputs()
        for key, at_s in outputs.scheduled:
            number = self._numbers[key]
            if np.isnan(self._scheduled[number]):
                self._scheduled[number] = at_s
                load = self._ranks[self._rank_of[number]]
                load.waiting -= 1
                load.running += 1
        for key, chunk in outputs.chunks:
            number = self._numbers[key]
            if np.isnan(self._first[number]):
                self._first[number] = time
            if chunk.finish is not None:
                self._last[number] = time
                self._ranks[self._rank_of[number]].running -= 1
                ended += number < first
        return ended


class _RankLoad:
    """Requests of one data-parallel rank."""

    def __init__(self) -> None:
        self.waiting = 0
        self.running = 0

    @property
    def score(self) -> int:
        """The value by which vLLM's front end compares ranks."""
        return WAITING_WEIGHT * self.waiting + self.running
