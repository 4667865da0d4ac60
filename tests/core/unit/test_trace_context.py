"""The trace that a call belongs to, as W3C's recommendation has it."""

from array import array
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import NO_TRACE, EngineRequest, Leg, Sampling, TraceContext
from kvrouter.frontend.generate import TRACE_VALUE_MAX_BYTES, trace_of
from kvrouter.transports.requests.encoding import decode_request, encode_request

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def of(**headers: str) -> TraceContext:
    return trace_of([(name.encode(), value.encode("latin-1")) for name, value in headers.items()])


def test_valid_trace_headers_are_kept_unchanged() -> None:
    trace = of(traceparent=PARENT, tracestate="congo=t61rcWkgMzE,rojo=1", baggage="user=a;p=1,b=c")
    assert trace == TraceContext(PARENT, "congo=t61rcWkgMzE,rojo=1", "user=a;p=1,b=c", TRACE_ID)
    assert trace.headers() == {
        "traceparent": PARENT,
        "tracestate": "congo=t61rcWkgMzE,rojo=1",
        "baggage": "user=a;p=1,b=c",
    }


def test_a_call_without_trace_headers_has_no_trace() -> None:
    assert trace_of([(b"host", b"a"), (b"x-request-id", b"r")]) is NO_TRACE
    assert NO_TRACE.headers() == {}
    assert NO_TRACE.trace_id == ""


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "0",
        PARENT + "-more",
        "ff" + PARENT[2:],
        "00-" + "0" * 32 + PARENT[35:],
        PARENT[:36] + "0" * 16 + "-01",
        PARENT.replace("-", "_"),
        PARENT + "\n",
        "é" + PARENT[1:],
    ],
)
def test_an_invalid_traceparent_is_dropped_with_its_tracestate(wrong: str) -> None:
    assert of(traceparent=wrong, tracestate="a=1", baggage="b=2") == TraceContext(baggage="b=2")


def test_a_later_traceparent_version_may_have_more_fields() -> None:
    later = "01" + PARENT[2:] + "-what-will-be"
    assert of(traceparent=later).traceparent == later
    assert of(traceparent="01" + PARENT[2:]).traceparent


def test_blanks_around_a_value_are_removed() -> None:
    assert of(traceparent=f" {PARENT}\t").traceparent == PARENT


def test_two_traceparent_headers_give_no_trace() -> None:
    twice = [(b"traceparent", PARENT.encode())] * 2
    assert trace_of([*twice, (b"tracestate", b"a=1")]) == NO_TRACE


def test_repeated_tracestate_or_baggage_headers_are_joined() -> None:
    sent = [
        (b"traceparent", PARENT.encode()),
        (b"tracestate", b"a=1"),
        (b"tracestate", b""),
        (b"tracestate", b"b=2"),
    ]
    assert trace_of(sent).tracestate == "a=1,b=2"
    assert trace_of([(b"baggage", b"a=1"), (b"baggage", b"b=2")]).baggage == "a=1,b=2"


def test_too_long_or_non_ascii_trace_values_are_dropped() -> None:
    long = "a=" + "x" * TRACE_VALUE_MAX_BYTES
    assert of(traceparent="01" + PARENT[2:] + "-" + long) == NO_TRACE
    assert of(traceparent=PARENT, tracestate=long, baggage="é=1") == TraceContext(PARENT, trace_id=TRACE_ID)


Headers = Iterable[tuple[bytes, bytes]]


@given(
    st.lists(st.tuples(st.sampled_from([b"traceparent", b"tracestate", b"baggage", b"other"]), st.binary()))
)
def test_any_headers_give_a_trace_context_that_a_leg_can_carry(headers: Headers) -> None:
    trace = trace_of(headers)
    for value in trace.headers().values():
        assert value.isascii()
        assert value.isprintable() or "\t" in value
    assert not trace.tracestate or trace.traceparent
    request = leg(trace)
    assert decode_request(encode_request(request)).trace == trace


def leg(trace: TraceContext) -> EngineRequest:
    tokens = array("I", [1])
    return EngineRequest(RequestId("r"), 0, Leg.DECODE, ModelName("m"), tokens, Sampling(1), trace=trace)


def test_a_worker_refuses_trace_values_invalid_as_headers() -> None:
    for wrong in ("a\r\nx: y", "é", "\0"):
        with pytest.raises(ProtocolError, match="trace"):
            decode_request(encode_request(leg(TraceContext(baggage=wrong))))
