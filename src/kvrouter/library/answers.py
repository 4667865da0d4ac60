"""What a library caller reads of a request."""

from collections.abc import AsyncGenerator, AsyncIterable
from types import TracebackType
from typing import Self, TypedDict

from kvrouter.core.requests import EngineChunk, FinishReason, KvTransferParams
from kvrouter.planes.requests.port import EngineStream
from kvrouter.service.prefills import Prefilled

CLIENT_LEFT = "client left"


class Meeting(TypedDict):
    """Where both legs of a bootstrap handoff meet."""

    host: str
    port: int
    room: int


class Answer(TypedDict, total=False):
    """One piece of an answer; ``finish_reason`` is there in the last one.

    What a prefill worker answers ends with where the KV is that a decode worker fetches:
    ``kv_transfer_params``, or ``bootstrap`` while the leg still runs; and with who it is.
    """

    token_ids: list[int]
    finish_reason: str
    kv_transfer_params: KvTransferParams
    bootstrap: Meeting
    prefill_worker_id: int


class Answers:
    """One request's answer, piece by piece, to be read once.

    Who stops before the last piece calls ``aclose`` (or reads inside ``async with``): the engine then stops
    too. Pieces that were never asked for are no exception.
    """

    def __init__(self, pieces: AsyncGenerator[Answer, None], stream: EngineStream | None = None) -> None:
        self._pieces = pieces
        self._stream = stream
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Answer:
        piece = await anext(self._pieces)
        self._has_ended |= "finish_reason" in piece
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Read no more; what still runs for this request is cancelled. Idempotent."""
        await self._pieces.aclose()
        if self._stream is not None and not self._has_ended:  # it may not even have begun
            self._stream.cancel(CLIENT_LEFT)


def answers_of(stream: EngineStream) -> Answers:
    """The answer that an open stream brings."""
    return Answers(_read(stream), stream)


async def pieces_of(chunks: AsyncIterable[EngineChunk]) -> AsyncGenerator[Answer, None]:
    """Turn an engine's chunks into what a library caller reads."""
    async for chunk in chunks:
        piece: Answer = {"token_ids": list(chunk.token_ids)}
        if chunk.finish is not None:
            piece["finish_reason"] = chunk.finish.value
        if chunk.kv_transfer_params is not None:
            piece["kv_transfer_params"] = chunk.kv_transfer_params
        yield piece


def piece_of(prefilled: Prefilled) -> Answer:
    """What a library caller reads of a prefill leg: it is the only piece."""
    piece: Answer = {
        "token_ids": [],
        "finish_reason": FinishReason.LENGTH.value,
        "prefill_worker_id": prefilled.placement.prefill_pick.rank.worker_id,
    }
    if prefilled.kv_transfer_params is not None:
        piece["kv_transfer_params"] = prefilled.kv_transfer_params
    if prefilled.bootstrap is not None:
        at = prefilled.bootstrap
        piece["bootstrap"] = {"host": at.host, "port": at.port, "room": at.room}
    return piece


async def _read(stream: EngineStream) -> AsyncGenerator[Answer, None]:
    has_ended = False
    try:
        async for piece in pieces_of(stream):
            has_ended |= "finish_reason" in piece
            yield piece
    finally:
        if not has_ended:  # else the KV of a prefill that has ended would not wait for its decode worker
            stream.cancel(CLIENT_LEFT)
