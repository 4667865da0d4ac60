"""The frames of an http answer: cut anywhere they read the same, and garbage is named, never more."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.encoding import CHUNKS_MAX_BYTES, ErrorMessage
from kvrouter.transports.requests.http.frames import ALIVE, HttpFrameReader, chunk_frame, failure_frame

chunks = st.builds(
    EngineChunk,
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
    finish=st.sampled_from([None, *FinishReason]),
    cached_tokens=st.none() | st.integers(0, 2**20),
    kv_transfer_params=st.none() | st.just({"remote_block_ids": [[1], [2, 3]]}),
)
refusals = st.builds(ErrorMessage, code=st.text(), message=st.text(), param=st.none() | st.text())


def frame(item: EngineChunk | ErrorMessage | None) -> bytes:
    if item is None:
        return ALIVE
    return failure_frame(item) if isinstance(item, ErrorMessage) else chunk_frame(item)


@given(st.lists(st.none() | chunks | refusals, max_size=8), st.lists(st.integers(1, 12), min_size=1))
def test_frames_read_the_same_wherever_they_are_cut(
    items: list[EngineChunk | ErrorMessage | None], cuts: list[int]
) -> None:
    sent = b"".join(map(frame, items))
    reader = HttpFrameReader()
    received: list[EngineChunk | ErrorMessage] = []
    turn = 0
    while sent:
        n_bytes = cuts[turn % len(cuts)]
        received += reader.feed(sent[:n_bytes])
        sent = sent[n_bytes:]
        turn += 1
    assert received == [item for item in items if item is not None]


@given(st.binary(max_size=64))
def test_garbage_is_a_protocol_error_or_waits_for_more(garbage: bytes) -> None:
    with suppress(ProtocolError):
        list(HttpFrameReader().feed(garbage))


def test_a_frame_above_the_limit_is_refused_by_its_length_alone() -> None:
    with pytest.raises(ProtocolError, match="above"):
        list(HttpFrameReader().feed((CHUNKS_MAX_BYTES + 1).to_bytes(4, "big")))
