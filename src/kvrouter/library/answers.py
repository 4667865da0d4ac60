"""What a library caller reads of a request."""

from collections.abc import AsyncGenerator, AsyncIterable
from types import TracebackType
from typing import Self, TypedDict

from kvrouter.core.requests import EngineChunk
from kvrouter.planes.requests.port import EngineStream

CLIENT_LEFT = "client left"


class Answer(TypedDict, total=False):
    """One piece of an answer; ``finish_reason`` is there in the last one."""

    token_ids: list[int]
    finish_reason: str


class Answers:
    """One request's answer, piece by piece, to be read once.

    Who stops before the last piece calls ``aclose`` (or reads inside ``async with``): the engine then stops
    too. Pieces that were never asked for are no exception.
    """

    def __init__(self, pieces: AsyncGenerator[Answer, None], stream: EngineStream | None = None) -> None:
        self._pieces = pieces
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Answer:
        return await anext(self._pieces)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Read no more; what still runs for this request is cancelled. Idempotent."""
        await self._pieces.aclose()
        if self._stream is not None:  # a generator that was never begun does not run its own ending
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
        yield piece


async def _read(stream: EngineStream) -> AsyncGenerator[Answer, None]:
    try:
        async for piece in pieces_of(stream):
            yield piece
    finally:
        stream.cancel(CLIENT_LEFT)
