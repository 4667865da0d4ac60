"""An engine's own bytes over every request plane: in one piece, and held back by a slow reader."""

import asyncio

from kvrouter.core.requests import EngineChunk, FinishReason
from kvrouter.transports.requests.port import EngineStream
from tests.testing.request_transports import RequestTransportSetup
from tests.testing.scripted_worker import IN_TIME_S, ScriptedStream, ScriptedWorker, accepted, leg

N_CHUNKS = 8_000


async def read(stream: EngineStream) -> list[EngineChunk]:
    async with asyncio.timeout(IN_TIME_S):
        return [chunk async for chunk in stream]


def joined(chunks: list[EngineChunk]) -> bytes:
    return b"".join(chunk.raw for chunk in chunks)


async def test_long_raw_chunk_arrives_in_one_piece_whatever_its_tokens(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())
    tokens = tuple(range(5_000))
    await worker.streams[0].put(EngineChunk(token_ids=tokens, raw=b"x" * 500_000, text_chars=9))
    await worker.streams[0].put(EngineChunk(token_ids=(1,), raw=b"y", finish=FinishReason.LENGTH))
    chunks = await read(stream)
    assert joined(chunks) == b"x" * 500_000 + b"y"
    assert len(chunks[0].raw) >= 500_000
    assert chunks[0].token_ids[:5_000] == tokens


async def test_a_slow_reader_of_bytes_stops_its_own_producer_only(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    slow = await accepted(setup.transport, address, leg("slow"))
    quick = await accepted(setup.transport, address, leg("quick"))
    piece = b"data: " + b"." * 300

    async def produce(inner: ScriptedStream) -> None:
        for _ in range(N_CHUNKS):
            await inner.put(EngineChunk(raw=piece))
        await inner.put(EngineChunk(finish=FinishReason.LENGTH))

    producers = [asyncio.create_task(produce(inner)) for inner in worker.streams]
    assert len(joined(await read(quick))) == N_CHUNKS * len(piece)
    assert worker.streams[0].n_put < N_CHUNKS // 2
    assert len(joined(await read(slow))) == N_CHUNKS * len(piece)
    await asyncio.gather(*producers)


async def test_comments_arrive_before_and_within_the_answer_in_order(setup: RequestTransportSetup) -> None:
    worker = ScriptedWorker()
    address, _ = await setup.serve(worker)
    stream = await accepted(setup.transport, address, leg())
    inner = worker.streams[0]
    ping = EngineChunk(comments=b": keep-alive\n\n")
    await inner.put(ping)
    async with asyncio.timeout(IN_TIME_S):
        assert await anext(stream) == ping
    for chunk in (EngineChunk((1,), raw=b"a", text_chars=1), ping, EngineChunk((2,), raw=b"b", text_chars=1)):
        await inner.put(chunk)
    await inner.put(EngineChunk(raw=b"c", text_chars=0, finish=FinishReason.LENGTH))
    chunks = await read(stream)
    assert b"".join(chunk.comments + chunk.raw for chunk in chunks) == b"a" + ping.comments + b"bc"
    assert sum(chunk.text_chars or 0 for chunk in chunks) == 2
    assert all(chunk.text_chars is not None for chunk in chunks if chunk.raw)
