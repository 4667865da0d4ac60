"""Handoffs between two processes of mock engines over sockets: how they come about, what is counted."""

import pytest

from kvrouter.app.mock_fleet import mock_summary
from kvrouter.core.requests import FinishReason, Leg
from kvrouter.engines.mock_engine.config import MockConfig
from tests.testing.mock_processes import N_PROMPT, processes, read_all


async def alone(max_tokens: int = 20) -> tuple[int, ...]:
    """What one engine that does both answers."""
    async with processes() as pair:
        tokens, _ = await read_all(await pair.send(Leg.AGGREGATED, max_tokens=max_tokens))
        return tokens


@pytest.mark.parametrize("decode_first", [True, False])
async def test_bootstrap_handoff_works_whichever_leg_comes_first(decode_first: bool) -> None:
    async with processes() as pair:
        if decode_first:
            decode = await pair.send(Leg.DECODE, room=5)
            await pair.until_joined()
            prefill = await pair.send(Leg.PREFILL, room=5)
        else:
            prefill = await pair.send(Leg.PREFILL, room=5)
            first, last = await read_all(prefill)
            assert last.kv_transfer_params is None
            decode = await pair.send(Leg.DECODE, room=5)
        tokens, last = await read_all(decode)
        assert last.finish is FinishReason.LENGTH
        assert tokens == await alone()
        first, _ = await read_all(prefill) if decode_first else (tokens[:1], None)
        assert first == tokens[:1]
        await pair.until_idle()


async def test_synchronous_handoff_gives_the_tokens_of_one_engine() -> None:
    async with processes() as pair:
        _, last = await read_all(await pair.send(Leg.PREFILL))
        params = last.kv_transfer_params
        assert params is not None
        assert (params["remote_host"], params["remote_port"]) == pair.peer
        assert not pair.prefill_cluster.idle, "its KV waits"
        tokens, _ = await read_all(await pair.send(Leg.DECODE, params=params))
        assert tokens == await alone()
        await pair.until_idle()


async def test_pulling_process_counts_the_kv_transfers() -> None:
    async with processes() as pair:
        for room in range(3):
            await pair.send(Leg.PREFILL, f"r{room}", room=room, n_prompt=N_PROMPT + room)
            decode = await pair.send(Leg.DECODE, f"r{room}", room=room, n_prompt=N_PROMPT + room)
            await read_all(decode)
        await pair.until_idle()
        ((domains, carried),) = pair.decode_cluster.carried().items()
        # The second and the third prompt begin as the first, whose six full blocks are there already.
        moved_tokens = N_PROMPT + 5 + 6
        assert (domains, carried.transfers) == (("a", "b"), 3)
        assert carried.arrived_bytes == moved_tokens * MockConfig().kv_bytes_per_token
        assert pair.prefill_cluster.carried() == {}
        served, pulled = pair.prefill_cluster.transfer_counts(), pair.decode_cluster.transfer_counts()
        assert (served.incoming, served.incoming_done, served.outgoing) == (3, 3, 0)
        assert (pulled.outgoing, pulled.outgoing_done, pulled.incoming) == (3, 3, 0)
        assert mock_summary(pair.prefill_cluster) == "3 of 3 pulls by other processes done"
        assert mock_summary(pair.decode_cluster) == (
            f"KV from a to b: 3 transfers, {carried.arrived_bytes} bytes; "
            "3 of 3 pulls from other processes done"
        )
