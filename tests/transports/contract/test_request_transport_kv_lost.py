"""Every request plane brings a decode leg's word that its KV is lost, and why, behind what came before."""

import pytest

from kvrouter.core.requests import EngineChunk, FinishReason, KvLoss, Leg
from tests.support.scripted_worker import ScriptedWorker, leg, read_all
from tests.support.wires import WIRES


@pytest.mark.parametrize("kind", sorted(WIRES))
async def test_the_last_word_says_why_the_kv_is_lost(kind: str) -> None:
    wire = await WIRES[kind]()
    try:
        worker = ScriptedWorker()
        address, _ = await wire.serve(worker)
        for n, loss in enumerate(KvLoss):
            stream = await wire.transport.open(address, leg(f"r{n}", which=Leg.DECODE))
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
        await wire.close()
