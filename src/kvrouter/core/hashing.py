"""Block hashes and sequence hashes, computed by the native core.

A block hash names the tokens of one block; a sequence hash names a block and everything before it. Equal
inputs give equal hashes on every machine, so workers and router replicas agree without talking.
"""

from kvrouter._native import Prompt, block_hashes, hash_seed, sequence_hashes

__all__ = ["Prompt", "block_hashes", "hash_seed", "sequence_hashes"]
