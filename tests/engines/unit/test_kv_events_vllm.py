"""vLLM's events: both encodings, hashes in every form, extra keys, groups, media, and refusals by field."""

import msgspec
import pytest

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import Medium
from kvrouter.core.hashing import multimodal_hash
from kvrouter.engines.kv_events.engine_events import (
    CacheGroup,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineSkipped,
    EngineStored,
    Skipped,
)
from kvrouter.engines.vllm.events import decode

DIGEST = "0123456789abcdef" + "0" * 48
DIGEST_HASH = 0x0123456789ABCDEF


def test_block_hash_is_the_same_in_every_encoding() -> None:
    whole = bytes(24) + (2**64 - 5).to_bytes(8, "big")
    for form in (2**64 - 5, -5, whole):
        event = _stored(block_hashes=[form], parent_block_hash=form)
        assert (event.names, event.parent) == ((2**64 - 5,), 2**64 - 5)


@pytest.mark.parametrize(
    "batch",
    [
        [1.0, [["AllBlocksCleared"]]],
        [1.0, [["AllBlocksCleared"]], None],
        [1.0, [{"type": "AllBlocksCleared"}], 3],
        [1.0, [["AllBlocksCleared"]], 3, "of a later release"],
        {"ts": 1.0, "events": [["AllBlocksCleared"]]},
        {"ts": 1, "events": [{"type": "AllBlocksCleared", "medium": "GPU"}], "data_parallel_rank": 3},
        {"ts": 1, "events": [["AllBlocksCleared"]], "attn_dp_rank": 3},
    ],
)
def test_batches_and_events_are_read_as_arrays_or_maps(batch: object) -> None:
    (found,) = decode(msgspec.msgpack.encode(batch))
    assert found.events == (EngineCleared(),)
    assert found.dp_rank in (None, 3)


@pytest.mark.parametrize("n_fields", range(5, 12))
def test_event_arrays_of_every_release_read_alike(n_fields: int) -> None:
    fields = [[1, 2], None, list(range(8)), 4, None, "GPU", None, None, 0, "full_attention", 128]
    event = _one(["BlockStored", *fields[:n_fields]])
    assert isinstance(event, EngineStored)
    assert (event.names, event.block_size, list(event.token_ids)) == ((1, 2), 4, list(range(8)))
    assert event.group == {9: CacheGroup(0, 1), 10: CacheGroup(0, 2), 11: CacheGroup(0, 2)}.get(n_fields)


def test_the_salt_is_the_last_plain_string_of_a_first_block() -> None:
    assert _stored(extra_keys=[["tenant-1"]]).cache_salt == "tenant-1"
    assert _stored(extra_keys=[[DIGEST]]).cache_salt == DIGEST
    mixed = _stored(lora_name="ada", extra_keys=[["ada", ["img", 3], "tenant-1", b"\1" * 32]])
    assert mixed.cache_salt == "tenant-1"
    assert mixed.mm_hashes == ((multimodal_hash("img"), multimodal_hash("01" * 32)),)
    assert _stored(extra_keys=[None]).mm_hashes is None


def test_a_salt_like_the_adapters_name_is_still_a_salt() -> None:
    event = _stored(lora_name="ada", extra_keys=[["ada", "ada"]])
    assert (event.cache_salt, event.mm_hashes) == ("ada", None)


def test_image_digest_in_an_early_array_is_read_as_an_image() -> None:
    event = _one(["BlockStored", [1], None, [0] * 4, 4, None, "GPU", None, [[DIGEST, "salt"]]])
    assert isinstance(event, EngineStored)
    assert (event.cache_salt, event.mm_hashes) == ("salt", ((DIGEST_HASH,),))
    event = _one(["BlockStored", [1], None, [0] * 4, 4, None, "GPU", None, [[DIGEST]]])
    assert isinstance(event, EngineStored)
    assert (event.cache_salt, event.mm_hashes) == (None, ((DIGEST_HASH,),))


def test_image_hash_does_not_depend_on_its_offset() -> None:
    one = _stored(parent_block_hash=9, extra_keys=[[[DIGEST, 0]]])
    other = _stored(parent_block_hash=9, extra_keys=[[[DIGEST, -16]]])
    assert one.mm_hashes == other.mm_hashes == ((DIGEST_HASH,),)


@pytest.mark.parametrize("key", ["text", 7, -7, 1.5, True, None, {}, [], [[1]], b""])
def test_unknown_extra_key_is_read_as_a_multimodal_hash(key: object) -> None:
    event = _stored(parent_block_hash=9, extra_keys=[[key]])
    assert event.mm_hashes is not None
    assert len(event.mm_hashes[0]) == 1


@pytest.mark.parametrize(
    ("kind", "standing"),
    [
        ("full_attention", 2),
        ("mla_attention", 2),
        ("sink_full_attention", 2),
        (None, 1),
        ("sliding_window", 0),
        ("mamba", 0),
        ("of a later release", 0),
    ],
)
def test_full_attention_groups_have_the_highest_standing(kind: str | None, standing: int) -> None:
    assert _stored(group_idx=1, kv_cache_spec_kind=kind).group == CacheGroup(1, standing)


