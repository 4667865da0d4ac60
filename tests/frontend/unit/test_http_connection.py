"""The sans-I/O connection: framing, refusals, limits and deadlines; the time is an argument."""

import pytest

from kvrouter.core.errors import ConfigError
from kvrouter.frontend.http.connection import MessageParser, ServerConnection
from kvrouter.frontend.http.limits import Limits
from kvrouter.frontend.http.response import (
    BadRequest,
    CloseReason,
    ConnectionClosed,
    Event,
    Request,
    RequestHead,
)
from tests.testing.calls import WatchCalls

RATE = "the request's body took too long to arrive: 30 s below 100 bytes/s"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def connection(**limits: float) -> ServerConnection:
    return ServerConnection(Limits(**limits), now_s=0.0)  # type: ignore[arg-type]


def receive(data: bytes, **limits: float) -> list[Event]:
    return connection(**limits).receive(data, 0.0)


def requests(events: list[Event]) -> list[Request]:
    return [event for event in events if isinstance(event, Request)]


def refusal(events: list[Event]) -> int | None:
    return next((event.status for event in events if isinstance(event, BadRequest)), None)


def post(body: bytes, *headers: bytes, version: bytes = b"1.1", host: bytes = b"Host: x") -> bytes:
    return b"\r\n".join((b"POST /v1/x HTTP/" + version, host, *headers, b"", body))


