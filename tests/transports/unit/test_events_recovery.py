"""Questions to a worker, and answers in pieces: whole, or not at all, in bounded time."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import Held, KvBatch, KvSnapshot, pack_hashes
from kvrouter.core.ids import DpRank, Epoch, EventId, WorkerId, WorkerRank
from kvrouter.transports.events.encoding import (
    RANGE_MAX_BYTES,
    SNAPSHOT_MAX_BYTES,
    Answer,
    Busy,
    FirstPiece,
    Piece,
    PieceQuestion,
    SnapshotQuestion,
    TransferGone,
    WholeAnswer,
    decode_answer,
    encode_answer,
    encode_question,
    encode_snapshot,
    snapshot_max_bytes,
)
from kvrouter.transports.events.port import AnswerTooLarge
from kvrouter.transports.events.recovery import (
    ENVELOPE_BYTES,
    TRANSFER_IDLE_S,
    Ask,
    RecoveryAnswers,
    RecoveryQuestions,
)
from tests.testing.virtual_time import run_in_virtual_time

RANK = WorkerRank(WorkerId(3), DpRank(0))
FRAME_MAX_BYTES = ENVELOPE_BYTES + 100


class Source:
    def __init__(self, n_blocks: int) -> None:
        names = pack_hashes(range(n_blocks))
        self.snapshot = KvSnapshot(RANK, Epoch(1), EventId(4), (Held(names, names),) if n_blocks else ())
        self.asked = 0

    def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        return None

    def recover_snapshot(self, rank: WorkerRank) -> KvSnapshot | None:
        self.asked += 1
        return self.snapshot


class Wire:
    """Carries questions to a desk; ``change`` may put another answer in the place of one."""

    def __init__(self, n_blocks: int = 100, change: Callable[[Answer], Answer] | None = None) -> None:
        self.source = Source(n_blocks)
        self.desk = RecoveryAnswers(transfers_max=2)
        self.desk.serve(RANK.worker_id, self.source)
        self.now_s = 0.0
        self.change = change

    def answer(self, question: bytes) -> Answer:
        frame = self.desk.answer(question, frame_max_bytes=FRAME_MAX_BYTES, now_s=self.now_s)
        assert len(frame) <= FRAME_MAX_BYTES
        answer = decode_answer(frame)
        return answer if self.change is None else self.change(answer)

    async def ask(self, question: bytes) -> bytes | None:
        return encode_answer(self.answer(question))

    def begin(self) -> Answer:
        return self.answer(encode_question(SnapshotQuestion(RANK)))


def questions_by(ask: Ask) -> RecoveryQuestions:
    return RecoveryQuestions(lambda _rank: ask, timeout_s=5.0)


@given(st.integers(0, 200))
def test_an_answer_of_any_size_arrives_whole(n_blocks: int) -> None:
    wire = Wire(n_blocks)
    assert asyncio.run(questions_by(wire.ask).recover_snapshot(RANK)) == wire.source.snapshot
    assert asyncio.run(questions_by(wire.ask).recover_snapshot(RANK)) == wire.source.snapshot
    for _ in range(2):
        assert isinstance(wire.begin(), WholeAnswer | FirstPiece), "the transfers before are over"


@pytest.mark.parametrize(
    "wrong",
    [
        Piece(2, b"x" * 100),
        Piece(1, b"x" * 99),
        Piece(1, b""),
        WholeAnswer(b""),
        Busy(),
        FirstPiece(1, 500, 0, b"x" * 100),
    ],
)
async def test_wrong_piece_is_a_protocol_error(wrong: Answer) -> None:
    wire = Wire(change=lambda answer: wrong if isinstance(answer, Piece) and answer.number == 1 else answer)
    with pytest.raises(ProtocolError, match="piece 1 of 100 bytes"):
        await questions_by(wire.ask).recover_snapshot(RANK)


async def test_pieces_with_a_wrong_checksum_are_a_protocol_error() -> None:
    def turned(answer: Answer) -> Answer:
        return Piece(answer.number, answer.body[::-1]) if isinstance(answer, Piece) else answer

    with pytest.raises(ProtocolError) as caught:
        await questions_by(Wire(change=turned).ask).recover_snapshot(RANK)
    assert caught.value.param == "crc32"


@pytest.mark.parametrize(
    "first",
    [
        FirstPiece(1, SNAPSHOT_MAX_BYTES + 1, 0, b"x" * 100),
        FirstPiece(1, 100, 0, b""),
        FirstPiece(1, 100, 0, b"x" * 100),
        FirstPiece(1, -5, 0, b"x"),
    ],
)
async def test_impossible_total_sizes_are_a_protocol_error(first: FirstPiece) -> None:
    with pytest.raises(ProtocolError) as caught:
        await questions_by(Wire(change=lambda _: first).ask).recover_snapshot(RANK)
    assert caught.value.param == "total_bytes"


@pytest.mark.parametrize(
    "answer", [Piece(1, b""), TransferGone(), WholeAnswer(b"\x00 no snapshot"), WholeAnswer(b"")]
)
async def test_invalid_answer_is_a_protocol_error(answer: Answer) -> None:
    with pytest.raises(ProtocolError):
        await questions_by(Wire(change=lambda _: answer).ask).recover_snapshot(RANK)


async def test_transfer_that_ends_midway_returns_none() -> None:
    wire = Wire(
        change=lambda answer: TransferGone() if isinstance(answer, Piece) and answer.number == 3 else answer
    )
    assert await questions_by(wire.ask).recover_snapshot(RANK) is None


def test_missing_answer_returns_none_after_the_timeout() -> None:
    async def never(_question: bytes) -> bytes | None:
        await asyncio.Event().wait()
        return None

    async def timed() -> float:
        assert await questions_by(never).recover_snapshot(RANK) is None
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(timed()) == pytest.approx(5.0)


def test_timeout_of_a_large_answer_applies_to_each_piece() -> None:
    wire = Wire()
    n_pieces = 3

    async def slow(question: bytes) -> bytes | None:
        nonlocal n_pieces
        await asyncio.sleep(4.0 if n_pieces else 6.0)
        n_pieces -= 1
        return await wire.ask(question)

    async def timed() -> float:
        assert await questions_by(slow).recover_snapshot(RANK) is None
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(timed()) == pytest.approx(17.0), "it falls silent after the third piece"
    n_pieces = 10_000
    assert run_in_virtual_time(questions_by(slow).recover_snapshot(RANK)) == wire.source.snapshot


def test_worker_with_too_many_transfers_is_busy_and_asked_again() -> None:
    wire = Wire()
    begun = [wire.begin() for _ in range(3)]
    assert [type(answer) for answer in begun] == [FirstPiece, FirstPiece, Busy]
    assert wire.source.asked == 2

    async def ask_again() -> KvSnapshot | None:
        asking = asyncio.create_task(questions_by(wire.ask).recover_snapshot(RANK))
        await asyncio.sleep(2.0)
        assert not asking.done()
        wire.now_s += TRANSFER_IDLE_S + 1.0
        return await asking

    assert run_in_virtual_time(ask_again()) == wire.source.snapshot, "others were given up"
    for answer in begun[:2]:
        assert isinstance(answer, FirstPiece)
        assert wire.answer(encode_question(PieceQuestion(answer.transfer, 1))) == TransferGone()


@pytest.mark.parametrize("number", [-1, 0, 17, 10**12])
def test_asking_for_an_absent_piece_ends_the_transfer(number: int) -> None:
    wire = Wire()
    first = wire.begin()
    assert isinstance(first, FirstPiece)
    assert wire.answer(encode_question(PieceQuestion(first.transfer, number))) == TransferGone()
    assert wire.answer(encode_question(PieceQuestion(first.transfer, 1))) == TransferGone()


def test_a_transfer_is_kept_while_its_pieces_are_asked_for() -> None:
    wire = Wire()
    first = wire.begin()
    assert isinstance(first, FirstPiece)
    for number in (1, 2, 3):
        wire.now_s += TRANSFER_IDLE_S - 1.0
        wire.begin()
        assert wire.answer(encode_question(PieceQuestion(first.transfer, number))) != TransferGone()


@pytest.mark.parametrize("frame", [b"", b"\xc0", b"\x81\xa4type\xa5other", b"x" * 50])
def test_invalid_question_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        Wire().desk.answer(frame, frame_max_bytes=FRAME_MAX_BYTES, now_s=0.0)


async def test_too_large_snapshot_is_refused_at_its_first_piece() -> None:
    first = FirstPiece(1, snapshot_max_bytes(2_000) + 1, 0, b"x" * 100)
    wire = Wire(change=lambda _: first)
    n_asked = 0

    async def ask(question: bytes) -> bytes | None:
        nonlocal n_asked
        n_asked += 1
        return await wire.ask(question)

    with pytest.raises(AnswerTooLarge):
        await questions_by(ask).recover_snapshot(RANK, blocks_max=2_000)
    assert n_asked == 1


async def test_too_large_range_returns_none() -> None:
    first = FirstPiece(1, RANGE_MAX_BYTES + 1, 0, b"x" * 100)
    wire = Wire(change=lambda _: first)
    assert await questions_by(wire.ask).recover_range(RANK, EventId(0), EventId(3)) is None


@given(st.lists(st.integers(1, 3_000), max_size=60))
def test_snapshot_of_any_columns_fits_the_size_limit(blocks: list[int]) -> None:
    """However the index cuts its columns: events of few blocks are few."""
    names = [pack_hashes(range(n_blocks)) for n_blocks in blocks]
    snapshot = KvSnapshot(RANK, Epoch(2**63), EventId(2**62), tuple(Held(each, each) for each in names))
    assert len(encode_snapshot(snapshot)) <= snapshot_max_bytes(sum(blocks))
