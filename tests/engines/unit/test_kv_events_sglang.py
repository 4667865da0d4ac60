"""SGLang's events: what is its own."""

import msgspec
import pytest

from kvrouter.core.events import Medium, Stored
from kvrouter.core.hashing import Prompt, hash_seed
from kvrouter.engines.kv_events.engine_events import EngineEvent, EngineRemoved, EngineStored, EngineTraits
from kvrouter.engines.kv_events.rank_blocks import RankBlocks
from kvrouter.engines.sglang.attach import decode

COMMON = (
    ("block_hashes", [-5]),
    ("parent_block_hash", None),
    ("token_ids", [1, 2, 3, 4]),
    ("block_size", 4),
    ("lora_id", None),
    ("medium", "CPU_PINNED"),
)
OWN = (("cache_salt", "tenant-1"), ("session_id", "s"), ("lora_name", "ada"))


@pytest.mark.parametrize("is_array", [False, True])
def test_store_event_with_all_fields_is_decoded(is_array: bool) -> None:
    fields = (*COMMON, *OWN)
    event = _one(
        ["BlockStored", *(value for _, value in fields)]
        if is_array
        else {"type": "BlockStored", **dict(fields)}
    )
    assert isinstance(event, EngineStored)
    assert (event.names, event.medium) == ((2**64 - 5,), Medium.CPU)
    assert (event.cache_salt, event.lora_name, event.group) == ("tenant-1", "ada", None)


def test_a_request_with_the_same_salt_and_adapter_finds_the_block() -> None:
    event = _one({"type": "BlockStored", **dict((*COMMON, *OWN)), "medium": "GPU"})
    (reported,) = RankBlocks(EngineTraits(block_size=4)).take((event,))
    assert isinstance(reported, Stored)
    seed = hash_seed(lora_name="ada", cache_namespace="tenant-1")
    assert reported.block_hashes == Prompt([1, 2, 3, 4], block_size=4, seed=seed).block_hashes


def test_token_pairs_are_decoded_to_their_first_tokens() -> None:
    pairs = [[1, 2], [2, 3], [3, 4], [4, 5]]
    event = _one({"type": "BlockStored", **dict(COMMON), "token_ids": pairs})
    assert isinstance(event, EngineStored)
    assert list(event.token_ids) == [1, 2, 3, 4]


def test_removal_of_many_hashes_is_decoded() -> None:
    event = _one({"type": "BlockRemoved", "block_hashes": [-1, 2, 3], "medium": "DISK"})
    assert isinstance(event, EngineRemoved)
    assert (event.names, event.medium) == ((2**64 - 1, 2, 3), Medium.DISK)


def _one(event: object) -> EngineEvent:
    (batch,) = decode(msgspec.msgpack.encode([1.0, [event], 0]))
    return batch.events[0]
