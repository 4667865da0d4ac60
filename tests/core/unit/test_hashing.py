"""Block hashes and sequence hashes, against vectors recorded from Dynamo's own function."""

import array
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import pytest

from kvrouter.core.events import pack_hashes, unpack_hashes
from kvrouter.core.hashing import Prompt, block_hashes, hash_seed, sequence_hashes

RECORDED = Path(__file__).parents[2] / "data" / "hash_vectors.json"


class Vector(TypedDict, total=False):
    tokens: list[int]
    block_size: int
    lora_name: str
    cache_namespace: str
    mm_hashes: list[list[int]] | None
    block_hashes: list[int]
    sequence_hashes: list[int]


VECTORS: list[Vector] = json.loads(RECORDED.read_text())["vectors"]


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_hashes_equal_the_recorded_vectors(vector: Vector) -> None:
    seed = hash_seed(lora_name=vector.get("lora_name"), cache_namespace=vector.get("cache_namespace"))
    prompt = Prompt(
        vector["tokens"], block_size=vector["block_size"], seed=seed, mm_hashes=vector["mm_hashes"]
    )
    assert list(unpack_hashes(prompt.block_hashes)) == vector["block_hashes"]
    assert list(unpack_hashes(prompt.sequence_hashes)) == vector["sequence_hashes"]


def test_the_vectors_cover_salts_and_multimodal_blocks() -> None:
    assert sum("lora_name" in vector for vector in VECTORS) >= 8
    assert sum("cache_namespace" in vector for vector in VECTORS) >= 8
    assert sum(vector["mm_hashes"] is not None for vector in VECTORS) >= 8
    assert max(len(vector["block_hashes"]) for vector in VECTORS) > 100


TOKENS = [5, 0, 2**32 - 1, 7, 9]


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        array.array("I", TOKENS),
        memoryview(array.array("I", TOKENS)),
        np.array(TOKENS, np.uint32),
        np.array([0, *TOKENS], np.uint32)[1:],
        memoryview(np.array(TOKENS, np.uint32).tobytes()).cast("I"),
    ],
    ids=["list", "tuple", "array", "memoryview", "numpy", "slice", "cast"],
)
def test_prompt_accepts_tokens_as_ints_or_u32_buffers(tokens: list[int]) -> None:
    prompt = Prompt(tokens, block_size=2)
    assert (prompt.isl_tokens, prompt.block_size, prompt.n_blocks, prompt.total_blocks) == (5, 2, 2, 3)
    assert prompt.block_hashes == block_hashes(TOKENS, block_size=2)
    assert prompt.sequence_hashes == sequence_hashes(prompt.block_hashes)
    assert "5" in repr(prompt)
    assert "4294967295" not in repr(prompt), "prompts never go into logs"


def test_prompt_accepts_tokens_as_range_or_bools() -> None:
    assert Prompt(range(4), block_size=2).block_hashes == Prompt([0, 1, 2, 3], block_size=2).block_hashes
    assert Prompt([True, False], block_size=2).isl_tokens == 2


