"""The session of requests, whatever its peer sends: no error but the protocol's, no token twice or lost."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.byte_budget import ByteBudget
from kvrouter.core.errors import KvrouterError, ProtocolError
from kvrouter.core.ids import Epoch, WorkerId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason
from kvrouter.transports.requests.frames import (
    TO_WORKER,
    FrameKind,
    encode_cancel,
    encode_credits,
    encode_refused,
    encoder,
    frame,
    goodbye,
)
from kvrouter.transports.requests.handshake import Hello, Secret, greeting, hello
from kvrouter.transports.requests.nats.transport import FromRouter, NatsPipe, PipePublisher
from kvrouter.transports.requests.port import StreamBroken, WorkerFull, WorkerUnreachable
from kvrouter.transports.requests.session import (
    READING_FULL,
    RouterHello,
    RouterLimits,
    RouterSession,
    Session,
)
from kvrouter.transports.requests.worker_session import (
    Answer,
    WorkerHello,
    WorkerLimits,
    WorkerSession,
    WorkerSide,
)
from tests.testing.engine_requests import plain_leg
from tests.testing.tcp_peers import encode_open

CREDIT_TOKENS = 8
ROUTER_LIMITS = RouterLimits(
    heartbeat_s=1.0,
    dead_after_s=3.0,
    slow_stream_limit_s=5.0,
    idle_close_s=10.0,
    stream_credit_tokens=CREDIT_TOKENS,
    streams_max=4,
    write_max_bytes=1 << 20,
)
WORKER_LIMITS = WorkerLimits(heartbeat_s=1.0, dead_after_s=3.0, streams_max=4)
SECRET = Secret("t")
REQUEST = plain_leg(max_tokens=5, time_left_s=60.0)


@dataclass
class Stream:
    """A leg at its router that keeps what came, and gives credit for it at once."""

    session: "RouterSession[Stream]"
    stream_id: int
    credit_tokens: int
    request: EngineRequest
    is_accepted: bool = False
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: KvrouterError | None = None

    def accept(self) -> None:
        self.is_accepted = True

    def push_tokens(self, token_ids: tuple[int, ...]) -> None:
        n_tokens = len(token_ids) or 1
        if n_tokens > CREDIT_TOKENS:
            raise ProtocolError("over", param="token_ids")
        self.tokens += token_ids
        self.session.give_credit(self.stream_id, n_tokens)

    def push(self, chunk: EngineChunk) -> None:
        self.push_tokens(chunk.token_ids)
        self.finish = chunk.finish

    def fail(self, error: KvrouterError) -> None:
        self.error = error

    def unread_for_s(self, _now_s: float) -> float:
        return 0.0

    def break_off(self, why: str) -> None:
        self.error = StreamBroken(why) if self.is_accepted else WorkerUnreachable(why)

    def withdraw(self, error: KvrouterError) -> None:
        raise AssertionError(error)


@dataclass
class Side:
    """A worker that notes what is asked of it."""

    session: WorkerSession | None = None
    answers: list[Answer] = field(default_factory=list)
    requests: list[EngineRequest] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    why: list[str] = field(default_factory=list)

    def begin(self, stream_id: int, credit_tokens: int, request: EngineRequest) -> Answer:
        assert self.session is not None
        self.requests.append(request)
        self.answers.append(Answer(self.session, stream_id, credit_tokens))
        return self.answers[-1]

    def cancel(self, stream_id: int, _reason: str) -> None:
        self.cancelled.append(stream_id)

    def ended(self, reason: str) -> None:
        self.why.append(reason)


def new_router(*, has_hello: bool = True) -> tuple[RouterSession[Stream], list[str]]:
    ends: list[str] = []
    router_hello = RouterHello(SECRET, b"m" * 16, WorkerId(1), Epoch(1)) if has_hello else None
    session = RouterSession(
        "worker",
        ROUTER_LIMITS,
        router_hello=router_hello,
        new_stream=Stream,
        wake=lambda: None,
        is_wanted=lambda: False,
        on_welcome=lambda: None,
        on_end=ends.append,
        on_refused=lambda _why: None,
    )
    return session, ends


def new_worker(
    *, has_hello: bool = True, mistakes: list[str] | None = None, budget: ByteBudget | None = None
) -> tuple[WorkerSession, Side]:
    side = Side()

    def admit(_said: Hello) -> WorkerSide | str:
        return side

    def fail(message: str, error: Exception) -> None:
        if mistakes is None:
            raise AssertionError(message) from error
        mistakes.append(message)

    session = side.session = WorkerSession(
        WORKER_LIMITS,
        worker_hello=WorkerHello(SECRET, b"n" * 16, admit) if has_hello else None,
        wake=lambda: None,
        on_refused=lambda _why: None,
        on_mistake=fail,
        budget=budget,
    )
    if not has_hello:
        session.side = side
    return session, side


def carry(one: Session, other: Session, cut: Callable[[int], int] = lambda n_bytes: n_bytes) -> None:
    """Carry what both have to say until neither has more."""
    while True:
        to_other, to_one = one.take_output(), other.take_output()
        if not to_other and not to_one:
            return
        for session, data in ((other, to_other), (one, to_one)):
            at = 0
            while at < len(data):
                end = at + cut(len(data) - at)
                session.receive(data[at:end])
                at = end


def cutter(data: st.DataObject) -> Callable[[int], int]:
    return lambda n_bytes: data.draw(st.integers(1, n_bytes))


TOKEN_RUNS = st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20), max_size=8)


@settings(max_examples=100)
@given(has_hello=st.booleans(), runs=TOKEN_RUNS, data=st.data())
def test_tokens_arrive_once_and_in_order_however_the_bytes_are_cut(
    has_hello: bool, runs: list[list[int]], data: st.DataObject
) -> None:
    router, _ = new_router(has_hello=has_hello)
    worker, side = new_worker(has_hello=has_hello)
    cut = cutter(data)
    carry(router, worker, cut)
    stream = router.open(REQUEST, 0)
    carry(router, worker, cut)
    assert side.requests == [REQUEST]
    worker.accept(0)
    (answer,) = side.answers
    for run in runs:
        chunk: EngineChunk | None = EngineChunk(tuple(run))
        while chunk is not None:
            if not answer.has_room(len(chunk.token_ids)):
                carry(router, worker, cut)
            rest = answer.rest_of(chunk)
            if rest is None:
                answer.send_chunk(chunk)
            chunk = rest
    answer.send_chunk(EngineChunk(finish=FinishReason.STOP))
    carry(router, worker, cut)
    assert stream.is_accepted
    assert stream.tokens == [token for run in runs for token in run]
    assert stream.finish is FinishReason.STOP
    assert not router.is_closed
    assert not worker.is_closed


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame that is right, or nearly, or not at all; with a length that may lie."""
    number = draw(st.integers(0, 3))
    body = draw(
        st.sampled_from(
            [
                b"",
                encoder.encode(number),
                encode_cancel(number, "why"),
                encode_credits({number: 5}),
                encoder.encode([(number, (1, 2), None)]),
                encoder.encode([(number, tuple(range(40)), None)]),
                encode_refused(number, WorkerFull("full")),
                encode_open(number, 5, REQUEST),
                encode_open(number, 5, REQUEST)[:-3] + b"xyz",
                greeting(b"n" * 16),
                hello(SECRET, b"n" * 16, b"m" * 16, 1, 1),
                b"\x91" * 5000,
            ]
        )
        | st.binary(max_size=60)
    )
    kind = draw(st.sampled_from(FrameKind))
    whole = frame(kind, body)
    if draw(st.booleans()):
        return whole
    return draw(st.binary(min_size=4, max_size=4)) + whole[4:]


