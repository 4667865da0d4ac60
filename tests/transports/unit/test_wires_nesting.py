"""Bytes that nest without end are refused like any others that make no sense: no wire's reader falls over."""

from collections.abc import Callable

import pytest

from kvrouter.core.errors import ProtocolError
from kvrouter.engines.mock.transfer import ConnectionRefused, decode_sink_message, decode_source_message
from kvrouter.transports.events import encoding as events
from kvrouter.transports.message_auth import MessageAuth
from kvrouter.transports.records.encoding import decode_record
from kvrouter.transports.requests import encoding as requests
from kvrouter.transports.requests.nats.transport import from_router, from_worker
from kvrouter.transports.sync.nats import decode_message
from kvrouter.worker.engine_door import decode_frame

SEAL = MessageAuth("token", "test")
DEPTH = 100_000
NESTED = b"\x91" * DEPTH + b"\xc0"
IN_A_FIELD = b"\x82\xa4type\xa4Join\xa1x" + NESTED
READERS: list[Callable[[bytes], object]] = [
    events.decode_batch,
    events.decode_range,
    events.decode_snapshot,
    events.decode_load,
    events.decode_question,
    requests.decode_request,
    requests.decode_chunk,
    requests.decode_refusal,
    decode_message,
    decode_frame,
    decode_sink_message,
    decode_source_message,
    lambda message: from_router(SEAL, "s", SEAL.seal("s", message)),
    lambda message: from_worker(SEAL, "s", SEAL.seal("s", message)),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("message", [NESTED, IN_A_FIELD])
def test_deeply_nested_message_is_refused(read: Callable[[bytes], object], message: bytes) -> None:
    with pytest.raises((ProtocolError, ConnectionRefused)):
        read(message)


def test_deeply_nested_record_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_record(b'{"x":' + b"[" * DEPTH)