@pytest.mark.parametrize(
    ("tokens", "error", "said"),
    [
        ([1, -1], OverflowError, r"tokens\[1\]: -1 is not within 0\.\.4294967295"),
        ([2**32], OverflowError, r"tokens\[0\]: 4294967296 is not within"),
        ([2**70], OverflowError, r"tokens\[0\]: \d+ is not within"),
        ([1, "a"], TypeError, r"tokens\[1\]: an int, not str"),
        ([1.5], TypeError, r"tokens\[0\]: an int, not float"),
        ([None], TypeError, r"tokens\[0\]: an int, not NoneType"),
        ("abc", TypeError, r"tokens\[0\]: an int, not str"),
        (b"abcd", TypeError, r"tokens: a buffer of unsigned 32-bit integers or .*, not bytes"),
        (np.array([1, 2], np.int64), TypeError, r"tokens: .* not ndarray of int64"),
        (np.array([1.0, 2.0], np.float32), TypeError, r"tokens: .* not ndarray of float32"),
        (np.arange(8, dtype=np.uint32)[::2], ValueError, r"tokens: the buffer has to be C-contiguous"),
        (np.zeros((2, 2), np.uint32), ValueError, r"tokens: the buffer has to be C-contiguous"),
        (5, TypeError, r"tokens: a buffer .* or a sequence of ints, not int"),
        (None, TypeError, r"tokens: a buffer .* or a sequence of ints, not NoneType"),
    ],
    ids=range(14),
)
def test_invalid_tokens_are_refused_by_position(tokens: list[int], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Prompt(tokens, block_size=2)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_below_one_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size: at least 1 token, not {block_size}"):
        Prompt([1], block_size=block_size)


def test_multimodal_hashes_need_one_entry_per_full_block() -> None:
    with pytest.raises(ValueError, match="mm_hashes: one entry for each of the 2 full blocks, not 1"):
        Prompt([1, 2, 3, 4], block_size=2, mm_hashes=[[7]])
    salted = Prompt([1, 2, 3, 4], block_size=2, mm_hashes=[[7, 3], []])
    assert salted.block_hashes == Prompt([1, 2, 3, 4], block_size=2, mm_hashes=[[3, 7], []]).block_hashes
    plain = Prompt([1, 2, 3, 4], block_size=2)
    assert salted.block_hashes[:8] != plain.block_hashes[:8]
    assert salted.block_hashes[8:] == plain.block_hashes[8:]
    assert salted.sequence_hashes[8:] != plain.sequence_hashes[8:]


def test_an_empty_prompt_has_no_blocks() -> None:
    nothing: list[Sequence[int] | npt.NDArray[np.uint32]] = [[], np.zeros(0, np.uint32)]
    for tokens in nothing:
        prompt = Prompt(tokens, block_size=16)
        assert (prompt.isl_tokens, prompt.n_blocks, prompt.total_blocks) == (0, 0, 0)
        assert prompt.block_hashes == prompt.sequence_hashes == b""


def test_sequence_hashes_continue_from_a_parent_hash() -> None:
    whole = Prompt(list(range(8)), block_size=2)
    parent, rest = whole.sequence_hashes[8:16], whole.block_hashes[16:]
    assert sequence_hashes(parent + rest)[8:] == whole.sequence_hashes[16:]


def test_a_column_with_a_partial_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="block_hashes: a column of 8-byte hashes, not 7 bytes"):
        sequence_hashes(b"1234567")


def test_seeds_add_up_and_empty_names_change_nothing() -> None:
    assert hash_seed() == hash_seed(lora_name="", cache_namespace="") == 1337
    lora, namespace = hash_seed(lora_name="a"), hash_seed(cache_namespace="a")
    assert lora != namespace
    assert hash_seed(lora_name="a", cache_namespace="a") == (lora + namespace - 1337) % 2**64


def test_a_prompt_is_immutable() -> None:
    prompt = Prompt([1, 2], block_size=2)
    with pytest.raises(AttributeError):
        prompt.block_size = 3  # type: ignore[misc]
    assert unpack_hashes(pack_hashes([1])) == (1,)


def test_a_prompt_rebuilt_from_its_block_hashes_is_equal() -> None:
    whole = Prompt(range(11), block_size=4, seed=7)
    rebuilt = Prompt.from_blocks(whole.block_hashes, isl_tokens=11, block_size=4)
    assert rebuilt.sequence_hashes == whole.sequence_hashes
    assert rebuilt.block_hashes == whole.block_hashes
    assert (rebuilt.isl_tokens, rebuilt.block_size) == (11, 4)
    assert (rebuilt.n_blocks, rebuilt.total_blocks) == (2, 3)


def test_a_prompt_may_be_built_from_its_leading_blocks_only() -> None:
    whole = Prompt(range(17), block_size=4)
    named = Prompt.from_blocks(whole.block_hashes[:16], isl_tokens=17, block_size=4)
    assert named.sequence_hashes == whole.sequence_hashes[:16]
    assert (named.n_blocks, named.total_blocks) == (2, 5)


@pytest.mark.parametrize(
    ("column", "isl_tokens", "block_size", "named"),
    [
        (b"1234567", 8, 4, "block_hashes"),
        (bytes(24), 11, 4, "isl_tokens"),
        (b"", -1, 4, "isl_tokens"),
        (b"", 0, 0, "block_size"),
    ],
)
def test_invalid_block_columns_and_sizes_are_refused_by_name(
    column: bytes, isl_tokens: int, block_size: int, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Prompt.from_blocks(column, isl_tokens=isl_tokens, block_size=block_size)
