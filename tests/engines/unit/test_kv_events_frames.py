"""The frames around a batch."""

import pytest

from kvrouter.core.errors import ProtocolError
from kvrouter.engines.kv_events.batches import (
    REPLAY_END,
    Published,
    ReplayEnd,
    read_published,
    read_replayed,
    replay_question,
)

SEQ = (7).to_bytes(8, "big")


@pytest.mark.parametrize(
    "frames",
    [
        (b"", SEQ, b"p"),
        (b"", b"", SEQ, b"p"),
        (SEQ, b"p"),  # by a REQ socket, which takes the empty frame away
    ],
)
def test_replayed_batch_without_a_topic_is_read(frames: tuple[bytes, ...]) -> None:
    assert read_replayed(frames) == Published(7, b"p")


@pytest.mark.parametrize("frames", [(b"", b"kv", SEQ, b"p"), (b"kv", SEQ, b"p")])
def test_replayed_batch_with_its_topic_is_read(frames: tuple[bytes, ...]) -> None:
    assert read_replayed(frames) == Published(7, b"p", b"kv")


@pytest.mark.parametrize("frames", [(b"", b"", REPLAY_END, b""), (b"", REPLAY_END, b""), (REPLAY_END, b"")])
def test_sequence_number_minus_one_ends_a_replay(frames: tuple[bytes, ...]) -> None:
    assert read_replayed(frames) == ReplayEnd()


def test_replay_is_requested_by_sequence_number() -> None:
    assert replay_question(258) == (b"", b"\0\0\0\0\0\0\1\2")


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ((), "frames"),
        ((b"t", SEQ), "frames"),
        ((b"t", b"", SEQ, b"p"), "frames"),
        ((b"t", b"\1", b"p"), "seq"),
        ((b"t", REPLAY_END, b""), "seq"),
        ((b"t" * 1025, SEQ, b"p"), "topic"),
    ],
)
def test_malformed_published_message_is_refused_by_field(frames: tuple[bytes, ...], field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        read_published(frames)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ((b"p",), "frames"),
        ((b"", b"", b"", SEQ, b"p"), "frames"),
        ((b"x", b"t", SEQ, b"p"), "frames[0]"),
        ((b"", b"t", b"\1", b"p"), "seq"),
        ((b"", b"", REPLAY_END, b"more"), "payload"),
    ],
)
def test_malformed_replayed_message_is_refused_by_field(frames: tuple[bytes, ...], field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        read_replayed(frames)
    assert caught.value.param == field


def test_payload_over_the_limit_is_refused() -> None:
    with pytest.raises(ProtocolError) as caught:
        read_published((b"", SEQ, bytes((64 << 20) + 1)))
    assert caught.value.param == "payload"
