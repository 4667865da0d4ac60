"""Recovery: questions to a worker about lost events, and answers in pieces of bounded size.

The worker has :class:`RecoveryAnswers`, the router :class:`RecoveryQuestions`. A transport carries one frame
there and one back. Large answers are pulled piece by piece at the router's pace, so that they need no queue.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from secrets import randbits
from typing import TypeVar

from kvrouter.core.errors import ProtocolError
from kvrouter.core.events import KvBatch, KvSnapshot
from kvrouter.core.ids import EventId, WorkerId, WorkerRank
from kvrouter.transports.events.encoding import (
    RANGE_MAX_BYTES,
    Answer,
    Busy,
    FirstPiece,
    Piece,
    PieceQuestion,
    Question,
    RangeQuestion,
    SnapshotQuestion,
    TransferGone,
    WholeAnswer,
    decode_answer,
    decode_question,
    decode_range,
    decode_snapshot,
    encode_answer,
    encode_question,
    encode_range,
    encode_snapshot,
    snapshot_max_bytes,
)
from kvrouter.transports.events.port import BLOCKS_MAX, AnswerTooLarge, RecoverySource, foreign
from kvrouter.transports.registered import registered

ANSWER_TIMEOUT_S = 5.0
"""How long a router waits for an answer, and for each further piece of it."""

ENVELOPE_BYTES = 256
"""Upper bound of an answer frame's bytes besides its body."""

QUESTION_MAX_BYTES = 1024
"""The largest question that a worker reads."""

TRANSFERS_MAX = 32
"""Large answers that one worker process sends concurrently."""

TRANSFER_IDLE_S = 10.0
"""Time without a request for the next piece after which an answer is dropped."""

BUSY_RETRY_S = 0.1

BatchOrSnapshot = TypeVar("BatchOrSnapshot", KvBatch, KvSnapshot)

Ask = Callable[[bytes], Awaitable[bytes | None]]
"""Carries a question to a worker and returns its answer; None without a worker to ask."""


@dataclass(slots=True)
class _Transfer:
    """A large answer in progress. Pieces are requested in order, the latest at ``asked_s``."""

    body: memoryview
    piece_bytes: int
    asked_s: float


class RecoveryAnswers:
    """Answers questions for every worker of one process. It has no clock: callers pass ``now_s``."""

    def __init__(
        self, *, transfers_max: int = TRANSFERS_MAX, transfer_idle_s: float = TRANSFER_IDLE_S
    ) -> None:
        self._transfers_max = transfers_max
        self._transfer_idle_s = transfer_idle_s
        self._sources: dict[WorkerId, RecoverySource] = {}
        self._transfers: dict[int, _Transfer] = {}

    def serve(self, worker_id: WorkerId, source: RecoverySource) -> Callable[[], None]:
        """Let ``source`` answer for the worker; return what ends it. A later source replaces it."""
        return registered(self._sources, worker_id, source)

    def serves(self, worker_id: WorkerId) -> bool:
        """Whether there is a source for the worker."""
        return worker_id in self._sources

    def answer(self, frame: bytes | memoryview, *, frame_max_bytes: int, now_s: float) -> bytes:
        """Return the answer's frame, of at most ``frame_max_bytes``; raise ProtocolError for no question."""
        question = decode_question(frame)
        if isinstance(question, PieceQuestion):
            return encode_answer(self._piece(question, now_s))
        source = self._sources.get(question.rank.worker_id)
        if isinstance(question, RangeQuestion):
            rank, first, last = question.rank, question.first, question.last
            batch = None if source is None else source.recover_range(rank, first, last)
            return encode_answer(self._begin(encode_range(batch), frame_max_bytes, now_s))
        if self._is_full(now_s):
            return encode_answer(Busy())  # before the snapshot is made
        snapshot = None if source is None else source.recover_snapshot(question.rank)
        return encode_answer(self._begin(encode_snapshot(snapshot), frame_max_bytes, now_s))

    def _begin(self, body: bytes, frame_max_bytes: int, now_s: float) -> Answer:
        piece_bytes = frame_max_bytes - ENVELOPE_BYTES
        if len(body) <= piece_bytes:
            return WholeAnswer(body)
        if self._is_full(now_s):
            return Busy()
        transfer = randbits(63)
        view = memoryview(body)
        self._transfers[transfer] = _Transfer(view, piece_bytes, now_s)
        return FirstPiece(transfer, len(body), zlib.crc32(body), bytes(view[:piece_bytes]))

    def _piece(self, question: PieceQuestion, now_s: float) -> Answer:
        transfer = self._transfers.get(question.transfer)
        if transfer is None:
            return TransferGone()
        start = question.number * transfer.piece_bytes
        end = start + transfer.piece_bytes
        if not 0 < start < len(transfer.body) or end >= len(transfer.body):
            del self._transfers[question.transfer]
        if not 0 < start < len(transfer.body):
            return TransferGone()
        transfer.asked_s = now_s
        return Piece(question.number, bytes(transfer.body[start:end]))

    def _is_full(self, now_s: float) -> bool:
        for number, transfer in list(self._transfers.items()):
            if now_s - transfer.asked_s > self._transfer_idle_s:
                del self._transfers[number]
        return len(self._transfers) >= self._transfers_max


