"""Response bytes."""

import json

import pytest

from kvrouter.frontend.http.response import (
    BadRequest,
    DateHeader,
    chunk,
    error_answer,
    response_head,
    sse_event,
)


def test_a_response_head_has_exact_bytes() -> None:
    head = response_head(
        503,
        [(b"retry-after", b"1"), (b"x-empty", b"")],
        date_line=b"date: now\r\n",
        connection=b"close",
        content_bytes=12,
        chunked=False,
    )
    assert head == (
        b"HTTP/1.1 503 Service Unavailable\r\ndate: now\r\nretry-after: 1\r\nx-empty: \r\n"
        b"content-length: 12\r\nconnection: close\r\n\r\n"
    )


@pytest.mark.parametrize("status", [299, 499, 599])
def test_an_unknown_status_has_no_reason_phrase(status: int) -> None:
    head = response_head(status, [], date_line=b"", connection=None, content_bytes=0, chunked=False)
    assert head == b"HTTP/1.1 %d \r\ncontent-length: 0\r\n\r\n" % status


@pytest.mark.parametrize("status", [-200, 0, 99, 199, 600, 1200])
def test_an_invalid_status_is_refused(status: int) -> None:
    with pytest.raises(ValueError, match="unknown"):
        response_head(status, [], date_line=b"", connection=None, content_bytes=0, chunked=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x", b"a\nb"),
        (b"x", b"a\rb"),
        (b"x", b"a\x00b"),
        (b"x y", b"a"),
        (b"", b"a"),
        (b"x:", b"a"),
        (b"X\r\nY", b"a"),
        (b"Transfer-Encoding", b"chunked"),
        (b"connection", b"close"),
    ],
)
def test_headers_that_would_break_the_framing_are_refused(name: bytes, value: bytes) -> None:
    with pytest.raises(ValueError, match=r"header name|control character"):
        response_head(200, [(name, value)], date_line=b"", connection=None, content_bytes=None, chunked=True)


def test_the_date_changes_with_the_second() -> None:
    date = DateHeader()
    assert date.line(0.0) == b"date: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
    assert date.line(0.9) is date.line(0.1)
    assert date.line(1.0) == b"date: Thu, 01 Jan 1970 00:00:01 GMT\r\n"


def test_sse_events_and_chunks_have_exact_bytes() -> None:
    assert sse_event(b'{"delta":"a"}') == b'data: {"delta":"a"}\n\n'
    assert chunk([b"abc", b"x" * 20], 23) == b"17\r\nabc" + b"x" * 20 + b"\r\n"


def test_errors_have_the_shape_of_openai() -> None:
    answer = error_answer(BadRequest(404, "no such model", "model_not_found"))
    said = {
        "message": "no such model",
        "type": "invalid_request_error",
        "param": None,
        "code": "model_not_found",
    }
    assert answer.body == json.dumps({"error": said}, separators=(",", ":")).encode()
