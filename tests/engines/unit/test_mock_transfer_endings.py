"""Every way in which a handoff between two processes ends early. After each, nobody holds anything."""

import asyncio

import pytest
from msgspec import structs

from kvrouter.core.requests import FinishReason, KvLoss, Leg
from kvrouter.engines.mock import MockCluster, MockStream
from kvrouter.engines.mock_engine.config import KvLoadFailurePolicy
from kvrouter.engines.mock_engine.remote import Peer
from tests.testing.asyncio_servers import port_of, serving_streams
from tests.testing.mock_processes import (
    SETTINGS,
    SLOW_LINKS,
    Pair,
    another_decode_process,
    processes,
    read_all,
    start,
)
from tests.testing.waits import until

POLICIES = pytest.mark.parametrize("policy", list(KvLoadFailurePolicy))


async def assert_without_kv(stream: MockStream, policy: KvLoadFailurePolicy, loss: KvLoss, why: str) -> None:
    """The decode leg failed and said what it lacked, or has computed the prompt itself, by its policy."""
    tokens, last = await read_all(stream)
    if policy is KvLoadFailurePolicy.FAIL:
        assert (tokens, last.finish, last.kv_lost) == ((), FinishReason.ERROR, loss)
        assert why in (last.error or "")
    else:
        assert (len(tokens), last.finish, last.kv_lost) == (20, FinishReason.LENGTH, None)


async def reach(pair: Pair, stage: str) -> tuple[MockStream | None, MockStream]:
    """Send the legs of a bootstrap handoff, and wait until it is at ``stage``."""
    decode = await pair.send(Leg.DECODE, room=5)
    await pair.until_joined()
    if stage == "before prefill":
        return None, decode
    prefill = await pair.send(Leg.PREFILL, room=5)
    await pair.until_pulling()
    return prefill, decode


@POLICIES
@pytest.mark.parametrize("stage", ["before prefill", "mid pull"])
async def test_decode_leg_fails_or_recomputes_after_prefill_process_death(
    stage: str, policy: KvLoadFailurePolicy
) -> None:
    async with processes(policy=policy, links=SLOW_LINKS) as pair:
        _, decode = await reach(pair, stage)
        await pair.prefill_cluster.close()
        await assert_without_kv(decode, policy, KvLoss.BROKEN, "lost")
        assert pair.decode_cluster.idle
        assert pair.decode_cluster.check_integrity() == []


@POLICIES
async def test_decode_leg_fails_or_recomputes_after_prefill_engine_death(policy: KvLoadFailurePolicy) -> None:
    async with processes(policy=policy, links=SLOW_LINKS) as pair:
        _, decode = await reach(pair, "mid pull")
        pair.prefill.kill()
        await assert_without_kv(decode, policy, KvLoss.BROKEN, "worker 1 is gone")
        await pair.until_idle()


@POLICIES
async def test_decode_leg_fails_or_recomputes_if_the_peer_is_unreachable(policy: KvLoadFailurePolicy) -> None:
    async with processes(policy=policy) as pair:
        await pair.prefill_cluster.close()
        await assert_without_kv(
            await pair.send(Leg.DECODE, room=5), policy, KvLoss.UNREACHABLE, "cannot be reached"
        )
        await pair.until_idle()


