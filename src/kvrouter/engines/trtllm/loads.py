"""How busy TensorRT-LLM says that it is, and what KV it has fetched. Each of these is told once."""

from typing import Annotated, TypeVar

import msgspec

from kvrouter.core.errors import ProtocolError
from kvrouter.core.workers import KvTransfers
from kvrouter.engines.openai.server import EngineServer

T = TypeVar("T")

ITERATIONS = "/metrics"
"""JSON: the statistics of the iterations that nobody asked for yet."""

REQUESTS = "/perf_metrics"
"""What requests took that ended since somebody asked; nothing without ``perf_metrics_max_requests``."""

_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class CacheStats(msgspec.Struct, frozen=True, rename="camel"):
    """``kvCacheStats``: used are the blocks that running requests hold."""

    tokens_per_block: Annotated[int, msgspec.Meta(ge=1)]
    max_num_blocks: int
    used_num_blocks: int = 0


class Iteration(msgspec.Struct, frozen=True, rename="camel"):
    """What the engine says of one of its iterations."""

    num_active_requests: int = 0
    num_queued_requests: int = 0
    kv_cache_stats: CacheStats | None = None


class _Timing(msgspec.Struct, frozen=True):
    """Seconds are those of one clock of the engine."""

    kv_cache_size: _Bytes = 0
    kv_cache_transfer_start: _Seconds = 0.0
    kv_cache_transfer_end: _Seconds = 0.0


class _Took(msgspec.Struct, frozen=True):
    timing_metrics: _Timing = _Timing()


class _Request(msgspec.Struct, frozen=True):
    perf_metrics: _Took = _Took()


_iterations = msgspec.json.Decoder(tuple[Iteration, ...])
_requests = msgspec.json.Decoder(tuple[_Request, ...])


async def ask_iteration(server: EngineServer) -> Iteration | None:
    """Ask for the last iteration that told of its cache; None when none did since somebody asked.

    Raises WorkerUnreachable or ProtocolError.
    """
    page = await server.look(ITERATIONS)
    iterations = () if page is None else decoded(_iterations, page, ITERATIONS)
    return next((each for each in reversed(iterations) if each.kv_cache_stats is not None), None)


async def ask_fetched(server: EngineServer, before: KvTransfers | None) -> KvTransfers | None:
    """Ask what KV was fetched; return that and what was fetched ``before``, None while nothing was.

    Raises WorkerUnreachable or ProtocolError.
    """
    page = await server.look(REQUESTS)
    requests = () if page is None else decoded(_requests, page, REQUESTS)
    took = [request.perf_metrics.timing_metrics for request in requests]
    fetched = [each for each in took if each.kv_cache_size]
    if not fetched:
        return before
    before = before or KvTransfers(transfers=0, bytes=0, seconds=0.0)
    return KvTransfers(
        transfers=before.transfers + len(fetched),
        bytes=before.bytes + sum(each.kv_cache_size for each in fetched),
        seconds=before.seconds
        + sum(max(0.0, each.kv_cache_transfer_end - each.kv_cache_transfer_start) for each in fetched),
    )


def decoded(decoder: "msgspec.json.Decoder[T]", body: bytes, path: str) -> T:
    """Decode the page at ``path``. Raises ProtocolError, which names it."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{path}: {error}", param=path) from error
