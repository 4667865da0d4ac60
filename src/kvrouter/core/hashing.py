"""Block hashes, sequence hashes and bit mixing, computed by the native core.

A block hash names the tokens of one block; a sequence hash names a block and everything before it. Equal
inputs give equal hashes on every machine, so workers and router replicas agree without communication.
"""

import re
from hashlib import blake2b

from kvrouter._native import Prompt, block_hashes, finish64, hash_seed, mix64, sequence_hashes

__all__ = [
    "Prompt",
    "block_hashes",
    "finish64",
    "hash_seed",
    "mix64",
    "multimodal_hash",
    "sequence_hashes",
]

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def multimodal_hash(identifier: str) -> int:
    """Return the entry of ``mm_hashes``, unsigned 64 bits, for an engine's multimodal ``identifier``.

    For a digest of 64 hexadecimal digits it is the first 16, which is also how engines shorten it; for any
    other name it is the first 8 bytes of its BLAKE2b.
    """
    if _DIGEST.fullmatch(identifier):
        return int(identifier[:16], 16)
    name = identifier.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