async def test_decode_leg_times_out_at_a_peer_that_never_answers() -> None:
    async def swallow(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    settings = structs.replace(SETTINGS, silence_max_s=0.1, keep_alive_s=0.02)
    async with processes(decode_settings=settings) as pair, serving_streams(swallow) as server:
        pair.peer = Peer("127.0.0.1", port_of(server))
        decode = await pair.send(Leg.DECODE, room=5)
        await assert_without_kv(decode, KvLoadFailurePolicy.FAIL, KvLoss.TIMEOUT, "too long")
        await pair.until_idle()


async def test_decode_leg_fails_at_an_invalid_peer_host() -> None:
    async with processes() as pair:
        pair.peer = Peer("no host \x00 of that name", 1)
        await assert_without_kv(
            await pair.send(Leg.DECODE, room=5), KvLoadFailurePolicy.FAIL, KvLoss.UNREACHABLE, ""
        )
        await pair.until_idle()


async def test_another_decode_process_gets_the_kv_after_the_first_dies() -> None:
    async with processes(links=SLOW_LINKS) as pair:
        _, last = await read_all(await pair.send(Leg.PREFILL))
        await pair.send(Leg.DECODE, params=last.kv_transfer_params)
        await pair.until_pulling()
        await pair.decode_cluster.close()
        # The one that comes next is refused until the prefill process has noticed.
        async with another_decode_process(pair) as other:
            while True:
                stream = await other.send(Leg.DECODE, params=last.kv_transfer_params)
                tokens, end = await read_all(stream)
                if end.finish is FinishReason.LENGTH:
                    break
                assert "its decode leg already" in (end.error or "")
            assert len(tokens) == 20
            await until(lambda: pair.prefill_cluster.idle)
            assert pair.prefill_cluster.check_integrity() == []


async def test_kv_expires_after_decode_engine_death() -> None:
    async with processes(links=SLOW_LINKS, expiry_s=0.2) as pair:
        await reach(pair, "mid pull")
        pair.decode.kill()
        await pair.until_idle()
        assert pair.prefill_cluster.transfer_counts().incoming_done == 0


@pytest.mark.parametrize("order", ["p", "d", "pd", "dp"])
@pytest.mark.parametrize("stage", ["at once", "joined", "mid pull"])
async def test_handoff_cancelled_at_any_stage_leaves_nothing(stage: str, order: str) -> None:
    async with processes(links=SLOW_LINKS) as pair:
        if stage == "mid pull":
            prefill, decode = await reach(pair, stage)
        else:
            decode = await pair.send(Leg.DECODE, room=5)
            if stage == "joined":
                await pair.until_joined()
            # A prompt that takes some time, so that its prefill is under way.
            prefill = await pair.send(Leg.PREFILL, room=5, n_prompt=10_000)
        assert prefill is not None
        for which in order:
            (prefill if which == "p" else decode).cancel("client left")
        if order == "p":
            # A decode leg that comes, or has come, for KV goes on without the prefill leg's client.
            decode.cancel("client left")
        for stream in (prefill, decode):
            assert (await read_all(stream))[1].finish is not None
        await pair.until_idle()


async def test_decode_leg_gets_the_reason_of_a_cancelled_prefill_leg() -> None:
    async with processes(speedup=1.0) as pair:
        decode = await pair.send(Leg.DECODE, room=5)
        await pair.until_joined()
        prefill = await pair.send(Leg.PREFILL, room=5, n_prompt=10_000)
        prefill.cancel("client left")
        await assert_without_kv(decode, KvLoadFailurePolicy.FAIL, KvLoss.UNKNOWN, "client left")
        await pair.until_idle()


async def test_decode_leg_cancelled_before_connecting_leaves_no_kv() -> None:
    async with processes() as pair:
        _, last = await read_all(await pair.send(Leg.PREFILL))
        decode = await pair.send(Leg.DECODE, params=last.kv_transfer_params)
        decode.cancel("client left")
        await pair.until_idle()
        assert pair.prefill_cluster.transfer_counts().incoming == 1


@POLICIES
async def test_decode_leg_without_a_prefill_leg_times_out(policy: KvLoadFailurePolicy) -> None:
    async with processes(policy=policy, expiry_s=0.1) as pair:
        decode = await pair.send(Leg.DECODE, room=5)
        await assert_without_kv(decode, policy, KvLoss.TIMEOUT, "in time")
        await pair.until_idle()


async def test_unclaimed_kv_expires_and_is_gone() -> None:
    async with processes(expiry_s=0.1) as pair:
        _, last = await read_all(await pair.send(Leg.PREFILL))
        await pair.until_idle()
        decode = await pair.send(Leg.DECODE, params=last.kv_transfer_params)
        await assert_without_kv(decode, KvLoadFailurePolicy.FAIL, KvLoss.UNKNOWN, "no KV waits")
        await pair.until_idle()


async def test_kv_expiry_is_in_real_seconds_whatever_the_speedup() -> None:
    loop = asyncio.get_running_loop()
    async with processes(expiry_s=0.2, speedup=1e6) as pair:
        began_s = loop.time()
        await read_all(await pair.send(Leg.PREFILL))
        await pair.until_idle()
        assert loop.time() - began_s >= 0.2


async def test_kv_whose_decode_leg_has_no_memory_expires() -> None:
    async with processes(expiry_s=0.1, decode_blocks=63, speedup=1.0) as pair:
        running = await pair.send(Leg.AGGREGATED, "full", n_prompt=801, max_tokens=200)
        decode = await pair.send(Leg.DECODE, room=5, n_prompt=250, first=1_000)
        await pair.until_joined()
        await pair.send(Leg.PREFILL, room=5, n_prompt=250, first=1_000)
        await until(lambda: pair.prefill_cluster.idle)
        running.cancel("enough")
        await assert_without_kv(decode, KvLoadFailurePolicy.FAIL, KvLoss.TIMEOUT, "in time")
        await pair.until_idle()


async def test_second_decode_leg_of_a_handoff_is_refused() -> None:
    async with processes() as pair:
        first = await pair.send(Leg.DECODE, "x", room=5)
        await pair.until_joined(1)
        second = await pair.send(Leg.DECODE, "y", room=5)
        await assert_without_kv(second, KvLoadFailurePolicy.FAIL, KvLoss.UNKNOWN, "its decode leg already")
        await pair.send(Leg.PREFILL, "x", room=5)
        assert len((await read_all(first))[0]) == 20
        await pair.until_idle()


async def test_new_prefill_process_at_an_address_has_no_kv_of_the_old_one() -> None:
    async with processes() as pair:
        _, last = await read_all(await pair.send(Leg.PREFILL))
        await pair.prefill_cluster.close()
        reborn = MockCluster(transfers=SETTINGS)
        assert await reborn.listen(*pair.peer) == pair.peer
        engine = reborn.add(pair.prefill.config, worker_id=pair.prefill.worker_id, domains={"zone": "a"})
        await start(engine)
        decode = await pair.send(Leg.DECODE, params=last.kv_transfer_params)
        await assert_without_kv(decode, KvLoadFailurePolicy.FAIL, KvLoss.UNKNOWN, "no KV waits")
        engine.kill()
        await reborn.close()


@POLICIES
@pytest.mark.parametrize("stage", ["connecting", "mid pull"])
async def test_closing_the_decode_process_ends_its_pulls(stage: str, policy: KvLoadFailurePolicy) -> None:
    async with processes(policy=policy, links=SLOW_LINKS, expiry_s=0.1) as pair:
        if stage == "mid pull":
            _, decode = await reach(pair, stage)
        else:
            decode = await pair.send(Leg.DECODE, room=5)
        await pair.decode_cluster.close()
        await assert_without_kv(decode, policy, KvLoss.BROKEN, "")
        await pair.until_idle()
