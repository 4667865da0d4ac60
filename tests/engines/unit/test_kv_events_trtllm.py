"""TensorRT-LLM's events, as the engine tells them and as they are published."""

import json

import msgspec
import pytest

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import Cleared, KvEvent, Medium, Removed, Stored
from kvrouter.core.hashing import Prompt, hash_seed, multimodal_hash
from kvrouter.core.ids import DpRank
from kvrouter.engines.kv_events import batches
from kvrouter.engines.kv_events.engine_events import EngineSkipped, EngineTraits, Skipped
from kvrouter.engines.kv_events.event_stream import EngineEventStream, Missed, Publish
from kvrouter.engines.kv_events.rank_blocks import RankBlocks
from kvrouter.engines.trtllm.events import NativeEvents, decode, native_batches
from tests.testing.recorded_frames import samples

FACTS = EngineTraits(block_size=4)
DIGEST = "ab" * 32
_STORED = {"type": "stored", "parent_hash": None}


def _one(*token_ids: int) -> dict[str, object]:
    return {"block_hash": 1, "tokens": [{"token_id": token_id} for token_id in token_ids]}


def test_block_is_followed_from_store_through_host_moves_to_removal() -> None:
    reported = _reported(
        _event(0, {"type": "created", "num_blocks_per_cache_level": [8, 8]}),
        _event(1, _stored(_block(11, 0), _block(12, 4))),
        _event(2, _updated(12, 0, 1)),
        _event(3, _updated(12, 1, 0)),
        _event(4, {"type": "updated", "block_hash": 12, "priority": {"old_value": 1, "new_value": 2}}),
        _event(5, {"type": "removed", "block_hashes": [12]}),
    )
    assert [(type(event), event.medium) for event in reported if not isinstance(event, Cleared)] == [
        (Stored, Medium.GPU),
        (Stored, Medium.CPU),
        (Removed, Medium.GPU),
        (Stored, Medium.GPU),
        (Removed, Medium.CPU),
        (Removed, Medium.GPU),
    ]
    first = reported[0]
    assert isinstance(first, Stored)
    assert first.block_hashes == Prompt(range(8), block_size=4).block_hashes


def test_block_hashes_may_be_hex_digests() -> None:
    first, second = "ab" * 31 + "01", "ab" * 31 + "02"
    reported = _reported(
        _event(0, {"type": "created"}) | {"layer_group_id": None, "hash_algo": "v2_sha256"},
        _event(1, _stored(_block(first, 0))),
        _event(2, _stored(_block(second, 4)) | {"parent_hash": first}),
        _event(3, _updated(second, 0, 1)),
        _event(4, {"type": "removed", "block_hashes": [second, first]}),
    )
    assert [(type(event), event.medium) for event in reported if not isinstance(event, Cleared)] == [
        (Stored, Medium.GPU),
        (Stored, Medium.GPU),
        (Stored, Medium.CPU),
        (Removed, Medium.GPU),
        (Removed, Medium.CPU),
        (Removed, Medium.GPU),
    ]
    stored = reported[1]
    assert isinstance(stored, Stored)
    assert stored.parent == int("ab" * 7 + "01", 16)


def test_partial_block_and_its_removal_are_skipped() -> None:
    partial = {"block_hash": 13, "tokens": [{"token_id": 9}]}
    reported = _reported(
        _event(0, _stored(_block(11, 0), partial)),
        _event(1, {"type": "removed", "block_hashes": [13]}),
    )
    assert [event.n_blocks for event in reported if isinstance(event, Stored)] == [1]
    assert len(reported) == 1


def test_only_events_of_the_largest_window_count() -> None:
    reported = _reported(
        _event(0, {"type": "created"}, window=512),
        _event(1, {"type": "created"}, window=128),
        _event(2, _stored(_block(11, 0)), window=128),
        _event(3, _stored(_block(11, 0)), window=512),
        _event(4, {"type": "removed", "block_hashes": [11]}, window=128),
    )
    assert [type(event) for event in reported] == [Stored]


