"""The frames around a batch: published ones, and both framings of a replay.

Engines publish ``topic, seq, payload``; seq is 8 bytes, big-endian. A replay is asked for with ``b"", seq``
and comes as one message a batch: ``b"", seq, payload`` (vLLM to 0.25) or ``b"", topic, seq, payload``; the
first frame is missing where a REQ socket swallowed it. The number −1 ends it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvrouter.core.errors import ProtocolError
from kvrouter.engines.customs.words import PAYLOAD_BYTES_MAX

SEQ_BYTES = 8
TOPIC_BYTES_MAX = 1024
REPLAY_END = (-1).to_bytes(SEQ_BYTES, "big", signed=True)


class Published(NamedTuple):
    """One batch on its way: batches of one start of an engine count from 0."""

    seq: int
    payload: bytes
    topic: bytes = b""


class ReplayEnd(NamedTuple):
    """Nothing more is replayed."""


def read_published(frames: Sequence[bytes]) -> Published:
    """Read the frames of a subscription. Raises ProtocolError."""
    if len(frames) != 3:
        raise ProtocolError(f"frames: topic, seq and payload, not {len(frames)} frames", param="frames")
    topic, seq, payload = frames
    if seq == REPLAY_END:
        raise ProtocolError("seq: the end of a replay, on the publishing socket", param="seq")
    return _batch(topic, seq, payload)


def read_replayed(frames: Sequence[bytes]) -> Published | ReplayEnd:
    """Read the frames of one answer to :func:`replay_question`, in either framing. Raises ProtocolError."""
    # The number is the last frame but one in every form; the topic may be empty, as the first frame is.
    if not 2 <= len(frames) <= 4:
        raise ProtocolError(
            f"frames: an empty one, topic, seq and payload, not {len(frames)} frames", param="frames"
        )
    *before, seq, payload = frames
    if len(before) == 2 and before[0]:
        raise ProtocolError("frames[0]: empty before topic, seq and payload", param="frames[0]")
    if seq == REPLAY_END:
        if payload:
            raise ProtocolError(f"payload: nothing ends a replay, not {len(payload)} bytes", param="payload")
        return ReplayEnd()
    return _batch(before[-1] if before else b"", seq, payload)


def replay_question(start_seq: int) -> tuple[bytes, bytes]:
    """The frames that ask, on a DEALER socket, for every batch from ``start_seq`` on that the engine has."""
    return b"", start_seq.to_bytes(SEQ_BYTES, "big")


def _batch(topic: bytes, seq: bytes, payload: bytes) -> Published:
    if len(topic) > TOPIC_BYTES_MAX:
        raise ProtocolError(f"topic: {len(topic)} bytes are more than {TOPIC_BYTES_MAX}", param="topic")
    if len(seq) != SEQ_BYTES:
        raise ProtocolError(f"seq: {SEQ_BYTES} bytes, not {len(seq)}", param="seq")
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ProtocolError(
            f"payload: {len(payload)} bytes are more than {PAYLOAD_BYTES_MAX}", param="payload"
        )
    return Published(int.from_bytes(seq, "big"), bytes(payload), bytes(topic))
