"""The native core: hashes, the block index, the ledger.

Tokens come as a C-contiguous buffer of unsigned 32-bit integers (``array('I')``, a numpy ``uint32`` array, a
memoryview of either; read where it lies) or as a sequence of ints (copied, which costs more than hashing). A
hash column is ``bytes``: unsigned 64-bit integers, little-endian, 8 bytes each. An ``out`` column is a
writable, C-contiguous buffer of unsigned 32-bit integers over slots.

Short calls keep the interpreter lock: a call of one microsecond that gave it up could wait milliseconds to
get it back. Big batches, ``dump``, ``load`` and ``drop`` give it up.
"""

from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

@final
class Prompt:
    """The hashes of one prompt: immutable, computed once, shared with every lease that is booked for it.

    ``mm_hashes[i]`` holds the hashes of the multimodal objects in full block ``i``, in any order.

    Raises ValueError (block_size below 1, a buffer that is not contiguous, mm_hashes of another length than
    n_blocks), OverflowError (an id outside 0..2**32-1), TypeError (neither ids nor a buffer of them).
    """

    def __new__(
        cls,
        tokens: Buffer | Sequence[int],
        *,
        block_size: int,
        seed: int = 1337,
        mm_hashes: Sequence[Sequence[int]] | None = None,
    ) -> Prompt: ...
    @property
    def isl_tokens(self) -> int:
        """The number of token ids."""
    @property
    def block_size(self) -> int:
        """Tokens a block."""
    @property
    def n_blocks(self) -> int:
        """The number of full blocks, which are the ones that have hashes."""
    @property
    def total_blocks(self) -> int:
        """The number of blocks that the prompt occupies, a partial tail included."""
    @property
    def block_hashes(self) -> bytes:
        """The hash of each full block's own tokens, as a column."""
    @property
    def sequence_hashes(self) -> bytes:
        """The hash of each full block chained over all blocks before it, as a column."""

def hash_seed(*, lora_name: str | None = None, cache_namespace: str | None = None) -> int:
    """The seed of block hashes: 1337 [+ xxh3_64(lora_name, 0)] [+ xxh3_64(cache_namespace, 1)] mod 2**64.

    An empty name counts as absent.
    """

def block_hashes(
    tokens: Buffer | Sequence[int],
    *,
    block_size: int,
    seed: int = 1337,
    mm_hashes: Sequence[Sequence[int]] | None = None,
) -> bytes:
    """The hash of each full block: xxh3_64 of its tokens (u32 LE) and then its sorted mm_hashes (u64 LE).

    Raises what Prompt raises.
    """

def sequence_hashes(block_hashes: bytes) -> bytes:
    """The chained column: s0 = h0, si = xxh3_64(s(i-1) LE, then hi LE; seed 1337).

    Raises ValueError when the column is not a multiple of 8 bytes.
    """
