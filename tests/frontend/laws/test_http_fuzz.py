"""Whatever bytes come, in whatever pieces: events, never an exception, never more of them than allowed."""

from itertools import pairwise
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.frontend.http.connection import ChunkScanner, ServerConnection
from kvrouter.frontend.http.limits import Limits
from kvrouter.frontend.http.response import BadRequest, ConnectionClosed, Event, Request, RequestHead

LIMITS = Limits(header_bytes=400, body_bytes=60, headers=10, pipelined_requests=3)

CORPUS = Path(__file__).parents[2] / "data" / "http-corpus"
FRAGMENT_BYTES_MAX = 200

FRAGMENTS = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"HEAD /a%20b?c HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
        b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\n",
        b"CONNECT h:1 HTTP/1.1\r\n\r\n",
        b"Content-Length: 99\r\n",
        b"Connection: close\r\n",
        b"3\r\nabc\r\n",
        b"0\r\n\r\n",
        b"0\r\nTrailer: x\r\n\r\n",
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
        b"\r",
        b"\x00",
        b"GET ",
        b"A" * 150,
        *sorted(
            path.read_bytes() for path in CORPUS.glob("*.http") if path.stat().st_size < FRAGMENT_BYTES_MAX
        ),
    ]
)
STREAMS = st.lists(FRAGMENTS | st.binary(max_size=20), max_size=12).map(b"".join)
CUTS = st.lists(st.integers(1, 60), min_size=1, max_size=20)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    out, at, turn = [], 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        out.append(data[at : at + size])
        at, turn = at + size, turn + 1
    return out


def feed(parts: list[bytes], *, answer_at_once: bool) -> list[Event]:
    """All events; a full connection is answered, as a server would, before it gets more."""
    conn = ServerConnection(LIMITS, now_s=0.0)
    events: list[Event] = []
    waiting = 0

    def take(new: list[Event]) -> None:
        nonlocal waiting
        events.extend(new)
        waiting += sum(isinstance(event, Request) for event in new)
        assert waiting <= LIMITS.pipelined_requests

    for part in parts:
        take(conn.receive(part, 0.0))
        while waiting and (answer_at_once or not conn.wants_read):
            waiting -= 1
            take(conn.request_done(0.0))
        assert conn.wants_read
    while waiting:
        waiting -= 1
        take(conn.request_done(0.0))
    take(conn.receive_eof())
    take(conn.on_time(1e9))
    return events


@given(STREAMS, CUTS)
@example(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 9, [1000])
def test_any_bytes_give_events_in_a_valid_order(data: bytes, cuts: list[int]) -> None:
    events = feed(pieces(data, cuts), answer_at_once=False)
    for event, following in pairwise(events):
        assert not isinstance(event, BadRequest | ConnectionClosed), "the last event was not last"
        if isinstance(event, RequestHead):
            assert isinstance(following, Request | BadRequest | ConnectionClosed)
            if isinstance(following, Request):
                assert following.head == event
    for event in events:
        if isinstance(event, Request):
            assert len(event.body) <= LIMITS.body_bytes


@given(STREAMS, CUTS)
def test_events_do_not_depend_on_how_bytes_are_split(data: bytes, cuts: list[int]) -> None:
    def meaning(events: list[Event]) -> list[object]:
        """A refusal's wording may differ with the cutting; nothing else may."""
        return [event.status if isinstance(event, BadRequest) else event for event in events]

    whole = meaning(feed([data] if data else [], answer_at_once=False))
    assert meaning(feed(pieces(data, cuts), answer_at_once=False)) == whole
    assert meaning(feed(pieces(data, cuts), answer_at_once=True)) == whole


BODIES = st.binary(max_size=60) | st.text("\r\n0;", max_size=60).map(str.encode)
LINES = st.tuples(st.integers(0, 40), st.sampled_from([b"", b";a", b';a="b c";d', b";" + b"e" * 70]))


@given(st.lists(st.lists(BODIES.filter(bool), max_size=5), max_size=4), st.lists(LINES, min_size=1), CUTS)
def test_the_end_of_a_chunked_body_is_found(
    bodies: list[list[bytes]], lines: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    for body in bodies:
        data = b""
        for nth, chunk in enumerate([*body, b""]):
            zeros, extension = lines[nth % len(lines)]
            data += b"0" * zeros + b"%x%b\r\n" % (len(chunk), extension) + chunk + b"\r\n" * bool(chunk)
        data += b"Trailer: 0\r\n" * (len(body) % 3) + b"\r\n"
        walk, done = ChunkScanner(), 0
        for part in pieces(data + b"GET / HTTP/1.1\r\n", cuts):
            end = walk.end(b"1\r\n" + part, 3) - 3
            done += end
            if end < len(part):
                break
            if done >= len(data):
                break
        assert done == len(data)


@given(st.lists(BODIES, max_size=6), st.booleans(), CUTS)
def test_bodies_arrive_as_sent(bodies: list[bytes], chunked: bool, cuts: list[int]) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\n"
    if chunked:
        data = b"".join(
            head
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
            + b"0\r\n\r\n"
            for body in bodies
        )
    else:
        data = b"".join(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)
    events = feed(pieces(data, cuts), answer_at_once=False)
    assert [event.body for event in events if isinstance(event, Request)] == bodies
    assert not any(isinstance(event, BadRequest) for event in events)