def test_only_events_of_the_first_layer_group_of_a_window_count() -> None:
    reported = _reported(
        _event(0, _stored(_block(11, 0)), window=512, layer_group_id=0),
        _event(1, _stored(_block(11, 0)), window=512, layer_group_id=1),
        _event(2, {"type": "removed", "block_hashes": [11]}, window=512, layer_group_id=1),
    )
    assert [type(event) for event in reported] == [Stored]


def test_salt_adapter_and_image_enter_the_block_hash() -> None:
    block = _block(11, 0) | {"cache_salt": "a", "mm_keys": [{"type": "mm_key", "hash": DIGEST}]}
    (reported,) = _reported(_event(0, _stored(block) | {"lora_name": "ada"}))
    assert isinstance(reported, Stored)
    seed = hash_seed(lora_name="ada", cache_namespace="a")
    same = Prompt(range(4), block_size=4, seed=seed, mm_hashes=[[multimodal_hash(DIGEST)]])
    assert reported.block_hashes == same.block_hashes


@pytest.mark.parametrize("token", [{"token_id": DIGEST}, {"token_id": 0, "token_extra_id": 7}])
def test_block_with_a_nontext_token_does_not_hash_as_text(
    token: dict[str, object],
) -> None:
    block = _block(11, 0)
    block["tokens"] = [token, *({"token_id": i} for i in range(1, 4))]
    (reported,) = _reported(_event(0, _stored(block)))
    assert isinstance(reported, Stored)
    assert reported.block_hashes != Prompt(range(4), block_size=4).block_hashes


def test_blocks_are_stored_on_the_medium_of_their_cache_level() -> None:
    reported = _reported(_event(0, _stored(_block(11, 0), _block(12, 4) | {"cache_level": 1})))
    assert [(event.medium, event.parent) for event in reported if isinstance(event, Stored)] == [
        (Medium.GPU, None),
        (Medium.CPU, 11),
    ]
    (batch,) = _decode(_event(0, _stored(_block(11, 0) | {"cache_level": 2})))
    assert batch == EngineSkipped(Skipped.UNKNOWN_MEDIUM)


def test_unknown_events_are_skipped_and_a_clear_clears_the_rank() -> None:
    assert _decode(_event(0, {"type": "counted"})) == [EngineSkipped(Skipped.UNKNOWN_EVENT)]
    assert _decode(_event(0, _updated(1, 0, 9))) == [EngineSkipped(Skipped.UNKNOWN_MEDIUM)]
    assert _reported(_event(0, {"type": "all_cleared"})) == [Cleared()]


def test_lost_event_clears_the_rank() -> None:
    follower = EngineEventStream(NativeEvents(4).decode, FACTS, can_replay=False)
    polled = native_batches(
        json.dumps([_event(0, _stored(_block(11, 0))), _event(2, {"type": "created"})]).encode()
    )
    commands = [command for _, batch in polled for command in follower.on_batch(batch)]
    assert commands[1:] == [Missed(1, 1), Publish(DpRank(0), (Cleared(),))]