@pytest.mark.parametrize(
    ("name", "medium"),
    [
        (None, Medium.GPU),
        ("GPU", Medium.GPU),
        ("CPU", Medium.CPU),
        ("cpu_pinned", Medium.CPU),
        ("STORAGE", Medium.DISK),
        ("EXTERNAL", Medium.EXTERNAL),
    ],
)
def test_medium_name_is_read_in_stores_and_removals(name: str | None, medium: Medium) -> None:
    assert _stored(medium=name).medium is medium
    removed = _one({"type": "BlockRemoved", "block_hashes": [1], "medium": name})
    assert removed == EngineRemoved((_stored().names[0],), medium)


def test_remote_or_unknown_events_are_skipped_and_counted() -> None:
    assert _one(_fields(medium="MARS")) == EngineSkipped(Skipped.UNKNOWN_MEDIUM)
    assert _one(_fields(locality="REMOTE")) == EngineSkipped(Skipped.NOT_LOCAL)
    assert isinstance(_one(_fields(locality="LOCAL", ownership="tier", session_id="s")), EngineStored)
    gone = {"type": "BlockRemoved", "block_hashes": [1, 2]}
    assert _one(gone | {"locality": "REMOTE"}) == EngineSkipped(Skipped.NOT_LOCAL, 2)
    assert _one(gone | {"medium": "MARS"}) == EngineSkipped(Skipped.UNKNOWN_MEDIUM, 2)
    wrong = _fields(medium="MARS") | {"token_ids": [-1]}
    assert _one(wrong) == EngineSkipped(Skipped.UNKNOWN_MEDIUM), "what is not used costs the batch nothing"
    assert _one(wrong | {"medium": "GPU", "locality": "REMOTE"}) == EngineSkipped(Skipped.NOT_LOCAL)
    assert _one({"type": "BlockMigrated", "to": 1}) == EngineSkipped(Skipped.UNKNOWN_EVENT)
    assert _one(["BlockMigrated", 1]) == EngineSkipped(Skipped.UNKNOWN_EVENT)


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        (7, "payload"),
        ([], "payload"),
        (["now", []], "ts"),
        ([1.0, {}], "events"),
        ([1.0, [], -1], "data_parallel_rank"),
        ({"events": []}, "payload"),
        ({"ts": 1.0, "events": [], "attn_dp_rank": 2**31}, "attn_dp_rank"),
        ([1.0, [7]], "events[0]"),
        ([1.0, [["AllBlocksCleared"], []]], "events[1]"),
        ([1.0, [[7]]], "events[0].type"),
        ([1.0, [{"type": "BlockStored"}]], "events[0]"),
        ([1.0, [["BlockRemoved", "all"]]], "events[0].block_hashes"),
        ([1.0, [["BlockRemoved", [1, "two"]]]], "events[0].block_hashes[1]"),
        ([1.0, [["BlockRemoved", [b"short"]]]], "events[0].block_hashes[0]"),
        ([1.0, [["BlockRemoved", [1], "GPU", -1]]], "events[0].group_idx"),
        ([1.0, [["BlockRemoved", [1] * 65_537]]], "events[0].block_hashes"),
        ([1.0, [["AllBlocksCleared"]] * 65_537], "events"),
        ([1.0, [["BlockStored", [1], b"no", [], 4]]], "events[0].parent_block_hash"),
        ([1.0, [["BlockStored", [1], None, [0] * (4_194_305), 4]]], "events[0].token_ids"),
        ([1.0, [["BlockStored", [1], None, [5, -1], 4]]], "events[0].token_ids[1]"),
        ([1.0, [["BlockStored", [1], None, [2**32], 4]]], "events[0].token_ids[0]"),
        ([1.0, [["BlockStored", [1], None, [5, [5, 6]], 4]]], "events[0].token_ids[1]"),
        ([1.0, [["BlockStored", [1], None, [0], -4]]], "events[0].block_size"),
    ],
)
def test_malformed_batch_is_refused_by_field(batch: object, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(msgspec.msgpack.encode(batch))
    assert caught.value.param == field


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000])
def test_invalid_msgpack_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(payload)
    assert caught.value.param == "payload"


def test_hex_image_identifier_is_shortened_as_engines_do() -> None:
    assert multimodal_hash(DIGEST) == DIGEST_HASH
    assert multimodal_hash(DIGEST.upper()) == DIGEST_HASH
    others = {multimodal_hash(name) for name in ("", "img", DIGEST[:63], DIGEST + "0", "\ud800")}
    assert len(others) == 5
    assert all(0 <= value < 2**64 for value in others)


@pytest.mark.parametrize(
    ("behind", "tokens"),
    [(None, 0), ([], 0), ([[]], 0), ([[7]], 1), ([[7, 8, 9]], 3), ([list(range(40))], 40)],
)
def test_lookahead_tokens_are_counted_from_the_event(behind: object, tokens: int) -> None:
    assert _stored(lookahead_token_ids=behind).lookahead_tokens == tokens


@pytest.mark.parametrize("behind", [[7], ["a"], [{}], [[0] * 4097], [[0] * 70_000]])
def test_invalid_lookahead_token_list_is_refused(behind: object) -> None:
    with pytest.raises(ProtocolError) as caught:
        _stored(lookahead_token_ids=behind)
    assert caught.value.param == "events[0].lookahead_token_ids[0]"


def _fields(**fields: object) -> dict[str, object]:
    first = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None}
    return {**first, "token_ids": [0] * 4, "block_size": 4, **fields}


def _stored(**fields: object) -> EngineStored:
    event = _one(_fields(**fields))
    assert isinstance(event, EngineStored)
    return event


def _one(event: object) -> EngineEvent:
    (batch,) = decode(msgspec.msgpack.encode([1.0, [event], 0]))
    return batch.events[0]
