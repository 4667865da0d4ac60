"""Two clusters of mock engines as two processes would have them: each its own, with sockets between them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import Bootstrap, EngineChunk, Leg
from kvrouter.core.workers import Role
from kvrouter.engines.mock import MockCluster, MockEngineHandle, MockStream, TransferSettings
from kvrouter.engines.mock_engine.config import KvLoadFailurePolicy, MockConfig
from kvrouter.engines.mock_engine.mock_links import Links
from kvrouter.engines.mock_engine.remote import Peer
from kvrouter.kernel.topology.link_table import Link
from tests.testing.engine_requests import plain_leg
from tests.testing.mock_engine import zone_links
from tests.testing.waits import until

IN_TIME_S = 60.0
TOKEN = "sesame"
N_PROMPT = 100
# Quick engines: what a test waits for is the link, where it says so.
SPEEDUP = 100.0
SETTINGS = TransferSettings(token=TOKEN)
SLOW_LINKS = zone_links(same=Link(0.0, 1.0), cross=Link(0.0, 1.0))
"""Over which no transfer ends while a test runs."""


@dataclass
class Pair:
    """A prefill process in domain a, and a decode process in domain b that pulls from it."""

    prefill_cluster: MockCluster
    decode_cluster: MockCluster
    prefill: MockEngineHandle
    decode: MockEngineHandle
    peer: Peer

    async def send(
        self,
        which: Leg,
        name: str = "x",
        *,
        room: int | None = None,
        params: Mapping[str, object] | None = None,
        max_tokens: int = 20,
        n_prompt: int = N_PROMPT,
        first: int = 0,
    ) -> MockStream:
        """Send one leg to the engine that serves it."""
        request = plain_leg(
            name,
            range(first, first + n_prompt),
            which,
            max_tokens=1 if which is Leg.PREFILL else max_tokens,
            bootstrap=None if room is None else Bootstrap(self.peer.host, self.peer.port, room),
            kv_transfer_params=params,
        )
        return await (self.prefill if which is Leg.PREFILL else self.decode).submit(request)

    async def until_idle(self) -> None:
        """Wait until neither process holds anything, and look at everyone's books."""
        await until(lambda: self.prefill_cluster.idle and self.decode_cluster.idle)
        assert self.prefill_cluster.check_integrity() == []
        assert self.decode_cluster.check_integrity() == []

    async def until_pulling(self) -> None:
        """Wait until the decode process pulls."""
        await until(lambda: any(carried.transfers for carried in self.decode_cluster.carried().values()))

    async def until_joined(self, n: int = 1) -> None:
        """Wait until the prefill process knows of ``n`` decode legs."""
        await until(lambda: self.prefill_cluster.transfer_counts().incoming == n)


@asynccontextmanager
async def processes(
    *,
    policy: KvLoadFailurePolicy = KvLoadFailurePolicy.FAIL,
    links: Links | None = None,
    speedup: float = SPEEDUP,
    expiry_s: float = 600.0,
    prefill_settings: TransferSettings = SETTINGS,
    decode_settings: TransferSettings = SETTINGS,
    decode_blocks: int = 1_000,
) -> AsyncIterator[Pair]:
    """A prefill process that listens, and a decode process."""
    prefill_cluster = MockCluster(speedup=speedup, links=links or zone_links(), transfers=prefill_settings)
    decode_cluster = MockCluster(speedup=speedup, links=links or zone_links(), transfers=decode_settings)
    peer = await prefill_cluster.listen("127.0.0.1")
    both = MockConfig(block_size=16, kv_load_failure_policy=policy, kv_wait_expiry_s=expiry_s)
    prefills = replace(both, role=Role.PREFILL, bootstrap_host=peer.host, bootstrap_port=peer.port)
    decodes = replace(both, role=Role.DECODE, total_kv_blocks=decode_blocks)
    prefill = prefill_cluster.add(prefills, worker_id=WorkerId(1), domains={"zone": "a"})
    decode = decode_cluster.add(decodes, worker_id=WorkerId(2), domains={"zone": "b"})
    await start(prefill)
    await start(decode)
    try:
        yield Pair(prefill_cluster, decode_cluster, prefill, decode, peer)
    finally:
        prefill.kill("the test ends")
        decode.kill("the test ends")
        await prefill_cluster.close()
        await decode_cluster.close()


@asynccontextmanager
async def another_decode_process(pair: Pair) -> AsyncIterator[Pair]:
    """Another decode process next to the same prefill process, with quick links."""
    cluster = MockCluster(speedup=SPEEDUP, transfers=SETTINGS)
    decode = cluster.add(pair.decode.config, worker_id=WorkerId(3), domains={"zone": "b"})
    await start(decode)
    try:
        yield Pair(pair.prefill_cluster, cluster, pair.prefill, decode, pair.peer)
    finally:
        decode.kill("the test ends")
        await cluster.close()


async def start(handle: MockEngineHandle) -> None:
    """Start an engine to whose events nobody listens."""
    await handle.start(lambda _rank, _events: None, lambda _report: None)


async def read_all(stream: MockStream) -> tuple[tuple[int, ...], EngineChunk]:
    """Return all tokens of a stream and its last chunk."""
    chunks: list[EngineChunk] = []
    async with asyncio.timeout(IN_TIME_S):
        async for chunk in stream:
            chunks.append(chunk)
    return tuple(token for chunk in chunks for token in chunk.token_ids), chunks[-1]
