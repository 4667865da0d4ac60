"""Every recorded message decodes to what is written next to it, and prediction equals truth."""

from collections.abc import Mapping

import pytest

from kvrouter.core.events import KvEvent, Removed, Stored, pack_hashes
from kvrouter.core.hashing import Prompt, block_hashes, hash_seed
from kvrouter.core.ids import DpRank
from kvrouter.engines.kv_events.batches import read_published, read_replayed
from kvrouter.engines.kv_events.engine_events import EngineCleared, EngineRemoved, EngineStored, EngineTraits
from kvrouter.engines.kv_events.event_stream import EngineEventStream, Publish
from kvrouter.engines.kv_events.rank_blocks import RankBlocks
from tests.testing.recorded_frames import Sample, samples, stored

ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.name)
def test_recorded_payload_decodes_to_its_written_events(sample: Sample) -> None:
    (batch,) = sample.decode(sample.payload)
    assert (batch.dp_rank, batch.published_s) == (sample.dp_rank, sample.published_s)
    assert len(batch.events) == len(sample.events)
    for event, written in zip(batch.events, map(_fields, sample.events), strict=True):
        names = tuple(value % 2**64 for value in _ints(written, "block_hashes"))
        match event:
            case EngineStored():
                parent = written["parent_block_hash"]
                assert written["type"] == "BlockStored"
                assert (event.names, event.block_size) == (names, written["block_size"])
                assert event.parent == (parent % 2**64 if isinstance(parent, int) else None)
                assert list(event.token_ids) == written["token_ids"]
                assert (event.lora_id, event.lora_name) == (written.get("lora_id"), written.get("lora_name"))
                assert event.medium.name == written.get("medium", "GPU")
                group = written.get("group_idx")
                assert (None if event.group is None else event.group.key) == group
            case EngineRemoved():
                assert written["type"] == "BlockRemoved"
                assert (event.names, event.group_key) == (names, written.get("group_idx"))
                assert event.medium is not None
                assert event.medium.name == written.get("medium", "GPU")
            case _:
                assert event == EngineCleared()
                assert written["type"] == "AllBlocksCleared"


RECORDED = [sample for sample in samples() if len(sample.frames) == 3]


@pytest.mark.parametrize("sample", RECORDED, ids=lambda sample: sample.name)
def test_recorded_message_reads_the_same_live_and_replayed(sample: Sample) -> None:
    topic, seq, payload = sample.frames
    live = read_published(sample.frames)
    assert (live.topic.decode(), live.seq, live.payload) == (sample.topic, sample.seq, payload)
    assert read_replayed((b"", topic, seq, payload)) == live
    assert read_replayed((b"", seq, payload)) == live._replace(topic=b"")


def test_a_request_with_the_same_tokens_salt_and_adapter_finds_the_blocks() -> None:
    """The block hashes that a worker computes are the ones that a router computes from the request."""
    for sample, salt, lora_name in (
        ("v0.32_block_stored_root", None, None),
        ("v0.32_block_stored_cache_salt", "tenant-1", None),
        ("v0.32_lora", None, "ada"),
        ("v0.32_nixl_decode_side", None, None),
        ("sglang0.5.23_block_stored_root", None, None),
    ):
        (event,) = _published(sample)
        assert isinstance(event, Stored)
        written = _fields(_named(sample).events[0])
        tokens = _ints(written, "token_ids")
        block_size = written["block_size"]
        assert isinstance(block_size, int)
        seed = hash_seed(lora_name=lora_name, cache_namespace=salt)
        assert event.block_hashes == Prompt(tokens, block_size=block_size, seed=seed).block_hashes
        others = hash_seed(cache_namespace="somebody else")
        assert event.block_hashes != block_hashes(tokens, block_size=block_size, seed=others)


def test_evictions_of_known_blocks_are_passed_on() -> None:
    sample = _named("v0.32_removed_and_stored_mixed")
    (batch,) = sample.decode(sample.payload)
    gone = tuple(event.names[0] for event in batch.events if isinstance(event, EngineRemoved))
    ledger = RankBlocks(EngineTraits(block_size=32))
    ledger.take((stored(gone, tokens=range(32 * len(gone)), block_size=32),))
    *removed, last = ledger.take(batch.events)
    assert [event for event in removed if isinstance(event, Removed)] == [
        Removed(pack_hashes((name,))) for name in gone
    ]
    assert isinstance(last, Stored)
    assert (last.n_blocks, ledger.held(), ledger.skipped.total()) == (6, 6, 0)


def test_block_reported_again_on_a_hit_is_counted_again() -> None:
    """What ``kv_cache_report_mode: full`` sends looks like a second store: the known drift."""
    sample = _named("v0.32_report_mode_full_restore")
    (batch,) = sample.decode(sample.payload)
    (event,) = batch.events
    assert isinstance(event, EngineStored)
    ledger = RankBlocks(EngineTraits(block_size=32))
    ledger.take((event, event, EngineRemoved(event.names)))
    assert ledger.held() == len(event.names)


def _published(name: str) -> tuple[KvEvent, ...]:
    sample = _named(name)
    follower = EngineEventStream(sample.decode, EngineTraits(block_size=sample.block_size), can_replay=False)
    publish = [each for each in follower.on_published(sample.frames) if isinstance(each, Publish)]
    assert [each.dp_rank for each in publish] == [DpRank(sample.dp_rank)]
    return publish[0].events


def _named(name: str) -> Sample:
    return next(sample for sample in samples() if sample.name == name)


def _fields(event: object) -> Mapping[str, object]:
    """The fields by name, of an event that is a map or an array."""
    if isinstance(event, dict):
        return event
    assert isinstance(event, list)
    kind, *values = event
    return {"type": kind, **dict(zip(ARRAY_FIELDS[kind], values, strict=False))}


def _ints(fields: Mapping[str, object], name: str) -> list[int]:
    values = fields.get(name, [])
    assert isinstance(values, list)
    return values
