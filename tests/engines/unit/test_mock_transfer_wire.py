"""Handoffs between processes over TLS, on uvloop, with signs of life, and with a peer that is killed."""

import asyncio
import json
import ssl
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
import uvloop
from msgspec.structs import replace

from kvrouter.core.requests import FinishReason, Leg
from kvrouter.engines.mock import TransferSettings
from tests.testing.mock_processes import IN_TIME_S, SETTINGS, SLOW_LINKS, Pair, processes, read_all
from tests.testing.waits import until

ROOT = Path(__file__).parents[3]


async def hand_over(pair: Pair) -> None:
    """One handoff of each kind."""
    await pair.send(Leg.PREFILL, "x", room=5)
    assert len((await read_all(await pair.send(Leg.DECODE, "x", room=5)))[0]) == 20
    _, last = await read_all(await pair.send(Leg.PREFILL, "y"))
    decode = await pair.send(Leg.DECODE, "y", params=last.kv_transfer_params)
    assert len((await read_all(decode))[0]) == 20
    await pair.until_idle()


@pytest.fixture(scope="module")
def secure() -> TransferSettings:
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    authority.configure_trust(client)
    return replace(SETTINGS, server_ssl=server, client_ssl=client)


async def test_handoff_works_over_tls(secure: TransferSettings) -> None:
    async with processes(prefill_settings=secure, decode_settings=secure) as pair:
        await hand_over(pair)


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_handoff_with_tls_at_one_end_only_fails(secure: TransferSettings, who: str) -> None:
    quick = replace(SETTINGS, hello_timeout_s=0.2, connect_timeout_s=0.5)
    secured = replace(secure, hello_timeout_s=0.2, connect_timeout_s=0.5)
    prefill, decode = (secured, quick) if who == "prefill" else (quick, secured)
    async with processes(prefill_settings=prefill, decode_settings=decode) as pair:
        _, last = await read_all(await pair.send(Leg.DECODE, room=5))
        assert last.finish is FinishReason.ERROR
        await pair.until_idle()


async def test_handoff_with_an_untrusted_certificate_fails(secure: TransferSettings) -> None:
    other = replace(secure, client_ssl=ssl.create_default_context(ssl.Purpose.SERVER_AUTH))
    async with processes(prefill_settings=secure, decode_settings=other) as pair:
        _, last = await read_all(await pair.send(Leg.DECODE, room=5))
        assert "certificate" in (last.error or "")
        await pair.until_idle()


def test_handoff_works_on_uvloop() -> None:
    async def once() -> None:
        async with processes() as pair:
            await hand_over(pair)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(once())


async def test_signs_of_life_keep_a_long_pull_alive() -> None:
    lively = replace(SETTINGS, keep_alive_s=0.02, silence_max_s=5.0)
    async with processes(prefill_settings=lively, decode_settings=lively, links=SLOW_LINKS) as pair:
        await pair.send(Leg.PREFILL, room=5)
        decode = await pair.send(Leg.DECODE, room=5)
        await pair.until_pulling()
        await asyncio.sleep(0.1)  # several signs of life, which nothing else tells of
        assert pair.prefill_cluster.transfer_counts().refused == {}
        decode.cancel("enough")
        await pair.until_idle()


class PeerProcess:
    """A mock engine in a process of its own."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def say(self, params: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(params).encode() + b"\n")
        await self.process.stdin.drain()

    async def read_line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(3 * IN_TIME_S):
            return (await self.process.stdout.readline()).decode()


@asynccontextmanager
async def peer_process() -> AsyncIterator[PeerProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.testing.mock_peer", stdin=PIPE, stdout=PIPE, cwd=ROOT
    )
    peer = PeerProcess(process)
    try:
        assert await peer.read_line() == "here\n"
        yield peer
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_decode_leg_fails_when_the_prefill_process_is_killed_mid_pull() -> None:
    async with processes(links=SLOW_LINKS) as pair, peer_process() as peer:
        await peer.say({})
        decode = await pair.send(Leg.DECODE, params=json.loads(await peer.read_line()))
        await pair.until_pulling()
        peer.process.kill()
        _, last = await read_all(decode)
        assert "lost" in (last.error or "")
        await pair.until_idle()


async def test_prefill_process_frees_kv_when_the_decode_process_is_killed() -> None:
    async with processes(expiry_s=1.5) as pair, peer_process() as peer:
        _, last = await read_all(await pair.send(Leg.PREFILL))
        await peer.say(last.kv_transfer_params)
        await pair.until_joined()
        peer.process.kill()
        await until(lambda: pair.prefill_cluster.idle)
        assert pair.prefill_cluster.check_integrity() == []
        assert pair.prefill_cluster.transfer_counts().incoming_done == 0