def test_poll_is_split_by_rank() -> None:
    events = [_event(5, {"type": "created"}) | {"attention_dp_rank": rank} for rank in (0, 1)]
    polled = native_batches(json.dumps(events).encode())
    assert [(rank, batch.seq) for rank, batch in polled] == [(0, 5), (1, 5)]
    assert [NativeEvents(4).decode(batch.payload)[0].dp_rank for _, batch in polled] == [0, 1]


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ([], "payload"),
        ({"event_id": -1, "data": {"type": "created"}}, "event_id"),
        ({"event_id": 0, "data": 7}, "data"),
        ({"event_id": 0, "data": {"type": "removed"}}, "data"),
        ({"event_id": 0, "data": {"type": "removed", "block_hashes": [1.5]}}, "data.block_hashes[0]"),
        ({"event_id": 0, "data": {"type": "removed", "block_hashes": ["x"]}}, "data.block_hashes"),
        ({"event_id": 0, "data": _STORED | {"blocks": [{"tokens": []}]}}, "data.blocks[0]"),
        ({"event_id": 0, "data": _STORED | {"blocks": [_one(-1)] * 4}}, "data.blocks.tokens[0]"),
        ({"event_id": 0, "data": _STORED | {"blocks": [_one(1), _one(2, 3)]}}, "data.blocks[1].tokens"),
    ],
)
def test_malformed_event_is_refused_by_field(event: object, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        NativeEvents(1).decode(json.dumps(event).encode())
    assert caught.value.param == field


def test_malformed_poll_is_refused() -> None:
    with pytest.raises(ProtocolError) as caught:
        native_batches(b"{}")
    assert caught.value.param == "payload"
    with pytest.raises(ProtocolError) as caught:
        native_batches(b'[{"event_id":0,"data":{}},{}]')
    assert caught.value.param == "[1]"


def test_published_event_identifies_images_by_number() -> None:
    (sample,) = (sample for sample in samples() if sample.name == "trtllm_published_stored")
    follower = EngineEventStream(decode, EngineTraits(block_size=32), can_replay=False)
    (publish,) = follower.on_published((b"", bytes(8), sample.payload))
    assert isinstance(publish, Publish)
    (reported,) = publish.events
    assert isinstance(reported, Stored)
    assert reported.block_hashes == Prompt(range(64), block_size=32, mm_hashes=[[], [99]]).block_hashes


def test_published_events_are_read_as_the_polled_ones() -> None:
    keys = [[], [{"type": "mm_key", "hash": DIGEST, "start_offset": 0}]]
    event = {
        "type": "BlockStored", "block_hashes": [2**64 - 1, 12], "parent_block_hash": None, "block_size": 4,
        "token_ids": [0, 1, 2, 3, DIGEST, 5, 6, 7], "lora_id": None, "medium": "GPU", "lora_name": None,
        "mm_keys": keys,
    }  # fmt: skip
    removal = {"type": "BlockRemoved", "block_hashes": [12], "medium": "GPU"}
    (batch,) = decode(msgspec.msgpack.encode([1.5, [event, removal], 0]))
    blocks = _block(2**64 - 1, 0), _block(12, 4) | {"mm_keys": keys[1]}
    blocks[1]["tokens"] = [{"token_id": token} for token in (DIGEST, 5, 6, 7)]
    own = _reported(_event(0, _stored(*blocks)), _event(1, {"type": "removed", "block_hashes": [12]}))
    assert list(RankBlocks(FACTS).take(batch.events)) == own


def test_the_objects_of_all_events_in_a_batch_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "OBJECTS_MAX", 8)
    event = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 4,
        "token_ids": ["a", "b", "c", "d"],
    }  # fmt: skip
    decode(msgspec.msgpack.encode([1.5, [event, event], 0]))
    with pytest.raises(ProtocolError) as caught:
        decode(msgspec.msgpack.encode([1.5, [event, event, event], 0]))
    assert caught.value.param == "events[2]"


def _reported(*events: dict[str, object]) -> list[KvEvent]:
    follower = EngineEventStream(NativeEvents(4).decode, FACTS, can_replay=False)
    commands = [
        command
        for _, batch in native_batches(json.dumps(events).encode())
        for command in follower.on_batch(batch)
    ]
    assert all(isinstance(command, Publish) for command in commands)
    return [event for command in commands if isinstance(command, Publish) for event in command.events]


def _decode(event: dict[str, object]) -> list[object]:
    (batch,) = NativeEvents(4).decode(json.dumps(event).encode())
    return list(batch.events)


def _event(
    event_id: int, data: dict[str, object], *, window: int | None = None, layer_group_id: int | None = None
) -> dict[str, object]:
    event: dict[str, object] = {"event_id": event_id, "data": data}
    if window is not None:
        event["window_size"] = window
    if layer_group_id is not None:
        event["layer_group_id"] = layer_group_id
    return event


def _stored(*blocks: dict[str, object]) -> dict[str, object]:
    return {"type": "stored", "parent_hash": None, "blocks": list(blocks)}


def _block(name: int | str, first_token: int) -> dict[str, object]:
    tokens = [{"token_id": first_token + i, "token_extra_id": 0} for i in range(4)]
    return {"type": "stored_block", "block_hash": name, "tokens": tokens, "cache_level": 0, "priority": 35}


def _updated(name: int | str, old: int, new: int) -> dict[str, object]:
    level = {"type": "event_diff", "old_value": old, "new_value": new}
    return {"type": "updated", "block_hash": name, "cache_level": level}
