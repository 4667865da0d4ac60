"""Frames and the handshake of the session between a router and a worker, without a socket."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.backoff import Backoff
from kvrouter.core.errors import ConfigError, InvalidRequest, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.encoding import is_bare
from kvrouter.transports.requests.frames import (
    CHUNK_MAX_BYTES,
    GREETED,
    HEADER,
    TO_ROUTER,
    TO_WORKER,
    FrameKind,
    FrameReader,
    encode_checked_chunk,
    encode_refused,
    encoder,
    frame,
    goodbye,
    items_decoder,
)
from kvrouter.transports.requests.handshake import Secret, greeting, hello, read_greeting, read_hello
from kvrouter.transports.requests.tcp.pipe import TcpAddress, read_address


@given(bodies=st.lists(st.binary(max_size=40)), data=st.data())
def test_frames_are_read_the_same_however_the_bytes_are_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame(FrameKind.CHUNKS, body) for body in bodies)
    reader = FrameReader(TO_ROUTER)
    read = []
    while stream:
        n_bytes = data.draw(st.integers(1, len(stream)))
        read += reader.feed(stream[:n_bytes])
        stream = stream[n_bytes:]
    assert read == [(FrameKind.CHUNKS, body) for body in bodies]


def test_an_oversized_frame_is_refused_by_its_header() -> None:
    header = HEADER.pack(TO_WORKER[FrameKind.CREDIT] + 1, FrameKind.CREDIT)
    with pytest.raises(ProtocolError, match=r"CREDIT frame of 1048577 bytes is over") as refused:
        FrameReader(TO_WORKER).feed(header)
    assert refused.value.param == "length"


@pytest.mark.parametrize("kind", [0, FrameKind.CHUNKS, 255])
def test_frame_of_an_unexpected_kind_is_refused_by_its_header(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"kind {int(kind)} may not come") as refused:
        FrameReader(TO_WORKER).feed(HEADER.pack(0, kind))
    assert refused.value.param == "kind"


@given(
    chunk=st.builds(
        EngineChunk,
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
        finish=st.none() | st.sampled_from(FinishReason),
        cached_tokens=st.none() | st.integers(0, 10**6),
        kv_transfer_params=st.none() | st.just({"remote_block_ids": [[1, 2]]}),
        error=st.none() | st.text(max_size=9),
    )
)
def test_chunk_survives_encoding_and_decoding(chunk: EngineChunk) -> None:
    item = (3, chunk.token_ids, None) if is_bare(chunk) else (3, (), msgspec.Raw(encode_checked_chunk(chunk)))
    ((stream_id, token_ids, whole),) = items_decoder.decode(encoder.encode([item]))
    assert stream_id == 3
    assert (EngineChunk(token_ids) if whole is None else whole) == chunk


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_out_of_range_is_refused(token: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        items_decoder.decode(encoder.encode([(0, (token,), None)]))


def test_too_large_chunk_is_refused() -> None:
    huge = EngineChunk(kv_transfer_params={"x": b"0" * CHUNK_MAX_BYTES}, finish=FinishReason.STOP)
    with pytest.raises(ProtocolError, match="over"):
        encode_checked_chunk(huge)


def test_a_sign_of_life_may_come_with_the_welcome() -> None:
    both = frame(FrameKind.WELCOME, b"w" * 32) + frame(FrameKind.PONG)
    assert [kind for kind, _ in FrameReader(GREETED).feed(both)] == [FrameKind.WELCOME, FrameKind.PONG]


def test_refusal_with_a_long_message_fits_its_frame() -> None:
    body = encode_refused(1, InvalidRequest("m" * 70_000, param="p" * 70_000))
    assert FrameReader(TO_ROUTER).feed(frame(FrameKind.REFUSED, body)) == [(FrameKind.REFUSED, body)]


def test_goodbye_with_a_long_reason_fits_its_frame() -> None:
    assert len(FrameReader(TO_ROUTER).feed(goodbye("é" * 100_000))) == 1


def test_greeting_and_hello_are_read_whole_or_refused_by_first_bytes() -> None:
    secret = Secret("t")
    said = greeting(b"n" * 16)
    assert [read_greeting(said[:n]) for n in range(len(said))] == [None] * len(said)
    assert read_greeting(said) == b"n" * 16
    answer = hello(secret, b"n" * 16, b"m" * 16, 2**63 - 1, 7)
    assert [read_hello(answer[:n]) for n in range(len(answer))] == [None] * len(answer)
    read = read_hello(answer)
    assert read is not None
    assert (read.nonce, read.worker_id, read.incarnation) == (b"m" * 16, 2**63 - 1, 7)
    assert read.proof == secret.router_proof(b"n" * 16, b"m" * 16, 2**63 - 1, 7)
    with pytest.raises(ProtocolError, match="does not speak"):
        read_hello(b"G")
    with pytest.raises(ProtocolError, match="version 258, not 1"):
        read_hello(b"kvrouter\x02\x01")


def test_proof_differs_by_token_connection_worker_and_side() -> None:
    said = (b"n" * 16, b"m" * 16, 1, 1)
    others = [(b"x" * 16, b"m" * 16, 1, 1), (b"n" * 16, b"x" * 16, 1, 1), (b"n" * 16, b"m" * 16, 2, 1)]
    proofs = {
        Secret("t").router_proof(*said),
        Secret("t").worker_proof(*said),
        Secret(None).router_proof(*said),
    }
    proofs |= {Secret("t").router_proof(*other) for other in others}
    assert len(proofs) == 6


@given(
    host=st.sampled_from(["10.0.0.1", "a-host.example", "::1", "fe80::2"]),
    port=st.integers(1, 65535),
    worker_id=st.integers(0, 2**63 - 1),
    incarnation=st.integers(0, 2**63 - 1),
)
def test_address_survives_formatting_and_parsing(
    host: str, port: int, worker_id: int, incarnation: int
) -> None:
    address = TcpAddress(host, port, WorkerId(worker_id), Epoch(incarnation))
    assert read_address(str(address)) == address


@pytest.mark.parametrize(
    "address",
    ["", "tcp://", "tcp://h:1", "tcp://h:1/2", "tcp://h:1/2/x", "tcp://h/2/3", "http://h:1/2/3",
     "tcp://h:99999/2/3", "tcp://h:1/-2/3", "tcp://h:1/2/99999999999999999999999", "tcp://[h:1/2/3",
     "tcp://a..b:1/2/3"],
)  # fmt: skip
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        read_address(address)


@given(n_failed=st.integers(1, 10**6))
def test_backoff_doubles_up_to_a_limit(n_failed: int) -> None:
    assert Backoff(0.1, 5.0).delay_s(n_failed) == min(5.0, 0.1 * 2.0 ** min(n_failed - 1, 60))
