"""Every request plane brings a decode leg's word that its KV is lost, and why, behind what came before."""

import pytest

from kvrouter.core.requests import EngineChunk, FinishReason, KvLoss, Leg
from tests.testing.request_transports import REQUEST_TRANSPORTS
from tests.testing.scripted_worker import ScriptedWorker, accepted, leg, read_all


@pytest.mark.parametrize("kind", sorted(REQUEST_TRANSPORTS))
async def test_last_chunk_says_why_kv_was_lost(kind: str) -> None:
    setup = await REQUEST_TRANSPORTS[kind]()
    try:
        worker = ScriptedWorker()
        address, _ = await setup.serve(worker)
        for n, loss in enumerate(KvLoss):
            stream = await accepted(setup.transport, address, leg(f"r{n}", which=Leg.DECODE))
            last = EngineChunk(finish=FinishReason.ERROR, error="no KV came", kv_lost=loss)
            await worker.streams[n].put(EngineChunk(token_ids=(n,), cached_tokens=16))
            await worker.streams[n].put(last)
            tokens, reported = await read_all(stream)
            assert tokens == [n]
            assert (reported.finish, reported.error, reported.kv_lost) == (
                FinishReason.ERROR,
                "no KV came",
                loss,
            )
    finally:
        await setup.close()
