"""A small engine behind its own server: a mock engine where the GPU would be, before it an engine's tongue.

It batches, caches, evicts and hands KV over as the mock engine does; which calls it takes, how it answers,
and how it tells its events and its load is the tongue's.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import NamedTuple, Protocol

from aiohttp import web

from kvrouter.core.errors import KvrouterError
from kvrouter.core.events import KvEvent, Removed, Stored, unpack_hashes
from kvrouter.core.hashing import block_hashes, hash_seed
from kvrouter.core.ids import DpRank, WorkerId, WorkerRank
from kvrouter.core.requests import EngineChunk, EngineRequest, FinishReason, merge_chunks
from kvrouter.core.timing import Timing
from kvrouter.core.workers import LoadReport
from kvrouter.engines.mock import MockCluster, MockEngineHandle, MockStream
from kvrouter.engines.mock_engine.config import MockConfig
from kvrouter.engines.mock_engine.tokens import TokenModel
from tests.testing.asyncio_servers import port_of, serving
from tests.testing.engine_publisher import Publisher
from tests.testing.scripted_engine import EVENT_STREAM, JSON

R0 = DpRank(0)


def timing(decode_ms: float) -> Timing:
    """Prompts are quick, and each token of an answer takes so long."""
    return Timing(
        prefill_quadratic=0.0,
        prefill_linear=0.0,
        prefill_base=2.0,
        decode_quadratic=0.0,
        decode_linear=0.0,
        decode_base=decode_ms,
    )


_worker_ids = count(1)
_names = count()


def next_name() -> str:
    """What an engine calls the next request of whoever gives it no name of its own."""
    return f"own-{next(_names)}"


class StoredBlocks(NamedTuple):
    """Blocks that were stored, as an engine tells them: with their tokens."""

    names: tuple[int, ...]
    parent: int | None
    token_ids: list[int]
    salt: str | None


class AnswerEncoder(Protocol):
    """How one call is answered: the bytes of a stream, or of a whole answer."""

    def piece(self, chunk: EngineChunk) -> bytes:
        """What is written for a chunk of a stream, its end included."""

    def whole(self, chunk: EngineChunk) -> bytes:
        """A whole answer, all in one chunk."""


class ParsedCall(NamedTuple):
    """A call as its engine understands it."""

    request: EngineRequest
    streams: bool
    answering: AnswerEncoder


class EngineProtocol(Protocol):
    """What is an engine's own in all of this."""

    def page(self, path: str, engine: "SmallEngine") -> bytes | None:
        """What it answers to a question; None where it knows none of it."""

    async def commanded(self, path: str, engine: "SmallEngine") -> tuple[int, bytes] | None:
        """The status and the answer where ``path`` asks for no tokens; None for a call."""

    def asked(self, path: str, headers: Mapping[str, str], body: bytes, config: MockConfig) -> ParsedCall:
        """Read a call; an error of the core tree for one at fault."""

    def refusal(self, error: KvrouterError) -> tuple[int, bytes]:
        """The status and body with which a call is refused, or fails before its first token."""

    def stored(self, blocks: StoredBlocks, block_size: int) -> dict[str, object]:
        """A store, as an event of its wire."""

    def removed(self, names: tuple[int, ...]) -> dict[str, object]:
        """A removal, as an event of its wire."""

    def reported(self, events: list[dict[str, object]], dp_rank: DpRank) -> bytes | None:
        """What is published for these events of a rank; None where the engine is asked for them."""

    def loaded(self, load: LoadReport) -> None:
        """A step brought another load."""


class FailedLater(KvrouterError):
    """The engine failed a leg that it had accepted."""


