"""A worker whose answers a test writes, and what a test reads of it over any request plane."""

import asyncio
from array import array
from collections.abc import AsyncIterator

from kvrouter.core.ids import ModelName, RequestId
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, Leg, Sampling
from kvrouter.transports.requests.port import EngineStream, RequestTransport, SentLeg

IN_TIME_S = 60.0
"""How long a test waits for what must happen; a plane that hangs fails it."""


class ScriptedStream:
    """A worker's stream that yields what a test puts in, and remembers what it was reported."""

    def __init__(self, chunks_max: int = 4) -> None:
        self.chunks: asyncio.Queue[EngineChunk] = asyncio.Queue(chunks_max)
        self.cancelled = asyncio.Event()
        self.reasons: list[str] = []
        self.n_put = 0
        self._ended = False

    def __aiter__(self) -> AsyncIterator[EngineChunk]:
        return self

    async def __anext__(self) -> EngineChunk:
        if self._ended:
            raise StopAsyncIteration
        chunk = await self.chunks.get()
        self._ended = chunk.finish is not None
        return chunk

    async def put(self, chunk: EngineChunk) -> None:
        await self.chunks.put(chunk)
        self.n_put += 1

    def cancel(self, reason: str) -> None:
        if not self.reasons:
            if self.chunks.full():
                self.chunks.get_nowait()
            self.chunks.put_nowait(EngineChunk(finish=FinishReason.CANCELLED))
        self.reasons.append(reason)
        self.cancelled.set()


class ScriptedWorker:
    """A worker whose answers a test writes."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.streams: list[ScriptedStream] = []
        self.refusal: Exception | None = None
        self.next_stream = ScriptedStream
        self.answers = asyncio.Event()
        self.answers.set()

    async def submit(self, request: EngineRequest) -> EngineStream:
        await self.answers.wait()
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.streams.append(self.next_stream())
        return self.streams[-1]


def leg(name: str = "x", *, attempt: int = 0, which: Leg = Leg.AGGREGATED) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        attempt=attempt,
        leg=which,
        model=ModelName("m"),
        token_ids=array("I", [1, 2, 3]),
        sampling=Sampling(max_tokens=100, temperature=0.5, seed=7),
        kv_transfer_params={"remote_engine_id": "e", "remote_block_ids": [[1, 2], [3]]},
        time_left_s=600.0,
    )


async def read_all(stream: EngineStream) -> tuple[list[int], EngineChunk]:
    tokens: list[int] = []
    chunk = EngineChunk()
    async with asyncio.timeout(IN_TIME_S):
        async for chunk in stream:
            tokens += chunk.token_ids
    return tokens, chunk


async def accepted(transport: RequestTransport, address: str, request: EngineRequest) -> SentLeg:
    """Open a leg and wait until its worker has accepted it; a caller that is cancelled cancels it."""
    stream = await transport.open(address, request)
    try:
        await stream.accepted()
    except asyncio.CancelledError:
        stream.cancel("its caller left")
        raise
    return stream