@settings(max_examples=300)
@given(has_hello=st.booleans(), said=st.lists(frames(), max_size=12), data=st.data())
def test_worker_session_goes_on_or_closes_once_on_any_router_input(
    has_hello: bool, said: list[bytes], data: st.DataObject
) -> None:
    router, _ = new_router(has_hello=has_hello)
    worker, side = new_worker(has_hello=has_hello)
    if data.draw(st.booleans()):
        carry(router, worker)
        router.open(REQUEST, 0)
        carry(router, worker)
    _hear(worker, b"".join(said), data)
    assert len(side.why) <= 1
    assert len(side.requests) <= len(said) + 1


@settings(max_examples=300)
@given(has_hello=st.booleans(), said=st.lists(frames(), max_size=12), data=st.data())
def test_router_session_goes_on_or_breaks_streams_on_any_worker_input(
    has_hello: bool, said: list[bytes], data: st.DataObject
) -> None:
    router, ends = new_router(has_hello=has_hello)
    worker, _ = new_worker(has_hello=has_hello)
    carry(router, worker)
    streams = [router.open(REQUEST, 0) for _ in range(2)]
    router.take_output()
    _hear(router, b"".join(said), data)
    assert len(ends) == router.is_closed
    for stream in streams:
        if router.is_closed and stream.error is None and stream.finish is None:
            raise AssertionError("a stream that nobody ends")


def _hear(session: Session, said: bytes, data: st.DataObject) -> None:
    while said:
        n_bytes = data.draw(st.integers(1, len(said)))
        session.receive(said[:n_bytes])
        session.take_output()
        said = said[n_bytes:]