class SmallEngine:
    """One engine; those of one ``cluster`` hand KV to each other."""

    def __init__(self, protocol: EngineProtocol, config: MockConfig, cluster: MockCluster) -> None:
        self.config = config
        self.loads: dict[DpRank, LoadReport] = {}
        self.publishers = {DpRank(rank): Publisher() for rank in range(config.dp_size)}
        self._tongue = protocol
        self._cluster = cluster
        self.rank = WorkerRank(WorkerId(next(_worker_ids)), R0)
        self._handle: MockEngineHandle = cluster.add(
            config, worker_id=self.rank.worker_id, domains={"zone": "a"}
        )
        self._model = TokenModel(
            model_seed=config.model_seed,
            token_ids=config.token_ids,
            eos_token_id=config.eos_token_id,
            eos_every=config.eos_every,
        )
        self._tokens_of: dict[int, tuple[list[int], str | None]] = {}
        self._unpublished: asyncio.Queue[tuple[DpRank, bytes]] = asyncio.Queue()
        self._publishing: asyncio.Task[None] | None = None
        self._door = AsyncExitStack()
        self.port = 0
        self.started_s = 1.79528047303e09

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, and publish."""
        await self._handle.start(self._on_events, self._on_load)
        for publisher in self.publishers.values():
            publisher.start()
        self._publishing = asyncio.create_task(self._publish())
        await self.open_door()

    async def stop(self) -> None:
        """Be gone; idempotent."""
        await self.close_door()
        if self._publishing is not None:
            self._publishing.cancel()
            self._publishing = None
        for publisher in self.publishers.values():
            publisher.stop()
        await self._handle.stop()

    async def forget(self, reported: dict[str, object]) -> bool:
        """Empty the cache, and tell so by this event of the wire; False where a request is still here."""
        if not self._handle.idle:
            return False
        self._cluster.deliver()
        await self._handle.stop()
        await self._handle.start(self._on_events, self._on_load)
        for dp_rank in self.publishers:
            payload = self._tongue.reported([reported], dp_rank)
            if payload is not None:
                self._unpublished.put_nowait((dp_rank, payload))
        return True

    async def open_door(self) -> None:
        """Answer; again where it did before."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/{path:.*}", self._question)
        app.router.add_post("/{path:.*}", self._call)
        door = serving(app, self.port, shutdown_timeout=0.001)
        self.port = port_of(await self._door.enter_async_context(door))

    async def close_door(self) -> None:
        """Answer nobody any more; what runs goes on. Idempotent."""
        await self._door.aclose()

    def _on_load(self, report: LoadReport) -> None:
        self.loads[report.rank.dp_rank] = report
        self._tongue.loaded(report)

    def _on_events(self, dp_rank: DpRank, events: tuple[KvEvent, ...]) -> None:
        payload = self._tongue.reported([self._reported(event) for event in events], dp_rank)
        if payload is not None:
            self._unpublished.put_nowait((dp_rank, payload))

    def _reported(self, event: KvEvent) -> dict[str, object]:
        if isinstance(event, Removed):
            return self._tongue.removed(unpack_hashes(event.engine_hashes))
        assert isinstance(event, Stored)
        found = [self._tokens_of[block_hash] for block_hash in unpack_hashes(event.block_hashes)]
        return self._tongue.stored(
            StoredBlocks(
                names=unpack_hashes(event.engine_hashes),
                parent=event.parent,
                token_ids=[token for tokens, _ in found for token in tokens],
                salt=found[0][1],
            ),
            self.config.block_size,
        )

    async def _publish(self) -> None:
        while True:
            dp_rank, payload = await self._unpublished.get()
            await self.publishers[dp_rank].publish(payload)

    def _learn(self, request: EngineRequest) -> None:
        """Know the tokens of every block that this request may store: events name them by their hashes."""
        drawn, _ = self._model.draw(
            self._model.state(request.token_ids, request.sampling),
            request.sampling.max_tokens,
            eos_from=None,
        )
        tokens, size = array("I", [*request.token_ids, *drawn]), self.config.block_size
        hashes = block_hashes(
            tokens, block_size=size, seed=hash_seed(cache_namespace=request.cache_namespace)
        )
        for at, block_hash in enumerate(unpack_hashes(hashes)):
            own = tokens[at * size : (at + 1) * size].tolist()
            self._tokens_of[block_hash] = (own, request.cache_namespace)

    async def _question(self, request: web.Request) -> web.StreamResponse:
        body = self._tongue.page(request.path, self)
        if body is None:
            return web.Response(body=b'{"detail":"Not Found"}', status=404, content_type=JSON)
        return web.Response(body=body, content_type=JSON)

    async def _call(self, request: web.Request) -> web.StreamResponse:
        commanded = await self._tongue.commanded(request.path, self)
        if commanded is not None:
            status, body = commanded
            return web.Response(body=body, status=status, content_type=JSON)
        try:
            asked = self._tongue.asked(request.path, request.headers, await request.read(), self.config)
            self._learn(asked.request)
            stream = await self._handle.submit(asked.request)
        except KvrouterError as error:
            return self._refused(error)
        try:
            return await self._answer(request, asked, stream)
        except FailedLater as error:
            return self._refused(error)
        except BaseException:
            stream.cancel("its client left")
            raise

    async def _answer(
        self, request: web.Request, asked: ParsedCall, stream: MockStream
    ) -> web.StreamResponse:
        if not asked.streams:
            whole = _sound(merge_chunks([chunk async for chunk in stream]))
            return web.Response(body=asked.answering.whole(whole), content_type=JSON)
        first = _sound(await anext(stream))
        response = web.StreamResponse(headers={"content-type": EVENT_STREAM})
        await response.prepare(request)
        await response.write(asked.answering.piece(first))
        async for chunk in stream:
            await response.write(asked.answering.piece(chunk))
        await response.write_eof()
        return response

    def _refused(self, error: KvrouterError) -> web.Response:
        status, body = self._tongue.refusal(error)
        return web.Response(body=body, status=status, content_type=JSON)


def _sound(chunk: EngineChunk) -> EngineChunk:
    if chunk.finish is FinishReason.ERROR:
        raise FailedLater(chunk.error or "it failed")
    return chunk


@asynccontextmanager
async def small_engine(
    protocol: EngineProtocol, config: MockConfig, cluster: MockCluster | None = None
) -> AsyncIterator[SmallEngine]:
    """A small engine that listens."""
    engine = SmallEngine(protocol, config, cluster or MockCluster())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