def test_a_request_with_a_body_is_parsed() -> None:
    events = receive(post(b"abc", b"Content-Length: 3", b"X-Thing:  a b "))
    assert [type(event) for event in events] == [RequestHead, Request]
    (request,) = requests(events)
    assert (request.method, request.path, request.query, request.body) == ("POST", "/v1/x", "", b"abc")
    assert request.header("x-thing") == "a b"
    assert request.header("X-THING") == "a b"
    assert request.header("absent") is None
    assert request.headers[0] == (b"host", b"x")


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/a?b=c&d", "/a", "b=c&d"),
        (b"/a%20%C3%A9?x=%20", "/a é", "x=%20"),
        (b"http://h:1/p?q", "/p", "q"),
        (b"http://h:1?q", "/", "q"),
        (b"*", "*", ""),
    ],
)
def test_valid_request_targets_are_split(target: bytes, path: str, query: str) -> None:
    (request,) = requests(receive(b"OPTIONS " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert (request.path, request.query) == (path, query)


@pytest.mark.parametrize("target", [b"/%FF", b"*a", b"ftp://h/x"])
def test_invalid_request_targets_are_refused(target: bytes) -> None:
    assert refusal(receive(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")) == 400


def test_a_chunked_body_with_extension_and_trailer_is_read() -> None:
    body = b"3;note=1\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: t\r\n\r\n"
    (request,) = requests(receive(post(body, b"Transfer-Encoding: chunked")))
    assert request.body == b"abcde"
    assert request.header("trailer") is None


def test_bytes_fed_one_by_one_give_the_same_events() -> None:
    data = (
        post(b"3\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: chunked")
        + post(b"xy", b"Content-Length: 2")
        + GET
    )
    slow = connection()
    events = [event for at in range(len(data)) for event in slow.receive(data[at : at + 1], 0.0)]
    assert events == receive(data)
    assert [request.body for request in requests(events)] == [b"abc", b"xy", b""]


@pytest.mark.parametrize(
    ("name", "data", "status"),
    [
        ("both framings", post(b"0\r\n\r\n", b"Content-Length: 5", b"Transfer-Encoding: chunked"), 400),
        ("both, other order", post(b"0\r\n\r\n", b"Transfer-Encoding: chunked", b"Content-Length: 5"), 400),
        ("equal lengths", post(b"ab", b"Content-Length: 2", b"Content-Length: 2"), 400),
        ("unequal lengths", post(b"ab", b"Content-Length: 2", b"Content-Length: 3"), 400),
        ("length list", post(b"ab", b"Content-Length: 2, 2"), 400),
        ("signed length", post(b"ab", b"Content-Length: +2"), 400),
        ("hex length", post(b"ab", b"Content-Length: 0x2"), 400),
        ("no length", post(b"ab", b"Content-Length:"), 400),
        ("endless length", post(b"", b"Content-Length: " + b"9" * 40), 400),
        (
            "coding twice",
            post(b"0\r\n\r\n", b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
            400,
        ),
        ("coding under 1.0", post(b"0\r\n\r\n", b"Transfer-Encoding: chunked", version=b"1.0"), 400),
        ("unknown coding", post(b"", b"Transfer-Encoding: xchunked"), 501),
        ("two codings", post(b"0\r\n\r\n", b"Transfer-Encoding: gzip, chunked"), 501),
        ("bare line feeds", b"GET / HTTP/1.1\nHost: x\n\n", 400),
        ("space before colon", b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        ("folded header", b"GET / HTTP/1.1\r\nHost: x\r\n y\r\n\r\n", 400),
        ("NUL in a value", b"GET / HTTP/1.1\r\nHost: x\x00\r\n\r\n", 400),
        ("no host", b"GET / HTTP/1.1\r\n\r\n", 400),
        ("two hosts", b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        ("CONNECT", b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 405),
        ("HTTP/2", b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        ("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        ("chunk size", post(b"zz\r\n", b"Transfer-Encoding: chunked"), 400),
        ("chunk too short", post(b"1\r\nab\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"), 400),
    ],
)
def test_malformed_requests_are_refused_and_end_the_connection(name: str, data: bytes, status: int) -> None:
    conn = connection()
    events = conn.receive(data, 0.0)
    if name == "HTTP/2 preface":
        assert refusal(events) in {400, 505}
    else:
        assert refusal(events) == status, events
    assert requests(events) == []
    assert conn.receive(GET, 0.0) == []
    assert conn.deadline_s() is None


def test_content_length_over_the_limit_is_refused_before_the_body() -> None:
    (event,) = receive(post(b"", b"Content-Length: 11"), body_bytes=10)
    refused = BadRequest(413, "the request body is over 10 bytes", "request_too_large", "/v1/x")
    assert event == refused


def test_chunked_body_over_the_limit_is_refused() -> None:
    events = receive(post(b"6\r\nabcdef\r\n5\r\nghijk\r\n", b"Transfer-Encoding: chunked"), body_bytes=10)
    assert refusal(events) == 413


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + b"a" * 3000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"H%d: %d\r\n" % (n, n) for n in range(200)) + b"\r\n",
        b"\r\n" * 3000,
    ],
)
@pytest.mark.parametrize("step", [1, 7, 100000])
def test_headers_over_the_limit_are_refused(data: bytes, step: int) -> None:
    conn = connection(header_bytes=1000)
    events: list[Event] = []
    for at in range(0, len(data), step):
        events += conn.receive(data[at : at + step], 0.0)
    assert refusal(events) == 431


def test_too_many_headers_are_refused() -> None:
    data = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100 + b"\r\n"
    assert refusal(receive(data)) == 431


def test_a_chunk_extension_without_end_is_refused() -> None:
    conn = connection(header_bytes=1000)
    events = conn.receive(post(b"1;", b"Transfer-Encoding: chunked"), 0.0)
    for _ in range(20):
        events += conn.receive(b"x" * 100, 0.0)
    assert refusal(events) == 400


def test_one_byte_chunks_are_served() -> None:
    body = b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n"
    (request,) = requests(receive(post(body, b"Transfer-Encoding: chunked"), header_bytes=1000))
    assert request.body == b"x" * 5000


@pytest.mark.parametrize(
    "data",
    [
        post(b"%x\r\n%b\r\n" % (40_000, b"\r\n\r\n" * 10_000), b"Transfer-Encoding: chunked"),
        post(b"5\r\na\r\n\r\n\r\n" * 10_000, b"Transfer-Encoding: chunked"),
        post(b"05;a\r\na\r\n\r\n\r\n" * 10_000, b"Transfer-Encoding: chunked"),
        post(
            b"14\r\n" + b"\r\n\r\n" * 5 + b"\r\n0014;b=c\r\n" + b"0\r\n\r\n" * 4 + b"\r\n",
            b"Transfer-Encoding: chunked",
        ),
        b"\r\n\r\n" * 10_000,
    ],
    ids=["one chunk", "short chunks", "extensions", "an end inside", "empty lines before a request"],
)
def test_runs_of_blank_lines_are_parsed_in_few_steps(data: bytes, watch_calls: WatchCalls) -> None:
    fed = watch_calls(MessageParser, "feed")
    end = b"0\r\nTrailer: t\r\n\r\n" if data.startswith(b"POST") else b""
    events = receive(data + end + GET)
    assert refusal(events) is None
    assert requests(events)[-1].path == "/health"
    assert len(fed) <= 4


def test_bytes_behind_the_body_are_refused() -> None:
    parser = MessageParser(Limits())
    parser.feed(memoryview(GET + b"\r\n"))
    faults = [parser.fault]
    parser.feed(memoryview(GET + GET))
    faults.append(parser.fault)
    assert faults == [None, BadRequest(400, "malformed HTTP: bytes behind the body")]
    assert len(parser.take_requests()) == 2


def test_reading_pauses_at_the_pipeline_limit_and_resumes() -> None:
    conn = connection(pipelined_requests=3)
    events = conn.receive(GET * 10, 0.0)
    assert len(requests(events)) == 3
    assert not conn.wants_read
    assert conn.deadline_s() is None
    served = 3
    while served < 10:
        events = conn.request_done(0.0)
        assert len(requests(events)) == 1
        served += 1
    assert conn.request_done(0.0) == []
    assert conn.wants_read


def test_a_head_split_at_its_end_respects_the_pipeline_limit() -> None:
    conn = connection(pipelined_requests=1)
    assert conn.receive(GET[:-1], 0.0) == []
    assert len(requests(conn.receive(GET[-1:] + GET, 0.0))) == 1


def test_waiting_bodies_are_bounded_together() -> None:
    conn = connection(body_bytes=10)
    events = conn.receive(post(b"abcdef", b"Content-Length: 6") * 4, 0.0)
    assert len(requests(events)) == 2
    assert not conn.wants_read


@pytest.mark.parametrize(
    ("version", "connection_header", "keep_alive"),
    [
        (b"1.1", b"X: y", True),
        (b"1.1", b"Connection: close", False),
        (b"1.1", b"Connection: x, Close", False),
        (b"1.0", b"X: y", False),
        (b"1.0", b"Connection: keep-alive", True),
    ],
)
def test_keep_alive_follows_version_and_connection_header(
    version: bytes, connection_header: bytes, keep_alive: bool
) -> None:
    one = b"\r\n".join((b"GET / HTTP/" + version, b"Host: x", connection_header, b"", b""))
    events = receive(one + one)
    assert [request.head.keep_alive for request in requests(events)] == [keep_alive] * (1 + keep_alive)
    assert refusal(events) is None


def test_http_1_0_needs_no_host() -> None:
    assert len(requests(receive(b"GET / HTTP/1.0\r\n\r\n"))) == 1


def test_an_upgrade_request_is_served_without_the_upgrade() -> None:
    upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    posted = post(b"ab", b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 2")
    chunked = post(
        b"2\r\nxy\r\n0\r\n\r\n", b"Connection: Upgrade", b"Upgrade: h2c", b"Transfer-Encoding: chunked"
    )
    events = receive(upgrade + posted + chunked + GET)
    assert [request.body for request in requests(events)] == [b"", b"ab", b"xy", b""]
    assert refusal(events) is None


@pytest.mark.parametrize(
    ("version", "length", "expects"), [(b"1.1", 2, True), (b"1.0", 2, False), (b"1.1", 0, False)]
)
def test_expect_continue_is_recognized_by_version_and_length(
    version: bytes, length: int, expects: bool
) -> None:
    events = receive(post(b"", b"Expect: 100-Continue", b"Content-Length: %d" % length, version=version))
    head = events[0]
    assert isinstance(head, RequestHead)
    assert head.expects_continue is expects


def test_a_half_close_ends_the_requests() -> None:
    assert connection().receive_eof() == [ConnectionClosed(CloseReason.EOF)]
    conn = connection()
    conn.receive(GET[:10], 0.0)
    assert conn.receive_eof() == [ConnectionClosed(CloseReason.EOF_IN_REQUEST)]
    assert conn.receive_eof() == []


def test_slow_headers_time_out_despite_steady_bytes() -> None:
    conn = connection(header_s=10)
    now_s = 5.0
    for byte in b"GET / HT":
        assert conn.receive(bytes([byte]), now_s) == []
        now_s += 1
    assert conn.deadline_s() == 15
    assert conn.on_time(14.9) == []
    assert refusal(conn.on_time(15)) == 408
    assert conn.on_time(100) == []


def test_a_slow_body_times_out_and_a_steady_one_does_not() -> None:
    conn = connection(body_s=30, body_bytes_per_s=100)
    conn.receive(post(b"", b"Content-Length: 10000"), 1.0)
    assert conn.deadline_s() == 31
    conn.receive(b"x" * 5000, 20.0)
    assert conn.deadline_s() == 50, "what came fast is no licence to stand still"
    for now_s in range(21, 60):
        conn.receive(b"x" * 101, now_s)
    assert conn.deadline_s() == 59 + 30
    conn.receive(b"x" * 50, 80.0)
    assert conn.deadline_s() == 89.5, "half a second's worth of bytes"
    assert conn.on_time(89.4) == []
    assert conn.on_time(89.5) == [BadRequest(408, RATE, "upload_too_slow", "/v1/x")]


def test_held_bytes_of_an_unfinished_request_are_reported() -> None:
    conn = connection(pipelined_requests=1)
    head = post(b"", b"Content-Length: 900")
    conn.receive(head[:20], 0.0)
    assert conn.unfinished_bytes == 20
    conn.receive(head[20:] + b"x" * 500, 0.0)
    assert conn.unfinished_bytes == len(head) + 500
    (request,) = requests(conn.receive(b"x" * 400 + GET, 0.0))
    assert request.held_bytes == len(head) + 900
    assert conn.unfinished_bytes == len(GET), "read, and not parsed before there is an answer"
    conn.end()
    assert conn.unfinished_bytes == 0
    assert conn.receive(GET, 0.0) == []


def test_an_idle_connection_closes_without_an_answer() -> None:
    conn = connection(header_s=10, idle_s=75)
    assert conn.on_time(74.9) == [], "one that was opened ahead of its request is no slow request"
    assert conn.on_time(75) == [ConnectionClosed(CloseReason.IDLE)]
    conn = connection(header_s=10, idle_s=75)
    conn.receive(GET, 1.0)
    assert conn.deadline_s() is None  # the answer is ours to give
    conn.request_done(50.0)
    assert conn.deadline_s() == 125
    assert conn.is_idle
    assert conn.on_time(125) == [ConnectionClosed(CloseReason.IDLE)]


def test_no_timeout_runs_while_reading_is_paused() -> None:
    conn = connection(pipelined_requests=1, header_s=10)
    conn.receive(GET + GET[:5], 0.0)
    assert conn.deadline_s() is None
    conn.request_done(1000.0)
    assert conn.deadline_s() == 1010


def test_answering_more_than_was_requested_is_an_error() -> None:
    with pytest.raises(IndexError):
        connection().request_done(0.0)


@pytest.mark.parametrize(
    "limits",
    [{"header_s": 0}, {"body_bytes": -1}, {"idle_s": float("nan")}, {"low_water_bytes": 64 * 1024}],
)
def test_invalid_limits_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        Limits(**limits)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(limits))