@given(said=st.lists(st.sampled_from(range(4)), max_size=12))
def test_lost_repeated_or_reordered_message_ends_the_session(said: list[int]) -> None:
    class Unsent(PipePublisher):
        def __init__(self) -> None:
            """It publishes nothing."""

        def wake(self, pipe: NatsPipe) -> None:
            """Nothing is sent."""

    worker, side = new_worker(has_hello=False)
    pipe = NatsPipe(Unsent(), "s", "", (1, 1))
    pipe.session = worker
    for heard, number in enumerate(said):
        pipe.receive(FromRouter("r", 0, number, is_sign=False, data=frame(FrameKind.PONG)))
        if worker.is_closed:
            assert number != heard
            assert side.why == ["a message was lost on the way"]
            return
        assert number == heard


def test_silent_worker_is_pinged_before_the_session_ends() -> None:
    router, ends = new_router(has_hello=False)
    stream = router.open(REQUEST, 0)
    stream.accept()
    router.take_output()
    said = []
    for now_s in range(1, 6):
        router.tick(float(now_s))
        said.append(router.take_output())
    why = "nothing was heard for 3 s"
    assert said == [b"", frame(FrameKind.PING), frame(FrameKind.PING), goodbye(why), b""]
    assert ends == [f"worker: {why}"]
    assert isinstance(stream.error, StreamBroken)
    with pytest.raises(WorkerUnreachable):
        router.open(REQUEST, 0)


def test_router_giving_up_over_messages_closes_the_worker_session() -> None:
    router, _ = new_router(has_hello=False)
    worker, side = new_worker(has_hello=False)
    router.open(REQUEST, 0)
    worker.receive(router.take_output())
    assert len(side.requests) == 1
    router.give_up("nobody serves it")
    worker.receive(router.take_output())
    assert worker.is_closed
    assert len(side.why) == 1


def test_router_giving_up_over_a_connection_sends_nothing_more() -> None:
    router, _ = new_router()
    router.take_output()
    router.give_up("nothing was heard")
    assert (router.is_lost, router.take_output()) == (True, b"")


@pytest.mark.parametrize("token", [object(), 2**70])
def test_token_that_cannot_be_encoded_fails_only_its_own_leg(token: int) -> None:
    mistakes: list[str] = []
    router, _ = new_router(has_hello=False)
    worker, side = new_worker(has_hello=False, mistakes=mistakes)
    odd, good = router.open(REQUEST, 0), router.open(REQUEST, 0)
    carry(router, worker)
    worker.accept(odd.stream_id)
    worker.accept(good.stream_id)
    worker.send_tokens(good.stream_id, (5,))
    worker.send_tokens(odd.stream_id, (token,))
    worker.send_tokens(good.stream_id, (6,))
    carry(router, worker)
    assert isinstance(odd.error, StreamBroken)
    assert (odd.tokens, side.cancelled) == ([], [odd.stream_id])
    assert (good.tokens, good.error) == ([5, 6], None)
    assert mistakes == ["tokens cannot travel"]
    assert not worker.is_closed


def test_session_lost_while_gathering_output_sends_nothing() -> None:
    class LostAtOnce(Session):
        def gather(self) -> None:
            self.lose("lost")

        def ended(self, reason: str) -> None:
            """Nobody wants to know."""

    def new_session() -> LostAtOnce:
        return LostAtOnce(
            kinds=TO_WORKER, has_opening=False, dead_after_s=3.0, pending=("item",), wake=lambda: None
        )

    sends, closes = new_session(), new_session()
    sends.send(FrameKind.PING)
    closes.close("why")
    for session in (sends, closes):
        assert session.is_lost
        assert session.take_output() == b""


def test_partial_requests_share_a_byte_budget_and_the_largest_is_dropped() -> None:
    budget = ByteBudget(1_000)
    (first, _), (second, side), (third, _) = (new_worker(has_hello=False, budget=budget) for _ in range(3))
    part = frame(FrameKind.OPEN, b"x" * 5_000)[:200]
    whole = frame(FrameKind.OPEN, encode_open(0, 5, REQUEST))
    first.receive(part)
    second.receive(whole[:-1])
    third.receive(part + b"x" * 300)
    assert budget.bytes == 200 + len(whole) - 1 + 500
    first.receive(b"x" * 200)
    assert (third.is_closed, third.take_output()) == (True, goodbye(READING_FULL))
    assert budget.bytes == 400 + len(whole) - 1
    second.receive(whole[-1:])
    assert side.requests == [REQUEST]
    assert budget.bytes == 400
    first.lose("gone")
    third.receive(b"x" * 5_000)
    assert budget.bytes == 0


def test_idle_session_sends_a_sign_of_life() -> None:
    worker, _ = new_worker(has_hello=False)
    said = []
    for now_s in range(1, 7):
        worker.receive(frame(FrameKind.PONG))
        worker.tick(float(now_s))
        said.append(worker.take_output())
    assert said == [frame(FrameKind.PONG), b""] * 3
    assert not worker.is_closed