class RecoveryQuestions:
    """Asks workers. ``ask_of`` returns what carries questions to a rank's worker; None without one to ask."""

    def __init__(
        self, ask_of: Callable[[WorkerRank], Ask | None], *, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._ask_of = ask_of
        self._timeout_s = timeout_s

    async def recover_range(self, rank: WorkerRank, first: EventId, last: EventId) -> KvBatch | None:
        """Ask for the events ``first`` to ``last``; None when they are gone, too large, or get no answer."""
        try:
            body = await self._recover(rank, RangeQuestion(rank, first, last), max_bytes=RANGE_MAX_BYTES)
        except AnswerTooLarge:
            return None
        batch = None if body is None else decode_range(body)
        return None if batch is None else answer_for(rank, batch)

    async def recover_snapshot(self, rank: WorkerRank, *, blocks_max: int = BLOCKS_MAX) -> KvSnapshot | None:
        """Ask for the rank's state; None without a worker to ask, or when it does not answer.

        Raises AnswerTooLarge for more bytes than ``blocks_max`` blocks need.
        """
        body = await self._recover(rank, SnapshotQuestion(rank), max_bytes=snapshot_max_bytes(blocks_max))
        if body is None:
            return None
        await asyncio.sleep(0)  # joining a large answer took a while, and so does decoding it
        snapshot = decode_snapshot(body)
        return None if snapshot is None else answer_for(rank, snapshot)

    async def _recover(self, rank: WorkerRank, question: Question, *, max_bytes: int) -> bytes | None:
        ask = self._ask_of(rank)
        return None if ask is None else await _recovered(ask, question, self._timeout_s, max_bytes=max_bytes)


def answer_for(rank: WorkerRank, answer: BatchOrSnapshot) -> BatchOrSnapshot:
    """Return ``answer`` to a question about ``rank``; raise ForeignRank when it is about another rank."""
    if answer.rank != rank:
        raise foreign(answer.rank, f"an answer about rank {rank}")
    return answer


async def _recovered(ask: Ask, question: Question, timeout_s: float, *, max_bytes: int) -> bytes | None:
    clock_s = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(timeout_s) as limit:
            while True:
                frame = await ask(encode_question(question))
                if frame is None:
                    return None
                match decode_answer(frame):
                    case WholeAnswer(body):
                        return body
                    case FirstPiece() as first:
                        if first.total_bytes > max_bytes:
                            raise AnswerTooLarge(
                                f"answer: {first.total_bytes} bytes are over {max_bytes}", param="total_bytes"
                            )
                        return await _pull(ask, first, lambda: limit.reschedule(clock_s() + timeout_s))
                    case Busy():
                        await asyncio.sleep(BUSY_RETRY_S)
                    case Piece() | TransferGone():
                        raise ProtocolError("answer: a piece of nothing", param="answer")
    except TimeoutError:
        return None


async def _pull(ask: Ask, first: FirstPiece, on_piece: Callable[[], None]) -> bytes | None:
    """Pull the answer that begins with ``first``; call ``on_piece`` before each piece. None if it is gone."""
    piece_bytes = len(first.body)
    if not 0 < piece_bytes < first.total_bytes:
        raise ProtocolError(
            f"answer: total_bytes: {first.total_bytes} in pieces of {piece_bytes}", param="total_bytes"
        )
    pieces, crc32 = [first.body], zlib.crc32(first.body)
    for number in range(1, -(-first.total_bytes // piece_bytes)):
        on_piece()
        frame = await ask(encode_question(PieceQuestion(first.transfer, number)))
        piece = TransferGone() if frame is None else decode_answer(frame)
        if isinstance(piece, TransferGone):
            return None
        length = min(piece_bytes, first.total_bytes - number * piece_bytes)
        if not isinstance(piece, Piece) or piece.number != number or len(piece.body) != length:
            raise ProtocolError(f"answer: not piece {number} of {length} bytes", param="piece")
        pieces.append(piece.body)
        crc32 = zlib.crc32(piece.body, crc32)
    if crc32 != first.crc32:
        raise ProtocolError("answer: its pieces do not make the whole that was announced", param="crc32")
    return b"".join(pieces)
