"""Hashing, searching, storing and keeping blocks: ``compute_block_hash_for_seq`` and ``RadixTree``."""

import json
from collections.abc import Iterator, Sequence

from benchmarks.measure import settle, time_calls, time_fresh
from benchmarks.peers.dynamo.core import load_core
from benchmarks.rss import trimmed_rss_bytes
from benchmarks.side import Facts, Params
from benchmarks.workload import (
    BLOCK_SIZE,
    FleetCaches,
    Run,
    Tokens,
    hashes_of,
    held_runs,
    private_run,
    random_hashes,
    random_tokens,
)

RUN_BLOCKS = 128


def stored_event(names: Sequence[int], own: Sequence[int], *, parent: int | None = None) -> bytes:
    """Return the event that stores the blocks ``own`` under ``names`` after ``parent``, as JSON."""
    blocks = [
        {"block_hash": name, "tokens_hash": block, "mm_extra_info": None}
        for name, block in zip(names, own, strict=True)
    ]
    stored = {"parent_hash": parent, "start_position": None, "blocks": blocks}
    return json.dumps({"event_id": 0, "data": {"stored": stored}, "dp_rank": 0}).encode()


def run_events(run: Run, event_blocks: int) -> Iterator[bytes]:
    """Yield the events that store ``run``, ``event_blocks`` at a time, each after the one before."""
    names, own = hashes_of(run.engine_hashes), hashes_of(run.block_hashes)
    for first in range(0, len(names), event_blocks):
        blocks = slice(first, first + event_blocks)
        yield stored_event(names[blocks], own[blocks], parent=names[first - 1] if first else None)


class Hashing:
    """``list``: token ids into block hashes, from a list, which is what the function takes."""

    def __init__(self, params: Params) -> None:
        self._n_tokens = params["isl_tokens"]
        self._core = load_core()
        self._next = 0

    async def prepare(self) -> Facts:
        tokens = random_tokens(0, self._n_tokens).tolist()
        return {"hashes": self._core.compute_block_hash_for_seq(tokens, BLOCK_SIZE)}

    async def round(self, variant: str, n_calls: int) -> list[float]:
        if variant != "list":
            raise KeyError(variant)
        first, self._next = self._next, self._next + n_calls
        hash_tokens = self._core.compute_block_hash_for_seq
        return time_fresh(
            lambda i: random_tokens(first + i, self._n_tokens).tolist(),
            lambda tokens: hash_tokens(tokens, BLOCK_SIZE),
            n_calls,
        )

    async def close(self) -> None:
        """Nothing is held."""


class Overlap:
    """``shared``, ``one``, ``nobody``: a prompt that every worker, one worker or nobody holds."""

    def __init__(self, params: Params) -> None:
        self._caches = FleetCaches(n_blocks=params["n_blocks"], n_shared=params["n_shared"])
        self._core = load_core()
        self._tree = self._core.RadixTree()
        self._next = 0

    async def prepare(self) -> Facts:
        blocks: dict[int, list[int]] = {}
        for number, held in enumerate(self._caches.held()):
            if held.prompt not in blocks:
                blocks = {held.prompt: self._hash(self._caches.tokens(held.prompt))}
            names = hashes_of(random_hashes(number, held.n_blocks))
            self._tree.apply_event(held.worker, stored_event(names, blocks[held.prompt][: held.n_blocks]))
        settle()
        return {"found": {kind: self._scores(kind, 7) for kind in ("shared", "one", "nobody")}}

    async def round(self, variant: str, n_calls: int) -> list[float]:
        first, self._next = self._next, self._next + n_calls
        prompts = [self._hash(self._caches.asked(variant, first + i)) for i in range(n_calls)]
        find = self._tree.find_matches
        return time_calls(lambda i: find(prompts[i]), n_calls)

    async def close(self) -> None:
        del self._tree

    def _hash(self, tokens: Tokens) -> list[int]:
        return self._core.compute_block_hash_for_seq(tokens.tolist(), BLOCK_SIZE)

    def _scores(self, kind: str, number: int) -> list[int]:
        scores = self._tree.find_matches(self._hash(self._caches.asked(kind, number))).scores
        return [scores.get((worker, 0), 0) for worker in range(self._caches.n_workers)]


class Apply:
    """``128``, ``16`` or ``1`` fresh blocks an event, JSON in; samples are nanoseconds a block."""

    def __init__(self, params: Params) -> None:
        self._n_workers = params["n_workers"]
        self._tree = load_core().RadixTree()
        self._next = 0

    async def prepare(self) -> Facts:
        return {}

    async def round(self, variant: str, n_calls: int) -> list[float]:
        """A call stores one run, in one event or more."""
        first, self._next = self._next, self._next + n_calls
        runs = [private_run(n, n % self._n_workers, RUN_BLOCKS) for n in range(first, first + n_calls)]
        calls = [(run.worker, list(run_events(run, int(variant)))) for run in runs]
        apply = self._tree.apply_event

        def store(i: int) -> None:
            worker, events = calls[i]
            for event in events:
                apply(worker, event)

        return [1000.0 * sample / RUN_BLOCKS for sample in time_calls(store, n_calls)]

    async def close(self) -> None:
        del self._tree


class Memory:
    """``held``: resident bytes a held block; ``dropped``: what is left of them after all is gone."""

    def __init__(self, params: Params) -> None:
        self._params = params
        self._tree = load_core().RadixTree()
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
        del self._tree

    def _store(self, run: Run) -> None:
        for event in run_events(run, RUN_BLOCKS):
            self._tree.apply_event(run.worker, event)

    def _drop(self) -> None:
        for worker in range(self._params["n_workers"]):
            self._tree.remove_worker(worker)
