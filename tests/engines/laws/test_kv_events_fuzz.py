"""Whatever bytes come: accepted, or a ProtocolError that names the field; never anything else."""

import json
import random
from collections.abc import Callable
from typing import TypeVar

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.engines.kv_events.batches import read_published, read_replayed
from kvrouter.engines.kv_events.engine_events import EngineTraits
from kvrouter.engines.kv_events.event_stream import EngineEventStream
from kvrouter.engines.trtllm.events import NativeEvents, native_batches
from tests.testing.recorded_frames import DECODERS, samples

PAYLOADS = [sample.payload for sample in samples()]
READERS: tuple[Callable[[bytes], object], ...] = (
    *DECODERS.values(),
    NativeEvents(4).decode,
    native_batches,
)

T = TypeVar("T")

FIELDS = (
    "ts",
    "events",
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "lora_name",
    "medium",
    "extra_keys",
    "block_mm_infos",
    "mm_objects",
    "group_idx",
    "locality",
    "event_id",
    "data",
    "blocks",
    "tokens",
    "window_size",
)
WORDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "full_attention", "stored", "removed")

Tree = None | bool | int | float | str | bytes | list["Tree"] | dict[str, "Tree"]


class Fuzz:
    """Payloads by one seed: drawing them piece by piece from Hypothesis takes a hundred times as long."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def payload(self) -> bytes:
        """Noise, a recorded payload with changes, a batch of nearly right events, or any tree."""
        match self._chance.randrange(6):
            case 0:
                return self._chance.randbytes(self._chance.randrange(60))
            case 1 | 2:
                return self.changed(self._chance.choice(PAYLOADS))
            case 3:
                return msgspec.msgpack.encode(self.tree(4))
            case 4:
                return json.dumps(self.tree(4), default=repr).encode()
            case _:
                events: list[Tree] = [self.event() for _ in range(3)]
                batch: list[Tree] = [1.5, events, 0]
                if self._chance.random() < 0.2:
                    batch[self._chance.randrange(3)] = self.leaf()
                return msgspec.msgpack.encode(batch)

    def changed(self, payload: bytes) -> bytes:
        """With bytes replaced, left out, put in, or cut off."""
        changed = bytearray(payload)
        for _ in range(self._chance.randint(1, 4)):
            at = self._chance.randrange(len(changed) + 1)
            match self._chance.randrange(4):
                case 0:
                    changed[at : at + 1] = self._chance.randbytes(1)
                case 1:
                    del changed[at : at + self._chance.randint(1, 8)]
                case 2:
                    changed[at:at] = self._chance.randbytes(self._chance.randint(1, 8))
                case _:
                    del changed[at + 1 :]
        return bytes(changed)

    def event(self) -> Tree:
        """An event with fields of the right names, most of them with a right type."""
        kind = self._chance.choice(WORDS[:4])
        hashes: list[Tree] = [self._chance.choice((7, -7, 2**64 - 1, b"x" * 32)) for _ in range(2)]
        fields: dict[str, Tree] = {
            "type": kind,
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": [0, 1, 2, 3, [4, 5], 5, 6, 7],
            "block_size": 4,
        }
        for name in self._chance.sample(FIELDS, 3):
            fields[name] = self.tree(3)
        return fields if self._chance.random() < 0.5 else list(fields.values())

    def tree(self, depth: int) -> Tree:
        """Lists and maps of lists and maps."""
        match self._chance.randrange(3) if depth else 0:
            case 1:
                return [self.tree(depth - 1) for _ in range(self._chance.randrange(4))]
            case 2:
                names = self._chance.sample(FIELDS, self._chance.randrange(4))
                return {name: self.tree(depth - 1) for name in names}
            case _:
                return self.leaf()

    def leaf(self) -> Tree:
        """Any value without parts."""
        return self._chance.choice(
            (None, True, 0, -1, 4, 2**32, -(2**63), 2**64 - 1, 1.5, float("nan"), "", b"", b"x" * 9, *WORDS)
        )


SEEDS = st.integers(0, 2**64 - 1)


@settings(max_examples=1000)
@given(seed=SEEDS)
def test_a_payload_is_accepted_or_refused_by_field(seed: int) -> None:
    payload = Fuzz(seed).payload()
    for read in READERS:
        refused = _refusal(read, payload)
        assert refused is None or refused.param
        assert refused is None or str(refused).startswith(refused.param or "")


@settings(max_examples=100)
@given(payload=st.binary(max_size=100))
def test_random_bytes_are_accepted_or_refused_by_field(payload: bytes) -> None:
    for read in READERS:
        refused = _refusal(read, payload)
        assert refused is None or refused.param


@given(frames=st.lists(st.binary(max_size=12) | st.sampled_from([b"", b"\xff" * 8, bytes(8)]), max_size=6))
def test_frames_are_accepted_or_refused_by_field(frames: list[bytes]) -> None:
    for read in (read_published, read_replayed):
        refused = _refusal(read, frames)
        assert refused is None or refused.param


@settings(max_examples=100)
@given(seed=SEEDS, can_replay=st.booleans())
def test_event_stream_survives_every_message(seed: int, can_replay: bool) -> None:
    fuzz, chance = Fuzz(seed), random.Random(seed)
    follower = EngineEventStream(DECODERS["vllm"], EngineTraits(block_size=4), can_replay=can_replay)
    follower.start()
    for _ in range(10):
        ends = chance.random() < 0.2
        frames = (
            (b"", b"\xff" * 8, b"") if ends else (b"", bytes([*[0] * 7, chance.randrange(7)]), fuzz.payload())
        )
        receive = chance.choice((follower.on_published, follower.on_replayed))
        receive(frames)


def _refusal(read: Callable[[T], object], data: T) -> ProtocolError | None:
    """The error, if there is one; any other goes on to the test."""
    try:
        read(data)
    except ProtocolError as error:
        return error
    return None
