"""Hashing, searching, storing and keeping blocks: ``Prompt`` and ``BlockIndex``."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.measure import settle, time_calls, time_fresh
from benchmarks.rss import trimmed_rss_bytes
from benchmarks.side import Facts, Params
from benchmarks.workload import (
    BLOCK_SIZE,
    HASH_BYTES,
    FleetCaches,
    Run,
    Tokens,
    hashes_of,
    held_runs,
    private_run,
    random_hashes,
    random_tokens,
)
from kvrouter.core.events import Cleared, KvBatch, KvEvent, Stored, unpack_hashes
from kvrouter.core.hashing import Prompt, block_hashes
from kvrouter.core.ids import DpRank, EngineHash, Epoch, EventId, Slot, WorkerId, WorkerRank
from kvrouter.kernel.index import BlockIndex
from kvrouter.kernel.index import NativeBlockIndex as NativeIndex
from kvrouter.transports.events.encoding import decode_batch, encode_batch

RUN_BLOCKS = 128


def run_events(run: Run, event_blocks: int) -> Iterator[KvEvent]:
    """Yield the events that store ``run``, ``event_blocks`` at a time, each after the one before."""
    names = unpack_hashes(run.engine_hashes)
    for first in range(0, run.n_blocks, event_blocks):
        blocks = slice(HASH_BYTES * first, HASH_BYTES * (first + event_blocks))
        parent = EngineHash(names[first - 1]) if first else None
        yield Stored(parent, run.engine_hashes[blocks], run.block_hashes[blocks])


class Hashing:
    """``list``, ``buffer``: token ids into block hashes. ``prompt, …``: with the chain over them."""

    def __init__(self, params: Params) -> None:
        self._n_tokens = params["isl_tokens"]
        self._next = 0

    async def prepare(self) -> Facts:
        hashes = block_hashes(random_tokens(0, self._n_tokens), block_size=BLOCK_SIZE)
        return {"hashes": hashes_of(hashes)}

    async def round(self, variant: str, n_calls: int) -> list[float]:
        what, _, form = variant.rpartition(", ")
        first, self._next = self._next, self._next + n_calls

        def fresh(i: int) -> Tokens | list[int]:
            tokens = random_tokens(first + i, self._n_tokens)
            return tokens.tolist() if form == "list" else tokens

        if what == "prompt":
            return time_fresh(fresh, lambda tokens: Prompt(tokens, block_size=BLOCK_SIZE), n_calls)
        if what == "":
            return time_fresh(fresh, lambda tokens: block_hashes(tokens, block_size=BLOCK_SIZE), n_calls)
        raise KeyError(variant)

    async def close(self) -> None:
        """Nothing is held."""


class Overlap:
    """``shared``, ``one``, ``nobody``: a prompt that every worker, one worker or nobody holds."""

    def __init__(self, params: Params) -> None:
        self._caches = FleetCaches(n_blocks=params["n_blocks"], n_shared=params["n_shared"])
        self._index: BlockIndex = NativeIndex()
        self._out = np.zeros(self._caches.n_workers, np.uint32)
        self._next = 0

    async def prepare(self) -> Facts:
        for number, held in enumerate(self._caches.held()):
            n_bytes = HASH_BYTES * held.n_blocks
            own = block_hashes(self._caches.tokens(held.prompt), block_size=BLOCK_SIZE)[:n_bytes]
            event = Stored(None, random_hashes(number, held.n_blocks), own)
            self._index.apply(Slot(held.worker), [event])
        settle()
        return {"found": {kind: self._found(kind, 7) for kind in ("shared", "one", "nobody")}}

    async def round(self, variant: str, n_calls: int) -> list[float]:
        first, self._next = self._next, self._next + n_calls
        prompts = [self._prompt(variant, first + i) for i in range(n_calls)]
        overlap, out = self._index.overlap, self._out
        return time_calls(lambda i: overlap(prompts[i], out), n_calls)

    async def close(self) -> None:
        del self._index

    def _prompt(self, kind: str, number: int) -> Prompt:
        return Prompt(self._caches.asked(kind, number), block_size=BLOCK_SIZE)

    def _found(self, kind: str, number: int) -> list[int]:
        self._index.overlap(self._prompt(kind, number), self._out)
        return [int(blocks) for blocks in self._out]


class Apply:
    """``128``, ``16`` or ``1`` fresh blocks an event, decoded; samples are nanoseconds a block.

    ``…, from bytes`` decodes a batch of one run from MessagePack first.
    """

    def __init__(self, params: Params) -> None:
        self._n_workers = params["n_workers"]
        self._index: BlockIndex = NativeIndex()
        self._next = 0

    async def prepare(self) -> Facts:
        return {}

    async def round(self, variant: str, n_calls: int) -> list[float]:
        """A call stores one run, in one event or more."""
        event_blocks, _, form = variant.partition(", ")
        first, self._next = self._next, self._next + n_calls
        runs = [private_run(n, n % self._n_workers, RUN_BLOCKS) for n in range(first, first + n_calls)]
        batches = [(Slot(run.worker), tuple(run_events(run, int(event_blocks)))) for run in runs]
        store = self._storing_bytes(batches) if form == "from bytes" else self._storing(batches)
        return [1000.0 * sample / RUN_BLOCKS for sample in time_calls(store, n_calls)]

    async def close(self) -> None:
        del self._index

    def _storing(self, batches: Sequence[tuple[Slot, tuple[KvEvent, ...]]]) -> Callable[[int], object]:
        apply = self._index.apply

        def store(i: int) -> object:
            slot, events = batches[i]
            return apply(slot, events)

        return store

    def _storing_bytes(self, batches: Sequence[tuple[Slot, tuple[KvEvent, ...]]]) -> Callable[[int], object]:
        apply = self._index.apply
        frames = []
        for slot, events in batches:
            rank = WorkerRank(WorkerId(slot), DpRank(0))
            frames.append((slot, encode_batch(KvBatch(rank, Epoch(1), EventId(0), events))))

        def store(i: int) -> object:
            slot, frame = frames[i]
            return apply(slot, decode_batch(frame).events)

        return store


class Memory:
    """``held``: resident bytes a held block; ``dropped``: what is left of them after all is gone."""

    def __init__(self, params: Params) -> None:
        self._params = params
        self._index: BlockIndex = NativeIndex()
        self._before = 0
        self._n_held = 0

    async def prepare(self) -> Facts:
        """One run comes and goes first, so that what is made only once is not counted."""
        self._store(private_run(0, 0, RUN_BLOCKS))
        self._drop()
        self._before = trimmed_rss_bytes()
        params = self._params
        for run in held_runs(
            n_workers=params["n_workers"], n_blocks=params["n_blocks"], shared=bool(params["shared"])
        ):
            self._store(run)
            self._n_held += run.n_blocks
        return {"n_held": self._n_held}

    async def round(self, variant: str, n_calls: int) -> list[float]:
        if variant == "dropped":
            self._drop()
        elif variant != "held":
            raise KeyError(variant)
        return [(trimmed_rss_bytes() - self._before) / self._n_held] * n_calls

    async def close(self) -> None:
        del self._index

    def _store(self, run: Run) -> None:
        self._index.apply(Slot(run.worker), list(run_events(run, RUN_BLOCKS)))

    def _drop(self) -> None:
        for worker in range(self._params["n_workers"]):
            self._index.apply(Slot(worker), [Cleared()])
