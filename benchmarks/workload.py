"""What is measured on: the same tokens, held blocks and running requests on both sides, from seeds alone.

Standard library alone, for the peers' side runs it too.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array

BLOCK_SIZE = 64
VOCABULARY_BITS = 17
"""Token ids are below 131,072, the size of today's vocabularies."""

HASH_BYTES = 8


def random_tokens(seed: int, n_tokens: int) -> Tokens:
    """Return ``n_tokens`` token ids that depend on ``seed`` alone."""
    mask = int.from_bytes(((1 << VOCABULARY_BITS) - 1).to_bytes(4, "little") * n_tokens, "little")
    drawn = random.Random(seed).getrandbits(32 * n_tokens) & mask
    tokens = array("I")
    tokens.frombytes(drawn.to_bytes(4 * n_tokens, "little"))
    return tokens


def random_hashes(seed: int, n_hashes: int) -> bytes:
    """Return a column of 64-bit hashes, 8 bytes each, that depend on ``seed`` alone."""
    return random.Random(seed).randbytes(HASH_BYTES * n_hashes)


def hashes_of(column: bytes) -> Sequence[int]:
    """Return a column's hashes as ints."""
    hashes = array("Q")
    hashes.frombytes(column)
    return hashes.tolist()


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks from the beginning of a sequence that one worker holds."""

    worker: int
    engine_hashes: bytes
    block_hashes: bytes

    @property
    def n_blocks(self) -> int:
        """How many blocks."""
        return len(self.engine_hashes) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class Held:
    """The first ``n_blocks`` blocks of a prompt or prefix, held by one worker."""

    worker: int
    prompt: int
    n_blocks: int


@dataclass(frozen=True, slots=True)
class Running:
    """One running request: where it is, its prompt, and the prefill tokens that it still loads."""

    worker: int
    tokens: Tokens
    prefill_tokens: int


@dataclass(frozen=True, slots=True)
class DecisionLoad:
    """A fleet of ``n_workers`` with caches and running requests, and prompts to route.

    Half of a prompt is one of a few prefixes, of which each worker holds some to some depth; the other half
    is fresh. ``blocks_held`` other blocks are spread over the workers, so that the index is not empty.
    """

    n_workers: int
    isl_tokens: int = 8192
    prefix_tokens: int = 4096
    n_prefixes: int = 64
    prefixes_per_worker: int = 8
    running_per_worker: int = 4
    running_tokens: int = 2048
    blocks_held: int = 262_144
    run_blocks: int = 128

    def prefix(self, prefix: int) -> Tokens:
        """Return the tokens of a shared prefix."""
        return random_tokens(1_000_000 + prefix, self.prefix_tokens)

    def prompt(self, number: int) -> Tokens:
        """Return prompt ``number``: no two have their second half in common."""
        fresh = random_tokens(2_000_000 + number, self.isl_tokens - self.prefix_tokens)
        return self.prefix(number % self.n_prefixes) + fresh

    def held(self) -> Iterator[Held]:
        """What each worker holds of the shared prefixes."""
        depth_max = self.prefix_tokens // BLOCK_SIZE
        for worker in range(self.n_workers):
            draw = random.Random(3_000_000 + worker)
            for prefix in draw.sample(range(self.n_prefixes), self.prefixes_per_worker):
                yield Held(worker, prefix, draw.randint(1, depth_max))

    def names(self, held: Held) -> bytes:
        """Return the engine hashes of what is held: the same at every worker that holds the same.

        Dynamo's selector finds less where workers name one block differently, and both sides must find the
        same before their times are compared.
        """
        return random_hashes(held.prompt, held.n_blocks)

    def others(self) -> Iterator[Run]:
        """Blocks of nobody's prompt, in runs, dealt out to the workers in turn."""
        for run in range(self.blocks_held // self.run_blocks):
            yield private_run(run, run % self.n_workers, self.run_blocks)

    def running(self) -> Iterator[Running]:
        """The running requests of each worker: half of them still prefill, and two share a prefix."""
        for worker in range(self.n_workers):
            for number in range(self.running_per_worker):
                seed = 4_000_000 + worker * self.running_per_worker + number
                shared = self.prefix(worker % self.n_prefixes)[: self.running_tokens // 2]
                fresh = random_tokens(seed, self.running_tokens // 2)
                tokens = shared + fresh if number < 2 else fresh + fresh
                yield Running(worker, tokens, self.running_tokens if number % 2 else 0)


def private_run(number: int, worker: int, n_blocks: int) -> Run:
    """Return a run whose content and names are nobody else's."""
    return Run(
        worker, random_hashes(5_000_000 + number, n_blocks), random_hashes(6_000_000 + number, n_blocks)
    )


@dataclass(frozen=True, slots=True)
class FleetCaches:
    """``n_blocks`` held by ``n_workers`` under opaque engine hashes, in prompts of ``prompt_blocks``.

    The first ``n_shared`` prompts are held by every worker, worker w's to a depth that grows with w; each of
    the others has one holder.
    """

    n_blocks: int
    n_shared: int
    n_workers: int = 16
    prompt_blocks: int = 128

    def depth(self, worker: int) -> int:
        """How much of a shared prompt ``worker`` holds: from a sixteenth of it (of 16 workers) to all."""
        return self.prompt_blocks * (worker + 1) // self.n_workers

    @property
    def n_private(self) -> int:
        """How many prompts have one holder."""
        shared = self.n_shared * sum(self.depth(worker) for worker in range(self.n_workers))
        return (self.n_blocks - shared) // self.prompt_blocks

    def tokens(self, prompt: int) -> Tokens:
        """Return a prompt's tokens: shared ones come first, then private ones; nobody holds the others."""
        return random_tokens(7_000_000 + prompt, self.prompt_blocks * BLOCK_SIZE)

    def held(self) -> Iterator[Held]:
        """Everything that is held, prompt by prompt."""
        for prompt in range(self.n_shared):
            for worker in range(self.n_workers):
                yield Held(worker, prompt, self.depth(worker))
        for prompt in range(self.n_shared, self.n_shared + self.n_private):
            yield Held(prompt % self.n_workers, prompt, self.prompt_blocks)

    def asked(self, kind: str, number: int) -> Tokens:
        """Return the tokens of a prompt that every worker holds (``shared``), or one, or ``nobody``.

        Successive numbers are far apart in the order of storing, as requests are.
        """
        match kind:
            case "shared":
                return self.tokens(number * 389 % self.n_shared)
            case "one":
                return self.tokens(self.n_shared + number * 7919 % self.n_private)
            case "nobody":
                return self.tokens(10_000_000 + number)
        raise KeyError(kind)


def held_runs(*, n_workers: int, n_blocks: int, shared: bool, run_blocks: int = 128) -> Iterator[Run]:
    """Yield ``n_blocks`` held blocks under names of their own; every worker holds their content, or one."""
    for run in range(n_blocks // run_blocks):
        own = private_run(run, run % n_workers, run_blocks)
        content = private_run(run // n_workers, 0, run_blocks) if shared else own
        yield Run(own.worker, own.engine_hashes, content.block_hashes)
