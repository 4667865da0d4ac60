"""Engines as the worker next to them has them, for the laws that all of them keep."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from kvrouter.core.ids import WorkerId
from kvrouter.core.requests import Bootstrap, EngineRequest
from kvrouter.core.workers import Role
from kvrouter.engines.mock import MockCluster
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.openai.engine import ServedEngine, ZmqEvents
from kvrouter.engines.openai.server import EngineServer
from kvrouter.engines.port import Engine, WatchedEngine
from kvrouter.engines.sglang.attach import SglangClient
from kvrouter.engines.sglang.attach import decode as decode_sglang
from kvrouter.engines.sglang.introspect import ask_info as ask_sglang
from kvrouter.engines.trtllm.attach import TrtllmClient
from kvrouter.engines.trtllm.introspect import ask_info as ask_trtllm
from kvrouter.engines.trtllm.polled import Polled
from kvrouter.engines.vllm.attach import VllmClient
from kvrouter.engines.vllm.events import decode as decode_vllm
from kvrouter.engines.vllm.introspect import ask_info as ask_vllm
from tests.testing.engine_recorder import EngineRecorder
from tests.testing.small_engine import EngineProtocol, SmallEngine, small_engine, timing
from tests.testing.small_engine_protocols import SglangProtocol, TrtllmProtocol, VllmProtocol
from tests.testing.waits import until

W = WorkerId(7)
PROBE_EACH_S = 0.02
BLOCK_SIZE = 32
N_BLOCKS = 24
CONTEXT_TOKENS = 700
RUNNING_MAX = 4
WAITING_MAX = 4
MEETS_AT = ("127.0.0.1", 8998)
IN_TIME_S = 120.0
QUICK_MS = 2.0
SLOW_MS = 100.0
"""How long a token takes: where the law is of legs that go on, no machine is too slow for it."""


@dataclass
class AttachedEngine:
    """An engine and all that it reported. ``door`` is the server of one that has one here, to be closed."""

    engine: Engine
    reported: EngineRecorder
    context_tokens: int
    door: SmallEngine | None = None

    @property
    def block_size(self) -> int:
        return self.reported.block_size

    async def settled(self, request: EngineRequest) -> None:
        """Wait until every whole block of an answered prompt is stored, by the events: those before it are
        reported by then.
        """
        tokens = request.token_ids
        wanted = len(tokens) // self.block_size
        await until(lambda: self.reported.overlap_blocks(tokens, namespace=request.cache_namespace) == wanted)


@dataclass
class EnginePair:
    """A prefill engine, and a decode engine that can fetch from it; ``room`` counts their meetings."""

    prefill: AttachedEngine
    decode: AttachedEngine
    meets_at: tuple[str, int] | None = None
    _rooms: list[int] = field(default_factory=list)

    def meeting(self) -> Bootstrap | None:
        """Where the two legs of the next request meet, if they do."""
        if self.meets_at is None:
            return None
        self._rooms.append(len(self._rooms) + 1)
        return Bootstrap(*self.meets_at, self._rooms[-1])


Attach = Callable[[EngineServer], Awaitable[tuple[ServedEngine, int, int]]]
"""Asks a server what it is; returns its engine, block size and context length."""


async def attach_vllm(server: EngineServer) -> tuple[ServedEngine, int, int]:
    info = await ask_vllm(server)
    assert info.block_size is not None
    assert info.context_length is not None
    engine = ServedEngine(
        server,
        VllmClient(W, info, model=info.models[0]),
        ZmqEvents(info.events, decode_vllm, info.block_size),
        started=info.started_s,
        look_each_s=PROBE_EACH_S,
    )
    return engine, info.block_size, info.context_length


async def attach_sglang(server: EngineServer) -> tuple[ServedEngine, int, int]:
    info = await ask_sglang(server)
    assert info.block_size is not None
    assert info.context_length is not None
    engine = ServedEngine(
        server,
        SglangClient(W, info),
        ZmqEvents(info.events, decode_sglang, info.block_size),
        started=info.started,
        look_each_s=PROBE_EACH_S,
    )
    return engine, info.block_size, info.context_length


async def attach_trtllm(server: EngineServer) -> tuple[ServedEngine, int, int]:
    info = await ask_trtllm(server)
    assert info.block_size is not None
    assert info.context_length is not None
    engine = ServedEngine(
        server,
        TrtllmClient(W, info, block_size=info.block_size),
        Polled(server, info.block_size, poll_each_s=PROBE_EACH_S),
        look_each_s=PROBE_EACH_S,
    )
    return engine, info.block_size, info.context_length


@asynccontextmanager
async def served(url: str, attach: Attach, door: SmallEngine | None = None) -> AsyncIterator[AttachedEngine]:
    """The engine behind a server, attached."""
    server = EngineServer(url)
    await server.open()
    engine, block_size, context_tokens = await attach(server)
    async with _started(engine, block_size, context_tokens, door) as attached:
        yield attached


@asynccontextmanager
async def _started(
    engine: Engine, block_size: int, context_tokens: int, door: SmallEngine | None = None
) -> AsyncIterator[AttachedEngine]:
    reported = EngineRecorder(block_size)
    if isinstance(engine, WatchedEngine):
        engine.watch(reported.on_state)
    await engine.start(reported.on_events, reported.on_load)
    try:
        async with asyncio.timeout(IN_TIME_S):
            yield AttachedEngine(engine, reported, context_tokens, door)
    finally:
        await engine.stop()


def config(
    role: Role = Role.BOTH,
    *,
    meets: bool = False,
    n_ranks: int = 1,
    decode_ms: float = QUICK_MS,
    waits_s: float = 60.0,
) -> MockConfig:
    """A small engine."""
    return MockConfig(
        role=role,
        dp_size=n_ranks,
        block_size=BLOCK_SIZE,
        total_kv_blocks=N_BLOCKS,
        max_num_seqs=RUNNING_MAX,
        max_waiting_seqs=WAITING_MAX,
        vocab_size=2_000,
        timing=timing(decode_ms),
        kv_wait_expiry_s=waits_s,
        bootstrap_host=MEETS_AT[0] if meets else None,
        bootstrap_port=MEETS_AT[1] if meets else None,
    )


class EngineKind(Protocol):
    """One kind of engine, brought up for one test."""

    def alone(
        self, *, n_ranks: int = 1, decode_ms: float = QUICK_MS
    ) -> AbstractAsyncContextManager[AttachedEngine]:
        """One that serves whole requests."""

    def pair(
        self, *, decode_ms: float = QUICK_MS, waits_s: float = 60.0
    ) -> AbstractAsyncContextManager[EnginePair]:
        """Two that share the legs of requests; ``waits_s`` is how long KV is waited for."""


class MockKind:
    """Mock engines, with no server between."""

    def __init__(self, *, meets: bool) -> None:
        self._meets = meets

    @asynccontextmanager
    async def alone(self, *, n_ranks: int = 1, decode_ms: float = QUICK_MS) -> AsyncIterator[AttachedEngine]:
        async with self._one(MockCluster(), 1, config(n_ranks=n_ranks, decode_ms=decode_ms)) as found:
            yield found

    @asynccontextmanager
    async def pair(self, *, decode_ms: float = QUICK_MS, waits_s: float = 60.0) -> AsyncIterator[EnginePair]:
        cluster = MockCluster()
        async with (
            self._one(cluster, 1, config(Role.PREFILL, meets=self._meets)) as prefill,
            self._one(cluster, 2, config(Role.DECODE, decode_ms=decode_ms, waits_s=waits_s)) as decode,
        ):
            yield EnginePair(prefill, decode, MEETS_AT if self._meets else None)

    def _one(
        self, cluster: MockCluster, worker_id: int, of: MockConfig
    ) -> AbstractAsyncContextManager[AttachedEngine]:
        handle = cluster.add(of, worker_id=WorkerId(worker_id), domains={"zone": "a"})
        return _started(handle, of.block_size, CONTEXT_TOKENS)


class HttpEngineKind:
    """Small engines behind servers of their own."""

    def __init__(self, protocol: Callable[[int], EngineProtocol], attach: Attach, *, meets: bool) -> None:
        self._tongue = protocol
        self._attach = attach
        self._meets = meets

    @asynccontextmanager
    async def alone(self, *, n_ranks: int = 1, decode_ms: float = QUICK_MS) -> AsyncIterator[AttachedEngine]:
        async with AsyncExitStack() as stack:
            yield await self._one(stack, MockCluster(), config(n_ranks=n_ranks, decode_ms=decode_ms))

    @asynccontextmanager
    async def pair(self, *, decode_ms: float = QUICK_MS, waits_s: float = 60.0) -> AsyncIterator[EnginePair]:
        cluster = MockCluster()
        async with AsyncExitStack() as stack:
            prefill = await self._one(stack, cluster, config(Role.PREFILL, meets=self._meets))
            decode = await self._one(
                stack, cluster, config(Role.DECODE, decode_ms=decode_ms, waits_s=waits_s)
            )
            yield EnginePair(prefill, decode, MEETS_AT if self._meets else None)

    async def _one(self, stack: AsyncExitStack, cluster: MockCluster, of: MockConfig) -> AttachedEngine:
        door = await stack.enter_async_context(small_engine(self._tongue(CONTEXT_TOKENS), of, cluster))
        return await stack.enter_async_context(served(door.url, self._attach, door))


SERVED_KINDS: dict[str, EngineKind] = {
    "vllm": HttpEngineKind(VllmProtocol, attach_vllm, meets=False),
    "sglang": HttpEngineKind(SglangProtocol, attach_sglang, meets=True),
    "trtllm": HttpEngineKind(TrtllmProtocol, attach_trtllm, meets=False),
}
KINDS: dict[str, EngineKind] = {
    "mock": MockKind(meets=False),
    "mock-meeting": MockKind(meets=True),
    **SERVED_KINDS,
}
