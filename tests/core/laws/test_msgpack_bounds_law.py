"""A frame of msgpack is counted before anything is built of it."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.core.json import (
    DEPTH_MAX,
    FRAME_CONTAINERS_MAX,
    FRAME_VALUES_MAX,
    unpacked,
)
from kvrouter.core.json_bounds import JsonRefused, MsgpackBounds
from kvrouter.engines.kv_events.batches import read_batch
from kvrouter.engines.kv_events.engine_events import PAYLOAD_TIMES
from kvrouter.transports.requests.encoding import decode_chunk, decode_request
from kvrouter.transports.requests.frames import credits_decoder, items_decoder

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=20))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner, max_size=20),
    max_leaves=60,
)


def counted(value: object, depth: int = 0) -> Iterator[tuple[int, bool]]:
    """Yield, of each value that this one becomes, how deep it is and whether it is a container."""
    is_container = isinstance(value, list | dict)
    yield depth + is_container, is_container
    if isinstance(value, dict):
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, list):
        for each in value:
            yield from counted(each, depth + 1)


@given(VALUES)
def test_frame_counts_equal_counts_of_its_decoded_objects(value: object) -> None:
    found = list(counted(value))
    values, containers = len(found), sum(is_container for _, is_container in found)
    depth = max(depth for depth, is_container in found if is_container) if containers else 0
    frame = msgspec.msgpack.encode(value)
    MsgpackBounds(depth=depth, values=values, containers=containers).scan(frame)
    for name, count in (("depth", depth), ("values", values), ("containers", containers)):
        bounds = {"depth": depth, "values": values, "containers": containers, name: count - 1}
        if containers and bounds[name] >= 0:
            with pytest.raises(JsonRefused) as refused:
                MsgpackBounds(**bounds).scan(frame)
            assert refused.value.kind == name


@given(st.binary(max_size=60), st.integers(0, 60), VALUES)
def test_scan_of_any_bytes_passes_or_raises_json_refused(noise: bytes, at: int, value: object) -> None:
    frame = msgspec.msgpack.encode(value)
    for each in (noise, frame[:at], frame[:at] + noise):
        with suppress(JsonRefused):
            MsgpackBounds(depth=5, values=50, containers=20).scan(each)


def array(n: int, each: bytes) -> bytes:
    return b"\xdd" + n.to_bytes(4, "big") + each * n


def chunk(params: bytes) -> bytes:
    return b"\x81\xb2kv_transfer_params\x81\xa1a" + params


MANY = 2_000_000
BOMBS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "lists in a chunk": (decode_chunk, chunk(array(MANY, b"\x90"))),
    "maps in a chunk": (decode_chunk, chunk(array(MANY, b"\x80"))),
    "texts in a chunk": (decode_chunk, chunk(array(MANY, b"\xa2ab"))),
    "lists inside lists": (decode_chunk, chunk(b"\x91" * MANY)),
    "lists in a request": (decode_request, chunk(array(MANY, b"\x90"))),
    "items": (lambda frame: unpacked(items_decoder, frame, "items"), array(MANY, b"\x93\x00\x90\x80")),
    "credits": (lambda frame: unpacked(credits_decoder, frame, "credits"), array(MANY, b"\x92\x00\x00")),
    "an engine's batch": (
        lambda frame: read_batch(frame, {}),
        b"\x92\x00" + array(10, array(MANY, b"\x92\x00\x00")),
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_frames_over_their_bounds_are_refused(name: str) -> None:
    read, frame = BOMBS[name]
    with pytest.raises(ProtocolError, match=r"than are read|inside each other"):
        read(frame)


class Nothing(Exception):
    """The decoder was asked."""


class Untouched:
    """A decoder that must not be asked."""

    type: object = object

    def decode(self, _data: object, /) -> object:
        raise Nothing


def test_a_refused_frame_builds_no_objects() -> None:
    inside = array(FRAME_CONTAINERS_MAX - 1, b"\x90")
    with pytest.raises(Nothing):
        unpacked(Untouched(), inside, "frame")
    for frame in (
        array(FRAME_CONTAINERS_MAX, b"\x90"),
        array(FRAME_VALUES_MAX, b"\x00"),
        b"\x91" * (DEPTH_MAX + 1) + bytes(FRAME_CONTAINERS_MAX),
    ):
        with pytest.raises(ProtocolError):
            unpacked(Untouched(), frame, "frame")
    with pytest.raises(Nothing):
        unpacked(Untouched(), array(FRAME_VALUES_MAX, b"\x00"), "frame", times=PAYLOAD_TIMES)


def test_a_refusal_names_the_bound_and_the_frame() -> None:
    with pytest.raises(ProtocolError, match="chunk: more values than are read") as refused:
        unpacked(msgspec.msgpack.Decoder(), array(MANY, b"\x90"), "chunk")
    assert refused.value.param == "chunk"
