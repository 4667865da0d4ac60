"""Whatever bytes come over a request plane are read or refused, and what was sent is read as it was."""

from array import array
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.engine_answer import EngineAnswer
from kvrouter.core.errors import InvalidRequest, KvrouterError, ProtocolError
from kvrouter.core.ids import DpRank, ModelName, RequestId, WorkerId
from kvrouter.core.requests import (
    Bootstrap,
    EngineChunk,
    EngineRequest,
    FinishReason,
    KvLoss,
    Leg,
    Sampling,
    merge_chunks,
)
from kvrouter.transports.requests.encoding import (
    decode_chunk,
    decode_refusal,
    decode_request,
    encode_chunk,
    encode_refusal,
    encode_request,
    error_of,
    refusal_of,
)
from kvrouter.transports.requests.port import StreamBroken, WorkerFull, WorkerUnreachable

READERS = [decode_request, decode_chunk, decode_refusal]

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=8)
opaque = st.none() | st.dictionaries(
    st.text(max_size=5), st.integers(-(2**31), 2**31) | st.binary(max_size=5) | st.lists(st.text(max_size=3))
)
requests = st.builds(
    EngineRequest,
    request_id=st.text(max_size=9).map(RequestId),
    attempt=st.integers(0, 9),
    leg=st.sampled_from(Leg),
    model=st.text(max_size=9).map(ModelName),
    token_ids=tokens.map(lambda ids: array("I", ids)),
    sampling=st.builds(Sampling, max_tokens=st.integers(0, 10**6), seed=st.none() | st.integers(0, 2**63)),
    dp_rank=st.integers(0, 99).map(DpRank),
    resumed_tokens=st.integers(0, 99),
    bootstrap=st.none()
    | st.builds(Bootstrap, st.text(max_size=9), st.integers(0, 65535), st.integers(0, 2**63)),
    kv_transfer_params=opaque,
    prefill_worker_id=st.none() | st.integers(0, 2**63 - 1).map(WorkerId),
    lora_name=st.none() | st.text(max_size=5),
    cache_namespace=st.none() | st.text(max_size=5),
    time_left_s=st.none() | st.floats(0, 1e9),
)
chunks = st.builds(
    EngineChunk,
    token_ids=tokens.map(tuple),
    finish=st.none() | st.sampled_from(FinishReason),
    cached_tokens=st.none() | st.integers(0, 10**6),
    kv_transfer_params=opaque,
    error=st.none() | st.text(max_size=9),
    kv_lost=st.none() | st.sampled_from(KvLoss),
    prompt_tokens=st.none() | st.integers(0, 10**6),
    completion_tokens=st.none() | st.integers(0, 10**6),
    kv_bytes=st.none() | st.integers(0, 10**12),
)


@given(requests)
def test_request_survives_encoding_and_decoding(request: EngineRequest) -> None:
    assert decode_request(encode_request(request)) == request


@given(chunks)
def test_chunk_survives_encoding_and_decoding(chunk: EngineChunk) -> None:
    assert decode_chunk(encode_chunk(chunk)) == chunk


@given(st.lists(chunks, min_size=1, max_size=4), st.lists(chunks, min_size=1, max_size=4))
def test_merging_chunks_in_any_portions_gives_the_same_chunk(
    first: list[EngineChunk], later: list[EngineChunk]
) -> None:
    whole = merge_chunks([*first, *later])
    assert merge_chunks([merge_chunks(first), merge_chunks(later)]) == whole
    assert whole.token_ids == tuple(token for chunk in [*first, *later] for token in chunk.token_ids)
    last = later[-1]
    assert (whole.finish, whole.error, whole.kv_lost) == (last.finish, last.error, last.kv_lost)
    counts = [chunk.completion_tokens for chunk in [*first, *later] if chunk.completion_tokens is not None]
    assert whole.completion_tokens == (counts[-1] if counts else None)
    reported = [chunk.kv_bytes for chunk in [*first, *later] if chunk.kv_bytes is not None]
    assert whole.kv_bytes == (reported[0] if reported else None)


@given(
    kind=st.sampled_from([WorkerUnreachable, WorkerFull, StreamBroken, ProtocolError]),
    message=st.text(),
    param=st.none() | st.text(),
)
def test_decoded_refusal_has_its_class_message_and_field(
    kind: type[KvrouterError], message: str, param: str | None
) -> None:
    error = error_of(decode_refusal(encode_refusal(refusal_of(kind(message, param=param)))))
    assert (type(error), error.message, error.param) == (kind, message, param)


class OldError(msgspec.Struct, frozen=True, array_like=True):
    """An error as ends read and wrote it that know nothing of an engine's answer."""

    code: str
    message: str
    param: str | None = None


def test_older_peers_read_and_write_errors_without_the_engine_answer() -> None:
    error = WorkerFull("full", param="p", answer=EngineAnswer(429, ((b"retry-after", b"7"),), b"\xff"))
    written = encode_refusal(refusal_of(error))
    old = msgspec.msgpack.decode(written, type=OldError)
    assert old == OldError("worker_full", "full", "p")
    again = error_of(decode_refusal(msgspec.msgpack.encode(old)))
    assert (type(again), again.message, again.param, again.answer) == (WorkerFull, "full", "p", None)
    assert error_of(decode_refusal(written)).answer == error.answer


def test_unexpected_exception_arrives_as_a_broken_stream() -> None:
    error = error_of(refusal_of(ZeroDivisionError("division by zero")))
    assert type(error) is StreamBroken
    assert "ZeroDivisionError: division by zero" in error.message


@pytest.mark.parametrize("read", READERS)
@given(data=st.binary(max_size=200) | requests.map(encode_request) | chunks.map(encode_chunk), cut=st.data())
def test_any_bytes_are_read_or_refused(read: object, data: bytes, cut: st.DataObject) -> None:
    assert callable(read)
    at = cut.draw(st.integers(0, len(data)))
    for frame in (data, data[:at], data[:at] + b"\xc1" + data[at:], data[:at] + b"\x91" + data[at + 1 :]):
        with suppress(ProtocolError):
            read(frame)


@pytest.mark.parametrize("read", READERS)
def test_deeply_nested_message_is_refused(read: object) -> None:
    assert callable(read)
    for opening in (b"\x81\xa1x", b"\x81\xb2kv_transfer_params\x81\xa1x"):
        with pytest.raises(ProtocolError):
            read(opening + b"\x91" * 100_000)


def test_request_with_too_large_integer_is_an_invalid_request() -> None:
    request = EngineRequest(
        RequestId("x"), 0, Leg.DECODE, ModelName("m"), array("I", [1]), Sampling(1, seed=2**70)
    )
    with pytest.raises(InvalidRequest, match="serialize"):
        encode_request(request)


def test_token_ids_of_a_wrong_length_are_refused_by_name() -> None:
    broken = msgspec.msgpack.decode(
        encode_request(
            EngineRequest(RequestId("x"), 0, Leg.DECODE, ModelName("m"), array("I", [1]), Sampling(1))
        )
    )
    with pytest.raises(ProtocolError, match="token_ids"):
        decode_request(msgspec.msgpack.encode({**broken, "token_ids": b"12345"}))
