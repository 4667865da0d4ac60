"""Record what Dynamo's own function says about block hashes, as vectors that kvrouter's hashes have to equal.

Needs the packages ``ai-dynamo-runtime==1.6.1`` and ``xxhash``, in an environment of their own::

    python -m venv recorder && recorder/bin/pip install ai-dynamo-runtime==1.6.1 xxhash
    recorder/bin/python scripts/record_hash_vectors.py > tests/data/hash_vectors.json

Dynamo gives the block hashes. It has no public function for sequence hashes, so those come from the formula,
s0 = h0 and si = xxh3_64(s(i-1) then hi, both u64 little-endian; seed 1337), through the ``xxhash`` package.
"""

import json
import struct
import sys
from collections.abc import Sequence
from importlib.metadata import version

import xxhash
from dynamo.llm import compute_block_hash_for_seq

SEQUENCE_SEED = 1337

TOKENS: dict[str, Sequence[int]] = {
    "counting": range(1, 200),
    "zeros": [0] * 70,
    "largest": [2**32 - 1, 0, 2**32 - 1, 1] * 17,
    "one": [42],
    "none": [],
    "spread": [(i * 2654435761) % 151_643 for i in range(530)],
}

SALTS: list[dict[str, str]] = [
    {},
    {"lora_name": "sql-adapter"},
    {"cache_namespace": "tenant-7"},
    {"lora_name": "sql-adapter", "cache_namespace": "tenant-7"},
    {"lora_name": "", "cache_namespace": ""},
    {"lora_name": "ключ", "cache_namespace": "鍵"},
]


def sequence_hashes(block_hashes: Sequence[int]) -> list[int]:
    """Chain ``block_hashes`` by the formula."""
    chained: list[int] = []
    for block in block_hashes:
        if chained:
            chained.append(xxhash.xxh3_64_intdigest(struct.pack("<QQ", chained[-1], block), SEQUENCE_SEED))
        else:
            chained.append(block)
    return chained


def record(
    tokens: Sequence[int], block_size: int, salt: dict[str, str], mm_hashes: list[list[int]] | None = None
) -> dict[str, object]:
    """One vector."""
    infos = None
    if mm_hashes is not None:
        infos = [{"mm_objects": [{"mm_hash": mm, "offsets": []} for mm in block]} for block in mm_hashes]
    hashes = compute_block_hash_for_seq(list(tokens), block_size, block_mm_infos=infos, **salt)
    hashes = [block % 2**64 for block in hashes]
    return {
        "tokens": list(tokens),
        "block_size": block_size,
        **salt,
        "mm_hashes": mm_hashes,
        "block_hashes": hashes,
        "sequence_hashes": sequence_hashes(hashes),
    }


def main() -> None:
    """Write all vectors to standard output."""
    vectors = [
        record(tokens, block_size, {}) for tokens in TOKENS.values() for block_size in (1, 4, 16, 60, 64, 128)
    ]
    vectors += [record(TOKENS["counting"], block_size, salt) for salt in SALTS for block_size in (16, 64)]
    for block_size in (16, 64):
        mm_hashes = [[], [7], [2**64 - 1, 5], [9, 9, 1]][: 199 // block_size]
        mm_hashes += [[]] * (199 // block_size - len(mm_hashes))
        vectors += [record(TOKENS["counting"], block_size, salt, mm_hashes) for salt in SALTS[:4]]
    made = (
        "scripts/record_hash_vectors.py: block hashes by compute_block_hash_for_seq of ai-dynamo-runtime "
        f"{version('ai-dynamo-runtime')}, sequence hashes by formula through xxhash {version('xxhash')}"
    )
    json.dump({"how_made": made, "vectors": vectors}, sys.stdout, separators=(",", ":"))


if __name__ == "__main__":
    main()
